"""Particle flows against closed forms, laws of flows, blow-up, and bad input."""

import numpy as np
import pytest
from flow_variants import VARIANTS
from scipy.integrate import quad
from scipy.linalg import expm

from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.dynamics import flow, flow_radius_bound
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

I2 = np.eye(2)


def cloud(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def square(rng, d, scale=1.0):
    return scale * rng.normal(size=(d, d))


# ------------------------------------------------------------------------------------------------ closed forms


def test_averaging_moves_along_the_mean():
    """A = 0: x_i' = V m and m' = V m, so x_i(t) = x_i(0) + (e^{tV} - I) m(0)."""
    V = square(np.random.default_rng(1), 3)
    X, w = cloud(5, 3), np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    out = flow(SoftmaxAttention(np.zeros((3, 3)), V), DiscreteMeasure(X, w), t_span=(0.5, 2.0), t_eval=[0.5, 1.0, 2.0])
    for k, t in enumerate((0.0, 0.5, 1.5)):
        exact = X + (expm(t * V) - np.eye(3)) @ (w @ X)
        assert np.abs(out.points[k] - exact).max() < 1e-7 * np.abs(exact).max()
    assert out.times.tolist() == [0.5, 1.0, 2.0]
    assert out.status == "success"
    assert out.blow_up_time == np.inf


def test_one_token_on_its_own_is_linear():
    V = square(np.random.default_rng(2), 3)
    out = flow(SoftmaxAttention(square(np.random.default_rng(3), 3), V), cloud(1, 3), t_span=(0, 1))
    assert np.allclose(out.points[-1, 0], expm(V) @ cloud(1, 3)[0], rtol=1e-7)


def test_two_tokens_on_the_circle():
    """Angle theta between two tokens, A = V = I: theta' = -2 sin(theta) / (1 + e^{1 - cos(theta)})."""
    theta = 2.0
    X = np.array([[1.0, 0.0], [np.cos(theta), np.sin(theta)]])
    out = flow(SoftmaxAttention(I2, I2), X, t_span=(0, 3), normalization="sphere", t_eval=[3.0])
    end = np.arccos(out.points[-1, 0] @ out.points[-1, 1])
    elapsed = quad(lambda a: (1 + np.exp(1 - np.cos(a))) / (2 * np.sin(a)), end, theta, epsabs=1e-12)[0]
    assert elapsed == pytest.approx(3.0, rel=1e-7)


@pytest.mark.parametrize("t0", [0.0, 1e6])
def test_cubic_blow_up(t0):
    """x' = x^3 blows up at 1 / (2 x_0^2); what lies before is kept, what lies after is named."""
    out = flow(
        LinearAttention([[1.0]], [[1.0]]), [[2.0]], t_span=(t0, t0 + 1), t_eval=t0 + np.array([0.0, 0.1, 0.2, 0.9])
    )
    assert out.status == "blow_up"
    assert out.blow_up_time - t0 == pytest.approx(0.125, rel=1e-7)
    assert out.times.tolist() == [t0, t0 + 0.1]
    assert out.missed.tolist() == [t0 + 0.2, t0 + 0.9]
    assert out.points[1, 0, 0] == pytest.approx(2 / np.sqrt(1 - 8 * 0.1), rel=1e-6)
    assert t0 + 0.124 < out.end <= out.blow_up_time
    assert out(out.end).shape == (1, 1)


def test_exponential_blow_up():
    """x' = x e^{x^2}: the time is int dx / (x e^{x^2})."""
    out = flow(ExponentialAttention([[1.0]], [[1.0]]), [[1.0]], t_span=(0, 1))
    exact = quad(lambda x: np.exp(-x * x) / x, 1, 30, epsabs=1e-14)[0]
    assert out.status == "blow_up"
    assert out.blow_up_time == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("x0", [25.0, 27.0])
def test_blow_up_faster_than_numbers(x0):
    """Velocities near and beyond the largest float: reported, not raised."""
    out = flow(ExponentialAttention([[1.0]], [[1.0]]), [[x0]], t_span=(0, 1), t_eval=[0.0, 0.5])
    assert out.status == "blow_up"
    assert 0.0 <= out.blow_up_time < 1e-250
    assert out.points.tolist() == [[[x0]]]
    assert out.missed.tolist() == [0.5]


def test_no_blow_up_in_sight():
    """The flow stops before its blow-up when the span does; sigmoids grow at most exponentially."""
    out = flow(LinearAttention([[1.0]], [[1.0]]), [[1.0]], t_span=(0, 0.49))
    assert (out.status, out.blow_up_time) == ("success", np.inf)
    assert out.points[-1, 0, 0] == pytest.approx(1 / np.sqrt(1 - 0.98), rel=1e-6)
    out = flow(SigmoidAttention([[3.0]], [[1.0]]), [[1.0]], t_span=(0, 40))
    assert out.status == "success"
    assert out.points[-1, 0, 0] > 1e15


def test_passing_through_zero_is_no_blow_up():
    """x' = b from -b: the growth rate 1/x is infinite at 0, the flow is not."""
    constant = MultiHeadAttention([LinearAttention([[0.0]], [[1.0]])], output_bias=[1.0])
    out = flow(constant, [[-1.0]], t_span=(0, 2))
    assert out.status == "success"
    assert out.points[-1, 0, 0] == pytest.approx(1.0, abs=1e-9)


# ------------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_solves_its_equation(name):
    """The integral equation along the interpolated solution, for weighted and causal measures alike."""
    attention = VARIANTS[name](np.random.default_rng(5))
    rng = np.random.default_rng(6)
    w = rng.dirichlet(np.ones(5))
    X = 0.5 * rng.normal(size=(5, 3))
    mu = SpaceTimeMeasure([0.2, 0.2, 0.5, 0.9, 1.0], X, w) if attention.causal else DiscreteMeasure(X, w)
    out = flow(attention, mu, t_span=(0, 0.3), rtol=1e-7)
    assert out.status == "success"
    # ReLU kinks are stepped over with local errors of the order of the tolerance
    assert out.defect() < (3e-5 if "relu" in name else 3e-6)
    assert out.verify()
    assert type(out.measure(-1)) is type(mu)
    assert np.array_equal(out.weights, mu.weights)
    if attention.causal:
        assert out.token_times.tolist() == [0.2, 0.2, 0.5, 0.9, 1.0]


def test_duplicates_and_weights_are_the_same():
    attention = SoftmaxAttention(square(np.random.default_rng(0), 2), square(np.random.default_rng(1), 2))
    X = cloud(3, 2)
    a = flow(attention, np.vstack([X, X[:1]]), t_span=(0, 1), t_eval=[1.0])
    b = flow(attention, DiscreteMeasure(X, [0.5, 0.25, 0.25]), t_span=(0, 1), t_eval=[1.0])
    assert np.abs(a.points[0, :3] - b.points[0]).max() < 1e-7
    assert np.abs(a.points[0, 0] - a.points[0, 3]).max() < 1e-12


def test_tokens_of_no_weight_are_carried_along():
    attention = SoftmaxAttention(I2, -I2)
    X = cloud(4, 2)
    with_tracer = flow(attention, DiscreteMeasure(X, [0.5, 0.3, 0.2, 0.0]), t_span=(0, 1), t_eval=[1.0])
    without = flow(attention, DiscreteMeasure(X[:3], [0.5, 0.3, 0.2]), t_span=(0, 1), t_eval=[1.0])
    assert np.abs(with_tracer.points[0, :3] - without.points[0]).max() < 1e-7
    assert not np.allclose(with_tracer.points[0, 3], X[3])
    assert with_tracer.radii()[0] == pytest.approx(np.linalg.norm(without.points[0], axis=1).max(), rel=1e-7)


def test_equivariance_and_composition_in_time():
    rng = np.random.default_rng(7)
    A, V, X = square(rng, 3), square(rng, 3), cloud(5, 3)
    O = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    whole = flow(SoftmaxAttention(A, V), X, t_span=(0, 1), t_eval=[0.4, 1.0], rtol=1e-10, atol=1e-12)
    turned = flow(
        SoftmaxAttention(O @ A @ O.T, O @ V @ O.T), X @ O.T, t_span=(0, 1), t_eval=[1.0], rtol=1e-10, atol=1e-12
    )
    assert np.abs(turned.points[0] - whole.points[1] @ O.T).max() < 1e-8
    rest = flow(SoftmaxAttention(A, V), whole.points[0], t_span=(0.4, 1.0), t_eval=[1.0], rtol=1e-10, atol=1e-12)
    assert np.abs(rest.points[0] - whole.points[1]).max() < 1e-8
    back = flow(SoftmaxAttention(A, -V), whole.points[1], t_span=(0, 1), t_eval=[1.0], rtol=1e-10, atol=1e-12)
    assert np.abs(back.points[0] - X).max() < 1e-6  # backwards the cloud may spread


def test_a_causal_flow_does_not_see_the_future():
    masked = MaskedAttention(SoftmaxAttention(I2, I2))
    X = cloud(5, 2)
    whole = flow(masked, X, t_span=(0, 1), t_eval=[1.0], rtol=1e-10)
    times = np.arange(1, 6) / 5
    first = flow(masked, SpaceTimeMeasure(times[:3], X[:3]), t_span=(0, 1), t_eval=[1.0], rtol=1e-10)
    assert np.abs(whole.points[0, :3] - first.points[0]).max() < 1e-8


def test_parameters_that_depend_on_time():
    """A = 0, V(t) = cos(t): m(t) = m(0) exp(sin t)."""
    out = flow(lambda t: SoftmaxAttention([[0.0]], [[np.cos(t)]]), [[1.0], [3.0]], t_span=(1.0, 4.0), rtol=1e-10)
    assert out.points[-1].mean() == pytest.approx(2 * np.exp(np.sin(4.0) - np.sin(1.0)), rel=1e-8)


def test_rescaled_tokens_are_the_tokens_rescaled():
    rng = np.random.default_rng(8)
    head = SoftmaxAttention(square(rng, 2), square(rng, 2), bias=[0.3, -0.2], value_bias=[0.1, 0.0])
    both = MultiHeadAttention([head, L2Attention(square(rng, 2), square(rng, 2), square(rng, 2))], [I2, square(rng, 2)])
    X = cloud(5, 2)
    V = both.outputs[0] @ both.heads[0].V + both.outputs[1] @ both.heads[1].V
    for attention, value in ((head, head.V), (MaskedAttention(both), V), (SinkhornAttention(0.3 * I2, I2), I2)):
        x = flow(attention, X, t_span=(0.5, 1.5), t_eval=[1.5], rtol=1e-10, atol=1e-12)
        z = flow(attention, X, t_span=(0.5, 1.5), t_eval=[1.5], rtol=1e-10, atol=1e-12, normalization="rescaled")
        assert np.abs(z.points[0] - x.points[0] @ expm(-value).T).max() < 1e-8


def test_rescaled_tokens_go_where_tokens_cannot():
    X = cloud(6, 2)
    out = flow(SoftmaxAttention(I2, I2), X, t_span=(0, 1000), normalization="rescaled")
    assert out.status == "overflow"  # A_t = e^{2t} A leaves float64 at t = 354
    assert 300 < out.end < 360
    assert "not representable" in out.message
    assert np.isfinite(out.points).all()


def test_the_sphere_is_kept():
    X = cloud(6, 3)
    out = flow(LinearAttention(3 * np.eye(3), np.eye(3)), X, t_span=(0, 20), normalization="sphere")
    norms = np.linalg.norm(out.points, axis=2)
    assert np.abs(norms / np.linalg.norm(X, axis=1) - 1).max() < 1e-14
    assert out.status == "success"


def test_layers_move_by_their_increments():
    attention = SoftmaxAttention(I2, I2)
    a = flow(Residual(attention, scale=0.5), cloud(4, 2), t_span=(0, 2), t_eval=[2.0], rtol=1e-10)
    b = flow(attention, cloud(4, 2), t_span=(0, 1), t_eval=[1.0], rtol=1e-10)
    assert np.abs(a.points - b.points).max() < 1e-8


def test_events():
    def half(t, X):
        return X[0, 0] - 0.5

    half.terminal = True
    contraction = SoftmaxAttention([[0.0]], [[-1.0]])
    out = flow(contraction, [[1.0]], t_span=(2, 9), events=half)
    assert out.status == "event"
    assert out.event_times[0][0] == pytest.approx(2 + np.log(2), rel=1e-7)
    assert out.event_points[0][0, 0, 0] == pytest.approx(0.5, rel=1e-7)
    free = flow(contraction, [[1.0]], t_span=(0, 2), events=[lambda t, X: X[0, 0] - 0.5, lambda t, X: t - 3])
    assert free.status == "success"
    assert [len(t) for t in free.event_times] == [1, 0]


def test_the_defect_sees_a_wrong_trajectory():
    out = flow(SoftmaxAttention(I2, I2), cloud(4, 2), t_span=(0, 1))
    assert out.verify()
    true = out.dense
    object.__setattr__(out, "dense", lambda t: true(t) * (1 + 1e-3 * t))
    assert not out.verify()


@pytest.mark.slow
def test_support_radius_never_exceeds_its_bound():
    """1,000 random flows of every normalised kernel; the margin is the solver's tolerance."""
    rng = np.random.default_rng(9)
    for k in range(1000):
        d, n = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        V = square(rng, d, 2.0)
        head = SoftmaxAttention(square(rng, d, 2.0), V, value_bias=rng.normal(size=d) if k % 2 else None)
        attention = [
            head,
            L2Attention(square(rng, d), square(rng, d), V),
            MaskedAttention(head),
            MultiHeadAttention(
                [head, head], [square(rng, d, 0.5), square(rng, d, 0.5)], output_bias=rng.normal(size=d)
            ),
            SinkhornAttention(square(rng, d, 0.5), V, tol=1e-8) if k % 20 == 4 else head,
        ][k % 5]
        X = rng.uniform(0.2, 2.0) * rng.normal(size=(n, d))
        out = flow(attention, X, t_span=(0, rng.uniform(0.1, 0.8)), rtol=1e-5, atol=1e-8, method="RK45", dense=False)
        assert out.status == "success"
        assert (out.radii() <= flow_radius_bound(attention, out.radii()[0], out.times) * (1 + 1e-4)).all()


def test_the_radius_bound_is_attained():
    """One token with V = v I moves like e^{vt}."""
    out = flow(SoftmaxAttention([[1.0]], [[1.5]], value_bias=[0.5]), [[2.0]], t_span=(0, 1), t_eval=[1.0], rtol=1e-11)
    assert out.radii()[0] == pytest.approx(
        flow_radius_bound(SoftmaxAttention([[1.0]], [[1.5]], value_bias=[0.5]), 2.0, 1.0), rel=1e-9
    )
    with pytest.raises(ValueError, match="normalised kernel"):
        flow_radius_bound(ReLUAttention([[1.0]], [[1.0]]), 1.0, 1.0)
    nested = Residual(Residual(SoftmaxAttention([[1.0]], [[1.0]]), scale=0.5), scale=0.5)  # moves by x / 2 + ...
    with pytest.raises(ValueError, match="normalised kernel"):
        flow_radius_bound(nested, 1.0, 1.0)
    with pytest.raises(ValueError, match="value matrix"):
        flow(nested, [[1.0]], t_span=(0, 1), normalization="rescaled")
    with pytest.raises(ValueError, match="non-negative"):
        flow_radius_bound(SoftmaxAttention([[1.0]], [[1.0]]), 1.0, [-1.0])
    with pytest.raises(ValueError, match="start must be finite"):
        flow_radius_bound(lambda t: SoftmaxAttention([[1.0]], [[1.0]]), 1.0, [1.0], start=np.nan)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t_span": (1.0, 0.0)}, "start < end"),
        ({"t_span": (1.0, 1.0)}, "start < end"),
        ({"t_span": (0.0, np.nan)}, "finite"),
        ({"t_eval": [0.0, 2.0]}, "must lie in t_span"),
        ({"t_eval": [0.5, 0.2]}, "strictly increasing"),
        ({"t_eval": []}, "strictly increasing"),
        ({"normalization": "ball"}, "normalization"),
        ({"method": "Euler"}, "method"),
        ({"rtol": -1.0}, "rtol"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        flow(SoftmaxAttention(I2, I2), cloud(3, 2), **{"t_span": (0.0, 1.0), **options})


def test_rescaled_tokens_of_parameters_that_depend_on_time():
    """``z = E(t)^{-1} x``, ``E' = V(t) E``; V triangular: ``e^{q}`` and ``e^{q} r``, q and r integrals of V."""

    def layer(t):
        return SoftmaxAttention((1 + t) * np.array([[1.0, 0.3], [0.0, -1.0]]), [[0.5 + t, 0.3 * t], [0.0, 0.5 + t]])

    X, times = cloud(4, 2), np.array([0.5, 1.0, 1.5])
    options = {"t_span": (0.5, 1.5), "t_eval": times, "rtol": 1e-10, "atol": 1e-12}
    plain, rescaled = (flow(layer, X, normalization=name, **options) for name in (None, "rescaled"))
    square = (times**2 - 0.25) / 2
    q, r = 0.5 * (times - 0.5) + square, 0.3 * square
    E = np.exp(q)[:, None, None] * np.array([[[1.0, s], [0.0, 1.0]] for s in r])
    assert np.allclose(rescaled.points @ np.swapaxes(E, 1, 2), plain.points, rtol=1e-8, atol=1e-8)
    constant = layer(0.0)
    first, second = (flow(a, X, normalization="rescaled", **options).points for a in (constant, lambda t: constant))
    assert np.allclose(first, second, rtol=1e-9, atol=1e-9)


def test_bad_maps():
    X = cloud(3, 2)
    with pytest.raises(ValueError, match="space of the tokens"):
        flow(SoftmaxAttention(I2, [[1.0, 0.0]]), X, t_span=(0, 1))
    with pytest.raises(TypeError, match="attention map"):
        flow("softmax", X, t_span=(0, 1))
    with pytest.raises(TypeError, match=r"attention\(t\)"):
        flow(lambda t: t, X, t_span=(0, 1))
    with pytest.raises(ValueError, match="must not be zero on the sphere"):
        flow(SoftmaxAttention(I2, I2), [[0.0, 0.0], [1.0, 0.0]], t_span=(0, 1), normalization="sphere")
    with pytest.raises(ValueError, match="value matrix"):
        flow(lambda t: LayerNorm([1.0, 1.0]), X, t_span=(0, 1), normalization="rescaled")
    with pytest.raises(ValueError, match="value matrix"):
        flow(LayerNorm([1.0, 1.0]), X, t_span=(0, 1), normalization="rescaled")
    out = flow(SoftmaxAttention(I2, I2), X, t_span=(0, 1), dense=False)
    with pytest.raises(ValueError, match="dense"):
        out(0.5)
    with pytest.raises(ValueError, match="dense"):
        out.defect()
    with pytest.raises(ValueError, match="must lie in"):
        flow(SoftmaxAttention(I2, I2), X, t_span=(0, 1))(1.5)


def test_a_flow_that_takes_too_long_is_flagged() -> None:
    attention = SoftmaxAttention(-np.eye(2), np.eye(2))
    X = np.random.default_rng(0).normal(size=(4, 2))
    short = flow(attention, X, t_span=(0.0, 5.0), max_evaluations=60)
    assert short.status == "failed"
    assert "max_evaluations" in short.message
    assert 0.0 < short.times[-1] < 5.0
    whole = flow(attention, X, t_span=(0.0, 5.0))
    assert whole.status == "success"
    assert np.abs(short.points[-1] - whole(short.times[-1])).max() < 1e-6
