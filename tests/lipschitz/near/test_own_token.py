"""The terms of the row's own token: blocks against differences in 40 digits, forms made of these, what climbs against the bound."""

from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from exact_maps import matrix, softmax

from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.near import own_token
from otattn.lipschitz.near.head import rounding
from otattn.lipschitz.near.heads import heads_at
from otattn.lipschitz.near.own_token import own_token_norm


def blocks(h, zeta, with_A=True):
    """``L (n, n, d, d)`` and ``N (n, d, d)`` of a head as the module's docstring has them; zeta ``(n, e)`` is before W."""
    z = zeta if h.W is None else zeta @ h.W
    u, w = z @ h.V, np.einsum("ie,ije->ij", z, h.y)
    pulled = np.einsum("ied,ie->id", h.field, z)
    inner = w[:, :, None] * h.k - pulled[:, None]
    L = u[:, None, :, None] * h.k[:, :, None, :] + h.g[:, None, :, None] * inner[:, :, None, :]
    if with_A:
        L = L + w[:, :, None, None] * h.A
    return h.P[:, :, None, None] * L, np.einsum("ij,ij,ija,ijb->iab", h.P, w, h.k, h.k)


def summed(heads, zeta, with_A=True):
    parts = [blocks(h, zeta, with_A) for h in heads]
    return sum(L for L, _ in parts), sum(N for _, N in parts)


def whole(L, N):
    """The symmetric matrix ``(n d, n d)`` of the form."""
    n, d = N.shape[:2]
    M = np.einsum("ijab->jaib", L).reshape(n * d, n * d)
    M = M + M.T
    for i in range(n):
        M[i * d : (i + 1) * d, i * d : (i + 1) * d] += N[i]
    return M


def drawn(rng, n, d, several, causal, scale=1.0):
    heads = [
        SoftmaxAttention(
            scale * rng.standard_normal((d, d)), rng.standard_normal((2, d)), bias=scale * rng.standard_normal(d)
        )
        for _ in range(several)
    ]
    ours = heads[0] if several == 1 else MultiHeadAttention(heads, [rng.standard_normal((3, 2)) for _ in heads])
    return MaskedAttention(ours) if causal else ours


