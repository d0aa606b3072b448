"""Damaged files of arrays on the command line: one line, or the right numbers."""

import pathlib

import array_files as files
import numpy as np
import pytest


def check(outcomes: list[files.Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.kind != "fault", outcome


@pytest.mark.parametrize("seed", range(1, 50))
def test_a_few_damaged_files(seed: int, tmp_path: pathlib.Path) -> None:
    check(files.one_file(seed, tmp_path))


@pytest.mark.slow
def test_many_damaged_files(tmp_path: pathlib.Path) -> None:
    kinds = set()
    for seed in range(50, 650):
        outcomes = files.one_file(seed, tmp_path)
        check(outcomes)
        kinds |= {outcome.kind for outcome in outcomes}
    assert kinds == {"value", "refused"}


@pytest.mark.parametrize("make", [files.weights, files.matrices])
@pytest.mark.parametrize("seed", range(3))
def test_whole_files_give_the_constants_of_the_formula(make, seed, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(seed)
    (tmp_path / "w.npz").write_bytes(files.npz_bytes(make(rng)))
    (tmp_path / "x.npy").write_bytes(files.npy_bytes(files.tokens(rng)))
    assert files.run("local", tmp_path, "none").kind == "value"


def test_a_wrong_number_is_a_fault(tmp_path: pathlib.Path, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "w.npz").write_bytes(files.npz_bytes(files.matrices(rng)))
    (tmp_path / "x.npy").write_bytes(files.npy_bytes(files.tokens(rng)))
    right = files.reference
    monkeypatch.setattr(files, "reference", lambda *f: right(*f) * (1 + 1e-4))
    assert files.run("local", tmp_path, "none").kind == "fault"
    monkeypatch.setattr(files, "main", lambda arguments: 3)
    assert files.run("local", tmp_path, "none").kind == "fault"
