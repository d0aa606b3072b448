"""Bounds of every entry of the Jacobian of softmax attention by auto_LiRPA; :mod:`benchmarks.peers` starts this script.

auto_LiRPA 0.3, the last release on PyPI, needs torch < 1.13 and numpy < 2, hence a Python 3.10 of its own
(``requirements-lirpa.txt``), and nothing of otattn is imported here:

    python benchmarks/lirpa_worker.py FOLDER COUNT    # problem0.npz ... -> answer0.npz ...

The release has no Jacobian operators (they came later, on GitHub), so the analytic Jacobian is written as a network
of affine maps, products, exp and 1/x of the flat tokens, all of which auto_LiRPA relaxes:

    P_ij = 1 / sum_k exp <A x_i, x_k - x_j>,   D_ij = sum_k P_ik (x_j - x_k) = x_j - m_i,
    J_ij = V P_ij (I + D_ij (A x_i)^T) + [i = j] V sum_k P_ik D_ik (A^T D_ik)^T.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm


def tensor(M):
    return torch.tensor(np.ascontiguousarray(M), dtype=torch.get_default_dtype())


class Affine(torch.nn.Linear):
    """A constant linear map of flat vectors."""

    def __init__(self, M):
        super().__init__(M.shape[1], M.shape[0], bias=False)
        self.weight = torch.nn.Parameter(tensor(M), requires_grad=False)


class JacobianNetwork(torch.nn.Module):
    """Flat tokens ``(1, n d)`` to flat Jacobian ``(1, (n e) (n d))``."""

    def __init__(self, A, V, n):
        super().__init__()
        d, e = A.shape[0], V.shape[0]
        I, T, O = np.eye(n), np.eye(d), np.ones(n)
        one = np.ones(d)

        def put(spec, *parts, rows, columns):
            return Affine(np.einsum(spec, *parts, optimize=True).reshape(rows, columns))

        # indices: i row, j column, k summed token, c and b coordinates, s and r the input's token and coordinate
        three = n**3 * d
        self.logit_left = put("is,br,j,k->ijkbsr", I, A, O, O, rows=three, columns=n * d)
        difference = np.einsum("ks,br,i,j->ijkbsr", I, T, O, O) - np.einsum("js,br,i,k->ijkbsr", I, T, O, O)
        self.logit_right = Affine(difference.reshape(three, n * d))
        self.sum_b = Affine(np.kron(np.eye(n**3), np.ones((1, d))))
        self.sum_k = Affine(np.kron(np.eye(n * n), np.ones((1, n))))
        self.spread_p = put("is,kr,j,c->ijkcsr", I, I, O, one, rows=three, columns=n * n)
        self.token_gap = Affine(-difference.reshape(three, n * d))  # x_j - x_k
        self.mean_gap = put("is,jr,k,ct->ijcsrkt", I, I, O, T, rows=n * n * d, columns=three)
        two = n * n * d * d
        self.gap_left = put("is,jr,ct,b->ijcbsrt", I, I, T, one, rows=two, columns=n * n * d)
        self.query = put("is,br,j,c->ijcbsr", I, A, O, one, rows=two, columns=n * d)
        self.gap_right = put("is,jr,tb,c->ijcbsrt", I, I, A, one, rows=two, columns=n * n * d)
        self.weight = put("is,jr,c,b->ijcbsr", I, I, one, one, rows=two, columns=n * n)
        out = (n * e) * (n * d)
        self.constant = put("is,jr,ab->iajbsr", I, I, V, rows=out, columns=n * n)  # V P_ij I
        self.moving = put("is,jr,ac,bt->iajbsrct", I, I, V, T, rows=out, columns=two)
        self.own = put("ij,is,k,ac,bt->iajbskct", I, I, O, V, T, rows=out, columns=two)

    def forward(self, x):
        P = torch.reciprocal(self.sum_k(torch.exp(self.sum_b(self.logit_left(x) * self.logit_right(x)))))
        D = self.mean_gap(self.spread_p(P) * self.token_gap(x))
        gap, weight = self.gap_left(D), self.weight(P)
        moving = weight * (gap * self.query(x))
        own = weight * (gap * self.gap_right(D))
        return self.constant(P) + self.moving(moving) + self.own(own)


def main(source, target):
    problem = np.load(source)
    A, V, X = problem["A"], problem["V"], problem["X"]
    torch.set_num_threads(1)
    n = len(X)
    network = JacobianNetwork(A, V, n)
    x = tensor(X.reshape(1, -1))
    eps, norm = float(problem["eps"]), float(problem["norm"])
    bounded = BoundedModule(network, x, bound_opts={"conv_mode": "matrix"})
    answer = {"jacobian": network(x).detach().numpy().reshape(n * V.shape[0], -1)}
    for method in problem["methods"]:
        start = time.perf_counter()
        with torch.no_grad():
            low, high = bounded.compute_bounds(
                x=(BoundedTensor(x, PerturbationLpNorm(norm=norm, eps=eps)),), method=str(method)
            )
        answer[f"{method} seconds"] = time.perf_counter() - start
        answer[f"{method} low"] = low.numpy().reshape(answer["jacobian"].shape)
        answer[f"{method} high"] = high.numpy().reshape(answer["jacobian"].shape)
    np.savez(target, **answer)


if __name__ == "__main__":
    for k in range(int(sys.argv[2])):
        main(f"{sys.argv[1]}/problem{k}.npz", f"{sys.argv[1]}/answer{k}.npz")