def test_the_blocks_are_what_the_own_token_adds_to_the_second_derivative():
    """The Hessian of the map less that of the map with frozen queries, by differences in 40 digits."""
    rng = np.random.default_rng(5)
    n, d = 3, 2
    A, V, X = rng.standard_normal((d, d)), rng.standard_normal((2, d)), rng.standard_normal((n, d))
    head = heads_at(SoftmaxAttention(A, V), X).heads[0]
    zeta = rng.standard_normal((n, 2))

    def value(y, frozen):
        queries = matrix(X) if frozen else y
        total = mp.mpf(0)
        for i in range(n):
            x = y.copy()
            x[i, :] = queries[i, :]
            # row i of softmax with its query apart from the tokens that it sees
            g = [mp.fsum(mp.mpf(float(A[k, m])) * x[i, m] for m in range(d)) for k in range(d)]
            p = [mp.exp(mp.fsum(g[k] * y[j, k] for k in range(d))) for j in range(n)]
            v = [mp.fsum(p[j] * y[j, k] for j in range(n)) / mp.fsum(p) for k in range(d)]
            total += mp.fsum(
                mp.mpf(float(zeta[i, e])) * mp.fsum(mp.mpf(float(V[e, k])) * v[k] for k in range(d)) for e in range(2)
            )
        return total

    with mp.workdps(40):
        x, h, size = matrix(X), mp.mpf(10) ** -9, n * d
        same = softmax(x, A, V, np.zeros(d))
        assert value(x, False) == pytest.approx(
            float(mp.fsum(same[i, e] * zeta[i, e] for i in range(n) for e in (0, 1)))
        )
        H = np.zeros((size, size))
        for a in range(size):
            for b in range(size):
                corners = []
                for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                    y = x.copy()
                    y[a // d, a % d] += s * h
                    y[b // d, b % d] += t * h
                    corners.append(value(y, False) - value(y, True))
                H[a, b] = float((corners[0] - corners[1] - corners[2] + corners[3]) / (4 * h * h))
    assert whole(*blocks(head, zeta)) == pytest.approx(H, rel=1e-9, abs=1e-9 * np.abs(H).max())


CASES = [(n, d, several, causal) for n, d in ((1, 2), (3, 2), (4, 3)) for several in (1, 2) for causal in (False, True)]


@pytest.mark.parametrize("case", CASES)
def test_the_forms_of_a_row(case):
    """``q_i`` with and without A and for the term with A apart: the largest eigenvalues of forms made of these blocks."""
    n, d, several, causal = case
    rng = np.random.default_rng(list(case))
    heads = heads_at(drawn(rng, n, d, several, causal), rng.standard_normal((n, d))).heads
    size = 2 if several == 1 else 3
    shares, crossed = own_token._form_shares(heads), own_token._crossed(heads)
    for i in range(n):
        plain, full, form, of_L, of_N = own_token._row(heads, i, crossed, shares)
        t = of_N - 1.0
        others = np.arange(n) != i

        def value(z, with_A, i=i, others=others, t=t):
            zeta = np.zeros((n, size))
            zeta[i] = z
            L, N = (part[i] for part in summed(heads, zeta, with_A))
            square = 2.0 * (L[others] ** 2).sum() + (1.0 + t) * (N**2).sum() + 4.0 * (1.0 + 1.0 / t) * (L[i] ** 2).sum()
            assert 2.0 * (L[others] ** 2).sum() + ((N + L[i] + L[i].T) ** 2).sum() <= square * (1 + 1e-12)
            return square

        def apart(z, i=i, others=others):
            total = 0.0
            for h, share in zip(heads, shares, strict=True):
                M = h.P[i] * (h.y[i] @ (z if h.W is None else h.W.T @ z))
                total += share * (2.0 * (M[others] ** 2).sum() + 4.0 * M[i] ** 2)
            return total

        for found, q in (
            (plain, lambda z: value(z, False)),
            (full, lambda z: value(z, True)),
            (form, apart),
        ):
            units = np.eye(size)
            gram = np.array([[(q(a + b) - q(a - b)) / 4.0 for a in units] for b in units])
            assert found == pytest.approx(np.linalg.eigvalsh(gram)[-1], rel=1e-9, abs=1e-25)
        assert of_L >= 2.0
        of_own, of_both = own_row_traces(heads, i, size)
        if of_both > 1e-12:  # a row that sees one token has no terms
            assert t == pytest.approx(np.clip(2.0 * np.sqrt(of_own / of_both), 1e-3, 1e3), rel=1e-6)
    assert sum(h.a**2 / s for h, s in zip(heads, shares, strict=True)) == pytest.approx(1.0)  # sum of t_h / sum t


def own_row_traces(heads, i, size):
    """Traces of ``|L_ii|^2`` without A, and of ``|N_i|^2``."""
    totals = np.zeros(2)
    for z in np.eye(size):
        zeta = np.zeros((heads[0].n, size))
        zeta[i] = z
        L, N = summed(heads, zeta, False)
        totals += (L[i, i] ** 2).sum(), (N[i] ** 2).sum()
    return totals


@pytest.mark.parametrize("case", CASES)
def test_the_pairs_of_rows(case):
    n, d, several, causal = case
    rng = np.random.default_rng(list(case))
    heads = heads_at(drawn(rng, n, d, several, causal), rng.standard_normal((n, d))).heads
    shares = own_token._form_shares(heads)
    tables = own_token._pairs(heads, shares)
    for table in tables:
        assert np.array_equal(table, table.T) or np.allclose(table, table.T, rtol=1e-14)
        assert np.all(np.diag(table) == 0.0)
    for _ in range(8):
        zeta = rng.standard_normal((n, 2 if several == 1 else 3))
        zeta /= np.linalg.norm(zeta, axis=1, keepdims=True)
        for table, with_A in zip(tables, (False, True), strict=False):
            L, _ = summed(heads, zeta, with_A)
            crossed = np.einsum("ijab,jiba->ij", L, L)
            assert np.all(np.abs(crossed - np.diag(np.diag(crossed))) <= table * (1 + 1e-12))
            sizes = np.linalg.norm(L, axis=(2, 3))
            assert np.all(sizes * sizes.T - np.diag(np.diag(sizes) ** 2) <= table * (1 + 1e-12))
        M = [h.P * np.einsum("ie,ije->ij", zeta if h.W is None else zeta @ h.W, h.y) for h in heads]
        total = sum(s * np.abs(m * m.T) for s, m in zip(shares, M, strict=True))
        assert np.all(total - np.diag(np.diag(total)) <= tables[2] * (1 + 1e-12))


def climbed(heads, size, rng, starts=5):
    """The largest value of the own terms over unit zeta and D: each in turn is the best for the other."""
    n, d = heads[0].g.shape
    best = 0.0
    for _ in range(starts):
        D = rng.standard_normal((n, d)) * rng.random((n, 1)) ** 6
        for _ in range(12):
            D = D / np.linalg.norm(D)
            zeta = np.zeros((n, size))
            for h in heads:  # the gradient in zeta, from the second derivatives themselves
                a, b = np.einsum("ijd,id->ij", h.k, D), h.g @ D.T
                b = b - (h.P * b).sum(axis=1, keepdims=True)
                m = (D @ h.A.T) @ D.T
                out = np.einsum("ij,ije->ie", h.P * (a * a + 2.0 * a * b + 2.0 * m), h.y) + 2.0 * (h.P * a) @ (
                    D @ h.V.T
                )
                zeta += out if h.W is None else out @ h.W.T
            best = max(best, float(np.linalg.norm(zeta)))
            zeta = zeta / max(np.linalg.norm(zeta), 1e-300)
            w, E = np.linalg.eigh(whole(*summed(heads, zeta)))
            best = max(best, float(np.abs(w).max()))
            D = E[:, np.abs(w).argmax()].reshape(n, d)
    return best


@pytest.mark.parametrize("seed", range(16))
def test_nothing_climbs_above_it(seed):
    rng = np.random.default_rng(seed)
    n, d, several = int(rng.integers(1, 6)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    ours = drawn(rng, n, d, several, rng.random() < 0.4, 10.0 ** rng.uniform(-1.5, 0.7))
    X = 10.0 ** rng.uniform(-0.5, 0.5) * rng.standard_normal((n, d))
    heads = heads_at(ours, X).heads
    bound = own_token_norm(heads, rounding(heads))
    found = climbed(heads, 2 if several == 1 else 3, rng)
    assert found <= bound
    assert bound <= 8.0 * found or n == 1  # with one token nothing moves but rounding


def test_with_one_row_that_counts_it_is_nearly_attained():
    """Masked, two tokens, e = d = 1: the second row alone has terms, and its matrix of 2 x 2 is nearly of rank one."""
    heads = heads_at(MaskedAttention(SoftmaxAttention([[2.0]], [[1.0]])), np.array([[0.3], [-0.4]])).heads
    bound = own_token_norm(heads, rounding(heads))
    M = whole(*summed(heads, np.array([[0.0], [1.0]])))
    assert np.linalg.norm(M, 2) <= bound <= 1.3 * np.linalg.norm(M)


def test_errors_of_the_floats_are_added():
    """The same numbers with larger errors: the bound holds for every head within them."""
    rng = np.random.default_rng(2)
    X = rng.standard_normal((4, 2))
    head = heads_at(drawn(rng, 4, 2, 1, False), X).heads[0]
    plain = own_token_norm([head], rounding([head]))
    for name in ("dP", "dy", "dk", "dg", "dfield", "dV", "dA"):
        size = 1e-3
        error = size if name in ("dV", "dA") else np.full_like(getattr(head, name), size)
        wide = replace(head, **{name: error})
        bound = own_token_norm([wide], rounding([wide]))
        assert bound > plain
        for _ in range(8):
            part = name[1:]
            moved = {part: perturbed(rng, getattr(head, part), size)}
            assert climbed([replace(head, **moved)], 2, rng, starts=1) <= bound


def perturbed(rng, value, size):
    """Every block moved by ``size`` (entries of P, norms of the others, Frobenius norm of matrices)."""
    step = rng.standard_normal(value.shape)
    axes = {2: None, 3: 2}[value.ndim]
    if value.ndim == 2 and value.shape[0] == value.shape[1] == 4:
        return np.clip(value + size * np.sign(step), 0.0, 1.0)  # weights
    step /= np.linalg.norm(step, axis=axes, keepdims=True)
    return value + size * step
