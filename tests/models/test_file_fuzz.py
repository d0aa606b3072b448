"""Mutated files, a few of each format; thousands by ``python -m benchmarks.fuzz_files``."""

import random
from pathlib import Path

import numpy as np
import pytest
from file_fuzz import FORMATS, Fault, Format, one_file, quiet

MODULES = ("fuzz_checkpoints", "fuzz_tokenizers")
for package in ("safetensors", "tokenizers", "gguf", *MODULES):
    pytest.importorskip(package, reason=f"the extra `models` ({package}) is not installed")


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files(name: str) -> None:
    with quiet():
        outcomes = {one_file(name, seed) for seed in range(12)}
    assert outcomes <= {"value", "ValueError", "FileNotFoundError"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutated_files(name: str) -> None:
    with quiet():
        outcomes = {one_file(name, seed) for seed in range(1000, 1300)}
    assert {"value", "ValueError"} <= outcomes


@pytest.mark.parametrize("name", FORMATS)
def test_good_files_are_values(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    form.make(tmp_path, random.Random(0))
    form.judge(tmp_path, form.read(tmp_path))


def test_faults_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that swallows, mixes up or crashes is caught."""
    good = FORMATS["llama F32"]

    def wrong(folder: Path) -> object:
        model, states, read = good.read(folder)
        return model, states + 1e-3, read

    def crash(folder: Path) -> object:
        raise MemoryError

    def nameless(folder: Path) -> object:
        raise ValueError("something is wrong")

    def warned(folder: Path) -> object:
        return np.exp(np.float64(1e4))

    for read in (wrong, crash, nameless, warned):
        monkeypatch.setitem(FORMATS, "broken", Format(good.files, good.make, read, good.judge))
        told = 0
        for seed in range(30):
            try:
                one_file("broken", seed)
            except Fault:
                told += 1
        assert told > 0
