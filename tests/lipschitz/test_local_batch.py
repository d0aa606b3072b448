"""Many windows in one call: the constants of the calls one by one."""

import numpy as np
import pytest

import otattn as oa

RNG = np.random.default_rng(0)
HEAD = oa.SoftmaxAttention(RNG.normal(size=(3, 3)), RNG.normal(size=(2, 3)))
WINDOWS = RNG.normal(size=(4, 7, 3))


def same(found, alone):
    assert len(found) == len(alone)
    for a, b in zip(found, alone, strict=True):
        assert (a.value, a.particle, a.splitting, a.residual, a.seed) == (
            b.value,
            b.particle,
            b.splitting,
            b.residual,
            b.seed,
        )
        np.testing.assert_array_equal(a.right, b.right)
        assert a.attention is HEAD


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_windows_of_one_size(n_jobs):
    found = oa.local_lipschitz_batch(HEAD, WINDOWS, n_jobs=n_jobs, tol=1e-7, rng=5)
    same(found, [oa.local_lipschitz(HEAD, X, tol=1e-7, rng=5) for X in WINDOWS])
    assert all(local.verify() for local in found)


def test_windows_of_many_sizes_and_kinds():
    rng = np.random.default_rng(1)
    windows = [rng.normal(size=(n, 3)) for n in (2, 9, 5)]
    weighted = oa.DiscreteMeasure(windows[1], rng.dirichlet(np.ones(9)))
    given = [windows[0], weighted, windows[2].tolist()]
    found = oa.local_lipschitz_batch(HEAD, given, p=1)
    same(found, [oa.local_lipschitz(HEAD, mu, p=1) for mu in (windows[0], weighted, windows[2])])
    assert [local.mu.n for local in found] == [2, 9, 5]
    assert all(local.p == 1 for local in found)


def test_a_generator_gives_each_window_its_own():
    results = [oa.local_lipschitz_batch(HEAD, WINDOWS, rng=np.random.default_rng(3), n_jobs=j) for j in (1, 2)]
    same(*results)
    assert len({local.seed for local in results[0]}) == len(WINDOWS)


def test_masked_maps_take_sequences():
    masked = oa.MaskedAttention(HEAD)
    found = oa.local_lipschitz_batch(masked, WINDOWS)
    assert [a.value for a in found] == [oa.local_lipschitz(masked, X).value for X in WINDOWS]
    assert all(isinstance(a.mu, oa.SpaceTimeMeasure) for a in found)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (
            WINDOWS[0],
            r"windows must have shape \(windows, n, d\).*received ndarray of shape \(7, 3\); local_lipschitz takes one",
        ),
        (oa.DiscreteMeasure(WINDOWS[0]), r"windows must have shape .*received DiscreteMeasure"),
        (WINDOWS[None], r"received ndarray of shape \(1, 4, 7, 3\)"),
        (WINDOWS[0].tolist(), r"windows\[0\] must have 2 dimension\(s\), received shape \(3,\)"),
        ([WINDOWS[0], WINDOWS[1, 0]], r"windows\[1\] must have 2 dimension\(s\), received shape \(3,\)"),
        ([], "windows must hold at least one window"),
        (WINDOWS[:0], "windows must hold at least one window"),
        ([WINDOWS[0, :, :2]], "must live in dimension 3, received 2"),
    ],
)
def test_what_is_no_list_of_windows(windows, message):
    with pytest.raises(ValueError, match=message):
        oa.local_lipschitz_batch(HEAD, windows)


@pytest.mark.parametrize(
    "many", [WINDOWS, list(WINDOWS), [oa.DiscreteMeasure(X) for X in WINDOWS]], ids=["array", "list", "measures"]
)
def test_many_windows_are_shown_the_way(many):
    with pytest.raises(
        ValueError, match=r"mu must be one measure or array \(n, d\).*local_lipschitz_batch takes many windows"
    ):
        oa.local_lipschitz(HEAD, many)
