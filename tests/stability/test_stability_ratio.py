"""One pair of measures: closed forms, the published upper bounds, near-equal measures, refusals."""

import dataclasses
import math

import numpy as np
import pytest

from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.data import load_sample
from otattn.distances import wasserstein
from otattn.errors import NotGaussianPreservingError
from otattn.lipschitz import lipschitz_upper_bound
from otattn.measures import DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure
from otattn.stability import Resolution, samplers, stability_ratio, stability_study

ORDERS = [1, 1.5, 2, 3, math.inf]


def mean_map(d: int) -> SoftmaxAttention:
    """A = 0, V = I: the image of every measure is the Dirac mass at its mean."""
    return SoftmaxAttention(np.zeros((d, d)), np.eye(d))


@pytest.mark.parametrize("p", ORDERS)
def test_the_mean_contracts_every_distance(p: float) -> None:
    study = stability_study(
        mean_map(3), samplers.uniform_ball_pairs(5, 3, 2.0, 4, True), n_pairs=40, p=p, rng=0, progress=False
    )
    assert study.ratios.max() <= 1.0 + 1e-12
    assert study.best.verify()


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_a_translation_is_kept_by_the_mean(p: float, offset: float) -> None:
    rng = np.random.default_rng(1)
    X, shift = rng.normal(size=(7, 3)) + offset, np.array([0.5, -2.0, 0.25])
    ratio = stability_ratio(mean_map(3), X, X + shift, p=p)
    assert ratio.value == pytest.approx(1.0, abs=1e-12)
    assert 1.0 - 1e-9 <= ratio.certified_lower <= ratio.value
    weights = rng.dirichlet(np.ones(7))
    ratio = stability_ratio(mean_map(3), DiscreteMeasure(X, weights), DiscreteMeasure(X + shift, weights), p=p)
    assert ratio.value == pytest.approx(1.0, abs=1e-12)


def test_masked_mean_of_a_translation() -> None:
    X = np.random.default_rng(2).normal(size=(6, 2))
    for p in ORDERS:
        ratio = stability_ratio(MaskedAttention(mean_map(2)), X, X + [3.0, 4.0], p=p)
        assert ratio.value == pytest.approx(1.0, abs=1e-12)
        assert ratio.denominator == pytest.approx(5.0, rel=1e-12)


@pytest.mark.parametrize("p", ORDERS)
def test_masked_ratios_in_every_conditional_distance(p: float) -> None:
    """Never above the proven constant of that p; the masked mean moves by the running averages of what its tokens move by."""
    masked = MaskedAttention(SoftmaxAttention([[0.6, 0.5], [-0.5, -0.4]], np.eye(2)))
    study = stability_study(masked, samplers.sequence_pairs(6, 2, 1.5), n_pairs=20, p=p, rng=0, progress=False)
    assert study.best.verify()
    assert 0.0 < study.ratios.min() <= study.ratios.max() <= lipschitz_upper_bound(masked, radius=1.5, n=6, p=p).value
    n = 40
    move = np.arange(1.0, n + 1) ** (-0.9 / p)
    mean = np.cumsum(move) / np.arange(1.0, n + 1)
    expected = np.linalg.norm(mean, p) / np.linalg.norm(move, p)
    X = np.random.default_rng(0).uniform(-1.0, 1.0, (n, 1))
    ratio = stability_ratio(MaskedAttention(mean_map(1)), X, X + move[:, None], p=p)
    assert ratio.value == pytest.approx(expected, rel=1e-12)
    if p == 1:  # the first token alone: a harmonic sum, so no constant holds for every n
        first = stability_ratio(MaskedAttention(mean_map(1)), X, X + (np.arange(n) == 0)[:, None], p=1)
        assert first.value == pytest.approx((1.0 / np.arange(1.0, n + 1)).sum(), rel=1e-12)
    elif math.isfinite(p):  # Hardy
        assert 1.0 < expected < p / (p - 1.0)


@pytest.mark.parametrize("p", ORDERS)
def test_no_values_no_stretch(p: float) -> None:
    rng = np.random.default_rng(3)
    attention = SoftmaxAttention(rng.normal(size=(3, 3)), np.zeros((2, 3)))
    ratio = stability_ratio(attention, rng.normal(size=(4, 3)), rng.normal(size=(6, 3)), p=p)
    assert ratio.value == ratio.certified_lower == ratio.numerator == 0.0
    assert ratio.verify()


@pytest.mark.parametrize("p", ORDERS)
def test_single_tokens_move_by_the_value_matrix(p: float) -> None:
    V = np.random.default_rng(4).normal(size=(2, 3))
    x, y = np.array([[1.0, 2.0, 3.0]]), np.array([[-1.0, 0.0, 5.0]])
    ratio = stability_ratio(SoftmaxAttention(np.eye(3), V), x, y, p=p)
    assert ratio.value == pytest.approx(np.linalg.norm(V @ (x - y)[0]) / np.linalg.norm(x - y), rel=1e-12)


