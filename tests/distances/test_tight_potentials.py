"""Potentials along a forest."""

import numpy as np
import pytest

import otattn as oa
from otattn.distances.duality import support_slack, tight_potentials
from otattn.distances.forest import peel


def test_they_are_tight_on_the_forest_and_keep_the_offset_of_each_tree():
    rng = np.random.default_rng(0)
    C = rng.normal(size=(4, 5)) * 1e3
    # two trees: columns 0, 1, 2 with rows 0, 1; columns 3, 4 with rows 2, 3
    rows, cols = np.array([0, 0, 1, 1, 2, 2, 3]), np.array([0, 1, 1, 2, 3, 4, 4])
    given = rng.normal(size=5)
    g = tight_potentials(C, rows, cols, given)
    assert [(g[tree] == given[tree]).sum() for tree in (slice(0, 3), slice(3, 5))] == [1, 1]
    f = np.array([C[0, 0] - g[0], C[1, 1] - g[1], C[2, 3] - g[3], C[3, 4] - g[4]])
    assert np.abs(support_slack(C, f, g, rows, cols)).max() <= 1e-12 * np.abs(C).max()
    np.testing.assert_array_equal(g, tight_potentials(C, rows, cols, given, peel(rows, cols, 4, 5)))


def test_each_step_of_a_peeling_takes_a_leaf_and_a_cycle_stays():
    rows, cols = np.array([0, 0, 1, 1, 2, 3, 3, 4, 4]), np.array([0, 1, 0, 1, 0, 2, 3, 4, 3])
    steps, left = peel(rows, cols, 5, 5), set(range(len(rows)))
    for leaf, neighbour, arc in steps:
        at = [k for k in left if leaf in (rows[k], cols[k] + 5)]
        assert at == [arc]
        assert {leaf, neighbour} == {rows[arc], cols[arc] + 5}
        left.remove(arc)
    assert left == {0, 1, 2, 3}


@pytest.mark.parametrize("n", [2, 40, 200])
def test_uniform_measures_are_certified_as_an_assignment(n, monkeypatch):
    """The value of the assignment, its potentials by shortest paths; no simplex."""
    monkeypatch.setattr("otattn.distances.plan.network_simplex", None)
    x, y = np.random.default_rng(n).normal(size=(2, n, 3))
    found = oa.transport(x, y)
    assert found.lower <= found.value <= found.upper
    assert found.gap <= 1e-12
    assert found.value == pytest.approx(oa.wasserstein(x, y), rel=1e-13)
    assert found.verify()
