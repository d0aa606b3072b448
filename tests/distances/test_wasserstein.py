"""Wasserstein distances: the cases of the field, closed forms, oracles, laws."""

import sys

import numpy as np
import pytest
from distance_truth import (
    ORDERS,
    assignment_by_brute_force,
    distance_digits,
    random_weights,
    relative_error,
    wasserstein_by_program,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from otattn.distances import costs, wasserstein
from otattn.errors import MemoryBudgetError
from otattn.measures import DiscreteMeasure, GaussianMeasure

# ---------------------------------------------------------------------------------------------- cases W1 to
# W16


@pytest.mark.parametrize("p", ORDERS)
def test_W1_float32_weights_give_the_distance_of_float64_weights(p):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(7, 2)), rng.normal(size=(7, 2))
    half = DiscreteMeasure(x, np.full(7, 1 / 7, dtype=np.float32))
    full = DiscreteMeasure(x, np.full(7, 1 / 7))
    assert wasserstein(half, y, p=p) == pytest.approx(wasserstein(full, y, p=p), rel=1e-6)
    assert wasserstein(half, full, p=p) == 0.0


def test_W2_weights_of_a_float32_softmax_are_accepted():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=5000).astype(np.float32)
    w = np.exp(logits) / np.exp(logits).sum()
    x = rng.normal(size=(5000, 1))
    assert w.dtype == np.float32
    mu = DiscreteMeasure(x, w)
    assert wasserstein(mu, DiscreteMeasure(x + 1.0, w)) == pytest.approx(1.0, rel=1e-12)


def test_W3_integer_points_are_widened():
    x, y = np.array([[100]], dtype=np.int8), np.array([[-100]], dtype=np.int8)
    assert wasserstein(x, y) == 200.0


@pytest.mark.parametrize(
    ("mu", "nu", "message"),
    [
        ([[np.nan]], [[0.0]], "finite"),
        ([[0.0]], [[np.inf]], "finite"),
        (np.zeros((0, 2)), [[0.0, 0.0]], "at least one point"),
        ([[0.0, 1.0]], [[0.0, 1.0, 2.0]], "2 and 3"),
        ([0.0, 1.0], [[0.0]], "dimension"),
    ],
)
def test_W5_bad_points_name_the_argument(mu, nu, message):
    with pytest.raises(ValueError, match=message):
        wasserstein(mu, nu)


@pytest.mark.parametrize("p", [0.5, -1, np.nan, "two", None])
def test_W5_orders_outside_one_to_infinity(p):
    with pytest.raises(ValueError, match="p must"):
        wasserstein([[0.0]], [[1.0]], p=p)


@pytest.mark.slow
def test_W6_six_thousand_atoms_in_the_plane():
    # the optimal map of a translation is the translation, for every p: the optimum is known
    rng = np.random.default_rng(6)
    x = rng.normal(size=(6000, 2))
    shift = np.array([0.03, -0.04])
    assert wasserstein(x, x[rng.permutation(6000)] + shift, p=2) == pytest.approx(0.05, rel=1e-9)


def test_W8_on_the_line_with_unequal_weights():
    mu, nu = DiscreteMeasure([[3.0], [0.0]], [0.1, 0.9]), DiscreteMeasure([[0.0], [1.0]], [0.5, 0.5])
    assert wasserstein(mu, nu, p=1) == pytest.approx(0.6, rel=1e-14)
    assert wasserstein(mu, nu, p=2) ** 2 == pytest.approx(0.8, rel=1e-14)
    assert wasserstein(mu, nu, p=np.inf) == 2.0


@pytest.mark.parametrize("p", ORDERS)
def test_W9_two_diracs(p):
    assert wasserstein([[0.0]], [[3.0]], p=p) == 3.0


@pytest.mark.parametrize("pad", [0, 1])
def test_W10_large_orders_do_not_underflow(pad):
    zero, other = np.zeros((1, 1 + pad)), np.zeros((2, 1 + pad))
    other[1, 0] = 0.01
    truth = 0.01 * 0.5 ** (1 / 200)
    assert wasserstein(zero, other, p=200) == pytest.approx(truth, rel=1e-14)
    assert truth == pytest.approx(0.0099654, abs=1e-7)
    assert wasserstein(zero, other, p=np.inf) == 0.01