def test_linear_attention_on_the_line() -> None:
    # Gamma(x) = x <y^2>: atoms +-s map to +-s^3, so the ratio of s = 1 and s = 2 is (8 - 1) / (2 - 1)
    ratio = stability_ratio(LinearAttention([[1.0]], [[1.0]]), [[1.0], [-1.0]], [[2.0], [-2.0]])
    assert ratio.value == pytest.approx(7.0, rel=1e-13)


def upper_mean_field(attention: SoftmaxAttention, radius: float) -> float:
    a, v = np.linalg.norm(attention.A, 2) * radius**2, np.linalg.norm(attention.V, 2)
    return v * (1 + 3 * a) * math.exp(2 * a)


def upper_discrete(attention: SoftmaxAttention, radius: float, n: int) -> float:
    a, v = np.linalg.norm(attention.A, 2) * radius**2, np.linalg.norm(attention.V, 2)
    return math.sqrt(3) * v * math.sqrt(a**2 * (4 * n + 1) + n)


@pytest.mark.parametrize("case", range(24))
def test_never_above_the_published_bounds(case: int) -> None:
    """24 x 45 random pairs: n, d, A and R vary, weighted pairs with different numbers of atoms included."""
    rng = np.random.default_rng(case)
    d, n = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    radius = float(rng.choice([0.3, 1.0, 2.0]))
    A = rng.normal(size=(d, d)) * rng.choice([0.1, 1.0, 5.0]) / radius**2
    attention = SoftmaxAttention(A if case % 3 else -np.eye(d), rng.normal(size=(int(rng.integers(1, 5)), d)))
    kinds = [
        (attention, samplers.uniform_ball_pairs(n, d, radius), True),
        (attention, samplers.uniform_ball_pairs(n, d, radius, n + 2, True), False),
        (attention, samplers.two_dirac_pairs(d, radius), False),
    ]
    if case % 4 == 0:
        kinds[2] = (MaskedAttention(attention), samplers.sequence_pairs(n, d, radius), True)
    for k, (moving, sampler, uniform) in enumerate(kinds):
        study = stability_study(moving, sampler, n_pairs=15, rng=k, progress=False)
        if not moving.causal:
            assert study.ratios.max() <= upper_mean_field(attention, radius) * (1 + 1e-12)
        if uniform:
            assert study.ratios.max() <= upper_discrete(attention, radius, n) * (1 + 1e-12)
        bound = study.lower_bound()
        assert bound.kind == "lower"
        assert bound.n == (n if uniform else None)
        # between computed distances: the certified value gives away rounding only
        assert study.best.value * (1 - 1e-6) <= bound.value <= study.best.value


@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_tiny_perturbations_give_the_jacobian(offset: float, weighted: bool) -> None:
    rng = np.random.default_rng(5)
    d, n = 3, 6
    attention = SoftmaxAttention(0.05 * rng.normal(size=(d, d)), rng.normal(size=(d, d)))
    X = rng.normal(size=(n, d)) + offset
    w = rng.dirichlet(5 * np.ones(n)) if weighted else np.full(n, 1 / n)
    step = rng.normal(size=(n, d))
    step *= 1e-8 / np.sqrt(w @ (step**2).sum(1))
    Y = X + step
    ratio = stability_ratio(attention, DiscreteMeasure(X, w), DiscreteMeasure(Y, w))
    moved = attention.jacobian(DiscreteMeasure(X, w)).jvp(Y - X)
    expected = np.sqrt(w @ (moved**2).sum(1)) / np.sqrt(w @ ((Y - X) ** 2).sum(1))
    # images of size 10 are rounded by 2e-15, 2e-7 of the displacement
    assert ratio.value == pytest.approx(expected, rel=1e-6)
    assert ratio.certified_lower == pytest.approx(expected, rel=1e-6)
    assert ratio.verify()


@pytest.mark.parametrize("strength", [0.0, 0.05, 0.5])
def test_rounding_is_never_certified(strength: float) -> None:
    """Measures that differ in one last digit: images in float64 are noise, double-double tells them apart."""
    rng = np.random.default_rng(6)
    above = 0
    for _ in range(25):
        X = rng.normal(size=(8, 2)) + 5
        Y = X.copy()
        Y[0, 0] = np.nextafter(Y[0, 0], np.inf)
        attention = SoftmaxAttention(strength * rng.normal(size=(2, 2)), np.eye(2))
        norm = np.linalg.norm(attention.jacobian(X).to_dense(), 2)
        ratio = stability_ratio(attention, X, Y)
        assert ratio.certified_lower <= ratio.value <= norm * (1 + 1e-6)
        assert ratio.resolution is Resolution.RESOLVED
        assert ratio.certified_lower >= ratio.value * (1 - 1e-6)
        images = attention.pushforward(X), attention.pushforward(Y)
        above += wasserstein(*images) / wasserstein(X, Y) > norm
    assert above > 0  # plain values do exceed it


