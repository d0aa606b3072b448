"""Space-time measures."""

import numpy as np
import pytest

from otattn.measures import DiscreteMeasure, SpaceTimeMeasure, as_spacetime


def test_sequences_sit_at_i_over_n():
    mu = SpaceTimeMeasure.from_sequence([[5.0], [6.0], [7.0], [8.0]])
    np.testing.assert_array_equal(mu.times, [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_array_equal(mu.weights, np.full(4, 0.25))
    assert (mu.n, mu.dim) == (4, 1)


@pytest.mark.parametrize(
    ("times", "points", "weights", "message"),
    [
        ([0.0, 1.1], [[0.0], [1.0]], None, r"times must lie in \[0, 1\], received \[0, 1.1\]"),
        ([-0.1, 1.0], [[0.0], [1.0]], None, "times must lie"),
        ([np.nan, 1.0], [[0.0], [1.0]], None, "times must be finite"),
        ([0.0], [[0.0], [1.0]], None, "times must have 2 entries, received 1"),
        ([0.0, 1.0], [[0.0], [np.inf]], None, "points must be finite"),
        ([0.0, 1.0], [[0.0], [1.0]], [0.5, 0.6], "weights must sum to 1"),
    ],
)
def test_bad_input_is_named(times, points, weights, message):
    with pytest.raises(ValueError, match=message):
        SpaceTimeMeasure(times, points, weights)


def test_marginals():
    mu = SpaceTimeMeasure([1.0, 0.0, 1.0, 0.5], [[1.0], [2.0], [3.0], [4.0]], [0.1, 0.2, 0.7, 0.0])
    times, masses = mu.time_marginal()
    np.testing.assert_array_equal(times, [0.0, 1.0])
    np.testing.assert_allclose(masses, [0.2, 0.8], rtol=1e-15)
    space = mu.space_marginal()
    np.testing.assert_array_equal(space.points, mu.points)
    np.testing.assert_array_equal(space.weights, mu.weights)
    assert mu.radius() == 3.0
    assert mu.support().n == 3
    np.testing.assert_array_equal(mu.support().times, [1.0, 0.0, 1.0])


def test_pushforward_acts_on_space_only():
    mu = SpaceTimeMeasure([0.0, 1.0], [[1.0], [2.0]], [0.3, 0.7])
    image = mu.pushforward(lambda x: -x)
    np.testing.assert_array_equal(image.points, [[-1.0], [-2.0]])
    assert image.times is mu.times
    assert image.weights is mu.weights
    with pytest.raises(ValueError, match="keep the number"):
        mu.pushforward(lambda x: x[:1])


def test_as_spacetime():
    mu = SpaceTimeMeasure([0.0], [[1.0]])
    assert as_spacetime(mu) is mu
    assert as_spacetime([[1.0], [2.0]]).n == 2
    with pytest.raises(TypeError, match="no times"):
        as_spacetime(DiscreteMeasure([[0.0]]))
    assert "times=1" in repr(mu)
    with pytest.raises(ValueError, match="read-only"):
        mu.times[0] = 0.5