@pytest.mark.parametrize("p", [50, 200, 1000, 1e5])
def test_W10_large_orders_in_a_wide_cloud(p):
    # most distances are far larger than those that count: their powers overflow at the scale of the optimum
    rng = np.random.default_rng(10)
    x = rng.normal(size=(6, 2))
    y = x[rng.permutation(6)] + 1e-3 * rng.normal(size=(6, 2))
    truth = assignment_by_brute_force(x, y, p)
    assert relative_error(wasserstein(x, y, p=p), truth) < 1e-12
    w = random_weights(6, rng)
    general = wasserstein(DiscreteMeasure(x, w), DiscreteMeasure(y, w[::-1]), p=p)
    bottleneck = wasserstein(DiscreteMeasure(x, w), DiscreteMeasure(y, w[::-1]), p=np.inf)
    assert bottleneck * min(w) ** (2 / p) / 2 <= general <= bottleneck * (1 + 1e-12)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_W11_the_ground_norm_is_euclidean(p):
    assert wasserstein([[0.0, 0.0]], [[1.0, 2.0]], p=p) == pytest.approx(np.sqrt(5.0), rel=1e-15)


@pytest.mark.parametrize("p", ORDERS)
def test_W12_close_diracs(p):
    x, y = np.array([[1.0]]), np.array([[1.0 + 1e-8]])
    assert wasserstein(x, y, p=p) == pytest.approx(1e-8, rel=1e-7)
    assert wasserstein(x, y, p=p) == pytest.approx(y[0, 0] - x[0, 0], rel=1e-15)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("shape", [(16, 64), (9, 1), (1, 3)])
def test_W13_a_cloud_against_its_copy(shape, p):
    rng = np.random.default_rng(13)
    x = rng.normal(size=shape).astype(np.float32)
    assert wasserstein(x, x.copy(), p=p) == 0.0
    assert wasserstein(x, x[rng.permutation(len(x))], p=p) == 0.0


@pytest.mark.parametrize("pad", [0, 2])
def test_W14_half_and_half_against_a_dirac(pad):
    x, y = np.zeros((2, 1 + pad)), np.zeros((1, 1 + pad))
    x[1, 0] = 3.0
    assert wasserstein(x, y, p=1) == 1.5
    assert wasserstein(x, y, p=2) == pytest.approx(3 / np.sqrt(2), rel=1e-15)
    assert wasserstein(x, y, p=np.inf) == 3.0


@pytest.mark.parametrize("p", [2, np.inf])
def test_W15_refuses_before_allocating(p, monkeypatch):
    def never(*_args):
        raise AssertionError("a cost matrix was allocated")

    monkeypatch.setattr(sys.modules["otattn.distances.wasserstein"], "pairwise_distances", never)
    x = np.zeros((60000, 2))
    x[:, 0] = np.arange(60000)
    with pytest.raises(MemoryBudgetError, match=r"57600000000 bytes|230400000000 bytes") as refusal:
        wasserstein(x, x + 1.0, p=p)
    assert "subsample" in str(refusal.value)
    assert isinstance(refusal.value, MemoryError)


def test_W15_the_line_has_no_limit():
    x = np.arange(60000.0)[:, None]
    assert wasserstein(x, x[::-1] + 0.5) == 0.5


# -------------------------------------------------------------------------------------------------------
# oracles

coordinate = st.integers(-3, 3).map(float)


@st.composite
def small_measures(draw, max_atoms=5):
    n, m, d = draw(st.integers(1, max_atoms)), draw(st.integers(1, max_atoms)), draw(st.integers(1, 3))
    clouds = [draw(st.lists(st.lists(coordinate, min_size=d, max_size=d), min_size=k, max_size=k)) for k in (n, m)]
    counts = [draw(st.lists(st.integers(0, 4), min_size=k, max_size=k).filter(any)) for k in (n, m)]
    return [(np.array(x), np.array(w) / sum(w)) for x, w in zip(clouds, counts, strict=True)]


@settings(max_examples=60, deadline=None)
@given(small_measures(), st.sampled_from([1, 2, 3, np.inf]))
def test_agrees_with_a_linear_program(pair, p):
    (x, a), (y, b) = pair
    value = wasserstein(DiscreteMeasure(x, a), DiscreteMeasure(y, b), p=p)
    # HiGHS works to 1e-10 on the p-th power
    assert value == pytest.approx(wasserstein_by_program(x, a, y, b, p), abs=1e-3 if value < 1e-3 else 1e-7)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(("n", "m", "dim"), [(7, 7, 2), (9, 5, 3), (12, 12, 1), (4, 11, 1)])
