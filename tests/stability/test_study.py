"""Studies of many pairs: reproducible at any number of workers, resumable, honest about what they find."""

import json
import os
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest

from otattn.attention import ExponentialAttention, MaskedAttention, SoftmaxAttention
from otattn.data import load_sample
from otattn.errors import ConvergenceError
from otattn.measures import DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure
from otattn.stability import StabilityStudy, samplers, stability_ratio, stability_study

RNG = np.random.default_rng(0)
SOFTMAX = SoftmaxAttention(RNG.normal(size=(3, 3)), RNG.normal(size=(3, 3)))
BALL = samplers.uniform_ball_pairs(5, 3, 1.0)
KINDS: list[tuple[Any, Any, type]] = [
    (SOFTMAX, BALL, DiscreteMeasure),
    (MaskedAttention(SOFTMAX), samplers.sequence_pairs(5, 3, 1.0), SpaceTimeMeasure),
    (SOFTMAX, samplers.gaussian_measure_pairs(3), GaussianMeasure),
]
study_of = partial(stability_study, progress=False)


@pytest.mark.parametrize(("attention", "sampler", "kind"), KINDS, ids=["discrete", "conditional", "gaussian"])
def test_ratios_are_those_of_the_pairs(attention: Any, sampler: Any, kind: type) -> None:
    study = study_of(attention, sampler, n_pairs=30, rng=7)
    assert study.n_pairs == 30
    assert study.n_skipped == 0
    children = np.random.SeedSequence(7).spawn(30)
    assert [s.spawn_key for s in study.seeds] == [s.spawn_key for s in children]
    for i in (0, 13, 29):
        mu, nu = sampler(np.random.default_rng(children[i]))
        assert isinstance(mu, kind)
        assert study.ratios[i] == stability_ratio(attention, mu, nu).value
        name = "mean" if kind is GaussianMeasure else "points"
        assert np.array_equal(getattr(mu, name), getattr(study.pair(i)[0], name))
    assert study.best.value == study.ratios.max()
    assert study.best.verify()
    assert study.quantile(0.5) == np.median(study.ratios)
    low, high = study.confidence_interval()
    assert low <= study.ratios.mean() <= high
    low, high = study.confidence_interval(0.9, statistic=0.75)
    assert low <= study.quantile(0.75) <= high
    assert study.confidence_interval(rng=3) == study.confidence_interval(rng=3)


def test_results_do_not_depend_on_the_workers() -> None:
    layer = load_sample()
    cases = [(a, s) for a, s, _ in KINDS[::2]] + [(layer.heads[0], samplers.window_pairs(layer.hidden_states, 8))]
    for attention, sampler in cases:
        one = study_of(attention, sampler, n_pairs=12, rng=1)
        two = study_of(attention, sampler, n_pairs=12, rng=1, n_jobs=2)
        assert np.array_equal(one.ratios, two.ratios)
        assert one.best.certified_lower == two.best.certified_lower


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threading", "multiprocessing", "sequential"])
def test_joblib_chooses_the_backend(backend: str) -> None:
    expected = study_of(SOFTMAX, BALL, n_pairs=20, rng=2).ratios
    with joblib.parallel_config(backend=backend, n_jobs=2):
        assert np.array_equal(study_of(SOFTMAX, BALL, n_pairs=20, rng=2, n_jobs=None).ratios, expected)


def test_seeds() -> None:
    short, long = (study_of(SOFTMAX, BALL, n_pairs=n, rng=3) for n in (10, 25))
    assert np.array_equal(long.ratios[:10], short.ratios)
    for rng in (np.random.SeedSequence(3), np.int64(3)):
        assert np.array_equal(study_of(SOFTMAX, BALL, n_pairs=10, rng=rng).ratios, short.ratios)
    child = np.random.SeedSequence(3).spawn(2)[1]
    assert study_of(SOFTMAX, BALL, n_pairs=3, rng=child).seeds[2].spawn_key == (1, 2)
    rng = np.random.default_rng(3)
    first, second = (study_of(SOFTMAX, BALL, n_pairs=10, rng=rng).ratios for _ in range(2))
    assert not np.array_equal(first, second)  # a generator moves on
    assert np.array_equal(study_of(SOFTMAX, BALL, n_pairs=10, rng=np.random.default_rng(3)).ratios, first)