def test_equal_measures_have_no_ratio() -> None:
    rng = np.random.default_rng(7)
    attention = SoftmaxAttention(np.eye(3), np.eye(3))
    X = rng.normal(size=(4, 3))
    cloud = rng.normal(size=(16, 64)).astype(np.float32)
    w = np.array([0.1, 0.2, 0.3, 0.4])
    split = DiscreteMeasure(np.vstack([X, X[2:]]), [0.1, 0.2, 0.1, 0.3, 0.2, 0.1])
    gaussian = GaussianMeasure(np.zeros(3), np.eye(3))
    pairs = [
        (SoftmaxAttention(np.eye(64), np.eye(64)), cloud, cloud.copy()),
        (SoftmaxAttention(np.eye(64), np.eye(64)), cloud, cloud[::-1]),
        (attention, DiscreteMeasure(X, w), DiscreteMeasure(X[::-1], w[::-1])),
        (attention, DiscreteMeasure(X, w), split),
        (attention, gaussian, GaussianMeasure(np.zeros(3), np.eye(3))),
        (MaskedAttention(attention), X, X.copy()),
        (attention, SpaceTimeMeasure.from_sequence(X), SpaceTimeMeasure.from_sequence(X)),
    ]
    for moving, mu, nu in pairs:
        for p in (2,) if isinstance(mu, GaussianMeasure) else (1, 2, math.inf):
            with pytest.raises(ValueError, match="different measures, received two equal"):
                stability_ratio(moving, mu, nu, p=p)


def test_gaussians_use_the_closed_form() -> None:
    # 1-D softmax: N(m, s^2) -> N(v (m + s^2 A m), (v A s^3)^2)
    A, v = 0.7, 1.3
    ratio = stability_ratio(
        SoftmaxAttention([[A]], [[v]]), GaussianMeasure([1.0], [[4.0]]), GaussianMeasure([0.5], [[1.0]])
    )
    means = v * (1 + 4 * A) - v * 0.5 * (1 + A)
    deviations = v * A * (8 - 1)
    assert ratio.value == pytest.approx(math.hypot(means, deviations) / math.hypot(0.5, 1.0), rel=1e-10)
    assert ratio.value * (1 - 1e-7) <= ratio.certified_lower <= ratio.value
    assert ratio.verify()
    assert ratio.resolution is Resolution.MARGINS  # closed forms, no proof


@pytest.mark.parametrize("variant", ["softmax", "l2", "sinkhorn", "linear"])
def test_close_gaussians_approach_a_limit(variant: str) -> None:
    rng = np.random.default_rng(8)
    A, V = rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    attention = {
        "softmax": SoftmaxAttention(A, V),
        "l2": L2Attention(A, A + 1.0, V),
        "sinkhorn": SinkhornAttention(A, V),
        "linear": LinearAttention(A, V),
    }[variant]
    F, D = rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    values = [
        stability_ratio(
            attention,
            GaussianMeasure([1.0, 2.0], F @ F.T),
            GaussianMeasure(np.array([1.0, 2.0]) + t, (F + t * D) @ (F + t * D).T),
        ).value
        for t in (1e-3, 1e-4, 1e-5)
    ]
    # first order in t: each step of ten brings the value ten times nearer
    assert abs(values[2] - values[1]) < 0.2 * abs(values[1] - values[0]) + 1e-6 * values[1]


def test_space_time_measures_compare_time_by_time() -> None:
    # the space marginals agree, so only a conditional distance sees a difference; A = 0, V = I, causal
    mu = SpaceTimeMeasure([0.0, 1.0], [[0.0], [1.0]])
    nu = SpaceTimeMeasure([0.0, 1.0], [[1.0], [0.0]])
    ratio = stability_ratio(MaskedAttention(mean_map(1)), mu, nu)
    # images (0, 1/2) and (1, 1/2)
    assert ratio.denominator == pytest.approx(1.0, rel=1e-12)
    assert ratio.numerator == pytest.approx(math.sqrt(0.5), rel=1e-12)
    assert stability_ratio(mean_map(1), mu, nu).value == 0.0


