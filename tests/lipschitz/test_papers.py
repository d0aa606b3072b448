"""What the papers print and what holds: each counterexample evaluated on its own, each corrected statement tried."""

import doctest
import itertools
import math
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest

import otattn.lipschitz
from otattn.attention import L2Attention, MaskedAttention, SoftmaxAttention
from otattn.lipschitz import bounds
from otattn.lipschitz.constants.rows import density_constant, row_norm

Array = np.ndarray
Function = Callable[[Array], Array]


def test_the_page_is_found_and_its_lines_give_what_they_say() -> None:
    page = otattn.lipschitz.papers
    assert all(f"**{k}. " in page.__doc__ for k in (1, 2, 3, 4))
    result = doctest.testmod(page)
    assert result.attempted >= 9
    assert result.failed == 0


# 1. the masked mean-field constant


def averages(n: int) -> Array:
    """What causal attention with A = 0, V = 1 does to n tokens."""
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


def test_the_masked_constant_is_above_the_unmasked_bound() -> None:
    with mp.workdps(30):
        second = mp.mpf("0.447")
        exact = mp.sqrt((1 + ((1 + second) / 2) ** 2) / (1 + second**2))
    assert 1.1267 < exact < 1.1269
    attention = SoftmaxAttention([[0.0]], [[1.0]])
    printed = bounds.geshkovski2024_mean_field(attention, radius=1.0).value
    assert printed < 1.0 + 1e-9
    # the attention map of the package is the map of the example
    x, y = np.zeros((2, 1)), np.array([[1.0], [0.447]])
    masked = MaskedAttention(attention)
    moved = np.linalg.norm(masked.pushforward(y).points - masked.pushforward(x).points)
    assert moved / np.linalg.norm(y - x) == pytest.approx(float(exact), rel=1e-14)
    holds = bounds.masked_average_bound(masked, radius=1.0).value
    # 1e-9: the outward rounding of a bound
    assert exact <= 2.0 <= holds <= 2.0 * (1 + 1e-9)


def test_the_masked_constant_tends_to_hardys() -> None:
    norms = [np.linalg.norm(averages(n), 2) for n in (1, 2, 10, 100, 1000)]
    assert norms[0] == 1.0
    assert norms[1] == pytest.approx(1.1441228, rel=1e-7)
    assert all(a < b < 2.0 for a, b in itertools.pairwise(norms))
    # the proof's sequence: |y|^2 / |x|^2 >= 4 - 8 zeta(3/2) / H_n, and below 4
    for n in (10**3, 10**6):
        i = np.arange(1.0, n + 1.0)
        x = i**-0.5
        y = np.cumsum(x) / i
        assert (y >= 2.0 * i**-0.5 - 2.0 / i).all()
        square = float(y @ y / (x @ x))
        assert 4.0 - 8.0 * float(mp.zeta(1.5)) / float(mp.harmonic(n)) <= square < 4.0
    # far out by the harmonic numbers alone: above 1.99 for n = e^2100
    assert math.sqrt(4.0 - 8.0 * float(mp.zeta(1.5)) / 2100.0) > 1.99


def test_the_proof_of_hardys_inequality_line_by_line() -> None:
    x = np.random.default_rng(0).standard_normal(500)
    i = np.arange(1, 501)
    y = np.cumsum(x) / i
    before = np.concatenate([[0.0], y[:-1]])
    assert np.allclose(x, i * y - (i - 1) * before, rtol=0, atol=1e-12)
    assert (y**2 - 2 * x * y <= (i - 1) * before**2 - i * y**2 + 1e-12).all()
    assert y @ y <= 2 * (x @ y)


# 2. one query, n Diracs


def image(A: Array, x: Array, y: Array) -> Array:
    logits = y @ (A @ x)
    weights = np.exp(logits - logits.max())
    return weights @ y / weights.sum()


def constant(A: Array, x: Array, y: Array) -> float:
    """The local constant of ``mu -> Gamma_mu(x)`` from ``W_2`` at n equal atoms, from its definition in plain numpy."""
    g = A @ x
    logits = y @ g
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    m = weights @ y
    blocks = [w * (np.eye(len(x)) + np.outer(p - m, g)) for w, p in zip(weights, y, strict=True)]
    return math.sqrt(len(y)) * float(np.linalg.norm(np.hstack(blocks), 2))


def test_the_third_estimate_fails_for_antipodal_atoms() -> None:
    n, R, h = 100, mp.mpf(3), mp.mpf("1e-3")
    with mp.workdps(40):

        def value(first: mp.mpf) -> mp.mpf:
            """The image of the query 3: logits ``-3 y``, one atom at ``first`` and 99 at 3."""
            one, many = mp.exp(-R * first), (n - 1) * mp.exp(-R * R)
            return (one * first + many * R) / (one + many)

        # a finite displacement inside the ball
        ratio = abs(value(-R + h) - value(-R)) / (h / mp.sqrt(n))
    assert ratio > 9.99
    t = 9.0
    assert ratio <= min(math.sqrt(n) * row_norm(t), density_constant(t, n)[0])