class Repeating:
    """Every third pair consists of equal measures."""

    def __call__(self, rng: np.random.Generator) -> tuple[Any, Any]:
        kind = rng.integers(0, 3)
        X = rng.normal(size=(4, 3))
        return X, X[::-1] if kind == 0 else X * (1 + 1e-14) if kind == 1 else rng.normal(size=(4, 3))


def test_equal_measures_are_skipped_and_counted() -> None:
    study = study_of(SOFTMAX, Repeating(), n_pairs=60, rng=4)
    assert 0 < len(study.ratios) < 60
    assert study.n_skipped == 60 - len(study.ratios)
    assert np.isfinite(study.ratios).all()
    kinds = [s.generate_state(1) is not None and np.random.default_rng(s).integers(0, 3) for s in study.seeds]
    assert study.indices.tolist() == [i for i, k in enumerate(kinds) if k == 2]
    assert study.to_dict()["n_skipped"] == study.n_skipped
    with pytest.raises(ValueError, match="all 5 pairs were equal"):
        study_of(SOFTMAX, lambda rng: (np.ones((2, 3)), np.ones((2, 3))), n_pairs=5, rng=0)


def test_bounds_are_labelled() -> None:
    study = study_of(SOFTMAX, BALL, n_pairs=100, rng=5)
    estimate, lower = study.estimate(), study.lower_bound()
    assert estimate.kind == "estimate"
    assert lower.kind == "lower"
    assert estimate.value >= study.best.value >= lower.value > 0
    assert "estimate" in estimate.reference
    assert estimate.details["method"] in {"generalised Pareto", "order statistics", "constant tail"}
    assert (lower.n, lower.p, lower.domain) == (5, 2.0, BALL.domain)
    assert stability_ratio(SOFTMAX, *lower.witness).certified_lower == lower.value
    with pytest.raises(ConvergenceError, match="at least 20"):
        study_of(SOFTMAX, BALL, n_pairs=10, rng=5).estimate()


def test_the_estimate_of_a_known_supremum() -> None:
    # A = 0, V = I: the supremum of the ratio is 1, reached by translations; two points on a line come near it
    mean = SoftmaxAttention([[0.0]], [[1.0]])
    study = study_of(mean, samplers.uniform_ball_pairs(2, 1, 1.0), n_pairs=800, rng=6)
    assert study.ratios.max() <= 1.0 + 1e-12
    # single estimates of an end that is reached scatter by a few percent
    assert study.estimate().value == pytest.approx(1.0, abs=0.1)
    translations = study_of(mean, shifted, n_pairs=50, rng=6)
    assert np.abs(translations.ratios - 1.0).max() <= 1e-12
    assert translations.estimate().value == pytest.approx(1.0, abs=1e-12)


def shifted(rng: np.random.Generator) -> tuple[Any, Any]:
    X = rng.normal(size=(3, 1))
    return X, X + rng.normal()


