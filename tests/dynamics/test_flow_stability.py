"""Two flows apart: exact growth where it is known, Gronwall bounds never violated; the mean-field limit."""

import numpy as np
import pytest

from otattn.attention import (
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.dynamics import flow_radius_bound, flow_stability, mean_field_limit
from otattn.lipschitz.local.growth import fit_exponent
from otattn.lipschitz.upper.published import castin2024_discrete, geshkovski2024_mean_field
from otattn.measures import DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure

I2 = np.eye(2)


def cloud(n, seed, scale=0.5):
    return scale * np.random.default_rng(seed).normal(size=(n, 2))


def test_one_token_each():
    """x' = V x: the ratio is |e^{tV} (x - y)| / |x - y|; one token's constant is ||V||, and our bound is attained."""
    out = flow_stability(SoftmaxAttention(3 * I2, 2 * I2), [[1.0, 0.0]], [[0.0, 1.0]], t_span=(0, 1), t_eval=[0.5, 1.0])
    assert out.times.tolist() == [0.0, 0.5, 1.0]
    assert np.allclose(out.ratios, np.exp(2 * out.times), rtol=1e-8)
    assert out.n == 1
    assert np.allclose(out.log_bounds["ours"], 2 * out.times, rtol=1e-9)
    assert out.verify()


CASES = {
    "softmax": SoftmaxAttention(-I2, I2),
    "softmax-bias": SoftmaxAttention([[1.0, 2.0], [0.0, -1.0]], I2, bias=[0.5, 0.0], value_bias=[0.1, 0.2]),
    "l2": L2Attention(0.5 * I2, I2, [[1.0, 0.5], [0.0, 1.0]]),
    "multihead": MultiHeadAttention([SoftmaxAttention(I2, I2), SoftmaxAttention(-I2, I2)], [0.5 * I2, I2]),
    "sigmoid": SigmoidAttention(I2, I2),
    "residual": Residual(SoftmaxAttention(I2, I2), scale=0.5),
    "sinkhorn": SinkhornAttention(I2, I2),
}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize(
    ("p", "weighted"),
    [
        *((2, False), (1, True), (np.inf, False)),
        *(pytest.param(p, weighted, marks=pytest.mark.slow) for p, weighted in ((2, True), (1, False), (np.inf, True))),
    ],
)
def test_bounds_hold(name, p, weighted):
    mu = DiscreteMeasure(cloud(3, 1), [0.5, 0.3, 0.2]) if weighted else cloud(4, 1)
    out = flow_stability(CASES[name], mu, cloud(4, 2), t_span=(0, 0.5), p=p, t_eval=[0.0, 0.25, 0.5])
    assert out.status == "success"
    assert out.n == (None if weighted else 4)
    assert out.verify()
    assert "ours" in out.log_bounds
    assert ("published" in out.log_bounds) == (p == 2 and name.startswith(("softmax", "residual", "multihead")))
    for name_, bound in out.log_bounds.items():
        assert (np.log(out.ratios) <= bound + 1e-6).all(), name_
        assert (np.diff(bound) > 0).all()
    if "published" in out.log_bounds:
        assert (out.log_bounds["ours"] <= out.log_bounds["published"]).all()
        assert (out.log_bounds["ours, radius along the flow"] <= out.log_bounds["ours"]).all()
    if out.radius_bounds is not None:
        assert (out.radii <= out.radius_bounds * (1 + 1e-8)).all()


def test_the_integral_of_the_published_constant():
    """V = v I: an upper sum of the integral of the constant on the growing ball, close to the integral."""
    attention = SoftmaxAttention(I2, 0.2 * I2)
    out = flow_stability(attention, cloud(3, 1), cloud(3, 2), t_span=(0, 1), t_eval=np.linspace(0, 1, 11))
    R0 = out.radii[0]

    def constant(t):
        R = R0 * np.exp(0.2 * t)
        return min(
            castin2024_discrete(attention, radius=R, n=3).value, geshkovski2024_mean_field(attention, radius=R).value
        )

    nodes, weights = np.polynomial.legendre.leggauss(8)
    exact = sum(0.5 * w * constant(0.5 * (x + 1)) for x, w in zip(nodes, weights, strict=True))
    assert exact <= out.log_bounds["published"][-1] <= 1.02 * exact


def test_huge_exponents_stay_finite_or_say_inf():
    out = flow_stability(
        SoftmaxAttention(1e3 * I2, I2), 3 * cloud(3, 1), 3 * cloud(3, 2), t_span=(0, 1), t_eval=[0.0, 1.0]
    )
    mu = DiscreteMeasure(3 * cloud(2, 1), [0.4, 0.6])
    weighted = flow_stability(SoftmaxAttention(-1e3 * I2, I2), mu, 3 * cloud(3, 2), t_span=(0, 1), t_eval=[0.0, 1.0])
    assert np.isfinite(out.log_bounds["ours"]).all()
    assert weighted.log_bounds["published"][-1] == np.inf
    assert weighted.verify()


def test_conditional_distance_under_a_mask():
    masked = MaskedAttention(SoftmaxAttention(-I2, I2))
    out = flow_stability(masked, cloud(4, 1), cloud(4, 2), t_span=(0, 0.5), t_eval=np.linspace(0, 0.5, 4))
    X, Y = (f.points for f in out.flows)
    assert np.allclose(out.distances, np.sqrt(((X - Y) ** 2).sum(axis=2).mean(axis=1)), rtol=1e-12)
    assert out.verify()
    assert (out.log_bounds["ours"] <= out.log_bounds["published"]).all()
    mu = SpaceTimeMeasure([0.5, 0.5, 1.0], cloud(3, 1), [0.25, 0.25, 0.5])
    nu = SpaceTimeMeasure([0.5, 1.0, 1.0], cloud(3, 2), [0.5, 0.25, 0.25])
    slices = flow_stability(masked, mu, nu, t_span=(0, 0.3), t_eval=[0.0, 0.3])
    assert slices.n is None
    assert slices.verify()
    with pytest.raises(ValueError, match="time"):
        flow_stability(masked, mu, SpaceTimeMeasure([0.5, 0.6, 1.0], cloud(3, 2)), t_span=(0, 1))


def test_gaussians():
    """Isotropic: sigma(t) = (1/sigma_0^2 - 2 t)^{-1/2} on the axes, BW = sqrt(2) |sigma - tau|."""
    a, b = GaussianMeasure([0.0, 0.0], I2), GaussianMeasure([0.0, 0.0], 0.5 * I2)
    out = flow_stability(SoftmaxAttention(I2, I2), a, b, t_span=(0, 0.6), t_eval=np.linspace(0, 0.6, 7))
    assert out.status == "blow_up"
    assert out.times.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    exact = np.sqrt(2) * ((1 - 2 * out.times) ** -0.5 - (2 - 2 * out.times) ** -0.5)
    assert np.allclose(out.distances, exact, rtol=1e-8)
    assert out.log_bounds == {}
    assert out.verify()


def test_a_flow_that_ends_early_ends_the_comparison():
    out = flow_stability(
        LinearAttention([[1.0]], [[1.0]]), [[1.0]], [[0.5]], t_span=(0, 1), t_eval=np.linspace(0, 1, 11)
    )
    assert out.status == "blow_up"
    assert out.times[-1] == pytest.approx(0.5, abs=0.11)
    assert out.verify()


def test_verify_sees_tampering():
    out = flow_stability(SoftmaxAttention(I2, I2), cloud(3, 1), cloud(3, 2), t_span=(0, 0.5), t_eval=[0.0, 0.5])
    low = out.log_bounds["ours"].copy()
    out.log_bounds["ours"] = low - 100
    assert not out.verify()
    out.log_bounds["ours"] = low
    assert out.verify()
    object.__setattr__(out, "distances", out.distances * (1 + 1e-6))
    assert not out.verify()


def turning(t):
    """Softmax attention whose parameters grow and turn with time."""
    c, s = np.cos(t), np.sin(t)
    return SoftmaxAttention((1 + t) * np.array([[c, -s], [s, c]]), (0.5 + t) * I2)


@pytest.mark.parametrize(
    "p", [1, 2, pytest.param(1.5, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), np.inf]
)
def test_parameters_that_depend_on_time(p):
    """``A(t), V(t)``: bounds for every order, as for a constant map."""
    out = flow_stability(turning, cloud(4, 1), cloud(4, 2), t_span=(0.5, 1.0), p=p, t_eval=[0.5, 0.75, 1.0])
    assert out.verify()
    assert set(out.log_bounds) == {"ours", "ours, radius along the flow"} | ({"published"} if p == 2 else set())
    for bound in out.log_bounds.values():
        assert (np.diff(bound) > 0).all()
    assert (out.radii <= out.radius_bounds * (1 + 1e-8)).all()
    allowed = flow_radius_bound(turning, float(out.radii[0]), out.times - 0.5, start=0.5)
    assert np.allclose(allowed, out.radius_bounds, rtol=1e-12)


def test_a_callable_that_is_constant_has_the_bounds_of_the_map():
    attention = CASES["softmax-bias"]
    pair = cloud(3, 1), cloud(3, 2)
    first, second = (
        flow_stability(a, *pair, t_span=(0, 0.5), t_eval=[0.0, 0.5]) for a in (attention, lambda t: attention)
    )
    for name, bound in first.log_bounds.items():
        assert np.allclose(bound, second.log_bounds[name], rtol=1e-10)


def test_the_radius_under_parameters_that_depend_on_time():
    """``R' = v(t) R`` with ``v = 1 + t``: above ``e^{t + t^2/2}``, by less than the steps of the sum; a switch is kept."""
    times = np.linspace(0, 1, 41)
    bound = flow_radius_bound(lambda t: SoftmaxAttention(I2, (1 + t) * I2), 2.0, times)
    exact = 2 * np.exp(times + times**2 / 2)
    assert (bound >= exact * (1 - 1e-12)).all()
    assert (bound <= exact * 1.002).all()
    switched = flow_radius_bound(lambda t: SoftmaxAttention(I2, (t <= 0.5) * I2), 1.0, [0.5, 2.0, 0.0])
    assert switched == pytest.approx([np.exp(0.5), np.exp(0.5 + 1.5 / 8), 1.0], rel=1e-12)
    assert flow_radius_bound(lambda t: SoftmaxAttention(I2, I2), 1.0, 0.0) == 1.0
    with pytest.raises(ValueError, match="normalised kernel"):
        flow_radius_bound(lambda t: LinearAttention(I2, I2) if t > 0 else SoftmaxAttention(I2, I2), 1.0, 1.0)


def test_ours_is_never_above_published():
    """Tied L2 attention: the published constant knows no radius, the integral of ours is 6.8e12 without it."""
    out = flow_stability(L2Attention(I2, I2, I2), 3 * cloud(4, 1), 3 * cloud(4, 2), t_span=(0, 3.0), t_eval=[0.0, 3.0])
    assert out.log_bounds["published"][-1] < 25
    for name in ("ours", "ours, radius along the flow"):
        assert out.log_bounds[name][-1] <= out.log_bounds["published"][-1]
    assert out.verify()


def test_bad_pairs():
    attention = SoftmaxAttention(I2, I2)
    g = GaussianMeasure([0.0, 0.0], I2)
    with pytest.raises(ValueError, match="0/0"):
        flow_stability(attention, cloud(3, 1), cloud(3, 1)[::-1], t_span=(0, 1))
    with pytest.raises(TypeError, match="one kind"):
        flow_stability(attention, g, cloud(3, 1), t_span=(0, 1))
    with pytest.raises(TypeError, match="one kind"):
        flow_stability(attention, SpaceTimeMeasure.from_sequence(cloud(3, 1)), cloud(3, 2), t_span=(0, 1))
    with pytest.raises(ValueError, match="p must be 2"):
        flow_stability(attention, g, GaussianMeasure([1.0, 0.0], I2), t_span=(0, 1), p=1)
    with pytest.raises(ValueError, match="start < end"):
        flow_stability(attention, cloud(3, 1), cloud(3, 2), t_span=(1, 0))


# ------------------------------------------------------------------------------------------------ mean-field limit


@pytest.mark.slow
def test_moments_approach_the_gaussian_flow_like_n_to_the_minus_half():
    """32 samples a size: root mean squares are known to 1/8, their slope over a factor 8 in n to about 0.1."""
    law = GaussianMeasure([0.0], [[1.0]])
    attention = SoftmaxAttention([[0.5]], [[-0.5]])
    study = mean_field_limit(attention, law, n_values=[40, 80, 160, 320], samples=32, t_span=(0, 1), rng=1)
    assert study.reference == "gaussian"
    rms = np.sqrt((study.distances**2).mean(axis=1))
    assert fit_exponent(study.n_values, rms).exponent == pytest.approx(-0.5, abs=0.2)
    assert study.rate == pytest.approx(0.5, abs=4 * study.fit().standard_error)
    # what contracts in distribution contracts in the moments
    assert (study.distances.mean(axis=1) < 2 * study.initial.mean(axis=1)).all()


def test_particles_approach_a_larger_system():
    """Uniform law on a circle, in W_2 to 600 particles: about n^{-1/2}, more slowly near the size of the reference."""

    def law(n, rng):
        angle = rng.uniform(0, 2 * np.pi, n)
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)

    study = mean_field_limit(
        SoftmaxAttention(I2, -I2),
        law,
        n_values=[20, 60, 180],
        samples=4,
        reference_size=600,
        t_span=(0, 0.5),
        rtol=1e-4,
        rng=0,
    )
    assert study.reference == "particles"
    assert 0.25 < study.rate < 0.75
    assert (np.diff(study.distances.mean(axis=1)) < 0).all()


def test_bad_mean_field_input():
    g = GaussianMeasure([0.0], [[1.0]])
    attention = SoftmaxAttention([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match="must exist"):
        mean_field_limit(attention, g, n_values=[10, 20], t_span=(0, 1), rng=0)  # blows up at 1/2
    with pytest.raises(ValueError, match="two numbers"):
        mean_field_limit(attention, g, n_values=[10], t_span=(0, 0.1), rng=0)
    with pytest.raises(ValueError, match="as law"):
        mean_field_limit(
            attention,
            lambda n, rng: rng.normal(size=(n, 1)),
            n_values=[10, 20],
            reference="gaussian",
            t_span=(0, 0.1),
            rng=0,
        )
    with pytest.raises(ValueError, match="reference"):
        mean_field_limit(attention, g, n_values=[10, 20], reference="exact", t_span=(0, 0.1), rng=0)
