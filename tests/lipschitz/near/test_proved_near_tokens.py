"""Certificates of second order in balls and intervals: what they prove, each number in 50 digits, and what they refuse."""

import sys
from dataclasses import replace
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

pytest.importorskip("flint", reason="python-flint is needed for rigorous proofs")

from exact_maps import derivatives, matrix, softmax

import otattn as oa
from otattn.attention import (
    Compose,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    RotaryAttention,
    SoftmaxAttention,
)
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import exact_arithmetic
from otattn.lipschitz.arithmetic.eigenvalues import Symmetric, largest_eigenvalue, proves_bound
from otattn.lipschitz.arithmetic.intervals import Interval, lift, upper
from otattn.lipschitz.near.build import chain_at
from otattn.lipschitz.near.heads import heads_at
from otattn.lipschitz.near.rotary import lifted
from otattn.lipschitz.near.third_order import ThirdOrder, third_order
from otattn.lipschitz.rigorous.chain import ProvedChain, claims_of, proved_chain
from otattn.lipschitz.rigorous.grams import hessian_gram, jacobian, jacobian_gram
from otattn.lipschitz.rigorous.heads import enclosed_heads
from otattn.lipschitz.rigorous.own_token import own_token_bound
from otattn.lipschitz.rigorous.turned import turned_tokens

sys.path.append(str(Path(__file__).parents[1]))
from proven_bounds import evaluated_once

KINDS = ("pairs", "constant")


def head(rng, d, bias=False):
    return SoftmaxAttention(
        rng.standard_normal((d, d)), rng.standard_normal((2, d)), bias=rng.standard_normal(d) if bias else None
    )


def several(rng, d):
    return MultiHeadAttention([head(rng, d), head(rng, d, True)], [rng.standard_normal((3, 2)) for _ in range(2)])


def factored(rng, d):
    Q, K = rng.standard_normal((2, 1, d))
    return SoftmaxAttention.from_qkv(Q, K, rng.standard_normal((2, d)), query_bias=[0.3])


def rotary(rng, d, layout="adjacent"):
    k = 4
    return RotaryAttention(
        *(rng.standard_normal((m, d)) for m in (k, k, 2)), base=10.0, layout=layout, key_bias=rng.standard_normal(k)
    )


MAPS = {
    "plain": (head, 3, 2),
    "one dimension": (head, 4, 1),
    "one token": (head, 1, 3),
    "two tokens, four dimensions": (head, 2, 4),
    "biased, six tokens": (lambda rng, d: head(rng, d, True), 6, 2),
    "factored": (factored, 3, 4),
    "causal": (lambda rng, d: MaskedAttention(head(rng, d, True)), 4, 2),
    "several": (several, 3, 3),
    "several, causal": (lambda rng, d: MaskedAttention(several(rng, d)), 3, 2),
    "rotary": (rotary, 3, 2),
    "rotary heads": (lambda rng, d: MultiHeadAttention([rotary(rng, d), rotary(rng, d, "half")]), 2, 3),
    "zero values": (lambda rng, d: SoftmaxAttention(np.eye(d), np.zeros((2, d))), 3, 2),
    "zero form": (lambda rng, d: SoftmaxAttention(np.zeros((d, d)), np.eye(d)), 3, 2),
}


def drawn(name):
    make, n, d = MAPS[name]
    rng = np.random.default_rng(len(name))
    return make(rng, d), rng.standard_normal((n, d))


@pytest.mark.parametrize("name", MAPS)
def test_the_value_is_proved_and_a_smaller_one_is_not(name):
    map, X = drawn(name)
    bound = oa.certify(map, X, radius=1e-4, kind=KINDS[len(name) % 2])
    with evaluated_once():
        proved = bound.rigorous_value()
        assert proved <= bound.value <= proved * (1.0 + 1e-9)
        assert bound.verify(rigorous=True)
        if bound.value > 0.0:
            assert not replace(bound, value=bound.value * (1.0 - 1e-6)).verify(rigorous=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPS)
