"""Energies of discrete measures: first variations by mass, gradients by displacement, closed forms, huge logits."""

import math

import numpy as np
import ot
import pytest

from otattn.attention import (
    ExponentialAttention,
    LinearAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.gradient_flow import energies
from otattn.measures import DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure

D = 3
BUILDERS = {
    "exponential": energies.ExponentialEnergy,
    "exponential-bias": lambda A: energies.ExponentialEnergy(A, bias=[0.4, -0.3, 0.2]),
    "linear": energies.LinearEnergy,
    "relu": energies.ReLUEnergy,
    "sigmoid": energies.SigmoidEnergy,
    "sinkhorn": lambda A: energies.SinkhornEnergy(A, tol=1e-13),
    "combined": lambda A: energies.CombinedEnergy(
        [energies.ExponentialEnergy(A), energies.SinkhornEnergy(-A, tol=1e-13)], [0.5, -2.0]
    ),
}


def _form(seed: int, symmetric: bool) -> np.ndarray:
    B = 0.6 * np.random.default_rng(seed).standard_normal((D, D))
    return (B + B.T) / 2 if symmetric else B


def _measure(seed: int, n: int = 6) -> DiscreteMeasure:
    rng = np.random.default_rng(100 + seed)
    return DiscreteMeasure.normalized(rng.standard_normal((n, D)), 0.2 + rng.random(n))


CASES = [(name, symmetric) for name in BUILDERS for symmetric in (True, False)]


@pytest.mark.parametrize(("name", "symmetric"), CASES)
def test_first_variation_is_the_derivative_in_mass(name: str, symmetric: bool) -> None:
    energy = BUILDERS[name](_form(1, symmetric))
    mu, nu = _measure(1), _measure(2, 4)
    union = np.concatenate([mu.points, nu.points])

    def along(s: float) -> float:
        return energy(DiscreteMeasure(union, np.concatenate([(1 - s) * mu.weights, s * nu.weights])))

    # fourth-order one-sided differences, since masses may not become negative: truncation 1e-9 at s = 1e-2
    h = 4e-3
    slope = (-25 * along(0) + 48 * along(h) - 36 * along(2 * h) + 16 * along(3 * h) - 3 * along(4 * h)) / (12 * h)
    exact = nu.weights @ energy.first_variation(nu.points, mu) - mu.weights @ energy.first_variation(mu.points, mu)
    assert abs(slope - exact) <= 2e-7 * (1.0 + abs(exact))


@pytest.mark.parametrize(("name", "symmetric"), CASES)
def test_gradient_is_that_of_the_first_variation(name: str, symmetric: bool) -> None:
    energy = BUILDERS[name](_form(2, symmetric))
    mu = _measure(3)
    x = np.random.default_rng(5).standard_normal((4, D))
    h = 1e-5
    numeric = np.empty_like(x)
    for k, e in enumerate(np.eye(D)):
        numeric[:, k] = (energy.first_variation(x + h * e, mu) - energy.first_variation(x - h * e, mu)) / (2 * h)
    exact = energy.gradient(x, mu)
    assert np.abs(numeric - exact).max() <= 1e-8 * (1.0 + np.abs(exact).max())


@pytest.mark.parametrize(("name", "symmetric"), CASES)
def test_gradient_moves_the_particles(name: str, symmetric: bool) -> None:
    """``d/dx_i E(sum w_i delta_{x_i}) = w_i grad phi(x_i)``."""
    energy = BUILDERS[name](_form(3, symmetric))
    mu = _measure(4)
    direction = np.random.default_rng(6).standard_normal(mu.points.shape)
    h = 1e-5
    up, down = (energy(mu._with_points(mu.points + s * h * direction)) for s in (1.0, -1.0))
    exact = float(mu.weights @ np.sum(energy.gradient(mu.points, mu) * direction, axis=1))
    assert abs((up - down) / (2 * h) - exact) <= 1e-8 * (1.0 + abs(exact))


ATTENTIONS = [
    (ExponentialAttention, energies.ExponentialEnergy),
    (LinearAttention, energies.LinearEnergy),
    (ReLUAttention, energies.ReLUEnergy),
    (SigmoidAttention, energies.SigmoidEnergy),
    (SinkhornAttention, energies.SinkhornEnergy),
]


@pytest.mark.parametrize(("build", "kind"), ATTENTIONS)
@pytest.mark.parametrize("c", [1.0, -1.0, 2.5])
def test_attention_is_the_gradient(build: type, kind: type, c: float) -> None:
    """``Gamma = c grad phi`` for ``V = c A``, on and off the atoms: ascent and descent."""
    A, mu = _form(7, True), _measure(8)
    structure = energies.known_structure(build(A, c * A))
    assert structure is not None
    assert isinstance(structure.energy, kind)
    assert not structure.mobility
    assert structure.coefficient == pytest.approx(c, rel=1e-14)
    x = np.concatenate([mu.points, np.random.default_rng(9).standard_normal((3, D))])
    field = build(A, c * A)(x, mu)
    assert np.allclose(field, c * structure.energy.gradient(x, mu), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bias", [None, np.array([0.3, -0.2, 0.5])])
def test_softmax_is_the_gradient_over_z(bias: np.ndarray | None) -> None:
    A, mu = _form(10, True), _measure(11)
    c = -1.5
    attention = SoftmaxAttention(A, c * A, bias=bias, value_bias=None if bias is None else c * bias)
    structure = energies.known_structure(attention)
    assert structure is not None
    assert structure.mobility
    shift = np.zeros(D) if bias is None else bias
    Z = np.exp(mu.points @ A.T @ mu.points.T + (mu.points @ shift)[:, None] + mu.points @ shift) @ mu.weights
    assert np.allclose(
        attention(mu.points, mu) * Z[:, None], c * structure.energy.gradient(mu.points, mu), rtol=1e-11, atol=1e-13
    )


def test_no_energy_is_named_where_there_is_none() -> None:
    A, B = _form(12, True), _form(12, False)
    for attention in (
        SoftmaxAttention(B, B.T),
        SoftmaxAttention(A, np.eye(D)),
        SoftmaxAttention(A, A, bias=[1.0, 0.0, 0.0]),
        SinkhornAttention(A, np.zeros((D, D))),
        SigmoidAttention(np.zeros((D, D)), A),
        ReLUAttention(A, np.eye(1, D)),
        MultiHeadAttention([SoftmaxAttention(A, A), SoftmaxAttention(-A, A)]),
        MultiHeadAttention([LinearAttention(A, A), SinkhornAttention(A, B)]),
        MultiHeadAttention([LinearAttention(A, A)] * 2, output_bias=[1.0, 0.0, 0.0]),
    ):
        assert energies.known_structure(attention) is None


def test_heads_add_their_energies() -> None:
    A, mu = _form(13, True), _measure(14)
    W = [2.0 * np.eye(D), -np.eye(D)]
    attention = MultiHeadAttention([SinkhornAttention(A, A), ReLUAttention(-A, A)], W)
    structure = energies.known_structure(attention)
    assert structure is not None
    x = mu.points
    assert np.allclose(attention(x, mu), structure.coefficient * structure.energy.gradient(x, mu), atol=1e-9)
    expected = 2.0 * energies.SinkhornEnergy(A)(mu) + energies.ReLUEnergy(-A)(mu)
    assert structure.energy(mu) == pytest.approx(expected, rel=1e-12)


def test_closed_forms() -> None:
    a, z = 0.7, 1.3
    pair = [[-z], [z]]
    s = a * z * z
    assert energies.ExponentialEnergy([[a]])(pair) == pytest.approx(math.cosh(s) / 2, rel=1e-14)
    assert energies.LinearEnergy([[a]])(pair) == pytest.approx(s * s / 4, rel=1e-14)
    assert energies.ReLUEnergy([[a]])(pair) == pytest.approx(s * s / 8, rel=1e-14)
    expected = (math.log1p(math.exp(s)) + math.log1p(math.exp(-s))) / 4
    assert energies.SigmoidEnergy([[a]])(pair) == pytest.approx(expected, rel=1e-14)
    # two points: the coupling is (1/2 +- q)/2 with logit difference 2 s, so E = log(cosh s) / 2
    assert energies.SinkhornEnergy([[a]])(pair) == pytest.approx(math.log(math.cosh(s)) / 2, rel=1e-12)


@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_sinkhorn_energy_is_the_supremum(scale: float) -> None:
    """Against POT's entropic solver and against the value of explicit couplings (never above)."""
    A, mu = scale * _form(15, False), _measure(16)
    w, L = mu.weights, mu.points @ A.T @ mu.points.T
    value = energies.SinkhornEnergy(A)(mu)

    def primal(plan: np.ndarray) -> float:
        return 0.5 * float(np.sum(plan * L) - np.sum(plan * np.log(plan / np.outer(w, w))))

    plan = ot.sinkhorn(w, w, -L, 1.0, method="sinkhorn_log", stopThr=1e-13, numItermax=100_000)
    assert abs(value - primal(plan)) <= 1e-8 * (1.0 + abs(value))
    independent, tied = np.outer(w, w), 0.5 * np.diag(w) + 0.5 * np.outer(w, w)
    for other in (independent, tied):
        for theta in (0.02, 0.3, 0.9):
            assert primal((1 - theta) * plan + theta * other) < value


def test_sinkhorn_energy_hardly_feels_the_tolerance() -> None:
    A, mu = 4.0 * _form(18, True), _measure(19)
    exact, rough = (energies.SinkhornEnergy(A, tol=tol)(mu) for tol in (1e-13, 1e-5))
    assert abs(exact - rough) <= 1e-9


def test_sinkhorn_energy_far_from_the_origin() -> None:
    """``E`` of a translate differs by ``<A h, m> + <A h, h> / 2`` (symmetric A); the centred part keeps its digits."""
    A, mu = _form(20, True), _measure(21)
    h = 1e4 * np.array([1.0, -2.0, 0.5])
    energy = energies.SinkhornEnergy(A, tol=1e-12)
    moved = energy(mu._with_points(mu.points + h))
    expected = energy(mu) + h @ A @ mu.mean() + 0.5 * h @ A @ h
    assert abs(moved - expected) <= 1e-14 * abs(h @ A @ h) + 1e-8


def test_huge_logits_keep_a_meaning() -> None:
    A, mu = 1e4 * _form(22, True), _measure(23)
    energy = energies.ExponentialEnergy(A)
    L = mu.points @ A @ mu.points.T
    assert energy.log(mu) == pytest.approx(L.max(), rel=1e-2)
    value, exponent = energy.scaled(mu)
    assert 0.0 < value <= 0.5
    assert exponent == pytest.approx(L.max(), rel=1e-14)
    with pytest.raises(OverflowError, match="scaled"):
        energy(mu)
    with pytest.raises(OverflowError, match="scaled"):
        energy.gradient(mu.points, mu)
    G, exponent = energy.scaled_gradient(mu.points, mu)
    i = int(np.unravel_index(L.argmax(), L.shape)[0])
    # the token of the largest logit: log |gradient| = log Z + log |A ybar|, Z and ybar from softmax attention
    m = SoftmaxAttention(A, A)(mu.points[i : i + 1], mu)[0]
    top = L[i].max()
    log_Z = top + math.log(np.exp(L[i] - top) @ mu.weights)
    assert np.allclose(G[i], math.exp(log_Z - exponent) * m, rtol=1e-9)
    small = energies.ExponentialEnergy(-1e4 * np.eye(D))
    assert small([[1.0, 0.0, 0.0]]) == 0.0  # exp(-10000), below the least number
    assert small.log([[1.0, 0.0, 0.0]]) == pytest.approx(-1e4, rel=1e-3)
    with pytest.raises(OverflowError, match="representable"):
        energies.LinearEnergy(1e200 * np.eye(D))(mu)
    with pytest.raises(OverflowError, match="logits"):
        energies.ExponentialEnergy(1e308 * np.ones((D, D)))(10.0 * np.ones((1, D)))


def test_atoms_of_zero_weight_do_not_enter() -> None:
    mu = DiscreteMeasure([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1e200, 0.0, 0.0]], [0.5, 0.5, 0.0])
    for build in BUILDERS.values():
        energy = build(_form(24, True))
        assert energy(mu) == energy(mu.support())


def test_blocks_of_rows_change_nothing() -> None:
    x = np.random.default_rng(25).standard_normal((2500, 2))
    energy = energies.SigmoidEnergy([[1.0, 0.2], [0.2, -1.0]])
    S = x @ energy.A @ x.T
    assert energy(x) == pytest.approx(0.5 * np.logaddexp(0, S).mean(), rel=1e-12)


def test_bad_input() -> None:
    energy = energies.LinearEnergy(np.eye(2))
    with pytest.raises(ValueError, match="dimension 2 of the energy, received 3"):
        energy(np.ones((4, 3)))
    with pytest.raises(ValueError, match="x must have dimension 2"):
        energy.gradient(np.ones((1, 3)), np.ones((4, 2)))
    with pytest.raises(TypeError, match="GaussianMeasure"):
        energy(GaussianMeasure([0.0, 0.0], np.eye(2)))
    with pytest.raises(ValueError, match="square"):
        energies.ReLUEnergy(np.ones((2, 3)))
    with pytest.raises(ValueError, match="positive energy, received -"):
        energies.SinkhornEnergy([[-1.0]]).log([[1.0]])
    with pytest.raises(ValueError, match="non-empty sequence of energies"):
        energies.CombinedEnergy([], [])
    with pytest.raises(ValueError, match="one space, received dimensions"):
        energies.CombinedEnergy([energy, energies.LinearEnergy([[1.0]])], [1.0, 1.0])
    with pytest.raises(ValueError, match="tol must be finite and positive"):
        energies.SinkhornEnergy(np.eye(2), tol=0.0)
    # a space-time measure has no energy here: its flow is not one of plain measures
    with pytest.raises((TypeError, ValueError)):
        energy(SpaceTimeMeasure([0.0, 1.0], np.ones((2, 3))))