@pytest.mark.parametrize(("attention", "sampler", "kind"), KINDS, ids=["discrete", "conditional", "gaussian"])
def test_save_and_load(tmp_path: Path, attention: Any, sampler: Any, kind: type) -> None:
    study = study_of(attention, sampler, n_pairs=25, rng=8)
    path = tmp_path / "study.npz"
    study.save(path)
    study.save(path)  # overwrites whole
    assert os.listdir(tmp_path) == ["study.npz"]
    replace(study, attention=None, sampler=None, best=replace(study.best, attention=None)).save(tmp_path / "bare.npz")
    bare = StabilityStudy.load(tmp_path / "bare.npz")
    assert np.array_equal(bare.ratios, study.ratios)
    assert bare.to_dict() | {"lower_bound": 0} == study.to_dict() | {"lower_bound": 0}
    assert bare.lower_bound().value == study.lower_bound().value
    assert isinstance(bare.best.mu, kind)
    with pytest.raises(ValueError, match="attention"):
        bare.best.verify()
    with pytest.raises(ValueError, match="sampler"):
        bare.pair(0)
    given = StabilityStudy.load(tmp_path / "bare.npz", attention=attention, sampler=sampler)
    for full in (StabilityStudy.load(path), given):
        assert full.best.verify()
        assert stability_ratio(full.attention, *full.pair(3)).value == study.ratios[3]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.npz"
    study_of(SOFTMAX, BALL, n_pairs=5, rng=8).save(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="must be"):
            StabilityStudy.load(path)
    path.write_bytes(whole)
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["numerators"] = 1.5 * arrays["numerators"]
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="is not the largest of its ratios"):
        StabilityStudy.load(path)
    np.savez(path, meta=np.array("[]"))
    with pytest.raises(ValueError, match=r"written by StabilityStudy.save"):
        StabilityStudy.load(path)
    np.savez(path, numerators=np.ones(3))
    with pytest.raises(ValueError, match=r"written by StabilityStudy.save"):
        StabilityStudy.load(path)


def test_plain_values() -> None:
    study = study_of(SOFTMAX, BALL, n_pairs=30, rng=9)
    plain = json.loads(json.dumps(study.to_dict(), allow_nan=False))
    assert plain["max"] == study.best.value
    assert plain["estimate"]["kind"] == "estimate"
    assert plain["lower_bound"]["kind"] == "lower"
    assert plain["sampler"] == repr(BALL)
    assert study_of(SOFTMAX, BALL, n_pairs=3, rng=9).to_dict()["estimate"] is None
    assert "largest" in repr(study)


def test_dataframe(monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(SOFTMAX, Repeating(), n_pairs=30, rng=9)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=dict))
    frame = study.to_dataframe()
    assert list(frame) == ["pair", "ratio", "numerator", "denominator"]
    assert all(len(column) == len(study.ratios) for column in frame.values())
    assert np.array_equal(np.divide(frame["numerator"], frame["denominator"]), frame["ratio"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        study.to_dataframe()


def test_progress_goes_to_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    stability_study(SOFTMAX, BALL, n_pairs=5, rng=0)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "5/5" in shown.err
    study_of(SOFTMAX, BALL, n_pairs=5, rng=0)
    assert capsys.readouterr() == ("", "")


def test_refusals() -> None:
    good: dict[str, Any] = {"attention": SOFTMAX, "sampler": BALL, "n_pairs": 3, "rng": 0}
    for change, error, message in [
        ({"n_pairs": 0}, ValueError, "n_pairs must"),
        ({"n_pairs": 2.0}, ValueError, "n_pairs must"),
        ({"p": 0.5}, ValueError, "p must"),
        ({"rng": -1}, TypeError, "rng must"),
        ({"rng": None}, TypeError, "rng must"),
        ({"sampler": 3}, TypeError, "sampler must"),
        ({"attention": None}, TypeError, "attention must"),
        ({"sampler": samplers.gaussian_measure_pairs(3), "p": 1}, ValueError, "p must be 2"),
        ({"sampler": samplers.uniform_ball_pairs(3, 2, 1.0)}, ValueError, "dimension 3"),
        ({"attention": ExponentialAttention(1e4 * np.eye(3), np.eye(3))}, OverflowError, "scale"),
    ]:
        with pytest.raises(error, match=message):  # type: ignore[call-overload]
            study_of(**(good | change))
    study = study_of(**good)
    for level in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="level must"):
            study.confidence_interval(level)
    with pytest.raises(ValueError, match="q must"):
        study.quantile(1.5)
    with pytest.raises(ValueError, match="index must"):
        study.pair(3)