def test_larger_balls(name, kind):
    map, X = drawn(name)
    for radius in (0.0, 3e-3, 3e-2):
        bound = oa.certify(map, X, radius=radius, kind=kind)
        proved = bound.rigorous_value()
        assert proved <= bound.value <= proved * (1.0 + 1e-9)


@pytest.mark.parametrize("name", ["biased, six tokens", "several, causal", "rotary"])
def test_every_number_of_a_certificate_is_confirmed(name):
    """One part in a million less of any of them is refused."""
    map, X = drawn(name)
    claims = claims_of(chain_at(map, X))
    with exact_arithmetic():
        proof = proved_chain(map, X, chain_at(map, X))
        heads, turned = proof.heads, proof.turned
        assert proof.stretch(1e-4) >= claims.norm
        lower = {
            "norm": replace(claims, norm=claims.norm * (1.0 - 1e-6)),
            "second": replace(claims, second=claims.second * (1.0 - 1e-6)),
            "third": replace(claims, third=lambda r: claims.third(r) * (1.0 - 1e-6)),
        }
        if name == "rotary":
            lower["first"] = replace(claims, first=claims.first * (1.0 - 1e-6))
        for wrong in lower.values():
            with pytest.raises(CertificateError, match="is not confirmed"):
                ProvedChain(wrong, heads, turned).stretch(1e-4)


def test_other_statements_are_refused():
    map, X = drawn("two tokens, four dimensions")
    bound = oa.certify(map, X, radius=1e-3)
    near = bound.domain
    for wrong in (
        replace(bound, domain=replace(near, radius=near.radius * (1.0 + 1e-6))),
        replace(bound, n=3),
        replace(bound, p=1.0),
        replace(bound, quantity="lipschitz"),
        replace(bound, attention=SoftmaxAttention(1.001 * map.A, map.V, bias=map.bias)),
    ):
        assert not wrong.verify(rigorous=True)
    assert not bound.verify(domain=replace(near, radius=2.0 * near.radius), rigorous=True)


def test_stacks_and_token_wise_maps_say_that_there_is_no_proof():
    rng = np.random.default_rng(0)
    X, map = rng.standard_normal((3, 2)), SoftmaxAttention(np.eye(2), np.eye(2))
    for other in (Residual(map), Compose(LayerNorm(np.ones(2)), map)):
        bound = oa.certify(other, X, radius=1e-4)
        assert bound.verify()
        with pytest.raises(ValueError, match=f"no rigorous evaluation.*{other.kind}"):
            bound.verify(rigorous=True)
        with pytest.raises(ValueError, match="no rigorous evaluation"):
            bound.rigorous_value()


# --- each number in 50 digits


