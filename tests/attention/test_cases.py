"""The rows A1 to A6, B5 and B6 of the cases from the field, for every variant."""

import numpy as np
import pytest
from scipy.special import expit
from variants import ALL, MASKED, NORMALISED, POINTWISE

from otattn.attention import AttentionMap, SinkhornAttention, SoftmaxAttention
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

ONE = np.array([[1.0]])


def line(points: list[float], weights: list[float] | None = None) -> DiscreteMeasure:
    return DiscreteMeasure(np.array(points)[:, None], weights)


def last(points: list[float], weights: list[float] | None = None) -> SpaceTimeMeasure:
    """All atoms at one time: masked maps act as unmasked ones."""
    return SpaceTimeMeasure(np.full(len(points), 0.5), np.array(points)[:, None], weights)


def place(name: str, points: list[float], weights: list[float] | None = None) -> DiscreteMeasure | SpaceTimeMeasure:
    return (last if name.startswith("masked") else line)(points, weights)


def at(attention: AttentionMap, mu: DiscreteMeasure | SpaceTimeMeasure, *x: float) -> np.ndarray:
    return attention(np.array(x)[:, None], mu, times=np.full(len(x), 0.5))[:, 0]


@pytest.mark.parametrize("form", [1e4, 1e6, 1e9])
@pytest.mark.parametrize("name", sorted(n for n in ALL if n.removeprefix("masked-") in NORMALISED))
def test_A1_huge_logits_pick_the_aligned_atom(name: str, form: float) -> None:
    attention, mu = ALL[name](form * ONE, ONE), place(name, [1.0, -1.0])
    assert np.array_equal(attention.pushforward(mu).points[:, 0], [1.0, -1.0])
    J = attention.jacobian(mu)
    # one-hot weights do not move: the value of the chosen atom does
    assert np.array_equal(J.to_dense(), np.eye(2))
    assert np.array_equal(J.jvp([[1.0], [2.0]]), [[1.0], [2.0]])
    assert np.array_equal(J.vjp([[1.0], [2.0]]), [[1.0], [2.0]])
    assert (attention.field_jacobian(mu.points, mu, times=[0.5, 0.5]) == 0.0).all()