def test_agrees_with_a_linear_program_on_random_clouds(n, m, dim, p):
    rng = np.random.default_rng(n * m)
    x, y = rng.normal(size=(n, dim)), rng.normal(size=(m, dim))
    a, b = random_weights(n, rng), random_weights(m, rng)
    value = wasserstein(DiscreteMeasure(x, a), DiscreteMeasure(y, b), p=p)
    assert value == pytest.approx(wasserstein_by_program(x, a, y, b, p), rel=1e-9)


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("separation", [1e-2, 1e-5, 1e-8, 1e-10])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_near_clouds_in_clusters_against_all_permutations(p, separation, offset):
    """Costs 1e-20 beside costs 1: a solver that is blind to the small ones fails here."""
    rng = np.random.default_rng(int(-np.log10(separation)))
    centres = rng.normal(size=(2, 2))
    for _ in range(2):
        x = offset + centres[rng.integers(0, 2, 6)] + separation * rng.normal(size=(6, 2))
        y = x[rng.permutation(6)] + separation * rng.normal(size=(6, 2))
        # coordinates near 1e3 have spacing 1e-13: the truth is that of the stored floats
        assert relative_error(wasserstein(x, y, p=p), assignment_by_brute_force(x, y, p)) < 1e-12


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("separation", [1e-4, 1e-8, 1e-11])
@pytest.mark.parametrize("dim", [1, 3])
def test_near_weighted_clouds(p, separation, dim):
    """Far apart atoms that each move a little: the identity is optimal whatever the weights."""
    rng = np.random.default_rng(5)
    x = np.round(rng.normal(size=(40, dim)), 2) + 10.0 * np.arange(40)[:, None]
    y = x + separation * rng.normal(size=(40, dim))
    w, order = random_weights(40, rng), rng.permutation(40)
    moved = np.array([float(distance_digits(a, b)) for a, b in zip(x, y, strict=True)])
    truth = moved.max() if np.isinf(p) else (w @ moved**p / w.sum()) ** (1 / p)
    value = wasserstein(DiscreteMeasure(x, w), DiscreteMeasure(y[order], w[order]), p=p)
    assert value == pytest.approx(truth, rel=1e-12)


def test_near_weighted_clusters_whose_masses_differ_by_rounding():
    """Weights normalised twice differ by 1e-17 between the clusters; moved across, that would cost 1e-17."""
    rng = np.random.default_rng(6)
    centres = np.repeat(rng.normal(size=(4, 2)), 10, axis=0)
    x = centres + 1e-8 * rng.normal(size=(40, 2))
    w = random_weights(40, rng)
    mu = DiscreteMeasure(x, w)
    nu = DiscreteMeasure.normalized(x[::-1] + 1e-8, 3.0 * w[::-1])
    # a translation is optimal: its length from the stored floats
    moved = np.linalg.norm((x + 1e-8) - x, axis=1)
    assert wasserstein(mu, nu, p=1) <= w @ moved * (1 + 1e-12)
    assert wasserstein(mu, nu, p=2) == pytest.approx(np.sqrt(w @ moved**2), rel=1e-7)
    # rounding of x + 1e-8 perturbs the translation by 1e-16 / 1e-8


@pytest.mark.parametrize("light", [1e-10, 1e-22, 1e-300])
def test_light_atoms_keep_their_relative_mass(light):
    mu = DiscreteMeasure.normalized([[0.0, 0.0], [1.0, 0.0]], [1.0, light])
    nu = DiscreteMeasure.normalized([[0.0, 0.0], [1.0, 2.0]], [1.0, light])
    assert wasserstein(mu, nu, p=1) == pytest.approx(min(2 * light, light * (1 + np.sqrt(5))), rel=1e-9)
    assert wasserstein(mu, nu, p=np.inf) == 2.0


# ----------------------------------------------------------------------------------------------------------
# laws


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("dim", [1, 3])
def test_laws_of_a_distance(p, uniform, dim):
    rng = np.random.default_rng(20 + dim)
    measures = []
    for k in (8, 8, 8) if uniform else (6, 9, 4):
        x = rng.normal(size=(k, dim))
        measures.append(DiscreteMeasure(x, None if uniform else random_weights(k, rng)))
    mu, nu, rho = measures
    base = wasserstein(mu, nu, p=p)
    assert base > 0.0
    assert wasserstein(nu, mu, p=p) == pytest.approx(base, rel=1e-13)
    assert base <= wasserstein(mu, rho, p=p) + wasserstein(rho, nu, p=p)
    order = rng.permutation(mu.n)
    shuffled = DiscreteMeasure(mu.points[order], mu.weights[order])
    assert wasserstein(shuffled, nu, p=p) == pytest.approx(base, rel=1e-13)
    shift = rng.normal(size=dim)
    moved = [m.pushforward(lambda x: x + shift) for m in (mu, nu)]
    assert wasserstein(*moved, p=p) == pytest.approx(base, rel=1e-12)
    for scale in (1e-6, 3.0, 1e9, 2.0**-400, 2.0**400):
        scaled = [m.pushforward(lambda x, s=scale: s * x) for m in (mu, nu)]
        assert wasserstein(*scaled, p=p) == pytest.approx(scale * base, rel=1e-12)
    rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    turned = [m.pushforward(lambda x: x @ rotation) for m in (mu, nu)]
    assert wasserstein(*turned, p=p) == pytest.approx(base, rel=1e-12)


