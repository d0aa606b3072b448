"""Sweeps are the studies of their points, resumable point by point."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import otattn as oa

RNG = np.random.default_rng(0)
SOFTMAX = oa.SoftmaxAttention(RNG.normal(size=(2, 2)), RNG.normal(size=(2, 2)))


def test_each_point_is_a_study() -> None:
    maps = {"softmax": SOFTMAX, "causal": oa.MaskedAttention(SOFTMAX)}
    grid = oa.sweep(maps, n=(3, 5), radius=(1.0, 2.0), p=(1, np.inf), rng=(0, 4), n_pairs=6, progress=False)
    assert len(grid.studies) == 2 * 2 * 2 * 2 * 2
    point = grid.select(attention="softmax", n=5, radius=2.0, p=1.0, seed=4)
    alone = oa.stability_study(
        SOFTMAX, oa.samplers.uniform_ball_pairs(5, 2, 2.0), n_pairs=6, p=1, rng=4, progress=False
    )
    assert np.array_equal(point.studies[0].ratios, alone.ratios)
    causal = grid.select(attention="causal", p=np.inf)
    assert all(isinstance(s.best.mu, oa.SpaceTimeMeasure) for s in causal.studies)
    rows = json.loads(json.dumps(grid.to_dict(), allow_nan=False))["rows"]
    assert rows[-1]["p"] == "inf"
    assert "32 studies" in repr(grid)
    with pytest.raises(ValueError, match="must occur"):
        grid.select(n=4)


def test_workers_and_stores_do_not_change_it(tmp_path: Path) -> None:
    options = {"n": (3, 4), "n_pairs": 8, "progress": False}
    plain = oa.sweep([SOFTMAX], **options)
    stored = oa.sweep([SOFTMAX], **options, store=tmp_path)
    names = sorted(f.name.rpartition("-")[0] for f in tmp_path.iterdir())
    assert names == ["0-n3-r1-p2-s0", "0-n4-r1-p2-s0"]  # and a hash of the coordinates
    resumed = oa.sweep([SOFTMAX], **options, store=tmp_path, n_jobs=2)
    for a, b, c in zip(plain.studies, stored.studies, resumed.studies, strict=True):
        assert np.array_equal(a.ratios, b.ratios)
        assert np.array_equal(a.ratios, c.ratios)


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    oa.sweep({"../../x": SOFTMAX}, n=2, n_pairs=2, progress=False, store=tmp_path / "s")
    assert [f.name for f in tmp_path.iterdir()] == ["s"]


def test_dataframe_and_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = oa.sweep(SOFTMAX, n=2, n_pairs=3, progress=False)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=dict))
    assert grid.to_dataframe()["largest"] == [grid.studies[0].best.value]
    for bad in ({"n": ()}, {"n": 0}, {"n": 2, "p": 0.5}, {"n": 2, "radius": -1.0}, {"n": 2, "rng": -1}):
        with pytest.raises(ValueError, match="must"):
            oa.sweep(SOFTMAX, **{"n_pairs": 2, "progress": False, **bad})
    with pytest.raises(ValueError, match="at least one map"):
        oa.sweep({}, n=2)
    with pytest.raises(TypeError, match="attention maps"):
        oa.sweep([3], n=2)