def test_slices_with_several_atoms_are_transported() -> None:
    rng = np.random.default_rng(9)
    attention = MaskedAttention(SoftmaxAttention(rng.normal(size=(2, 2)), rng.normal(size=(2, 2))))
    times = [0.0, 0.0, 0.5, 0.5, 0.5, 1.0]
    X, Y = rng.normal(size=(6, 2)), rng.normal(size=(6, 2))
    order = [1, 0, 4, 2, 3, 5]
    ratio = stability_ratio(attention, SpaceTimeMeasure(times, X), SpaceTimeMeasure(times, Y))
    again = stability_ratio(attention, SpaceTimeMeasure(times, X[order]), SpaceTimeMeasure(times, Y))
    assert again.value == pytest.approx(ratio.value, rel=1e-12)
    assert ratio.value * (1 - 1e-9) <= ratio.certified_lower <= ratio.value


def test_sinkhorn_keeps_its_own_tolerance_out_of_the_certificate() -> None:
    rng = np.random.default_rng(10)
    X = rng.normal(size=(6, 2))
    loose = SinkhornAttention(rng.normal(size=(2, 2)), np.eye(2), tol=1e-5)
    tight = SinkhornAttention(loose.A, loose.V, tol=1e-14)
    for size in (1e-3, 1e-7):
        Y = X + size * rng.normal(size=X.shape)
        expected = stability_ratio(tight, X, Y)
        assert expected.certified_lower == pytest.approx(expected.value, rel=1e-6)
        # the images of the loose map are known to 1e-5 only, its potentials are polished for the certificate
        assert stability_ratio(loose, X, Y).certified_lower <= expected.value * (1 + 1e-9)


def test_a_real_head() -> None:
    layer = load_sample()
    mu, nu = layer.tokens(0, 24), layer.tokens(1, 24)
    ratio = stability_ratio(layer.heads[3], mu, nu)
    assert ratio.verify()
    assert 0.0 < ratio.certified_lower <= ratio.value
    whole = stability_ratio(layer.attention, mu, nu)
    assert whole.certified_lower == pytest.approx(whole.value, rel=1e-9)


def test_verify_rejects_wrong_answers() -> None:
    rng = np.random.default_rng(11)
    attention = SoftmaxAttention(rng.normal(size=(2, 2)), np.eye(2))
    ratio = stability_ratio(attention, rng.normal(size=(4, 2)), rng.normal(size=(5, 2)))
    assert ratio.verify()
    wrong = [
        {"value": ratio.value * (1 + 1e-9)},
        {"value": math.nan},
        {"numerator": ratio.numerator * 1.01, "value": ratio.value * 1.01},
        {"denominator": ratio.denominator * 0.99, "value": ratio.value / 0.99},
        {"certified_lower": ratio.value * 1.001},
        {"certified_lower": -1.0},
        {"attention": mean_map(2)},
        {"nu": ratio.mu},
        {"denominator": 0.0},
        {"resolution": Resolution.UNBOUNDED},
    ]
    for change in wrong:
        assert not dataclasses.replace(ratio, **change).verify()
    with pytest.raises(ValueError, match="needs the attention"):
        dataclasses.replace(ratio, attention=None).verify()


def test_refusals() -> None:
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    X, g = np.ones((3, 2)), GaussianMeasure(np.zeros(2), np.eye(2))
    h = GaussianMeasure(np.ones(2), np.eye(2))
    sequence = SpaceTimeMeasure.from_sequence(X)
    with pytest.raises(TypeError, match="attention must be an attention map"):
        stability_ratio(np.eye(2), X, X + 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one kind"):
        stability_ratio(attention, g, X)
    with pytest.raises(TypeError, match="one kind"):
        stability_ratio(attention, sequence, X)
    with pytest.raises(TypeError, match="no times"):
        stability_ratio(MaskedAttention(attention), DiscreteMeasure(X), DiscreteMeasure(X + 1))
    with pytest.raises(ValueError, match="p must be 2 between Gaussian"):
        stability_ratio(attention, g, h, p=1)
    with pytest.raises(ValueError, match="p must lie"):
        stability_ratio(attention, X, X + 1, p=0.5)
    with pytest.raises(ValueError, match="dimension"):
        stability_ratio(attention, X, np.ones((3, 3)))
    with pytest.raises(NotGaussianPreservingError):
        stability_ratio(ExponentialAttention(np.eye(2), np.eye(2)), g, h)
    with pytest.raises(ValueError, match="time"):
        stability_ratio(MaskedAttention(attention), np.ones((3, 2)), np.zeros((2, 2)))
    with pytest.raises(OverflowError, match="scale"):
        stability_ratio(ExponentialAttention(1e4 * np.eye(2), np.eye(2)), X, X + 1)


def test_arguments_are_not_mutated() -> None:
    X, Y = np.ones((3, 2)), np.zeros((3, 2))
    before_x, before_y = X.copy(), Y.copy()
    stability_ratio(SoftmaxAttention(np.eye(2), np.eye(2)), X, Y)
    assert np.array_equal(X, before_x)
    assert np.array_equal(Y, before_y)