class Exact:
    """A head at tokens in mpmath: weights, centred values and keys, gradients, fields."""

    def __init__(self, map, X):
        n = len(X)
        x, A, V = matrix(X), matrix(map.A), matrix(map.V)
        c = mp.zeros(A.rows, 1) if map.bias is None else matrix(map.bias).T
        self.n, self.A, self.V = n, A, V
        self.g = [A * x[i, :].T + c for i in range(n)]
        logits = [[(self.g[i].T * x[j, :].T)[0] for j in range(n)] for i in range(n)]
        grown = [[mp.exp(s - max(row)) for s in row] for row in logits]
        self.P = [[e / mp.fsum(row) for e in row] for row in grown]

        def centred(f, i):
            total = f[0] * 0
            for j in range(n):
                total += self.P[i][j] * f[j]
            return [f[j] - total for j in range(n)]

        values, keys = [V * x[j, :].T for j in range(n)], [A.T * x[j, :].T for j in range(n)]
        self.y = [centred(values, i) for i in range(n)]
        self.k = [centred(keys, i) for i in range(n)]
        self.F = []
        for i in range(n):
            F = mp.zeros(V.rows, A.rows)
            for j in range(n):
                F += self.P[i][j] * self.y[i][j] * self.k[i][j].T
            self.F.append(F)

    def jacobian(self):
        e, d = self.V.rows, self.A.rows
        J = mp.zeros(self.n * e, self.n * d)
        for i in range(self.n):
            for j in range(self.n):
                block = self.P[i][j] * (self.V + self.y[i][j] * self.g[i].T) + (self.F[i] if i == j else self.F[i] * 0)
                J[i * e : (i + 1) * e, j * d : (j + 1) * d] = block
        return J

    def hessian(self, i, zeta):
        """The part of row i without its own token, a matrix ``(n d, n d)``; zeta is a unit vector of the outputs."""
        n, d = self.n, self.A.rows
        g, P, w = self.g[i], self.P[i], [self.y[i][j][zeta] for j in range(self.n)]
        u = self.V[zeta, :].T
        cross, square = u * g.T + g * u.T, g * g.T
        H = mp.zeros(n * d, n * d)
        for j in range(n):
            for k in range(n):
                lap = (P[j] if j == k else 0) - P[j] * P[k]
                kap = (P[j] * w[j] if j == k else 0) - P[j] * w[j] * P[k] - P[j] * P[k] * w[k]
                H[j * d : (j + 1) * d, k * d : (k + 1) * d] = lap * cross + kap * square
        return H

    def own(self):
        """The bound of the terms of a row's own token, from its blocks ``L_ij`` and ``N_i``."""
        n, e, d = self.n, self.V.rows, self.A.rows
        norms = {"A": mp.sqrt(top(self.A.T * self.A)), "V": mp.sqrt(top(self.V * self.V.T)), "F": frobenius(self.A)}
        q, pairs = {}, {}
        size = mp.norm
        for with_A in (False, True):
            tops = []
            for i in range(n):
                L = [[self.block(i, j, z, with_A) for z in range(e)] for j in range(n)]
                N = [
                    sum((self.P[i][j] * self.y[i][j][z] * self.k[i][j] * self.k[i][j].T for j in range(n)), mp.zeros(d))
                    for z in range(e)
                ]
                all_L = sum((form(row) for row in L), mp.zeros(e))
                own_L = form([self.block(i, i, z, False) for z in range(e)])
                t = mp.mpf(min(max(2 * mp.sqrt(trace(own_L) / trace(form(N))), 1e-3), 1e3))
                twice = 4 * (1 + 1 / t) - 2
                tops.append(top(2 * all_L + twice * form(L[i]) + (1 + t) * form(N)))
            q[with_A] = tops
        beta = [[self.P[i][j] * size(self.y[i][j]) for j in range(n)] for i in range(n)]
        for with_A in (False, True):
            pairs[with_A] = [
                [
                    self.P[i][j]
                    * (
                        norms["V"] * size(self.k[i][j])
                        + size(self.g[i]) * (size(self.y[i][j]) * size(self.k[i][j]) + frobenius(self.F[i]))
                    )
                    + (beta[i][j] * norms["F"] if with_A else 0)
                    for j in range(n)
                ]
                for i in range(n)
            ]
        moments = [
            2
            * norms["A"] ** 2
            * (
                sum((self.P[i][j] ** 2 * self.y[i][j] * self.y[i][j].T for j in range(n)), mp.zeros(e))
                + self.P[i][i] ** 2 * self.y[i][i] * self.y[i][i].T
            )
            for i in range(n)
        ]
        apart = joined(q[False], pairs[False]) + joined([top(M) for M in moments], beta, norms["A"] ** 2)
        return min(apart, joined(q[True], pairs[True]))

    def block(self, i, j, zeta, with_A):
        """``L_ij`` for a unit vector of the outputs."""
        w, m = self.y[i][j][zeta], self.F[i][zeta, :]
        L = self.V[zeta, :].T * self.k[i][j].T + self.g[i] * (w * self.k[i][j].T - m)
        return self.P[i][j] * (L + w * self.A.T.T if with_A else L)


def frobenius(M):
    return mp.mnorm(M, "f")


def trace(M):
    return mp.fsum(M[k, k] for k in range(M.rows))


def top(S):
    return max(mp.eigsy(S, eigvals_only=True))


