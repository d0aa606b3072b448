"""A point far away that two measures share, or nearly share, costs the ordinary points no digits: squares overflow, values not."""

import itertools

import mpmath as mp
import numpy as np
import pytest

import otattn as oa
from otattn.distances import transport, wasserstein, wasserstein_batch
from otattn.distances.costs import pair_distances, pairwise_distances

NEAR = np.array([[0.0, 0.0], [1.0, 0.5]])
MOVED = np.array([[0.25, 0.0], [1.0, 1.0]])
ORDERS = (1.0, 1.5, 2.0, 3.0, 20.0, np.inf)


def exact(x, y, p):
    """The distance of uniform measures by enumeration, with 60 digits."""
    with mp.workdps(60):

        def apart(a, b):
            return mp.sqrt(sum((mp.mpf(float(s)) - mp.mpf(float(t))) ** 2 for s, t in zip(a, b, strict=True)))

        D = [[apart(a, b) for b in y] for a in x]
        values = []
        for order in itertools.permutations(range(len(x))):
            paid = [D[i][j] for i, j in enumerate(order)]
            mean = max(paid) if np.isinf(p) else (sum(v ** mp.mpf(p) for v in paid) / len(x)) ** (1 / mp.mpf(p))
            values.append(mean)
        return float(min(values))


def split(x):
    """The same measure with its first atom in two halves: no longer an assignment."""
    n = len(x)
    return oa.DiscreteMeasure(np.r_[x, x[:1]], np.r_[0.5, np.ones(n - 1), 0.5] / n)


def every_path(x, y, p):
    """The distance by every road there is to it."""
    slices = [oa.SpaceTimeMeasure(np.full(len(z), 0.5), z) for z in (x, y)]
    plans = [transport(x, y, p=p), transport(split(x), y, p=p)]
    for plan in plans:
        assert plan.verify()
        assert plan.lower <= plan.value <= plan.upper
    mean = oa.SoftmaxAttention(np.zeros((x.shape[1],) * 2), np.eye(x.shape[1]))
    yield wasserstein(x, y, p=p)
    yield wasserstein(split(x), y, p=p)
    yield from (plan.value for plan in plans)
    yield from wasserstein_batch(
        np.stack([x, y, NEAR[:, : x.shape[1]].repeat(2, 0)[: len(x)]]), np.stack([y, x, x]), p=p
    )[:2]
    yield oa.conditional_wasserstein(*slices, p=p)
    yield oa.conditional_transport(*slices, p=p).value
    if np.isfinite(p):
        yield oa.conditional_wasserstein(*slices, p=p, method="penalized", penalty=1.0)
    yield oa.stability_ratio(mean, x, y, p=p).denominator


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("size", [1e30, 1e139, 1e155, 1e200, 1e300])
@pytest.mark.parametrize("nearly", [False, True], ids=["shared", "nearly shared"])
def test_one_far_point(p, size, nearly):
    far = np.array([[size, -0.5 * size]])
    x, y = np.r_[NEAR, far], np.r_[np.nextafter(far, 0.0) if nearly else far, MOVED]
    expected = exact(x, y, p)
    for value in every_path(x, y, p):
        assert value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("unit", [1e-170, 1e-60, 1e-20])
def test_tiny_clouds_beside_an_ordinary_point(p, unit):
    x, y = np.r_[NEAR * unit, [[2.0, 2.0]]], np.r_[[[2.0, 2.0]], MOVED * unit]
    expected = exact(x, y, p)
    for value in every_path(x, y, p):
        assert value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("p", ORDERS)
def test_on_the_line(p):
    x, y = np.array([[0.0], [1.0], [1e250]]), np.array([[1e250], [0.5], [1.25]])
    for value in every_path(x, y, p):
        assert value == pytest.approx(exact(x, y, p), rel=1e-9)


@pytest.mark.parametrize("p", ORDERS)
def test_what_leaves_float64_is_an_overflow(p):
    x, y = np.array([[1.7e308, 0.0], [0.0, 0.0]]), np.array([[-1.7e308, 1.0], [1.0, 1.0]])
    for x_, y_ in ((x, y), (x[:1, :1], y[:1, :1]), (x[:1], y[:1])):
        slices = [oa.SpaceTimeMeasure(np.full(len(z), 0.5), z) for z in (x_, y_)]
        for call in (
            lambda x=x_, y=y_: wasserstein(x, y, p=p),
            lambda x=x_, y=y_: transport(x, y, p=p),
            lambda x=x_, y=y_: wasserstein_batch(x[None], y[None], p=p),
            lambda s=slices: oa.conditional_wasserstein(*s, p=p),
            lambda s=slices: oa.conditional_transport(*s, p=p),
        ):
            with pytest.raises(OverflowError, match="rescale"):
                call()


def test_light_mass_far_away_weighs_as_much_as_it_should():
    """A mass 1e-250 that moves 1e250 costs as much as the mass one that moves 1."""
    mu = oa.DiscreteMeasure([[0.0, 0.0], [1e250, 0.0]], [1.0, 1e-250])
    nu = oa.DiscreteMeasure([[1.0, 0.0], [2e250, 0.0]], [1.0, 1e-250])
    assert wasserstein(mu, nu, p=1) == pytest.approx(2.0, rel=1e-12)


def test_distances_pair_by_pair():
    x = np.array([[3.0, 4.0], [3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0], [1.7e308, 0.0]])
    y = np.zeros_like(x)
    y[4] = [-1.7e308, 0.0]
    assert pair_distances(x, y).tolist() == pytest.approx([5.0, 5e200, 5e-200, 0.0, np.inf], rel=1e-15)
    D = pairwise_distances(x[:4], y[:1])
    assert D[:, 0].tolist() == pytest.approx([5.0, 5e200, 5e-200, 0.0], rel=1e-15)
    assert D[0, 0] == 5.0
