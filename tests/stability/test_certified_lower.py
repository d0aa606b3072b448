"""The certified value is never above the exact ratio (60 digits, all permutations), and close to it."""

from dataclasses import replace
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from attention_maps import MAPS
from exact_images import DIGITS, exact_ratio

from otattn.attention import (
    AttentionMap,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    ReLUAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.distances.masses import exact_masses
from otattn.measures import DiscreteMeasure
from otattn.stability import Resolution, StabilityRatio, stability_ratio
from otattn.stability.enclosed import Enclosed
from otattn.stability.transport_bounds import Problem, distance_bounds, pair_slices, transport_lower, transport_upper

PAIRS, PARTS = 10_000, 8


def check(attention: AttentionMap, X: np.ndarray, Y: np.ndarray, p: float = 2.0) -> tuple[StabilityRatio, float]:
    """The ratio, its truth asserted, and how far below the exact one it is, relatively."""
    found, exact = stability_ratio(attention, X, Y, p=p), exact_ratio(attention, X, Y, p)
    with mp.workdps(DIGITS):
        assert mp.mpf(found.certified_lower) <= exact, (attention, X.tolist(), Y.tolist(), p)
        if found.resolution is Resolution.RESOLVED:
            assert abs(mp.mpf(found.value) - exact) <= mp.mpf("1e-3") * exact + mp.mpf("1e-280")
        return found, float(1 - mp.mpf(found.certified_lower) / exact) if exact > 0 else 0.0


def test_values_orthogonal_to_the_tokens() -> None:
    attention = SoftmaxAttention(np.zeros((3, 3)), np.ones((1, 3)))
    X = np.array([[0.5, 0.5, -1.0]])
    for seed in range(20):
        Y = X + 1e-15 * np.random.default_rng(seed).normal(size=X.shape)
        if (X != Y).any():
            assert check(attention, X, Y)[1] < 1e-6
    V = np.array([[0.3, 0.5, 0.1]])
    X = np.array([[-0.3, -0.9, 5.4]] * 2)
    found, short = check(SoftmaxAttention(np.zeros((3, 3)), V), X, X + 2.0**-47 * V / np.linalg.norm(V))
    assert found.certified_lower < 0.5916
    assert short < 1e-6


def random_form(rng: np.random.Generator, d: int) -> np.ndarray:
    B = rng.normal(size=(d, d))
    choices = [np.eye(d), -np.eye(d), B - B.T, np.outer(B[0], B[-1]), B @ B.T, B, 0.0 * B]
    return 10.0 ** rng.uniform(-1, 1) * choices[rng.integers(len(choices))]


def random_map(rng: np.random.Generator, d: int) -> AttentionMap:
    A, e = random_form(rng, d), int(rng.integers(1, 3))
    V = rng.integers(-3, 4, (e, d)).astype(float) if rng.random() < 0.5 else rng.normal(size=(e, d))
    kinds = [
        lambda: SoftmaxAttention(A, V, bias=rng.normal(size=d)),
        lambda: SoftmaxAttention(A, V),
        lambda: SoftmaxAttention.from_qkv(rng.normal(size=(2, d)), rng.normal(size=(2, d)), V),
        lambda: L2Attention(A, random_form(rng, d), V),
        lambda: LinearAttention(A, V),
        lambda: ReLUAttention(A, V),
        lambda: SigmoidAttention(A, V),
        lambda: MaskedAttention(SoftmaxAttention(A, V)),
        lambda: Residual(SoftmaxAttention(A, rng.normal(size=(d, d))), scale=rng.choice([-1.0, 0.5])),
        lambda: SinkhornAttention(0.03 * A / (1.0 + np.linalg.norm(A)), V),
    ]
    return kinds[rng.integers(len(kinds))]()


def random_pair(rng: np.random.Generator, attention: AttentionMap, d: int) -> tuple[np.ndarray, np.ndarray]:
    n = int(rng.integers(1, 4))
    X = np.round(rng.normal(size=(n, d)), 1)
    V = getattr(attention, "V", None)
    if V is not None and d > 1 and V.any() and rng.random() < 0.4:  # tokens that the first row of V does not see
        v = V[0] if V[0].any() else V[-1]
        X = np.outer(rng.integers(1, 20, n) / 2, (np.eye(d) - np.outer(v, v) / (v @ v))[rng.integers(d)])
    return X, X + 10.0 ** rng.uniform(-16, -8) * rng.normal(size=X.shape)


def attack(seed: int, pairs: int) -> None:
    rng, done = np.random.default_rng([20, seed]), 0
    while done < pairs:
        d = int(rng.integers(1, 4))
        attention = random_map(rng, d)
        X, Y = random_pair(rng, attention, d)
        if (X == Y).all():
            continue
        found, short = check(attention, X, Y, float(rng.choice([1.0, 2.0, 2.0, 3.0, np.inf])))
        assert found.certified_lower <= found.value
        # double-double tells also the closest pairs apart; where the first order of the image vanishes, what is
        # left (1e-24 of the tokens, say) may have three digits only, or none
        if found.value > 1e-3:
            assert found.resolution is Resolution.RESOLVED
            assert short < 1e-6
        elif found.resolution is Resolution.RESOLVED:
            assert short < 3e-3
        done += 1


def test_nearly_equal_pairs() -> None:
    attack(PARTS, 60)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_nearly_equal_pairs(part: int) -> None:
    attack(part, PAIRS // PARTS)


@pytest.mark.parametrize("name", MAPS)
def test_every_map_at_close_tokens(name: str) -> None:
    rng = np.random.default_rng(1)
    attention, X = MAPS[name](rng), rng.normal(size=(2, 3))
    for size in (1e-2, 1e-8):
        found, short = check(attention, X, X + size * rng.normal(size=X.shape))
        assert short < 1e-6
        assert found.resolution is Resolution.RESOLVED


def test_numbers_of_every_size() -> None:
    rng = np.random.default_rng(4)
    for _ in range(30):
        n, d = rng.integers(1, 4, 2)
        s, logits, v = 10.0 ** rng.uniform(-150, 150), 10.0 ** rng.uniform(-3, 6), 10.0 ** rng.uniform(-120, 120)
        X = s * rng.normal(size=(n, d))
        Y = X + s * 10.0 ** rng.uniform(-16, 0) * rng.normal(size=(n, d))
        A, V = rng.normal(size=(d, d)) * logits / s / s, rng.normal(size=(2, d)) * v
        if (X == Y).all() or not 1e-140 < s * v < 1e140:
            continue
        for attention in (SoftmaxAttention(A, V), MaskedAttention(SoftmaxAttention(A, V)), LayerNorm(np.ones(d))):
            if d > 1 or not isinstance(attention, LayerNorm):
                check(attention, X, Y)


def test_a_large_problem_says_that_it_is_not_resolved() -> None:
    rng = np.random.default_rng(5)
    X = rng.normal(size=(200, 8)) + 100.0
    attention = SoftmaxAttention(0.1 * np.eye(8), np.eye(8))
    found = stability_ratio(attention, X, X + 1e-13 * rng.normal(size=X.shape))
    assert found.resolution is Resolution.ROUNDING
    assert found.certified_lower < 0.5 * found.value
    assert "rounding" in repr(found)
    assert "rounding" in found._repr_html_()
    assert found.verify()


def test_a_map_of_ones_own_is_not_certified() -> None:
    class Other(SoftmaxAttention):
        pass

    found = stability_ratio(Other([[0.0]], [[1.0]]), [[0.0]], [[1.0]])
    assert found.value == pytest.approx(1.0)
    assert found.certified_lower == 0.0
    assert found.resolution is Resolution.UNBOUNDED


def exact_on_the_line(x: list, A: list[int], y: list, B: list[int], p: int) -> Fraction:
    """``W_p^p`` of the monotone coupling, in fractions."""
    left = sorted([Fraction(v), m] for v, m in zip(x, A, strict=True))
    right = sorted([Fraction(v), m] for v, m in zip(y, B, strict=True))
    total, paid = sum(A), Fraction(0)
    while left and right:
        m = min(left[0][1], right[0][1])
        paid += abs(left[0][0] - right[0][0]) ** p * Fraction(m, total)
        for side in (left, right):
            side[0][1] -= m
            if side[0][1] == 0:
                side.pop(0)
    return paid


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_weighted_distances_are_enclosed(p: int, size: float) -> None:
    rng = np.random.default_rng(6)
    for n, m in ((1, 3), (4, 4), (5, 3), (6, 6)):
        x = rng.normal(size=(n, 1))
        y = (x if n == m else rng.normal(size=(m, 1))) + size * rng.normal(size=(m, 1))
        a = rng.dirichlet(np.ones(n))
        mu, nu = DiscreteMeasure(x, a), DiscreteMeasure(y, a if n == m else rng.dirichlet(np.ones(m)))
        problem = Problem(mu.weights, nu.weights, pair_slices(mu, nu), float(p))
        # turned into the plane, so that the general solver is at work
        X, Y = (Enclosed.exact(np.hstack([z, np.zeros_like(z)])) for z in (x, y))
        A, B = exact_masses(mu.weights, nu.weights)
        exact = exact_on_the_line(x[:, 0].tolist(), A, y[:, 0].tolist(), B, p)
        guess = float(exact) ** (1 / p)
        lower, upper = transport_lower(X, Y, problem, guess), transport_upper(X, Y, problem, guess)
        assert Fraction(lower) ** p <= exact <= Fraction(upper) ** p
        assert upper <= lower * (1 + 1e-6)
        # errors of the atoms count against both
        wide = transport_lower(X.widened(1e-3 * size), Y, problem, guess)
        assert lower - 1.5e-3 * size <= wide <= lower - 0.3e-3 * size


def test_bottleneck_distances_are_enclosed() -> None:
    rng = np.random.default_rng(7)
    for a, b in (([0.5, 0.25, 0.25], [0.25, 0.75]), ([1 / 3] * 3, [1 / 3] * 3)):
        x, y = rng.normal(size=(len(a), 2)), rng.normal(size=(len(b), 2))
        mu, nu = DiscreteMeasure(x, a), DiscreteMeasure(y, b)
        problem = Problem(mu.weights, nu.weights, pair_slices(mu, nu), np.inf)
        lower, upper = (
            f(Enclosed.exact(x), Enclosed.exact(y), problem, 1.0) for f in (transport_lower, transport_upper)
        )
        assert lower <= upper <= lower * (1 + 1e-14)
        D = np.linalg.norm(x[:, None] - y[None], axis=2)
        assert np.isclose(D, lower, rtol=1e-13).any()


def test_distances_of_every_size() -> None:
    points = np.array([[0.0, 0.0], [1e-200, -1e-200], [1e150, 1.0], [1.0, 1.0], [1.0, np.nextafter(1.0, 2.0)]])
    lower, upper = distance_bounds(Enclosed.exact(points), Enclosed.exact(points))
    with mp.workdps(DIGITS):
        for i, x in enumerate(points.tolist()):
            for j, y in enumerate(points.tolist()):
                exact = mp.sqrt(mp.fsum((mp.mpf(s) - mp.mpf(t)) ** 2 for s, t in zip(x, y, strict=True)))
                assert lower[i, j] <= exact <= upper[i, j]
                assert upper[i, j] <= lower[i, j] * (1 + 1e-13) + 1e-300


def test_distances_need_one_precision() -> None:
    x = np.array([[0.0, 1.0]])
    for fine in (False, True):
        with pytest.raises(ValueError, match="one precision"):
            distance_bounds(Enclosed.exact(x, fine=fine), Enclosed.exact(x + 1.0, fine=not fine))


def test_a_pair_that_leaves_float64_is_not_verified() -> None:
    """Measures put in place of others, so far apart that their distance overflows: no ratio, and no exception."""
    ratio = stability_ratio(SoftmaxAttention([[0.0]], [[1.0]]), [[0.0], [1.0]], [[2.0], [3.0]])
    assert ratio.verify()
    far = [DiscreteMeasure([[side * 1.7e308]]) for side in (1.0, -1.0)]
    assert not replace(ratio, mu=far[0], nu=far[1]).verify()