def form(blocks):
    """``<B_a, B_b>``."""
    flat = [list(block) for block in blocks]
    return mp.matrix([[mp.fdot(a, b) for b in flat] for a in flat])


def joined(tops, pairs, share=1):
    n = len(tops)
    S = mp.matrix(n, n)
    for i in range(n):
        for j in range(n):
            S[i, j] = tops[i] if i == j else 2 * share * pairs[i][j] * pairs[j][i]
    return mp.sqrt(min(2 * max(tops), top(S)))


def holds(interval, exact):
    """Whether intervals hold the numbers of an mp matrix, none wider than rounding."""
    lo, hi = np.atleast_2d(interval.lo), np.atleast_2d(interval.hi)
    assert lo.shape == (exact.rows, exact.cols)
    for i in range(exact.rows):
        for j in range(exact.cols):
            assert mp.mpf(lo[i, j]) <= exact[i, j] <= mp.mpf(hi[i, j])
    assert (hi - lo).max() <= 1e-12 * max(1.0, np.abs(hi).max())


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(4)
    map, X = (
        SoftmaxAttention(rng.standard_normal((2, 2)), rng.standard_normal((2, 2)), bias=[0.3, -0.2]),
        rng.standard_normal((3, 2)),
    )
    with mp.workdps(50):
        exact = Exact(map, X)
    with exact_arithmetic():
        return map, X, exact, enclosed_heads(map, X)


@pytest.fixture(autouse=True)
def _fifty_digits():
    with mp.workdps(50):
        yield


def test_what_a_head_is_made_of_in_fifty_digits(small):
    _, _, exact, (h,) = small
    holds(h.P, mp.matrix(exact.P))
    for i in range(3):
        holds(h.y[i], mp.matrix([list(y) for y in exact.y[i]]))
        holds(h.k(i), mp.matrix([list(k) for k in exact.k[i]]))
        holds(h.field[i], exact.F[i])
    holds(h.g, mp.matrix([list(g) for g in exact.g]))
    J = jacobian([h])
    holds(J.reshape(len(J), -1), exact.jacobian())
    for value, M in ((h.a, exact.A), (h.v, exact.V)):
        assert mp.sqrt(top(M.T * M)) <= value <= mp.sqrt(top(M.T * M)) * (1 + mp.mpf("1e-12"))


def test_the_gram_matrices_in_fifty_digits(small):
    _, _, exact, heads = small
    J = exact.jacobian()
    rows = [exact.hessian(i, z) for i in range(3) for z in range(2)]
    for gram, M in ((jacobian_gram(heads), J * J.T), (hessian_gram(heads), form(rows))):
        lost = mp.fsum((M[i, j] - gram.mid[i, j]) ** 2 * (2 if j < i else 1) for i in range(6) for j in range(i + 1))
        assert mp.sqrt(lost) <= gram.spread <= 1e-11 * float(trace(M))
        value = float(top(M))
        assert gram.largest_at_most(value * (1.0 + 1e-11))
        assert not gram.largest_at_most(value * (1.0 - 1e-11))


def test_the_own_token_in_fifty_digits(small):
    _, _, exact, heads = small
    value = exact.own()
    assert value * (1 - mp.mpf("1e-14")) <= own_token_bound(heads) <= value * (1 + mp.mpf("1e-11"))


@pytest.mark.parametrize("r", [0.0, 0.05])
def test_the_third_order_on_intervals(small, r):
    """Between what the directions of the ball reach and the float64 evaluation, which it equals up to rounding."""
    map, X, _, (h,) = small
    D3 = ThirdOrder(h.P, h.P, h.G, h.Y, h.K, *h.spreads(), h.a, h.v)(r)
    assert D3 <= third_order(heads_at(map, X).heads[0])(r) <= D3 * (1.0 + 1e-9)
    rng = np.random.default_rng(1)
    for _ in range(3):
        D = rng.standard_normal(X.shape)
        found = derivatives(
            lambda x: softmax(x, map.A, map.V, map.bias), X + r * D / np.linalg.norm(D), D / np.linalg.norm(D)
        )
        assert found[2] <= D3