@pytest.mark.parametrize("dim", [1, 2])
def test_increases_with_the_order(dim):
    rng = np.random.default_rng(3)
    mu = DiscreteMeasure(rng.normal(size=(7, dim)), random_weights(7, rng))
    values = [wasserstein(mu, rng.normal(size=(5, dim)) * 0 + 1, p=p) for p in (1, 1.5, 2, 4, 16, 64, np.inf)]
    assert np.all(np.diff(values) >= 0.0)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dim", [1, 2])
def test_equal_measures_in_disguise(p, dim):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(5, dim))
    w = random_weights(5, rng)
    mu = DiscreteMeasure(x, w)
    split = DiscreteMeasure(
        np.vstack([x, x[:3], x[:1]]), np.r_[w[0] / 4, w[1:3] / 3, w[3:], w[0] / 2, w[1:3] * 2 / 3, w[0] / 4]
    )
    padded = DiscreteMeasure(np.vstack([x, 100 + x]), np.r_[w, np.zeros(5)])
    assert wasserstein(mu, split, p=p) == 0.0
    assert wasserstein(padded, split, p=p) == 0.0
    assert wasserstein(DiscreteMeasure([[0.0], [-0.0]]), [[0.0]], p=p) == 0.0


@pytest.mark.parametrize("p", ORDERS)
def test_atoms_of_weight_zero_never_matter(p):
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(5, 2)), rng.normal(size=(4, 2))
    w = random_weights(5, rng)
    padded = DiscreteMeasure(np.vstack([[[1e4, 1e4]], x]), np.r_[0.0, w])
    assert wasserstein(padded, y, p=p) == wasserstein(DiscreteMeasure(x, w), y, p=p)


@pytest.mark.parametrize("p", [1, 2, np.inf])
def test_duplicated_atoms_are_one_atom(p):
    x, y = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), np.array([[0.5, 1.0], [2.0, 2.0]])
    merged = DiscreteMeasure([[0.0, 0.0], [1.0, 0.0]], [2 / 3, 1 / 3])
    assert wasserstein(x, y, p=p) == pytest.approx(wasserstein(merged, y, p=p), rel=1e-14)


def test_arguments_are_not_touched():
    x, y = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 1.0], [0.0, 0.0]])
    before = x.copy(), y.copy()
    wasserstein(x, y)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])
    assert isinstance(wasserstein(x, y), float)


def test_tiny_differences_beside_large_ones_do_not_vanish():
    assert wasserstein([[0.0, 0.0], [1.0, 0.0]], [[1e-170, 0.0], [1.0, 0.0]], p=np.inf) == pytest.approx(
        0.0, abs=1e-160
    )
    value = wasserstein([[0.0, 0.0], [1.0, 0.0]], [[1e-170, 0.0], [1.0, 0.0]], p=1)
    assert value == pytest.approx(5e-171, rel=1e-12)


def test_a_distance_beyond_float64_is_refused():
    with pytest.raises(OverflowError, match="rescale"):
        wasserstein([[1.5e308]], [[-1.5e308]])


def test_the_budget_is_a_constant():
    assert costs.MAX_BYTES == 4 * 2**30
    costs.check_budget(16384, 16384, costs.ASSIGNMENT_BYTES)
    with pytest.raises(MemoryBudgetError):
        costs.check_budget(16385, 16384, costs.ASSIGNMENT_BYTES)


def test_gaussian_measures_have_their_closed_form():
    near, far = GaussianMeasure([0.0], [[1.0]]), GaussianMeasure([3.0], [[25.0]])
    assert wasserstein(near, far) == 5.0
    with pytest.raises(ValueError, match="p must be 2 between Gaussian"):
        wasserstein(near, far, p=1)
    with pytest.raises(TypeError, match=r"sample\(n, rng\)"):
        wasserstein(near, [[0.0]])