@pytest.mark.parametrize("form", [1e4, 1e6, -1e6])
@pytest.mark.parametrize("name", sorted(n for n in ALL if n.removeprefix("masked-") in NORMALISED))
def test_A1_huge_logits_stay_finite_on_clouds(name: str, form: float) -> None:
    rng = np.random.default_rng(0)
    A, X = form * np.eye(3), rng.standard_normal((12, 3))
    attention = ALL[name](A, np.eye(3))
    if name == "sinkhorn":  # logits of 1e7 round by 1e-9: the marginals can reach no more
        attention = SinkhornAttention(A, np.eye(3), tol=1e-7)
    out = attention.on_tokens(X)
    J = attention.jacobian(X)
    assert np.isfinite(out).all()
    assert np.isfinite(J.jvp(X)).all()
    assert np.isfinite(J.vjp(X)).all()
    # outputs are averages of tokens, whatever the logits
    assert (out >= X.min(axis=0) - 1e-12).all()
    assert (out <= X.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_A1_huge_logits_without_normalisation(name: str) -> None:
    attention, mu = POINTWISE[name](1e4 * ONE, ONE), line([1.0, -1.0])
    if name == "exponential":
        with pytest.raises(OverflowError, match="below 709"):
            attention.pushforward(mu)
        return
    expected = {"sigmoid": [0.5, -0.5], "relu": [5e3, -5e3], "linear": [1e4, -1e4]}[name]
    assert np.array_equal(attention.pushforward(mu).points[:, 0], expected)
    assert np.isfinite(attention.jacobian(mu).to_dense()).all()


@pytest.mark.parametrize("name", ["relu", "linear"])
def test_A1_values_beyond_float64_are_an_error(name: str) -> None:
    attention, mu = POINTWISE[name](1e200 * ONE, 1e200 * ONE), line([1.0, 2.0])
    with pytest.raises(OverflowError, match="not representable"), np.errstate(over="ignore"):
        attention.pushforward(mu)
    with pytest.raises(OverflowError, match="not representable"), np.errstate(over="ignore"):
        attention.jacobian(mu).jvp([[1.0], [1.0]])


@pytest.mark.parametrize("name", ["softmax", "l2", "masked-softmax"])
def test_A1_logits_beyond_float64_are_an_error(name: str) -> None:
    attention, mu = ALL[name](1e200 * ONE, ONE), place(name, [1e200, 0.0])
    with pytest.raises(OverflowError, match="logits"), np.errstate(over="ignore", invalid="ignore"):
        attention.pushforward(mu)


@pytest.mark.parametrize("name", sorted(ALL))
def test_A2_zero_weight_atoms_never_enter(name: str) -> None:
    attention = ALL[name](ONE, ONE)
    mu, alone = place(name, [1e4, 0.5], [0.0, 1.0]), place(name, [0.5])
    assert at(attention, mu, 0.5) == pytest.approx(at(attention, alone, 0.5), rel=1e-15)
    if name.removeprefix("masked-") in NORMALISED:
        assert at(attention, mu, 0.5) == pytest.approx(0.5, rel=1e-15)
        assert attention.pushforward(mu).points[1, 0] == pytest.approx(0.5, rel=1e-15)
        assert np.allclose(attention.jacobian(mu).to_dense(), [[0.0, 1.0], [0.0, 1.0]], rtol=0, atol=1e-15)
    if "exponential" in name:
        # the row at 1e4 itself has no value in float64
        with pytest.raises(OverflowError):
            attention.pushforward(mu)
    else:
        assert np.isfinite(attention.pushforward(mu).points).all()


TWO_ATOMS = {
    "softmax": (0.5, expit(1.0)),
    "softmax-qkv": (0.5, expit(1.0)),
    "l2": (expit(-1.0), expit(1.0)),
    # the doubly stochastic 2 x 2 matrix with cross-ratio e
    "sinkhorn": (expit(-0.5), expit(0.5)),
    "multihead": (0.5 * (0.5 + expit(-1.0)), expit(1.0)),
    "sigmoid": (0.25, 0.5 * expit(1.0)),
    "relu": (0.0, 0.5),
    "linear": (0.0, 0.5),
    "exponential": (0.5, 0.5 * np.e),
}


@pytest.mark.parametrize("name", sorted(ALL))
def test_A3_two_atoms_by_hand(name: str) -> None:
    attention, mu = ALL[name](ONE, ONE), place(name, [0.0, 1.0])
    # Sinkhorn stops at marginals of 1e-10
    tol = 1e-10 if name == "sinkhorn" else 1e-15
    assert at(attention, mu, 0.0, 1.0) == pytest.approx(TWO_ATOMS[name.removeprefix("masked-")], abs=tol)


@pytest.mark.parametrize("name", sorted(ALL))
def test_A4_repeated_points_are_weights(name: str) -> None:
    attention = ALL[name](ONE, ONE)
    repeated, weighted = place(name, [0.0, 0.0, 1.0]), place(name, [0.0, 1.0], [2 / 3, 1 / 3])
    values = at(attention, repeated, 0.0, 1.0)
    assert values == pytest.approx(at(attention, weighted, 0.0, 1.0), rel=1e-9, abs=1e-15)
    if name == "softmax":
        assert values == pytest.approx([1 / 3, np.e / (2 + np.e)], rel=1e-14)
        assert values[1] == pytest.approx(0.576117, abs=5e-7)
    # the particle part is the same in L2(mu): the repeated atom moves as one
    J = attention.jacobian(weighted).reweighted(weighted.weights).to_dense()
    full = attention.jacobian(repeated).to_dense()
    merge = np.array([[2**-0.5, 0.0], [2**-0.5, 0.0], [0.0, 1.0]])
    assert np.allclose(merge.T @ full @ merge, J, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", sorted(NORMALISED))
def test_A5_vanishing_weight_against_a_huge_logit(name: str) -> None:
    attention, mu = NORMALISED[name](ONE, ONE), line([1000.0, 0.0], [1e-300, 1.0])
    assert at(attention, mu, 1000.0) == pytest.approx(1000.0, rel=1e-12)
    assert np.isfinite(attention.jacobian(mu).to_dense()).all()


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_A5_vanishing_weight_without_normalisation(name: str) -> None:
    attention, mu = POINTWISE[name](ONE, ONE), line([1000.0, 0.0], [1e-300, 1.0])
    if name == "exponential":
        with pytest.raises(OverflowError):
            at(attention, mu, 1000.0)
    else:
        factor = {"sigmoid": 1.0, "relu": 1e6, "linear": 1e6}[name]
        assert at(attention, mu, 1000.0) == pytest.approx(factor * 1e3 * 1e-300, rel=1e-12)


@pytest.mark.parametrize("name", sorted(ALL))
def test_A6_half_precision_tokens_of_norm_300(name: str) -> None:
    X = np.random.default_rng(1).standard_normal((6, 4))
    X = (300.0 * X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float16)
    attention = ALL[name](np.eye(4), np.eye(4))
    if "exponential" in name:
        with pytest.raises(OverflowError, match="709"):
            attention.on_tokens(X)
        return
    out = attention.on_tokens(X)
    assert out.dtype == np.float64
    assert np.isfinite(out).all()
    assert np.array_equal(out, attention.on_tokens(X.astype(np.float64)))


@pytest.mark.parametrize("e", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(ALL))
def test_B5_zero_values(name: str, e: int) -> None:
    rng = np.random.default_rng(2)
    X = rng.standard_normal((5, 2))
    attention = ALL[name](rng.standard_normal((2, 2)), np.zeros((e, 2)))
    assert (attention.on_tokens(X) == 0.0).all()
    assert attention.on_tokens(X).shape == (5, e)
    J = attention.jacobian(X)
    assert (J.to_dense() == 0.0).all()
    assert (J.jvp(X) == 0.0).all()
    assert (J.vjp(np.ones((5, e))) == 0.0).all()
    assert (attention.field_jacobian(X, X) == 0.0).all()


@pytest.mark.parametrize("name", sorted(ALL))
def test_B5_zero_form(name: str) -> None:
    """Equal logits: the mean (for L2 with A = 0 the keys still count, so its logits are -|y|^2)."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((5, 2))
    masked, kind = name.startswith("masked"), name.removeprefix("masked-")
    out = ALL[name](np.zeros((2, 2)), np.eye(2)).on_tokens(X)
    seen = np.tril(np.ones((5, 5))) if masked else np.ones((5, 5))
    mean = seen @ X / seen.sum(axis=1, keepdims=True)
    tilted = seen * np.exp(-np.sum(X**2, axis=1))
    tilted = tilted @ X / tilted.sum(axis=1, keepdims=True)
    expected = {
        "l2": tilted,
        "multihead": 0.5 * (mean + tilted),
        "sigmoid": 0.5 * seen @ X / 5,
        "relu": 0.0 * X,
        "linear": 0.0 * X,
        "exponential": seen @ X / 5,
    }.get(kind, mean)
    assert np.allclose(out, expected, rtol=0, atol=1e-14)
    J = ALL[name](np.zeros((2, 2)), np.eye(2)).jacobian(X)
    assert np.isfinite(J.to_dense()).all()
    if kind in ("softmax", "softmax-qkv", "sinkhorn"):
        assert np.allclose(J.to_dense(), np.kron(seen / seen.sum(axis=1, keepdims=True), np.eye(2)), atol=1e-14)


@pytest.mark.parametrize("e", [1, 3])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", sorted(ALL))
def test_B6_smallest_sizes(name: str, n: int, d: int, e: int) -> None:
    rng = np.random.default_rng(4)
    A, V, X = rng.standard_normal((d, d)), rng.standard_normal((e, d)), rng.standard_normal((n, d))
    attention = ALL[name](A, V)
    out = attention.on_tokens(X)
    assert out.shape == (n, e)
    J = attention.jacobian(X)
    assert J.shape == (n * e, n * d)
    v, g = rng.standard_normal((n, d)), rng.standard_normal((n, e))
    assert np.allclose(J.to_dense() @ v.ravel(), J.jvp(v).ravel(), rtol=1e-12, atol=1e-13)
    assert np.sum(g * J.jvp(v)) == pytest.approx(np.sum(v * J.vjp(g)), rel=1e-12, abs=1e-14)
    if n == 1 and name.removeprefix("masked-") in NORMALISED:
        assert np.allclose(out, X @ V.T, rtol=1e-14, atol=0)
        assert np.allclose(J.to_dense(), V, rtol=1e-14, atol=1e-15)


def test_A_readonly_and_foreign_arrays() -> None:
    """Fortran order, strides and read-only inputs give what contiguous copies give."""
    rng = np.random.default_rng(5)
    X = np.asfortranarray(rng.standard_normal((6, 4)))[:, ::2]
    X.flags.writeable = False
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    assert np.array_equal(attention.on_tokens(X), attention.on_tokens(X.copy()))
    assert {*MASKED} <= {*ALL}
