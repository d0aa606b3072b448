"""Situations in which one term of a formula of the stability ratios decides: a change of it is noticed here."""

from fractions import Fraction

import numpy as np
import pytest

from otattn.attention import SoftmaxAttention
from otattn.stability import stability_study
from otattn.stability.enclosed import Enclosed
from otattn.stability.transport_bounds import distance_bounds

MEAN = SoftmaxAttention([[0.0]], [[2.0]])
"""Every token goes to twice the mean."""


def moved_by(step):
    def sampler(rng):
        x = 1.0 + rng.random((3, 1))
        return x, x + step

    return sampler


@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-9, 1e-11])
def test_a_study_counts_pairs_far_below_their_size(step):
    """A translation by ``step`` is a distance of ``step``, and its image one of twice that."""
    study = stability_study(MEAN, moved_by(step), n_pairs=4, rng=0, progress=False)
    np.testing.assert_allclose(study.denominators, step, rtol=4 * 2.0**-52 / step)
    np.testing.assert_allclose(study.numerators / study.denominators, 2.0, rtol=32 * 2.0**-52 / step)


def test_a_study_does_not_count_pairs_that_are_one_rounding_apart():
    with pytest.raises(ValueError, match="different measures"):
        stability_study(MEAN, moved_by(2e-15), n_pairs=4, rng=0, progress=False)


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("gap", [0.0, 1e-16, 0.7])
def test_distances_hold_for_all_atoms_of_an_enclosure(d, gap):
    """The nearest and the furthest atoms that the errors allow, in fractions; the errors may be all that there is."""
    rng = np.random.default_rng(d)
    for _ in range(50):
        y, error = np.full((1, d), gap), rng.random((1, d)) * 10.0 ** rng.integers(-3, 1)
        for x in (Enclosed(np.zeros((1, d)), None, error), Enclosed(np.zeros((1, d)), np.zeros((1, d)), error)):
            lower, upper = (Fraction(float(v[0, 0])) for v in distance_bounds(x, Enclosed.exact(y, fine=x.fine)))
            pairs = [(Fraction(float(g)), Fraction(float(e))) for g, e in zip(y[0], error[0], strict=True)]
            assert upper**2 >= sum((g + e) ** 2 for g, e in pairs)
            assert lower**2 <= sum(max(g - e, Fraction(0)) ** 2 for g, e in pairs)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_products_of_few_terms_hold_the_fractions(k):
    rng = np.random.default_rng(k)
    a, b = 1.0 + rng.random((20, k)), 1.0 + rng.random((k, 20))
    found = Enclosed.exact(a) @ Enclosed.exact(b)
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.T.tolist()):
            exact = sum(Fraction(u) * Fraction(v) for u, v in zip(row, column, strict=True))
            assert abs(Fraction(float(found.high[i, j])) - exact) <= Fraction(float(found.radius[i, j]))


def test_sums_of_pairs_hold_the_fractions():
    """Double-double sums that need more than 106 bits: the radius is all that is known of the rest."""
    rng = np.random.default_rng(0)
    x, y = (Enclosed(v, 2.0**-54 * v * rng.random(40), None) for v in (1.0 + rng.random((2, 40))))
    y = Enclosed(y.high * 1e-9, y.low * 1e-9, None)
    for found, sign in ((x + y, 1), (x - y, -1)):
        for k in range(40):
            exact = sum(Fraction(float(v[k])) for v in (x.high, x.low))
            exact += sign * sum(Fraction(float(v[k])) for v in (y.high, y.low))
            apart = abs(exact - Fraction(float(found.high[k])) - Fraction(float(found.low[k])))
            assert apart <= Fraction(float(found.radius[k]))