def test_the_constant_of_one_query_grows_like_the_root_of_n() -> None:
    A, R, n = -np.eye(2), 3.0, 100
    x = np.array([R, 0.0])
    anchors = np.array([[0.0, R], [0.0, -R]])
    y = np.concatenate([anchors, np.tile([R, 0.0], (n - 2, 1))])
    holds = min(math.sqrt(n) * row_norm(9.0), density_constant(9.0, n)[0])
    assert 63.0 < constant(A, x, y) <= holds < 64.3
    # the derivative is that of the image
    h = 1e-5
    moved = [(image(A, x, y + h * e) - image(A, x, y - h * e)) / (2 * h) for e in np.eye(2 * n)[:4].reshape(4, n, 2)]
    steps = np.linalg.norm(np.array(moved), 2) * math.sqrt(n)
    assert steps == pytest.approx(constant(A, x, y), rel=1e-3)


def test_the_corrected_estimate_holds_on_random_atoms() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        d, n, R = int(rng.integers(1, 4)), int(rng.integers(1, 30)), float(rng.uniform(0.3, 4.0))
        A = rng.standard_normal((d, d))
        x, *y = R * rng.standard_normal((n + 1, d))
        atoms = np.array(y)
        x, atoms = (z * np.minimum(1.0, R / np.linalg.norm(z, axis=-1, keepdims=True)) for z in (x, atoms))
        t = float(np.linalg.norm(A @ x)) * R
        assert constant(A, x, atoms) <= min(math.sqrt(n) * row_norm(t), density_constant(t, n)[0])


# 3. the degree of tied L2 attention


def tied(W_Q: Array, W_V: Array, W_O: Array, X: Array) -> Array:
    """One head in the notation of the paper, H = 1."""
    scale = math.sqrt(X.shape[1])
    Y = X @ W_Q
    logits = -((Y[:, None, :] - Y[None, :, :]) ** 2).sum(axis=-1) / scale
    P = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(P / P.sum(axis=1, keepdims=True) @ X @ (W_Q @ W_Q.T / scale) @ W_V @ W_O)


def test_the_printed_constant_of_tied_attention_fails_for_one_token() -> None:
    W_Q, one = np.array([[2.0]]), np.eye(1)
    x, y = np.array([[0.0]]), np.array([[1.0]])
    ratio = float(np.linalg.norm(tied(W_Q, one, one, y) - tied(W_Q, one, one, x)))
    printed = math.sqrt(1) * (4 * 0 + 1) * math.sqrt(2.0**2 * 1.0)
    assert ratio == 4.0
    assert ratio > printed
    # the package's notation: Q = W_Q^T / (D/H)^{1/4}, V = W_V^T W_Q W_Q^T / sqrt(D/H)
    holds = bounds.kim2021_l2(L2Attention([[2.0]], [[2.0]], [[4.0]]), n=1).value
    assert ratio <= holds <= 4.0 * (1 + 1e-9)


def test_the_degree_in_the_queries_is_two() -> None:
    rng = np.random.default_rng(2)
    W_Q, W_V, W_O, X = (rng.standard_normal(s) for s in ((3, 3), (3, 2), (2, 2), (5, 3)))
    for c in (0.1, 7.0):
        # c times the image at X / c: the constant is c^2 times as large
        assert np.allclose(tied(c * W_Q, W_V, W_O, X / c), c * tied(W_Q, W_V, W_O, X), rtol=1e-12, atol=0)


# 4. value and tangent


def jvp(f: Function, X: Array, u: Array) -> tuple[Array, Array]:
    """Value and tangent, in the order of ``torch.func.jvp``; the complex step has no truncation error."""
    return f(X), np.imag(f(X + 1e-30j * u)) / 1e-30


def softmax_attention(A: Array, V: Array) -> Function:
    def f(X: Array) -> Array:
        weights = np.exp(X @ A.T @ X.T)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True) @ X @ V.T)

    return f


def power_iteration(f: Function, X: Array, output: int, start: Array, steps: int = 400) -> float:
    basis = np.eye(X.size).reshape(X.size, *X.shape)
    J = np.array([jvp(f, X, e)[1].ravel() for e in basis]).T
    u = start / np.linalg.norm(start)
    for _ in range(steps):
        v = (J.T @ jvp(f, X, u)[output].ravel()).reshape(X.shape)
        size = float(np.linalg.norm(v))
        u = v / size
    return math.sqrt(size)


def test_the_value_in_place_of_the_tangent_gives_another_number() -> None:
    rng = np.random.default_rng(3)
    A, V, X, *starts = (rng.standard_normal(s) for s in ((2, 2), (2, 2), (4, 2), (4, 2), (4, 2)))
    f = softmax_attention(A, V)
    exact = np.linalg.norm(SoftmaxAttention(A, V).jacobian(X).to_dense(), 2)
    for start in starts:
        # 400 steps of the square of the ratio of the first two singular values
        assert power_iteration(f, X, 1, start) == pytest.approx(exact, rel=1e-8)
        # with the value u never enters: one step or many, any start
        wrong = power_iteration(f, X, 0, start)
        assert wrong == power_iteration(f, X, 0, starts[0], steps=1)
        assert abs(wrong / exact - 1.0) > 0.05


def test_the_value_makes_the_constant_of_a_linear_map_depend_on_the_point() -> None:
    def double(X: Array) -> Array:
        return 2.0 * X

    one = np.ones((1, 1))
    assert power_iteration(double, 3.0 * one, 1, one) == pytest.approx(2.0, rel=1e-15)
    assert power_iteration(double, 3.0 * one, 0, one) == pytest.approx(math.sqrt(12.0), rel=1e-15)
    assert power_iteration(double, 300.0 * one, 0, one) == pytest.approx(math.sqrt(1200.0), rel=1e-15)
