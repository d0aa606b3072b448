"""Sinkhorn attention: marginals recomputed from the potentials, hard kernels, the implicit derivative."""

import numpy as np
import pytest

from otattn.attention import SinkhornAttention, laplacian, memory
from otattn.errors import ConvergenceError
from otattn.measures import DiscreteMeasure

Rng = np.random.Generator


def cloud(kind: str, n: int, d: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """A form of unit scale and tokens."""
    A = rng.standard_normal((d, d)) / np.sqrt(d)
    X = rng.standard_normal((n, d))
    if kind == "clusters":
        X = rng.standard_normal((4, d))[rng.integers(0, 4, n)] + 0.01 * X
    elif kind == "two-sides":
        X = np.where(rng.random((n, 1)) < 0.5, -1.0, 1.0) + 0.05 * X
    elif kind == "negative":
        A = -A @ A.T
    elif kind == "positive":
        A = A @ A.T
    return A, X


def marginal_error(attention: SinkhornAttention, mu: DiscreteMeasure) -> float:
    """Largest error of a marginal of the kernel, recomputed from the potentials."""
    f, h = attention.potentials(mu)
    k = np.exp(mu.points @ attention.A.T @ mu.points.T + f[:, None] + h[None, :])
    live = mu.weights > 0
    rows, columns = k @ mu.weights - 1.0, mu.weights @ k - 1.0
    return float(max(np.abs(rows[live]).max(), np.abs(columns[live]).max()))


KINDS = ("normal", "clusters", "two-sides", "negative", "positive")


@pytest.mark.parametrize("scale", [1.0, 10.0, 50.0, 1000.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 30, 120])
def test_marginals_are_one(kind: str, scale: float, n: int) -> None:
    A, X = cloud(kind, n, 4, np.random.default_rng(n))
    attention = SinkhornAttention(scale * A, np.eye(4))
    logits = scale * np.abs(X @ A.T @ X.T).max()
    # the recomputed kernel rounds its logits, each a sum of four products
    assert marginal_error(attention, DiscreteMeasure(X)) <= 1e-10 + 4e-15 * logits


@pytest.mark.parametrize("kind", KINDS)
def test_marginals_of_a_larger_cloud(kind: str) -> None:
    A, X = cloud(kind, 300, 4, np.random.default_rng(300))
    attention = SinkhornAttention(10.0 * A, np.eye(4))
    assert marginal_error(attention, DiscreteMeasure(X)) <= 1e-10 + 4e-15 * 10.0 * np.abs(X @ A.T @ X.T).max()


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("kind", KINDS)
def test_conjugate_gradients_agree_with_factorisation(kind: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(60)
    A, X = cloud(kind, 60, 3, rng)
    attention = SinkhornAttention(scale * A, rng.standard_normal((2, 3)), tol=1e-12 * scale)
    v, g = rng.standard_normal((60, 3)), rng.standard_normal((60, 2))
    J = attention.jacobian(X)
    dense = attention.on_tokens(X), J.jvp(v), J.vjp(g)
    monkeypatch.setattr(laplacian, "DENSE_LIMIT", 0)
    J = attention.jacobian(X)
    assert np.abs(attention.on_tokens(X) - dense[0]).max() < 1e-9
    # 1e-6: where parts of the kernel are nearly separate, marginals to tol leave that of the potentials and derivatives
    assert np.abs(J.jvp(v) - dense[1]).max() < 1e-6 * np.abs(dense[1]).max()
    assert np.abs(J.vjp(g) - dense[2]).max() < 1e-6 * np.abs(dense[2]).max()
    size = np.linalg.norm(J.jvp(v)) * np.linalg.norm(g)
    assert abs(np.sum(g * J.jvp(v)) - np.sum(v * J.vjp(g))) <= 1e-12 * size


@pytest.mark.parametrize(("n", "budget"), [(1100, memory.MEMORY_BUDGET), (400, 2**18)], ids=["kept", "recomputed"])
def test_large_clouds_by_conjugate_gradients(n: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a factorisation, and then without a stored kernel, as for clouds beyond the memory budget."""
    rng = np.random.default_rng(15)
    A, X = cloud("normal", n, 3, rng)
    attention = SinkhornAttention(2.0 * A, np.eye(3))
    v, g = rng.standard_normal((n, 3)), rng.standard_normal((n, 3))
    expected = attention.on_tokens(X)
    monkeypatch.setattr(laplacian, "DENSE_LIMIT", 100)
    monkeypatch.setattr(memory, "MEMORY_BUDGET", budget)
    assert marginal_error(attention, DiscreteMeasure(X)) <= 1.1e-10
    assert np.abs(attention.on_tokens(X) - expected).max() < 1e-8
    J = attention.jacobian(X)
    Jv, Jg = J.jvp(v), J.vjp(g)
    assert abs(np.sum(g * Jv) - np.sum(v * Jg)) <= 1e-12 * np.linalg.norm(Jv) * np.linalg.norm(g)


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_implicit_derivative(kind: str, scale: float) -> None:
    rng = np.random.default_rng(21)
    A, X = cloud(kind, 25, 3, rng)
    # 1e-13 is out of reach of large logits, which round by more
    attention = SinkhornAttention(scale * A, np.eye(3), tol=1e-13 * max(1.0, scale))
    J = attention.jacobian(X)
    v, g = rng.standard_normal((25, 3)), rng.standard_normal((25, 3))
    Jv, Jg = J.jvp(v), J.vjp(g)
    assert abs(np.sum(g * Jv) - np.sum(v * Jg)) <= 1e-12 * np.linalg.norm(Jv) * np.linalg.norm(g)

    def f(t: float) -> np.ndarray:
        return attention.on_tokens(X + t * v)

    h = 1e-4 / np.sqrt(scale)
    differences = (8.0 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12.0 * h)
    # differences of values whose potentials are known to tol: 1e-13 / 1e-4, times the slack of nearly separate parts
    assert np.linalg.norm(differences - Jv) <= 1e-7 * np.linalg.norm(Jv)


def test_the_mean_is_kept() -> None:
    """The column marginals are one: the average output is V times the average token, and so is its derivative."""
    rng = np.random.default_rng(22)
    A, X = cloud("normal", 20, 3, rng)
    V, w = rng.standard_normal((2, 3)), rng.random(20)
    mu = DiscreteMeasure.normalized(X, w)
    attention = SinkhornAttention(3.0 * A, V, tol=1e-13)
    assert np.allclose(attention.pushforward(mu).mean(), V @ mu.mean(), rtol=0, atol=1e-12)
    v = rng.standard_normal((20, 3))
    assert np.allclose(mu.weights @ attention.jacobian(mu).jvp(v), V @ (mu.weights @ v), rtol=0, atol=1e-12)


def test_symmetric_forms_have_a_symmetric_jacobian() -> None:
    """With V = A symmetric the flow is a gradient flow: the Jacobian is symmetric."""
    rng = np.random.default_rng(23)
    A, X = cloud("positive", 15, 3, rng)
    J = SinkhornAttention(A, A, tol=1e-13).jacobian(X).to_dense()
    assert np.abs(J - J.T).max() < 1e-11 * np.abs(J).max()


def test_potentials_gauge_shift_and_extension() -> None:
    rng = np.random.default_rng(24)
    A, X = cloud("normal", 12, 3, rng)
    w = rng.random(12)
    w[:3] = 0.0
    mu = DiscreteMeasure.normalized(X, w)
    attention = SinkhornAttention(A, np.eye(3), tol=1e-13)
    f, h = attention.potentials(mu)
    assert abs(mu.weights @ h) < 1e-13
    k = np.exp(X @ A.T @ X.T + f[:, None] + h[None, :])
    # also at the atoms of zero weight: each potential is extended by its own condition
    assert np.allclose(k @ mu.weights, 1.0, rtol=0, atol=1e-12)
    assert np.allclose(mu.weights @ k, 1.0, rtol=0, atol=1e-12)
    blocked = attention.potentials(mu, block_size=2)
    assert np.allclose(blocked[0], f, rtol=0, atol=1e-12)
    assert np.allclose(blocked[1], h, rtol=0, atol=1e-12)
    # the transposed form swaps the roles
    back = SinkhornAttention(A.T, np.eye(3), tol=1e-13).potentials(mu)
    shift = f[3] - back[1][3]
    assert np.allclose(back[1] + shift, f, rtol=0, atol=1e-11)
    assert np.allclose(back[0] - shift, h, rtol=0, atol=1e-11)


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_offset_clouds_keep_their_digits(offset: float) -> None:
    """The potentials absorb a translation: the map commutes with it."""
    rng = np.random.default_rng(25)
    A, X = cloud("normal", 15, 3, rng)
    X = np.round(X * 2**20) / 2**20  # so that the translation is exact
    shift = offset * np.array([1.0, -1.0, 2.0])
    attention = SinkhornAttention(A, np.eye(3), tol=1e-13)
    out, moved = attention.on_tokens(X), attention.on_tokens(X + shift)
    assert np.abs(moved - shift - out).max() <= 4e-16 * offset + 1e-13
    v = rng.standard_normal((15, 3))
    J, K = attention.jacobian(X), attention.jacobian(X + shift)
    # the centre of the cloud rounds by 1e-16 * offset, and everything is measured from it
    assert np.allclose(J.jvp(v), K.jvp(v), rtol=0, atol=1e-12 + 1e-15 * offset)


def test_permutation_like_kernels_become_the_assignment() -> None:
    X = np.array([[0.0], [1.0], [2.0], [5.0]])
    assert np.array_equal(SinkhornAttention([[1e6]], [[1.0]]).on_tokens(X), X)
    # the largest total of -<x, y> reverses the order
    assert np.allclose(SinkhornAttention([[-1e4]], [[1.0]]).on_tokens(X), X[::-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("smallest", [1e-3, 1e-8, 1e-30])
def test_unequal_weights(smallest: float) -> None:
    rng = np.random.default_rng(26)
    A, X = cloud("normal", 20, 3, rng)
    mu = DiscreteMeasure.normalized(X, smallest ** rng.random(20))
    assert marginal_error(SinkhornAttention(3.0 * A, np.eye(3)), mu) <= 1.1e-10


def test_too_few_iterations_are_an_error_with_what_was_reached() -> None:
    A, X = cloud("positive", 40, 3, np.random.default_rng(27))
    attention = SinkhornAttention(20.0 * A, np.eye(3), max_iter=5)
    for call in (attention.on_tokens, attention.jacobian, attention.potentials):
        with pytest.raises(ConvergenceError, match=r"marginals to 1e-10, reached \S+ after \d+ passes .*max_iter"):
            call(X)


def test_a_tolerance_below_rounding_is_an_error_soon() -> None:
    A, X = cloud("normal", 30, 3, np.random.default_rng(28))
    attention = SinkhornAttention(1e4 * A, np.eye(3), tol=1e-16)
    with pytest.raises(ConvergenceError, match="rounding of the logits"):
        attention.on_tokens(X)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="square"):
        SinkhornAttention(np.ones((2, 3)), np.eye(3))
    with pytest.raises(ValueError, match="tol"):
        SinkhornAttention(np.eye(2), np.eye(2), tol=0.0)
    with pytest.raises(ValueError, match="max_iter"):
        SinkhornAttention(np.eye(2), np.eye(2), max_iter=0)