def test_turned_tokens_in_fifty_digits():
    map, X = drawn("rotary heads")
    place, _ = lifted(map, len(X))
    with exact_arithmetic():
        turned = turned_tokens(place, X)
    exact = matrix(X) * matrix(place.L).T
    for i in range(len(X)):
        for k in range(exact.cols):
            exact[i, k] += mp.mpf(float(place.b[k]))
    start = 0
    for h in map.heads:
        for rows in (range(start, start + 4), range(start + 4, start + 8)):
            for t, (a, b) in enumerate(((0, 1), (2, 3)) if h.layout == "adjacent" else ((0, 2), (1, 3))):
                for i in range(len(X)):
                    angle = (i + 1) * mp.mpf(float(h.frequencies[t]))
                    x, y = exact[i, rows[a]], exact[i, rows[b]]
                    exact[i, rows[a]], exact[i, rows[b]] = (
                        x * mp.cos(angle) - y * mp.sin(angle),
                        x * mp.sin(angle) + y * mp.cos(angle),
                    )
        start += 10
    holds(turned.tokens.interval(), exact)


# --- eigenvalues by factorisation


@pytest.mark.parametrize("k", [1, 2, 7, 30])
def test_largest_eigenvalues_in_fifty_digits(k):
    rng = np.random.default_rng(k)
    M = rng.standard_normal((k, max(k // 2, 1)))
    S = lift(M) @ lift(M.T)
    exact = top(matrix(M) * matrix(M).T)
    found = largest_eigenvalue(S)
    assert exact <= found <= exact * (1 + mp.mpf("1e-11"))
    tiny = largest_eigenvalue(S * 1e-200)
    assert exact * mp.mpf(1e-200) <= tiny <= exact * mp.mpf(1e-200) * (1 + mp.mpf("1e-11"))


def test_blocks_of_a_large_matrix():
    rng = np.random.default_rng(0)
    M = rng.standard_normal((1100, 40))
    G, S = Symmetric(1100), M @ M.T
    for a in range(0, 1100, 275):
        b = a + 275
        G.put(slice(a, b), slice(0, b), Interval.between(S[a:b, :b] - 1e-12, S[a:b, :b] + 1e-12))
    value = float(np.linalg.eigvalsh(M.T @ M)[-1])
    assert 1e-12 * 1100 <= G.spread <= 2e-12 * 1100
    assert G.largest_at_most(value * (1.0 + 1e-9))
    assert not G.largest_at_most(value * (1.0 - 1e-9))


def test_what_proves_nothing():
    S = np.diag([1.0, 2.0])
    assert proves_bound(S, 0.0, 2.0 + 1e-13)
    assert not proves_bound(S, 0.0, 2.0 - 1e-13)
    assert not proves_bound(S, 1e-3, 2.0 + 1e-4)
    assert proves_bound(S, 1e-3, 2.0 + 2e-3)
    assert proves_bound(S + np.array([[0.0, 5.0], [0.0, 0.0]]), 0.0, 2.0 + 1e-13)  # the upper triangle is not read
    for bound in (0.0, -1.0, np.nan, np.inf):
        assert not proves_bound(S, 0.0, bound)
    assert not proves_bound(np.full((2, 2), np.nan), 0.0, 1.0)
    assert largest_eigenvalue(lift(np.zeros((3, 3)))) == 0.0
    assert float(upper(lift(np.array([[3.0, 4.0]])).spectral_norm())) == pytest.approx(5.0, rel=1e-13)


@pytest.mark.slow
def test_a_head_of_the_sample_layer():
    layer = oa.load_sample()
    X = layer.hidden_states[0][:64]
    radius = 1e-4 * float(np.linalg.norm(X, axis=1).max())
    bound = oa.certify(layer.heads[11], X, radius=radius)
    proved = bound.rigorous_value()
    assert proved <= bound.value <= proved * (1.0 + 1e-9)
