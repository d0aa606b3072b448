"""Stores: a kill at any moment loses nothing, two processes do not meet, damage is named and repaired."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.errors import StoreError, StoreWarning
from otattn.stability import DirectoryStore, MemoryStore, samplers, stability_study

RNG = np.random.default_rng(0)
SOFTMAX = SoftmaxAttention(RNG.normal(size=(3, 3)), RNG.normal(size=(3, 3)))
BALL = samplers.uniform_ball_pairs(5, 3, 1.0)
study_of = partial(stability_study, progress=False)


class Interrupting(DirectoryStore):
    """A kill after a number of chunks."""

    def __init__(self, path: Path, chunks: int) -> None:
        super().__init__(path)
        self.left = chunks

    def put(self, indices: Sequence[int], terms: Sequence[tuple[float, float]]) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().put(indices, terms)


class Counting:
    """A sampler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rng: np.random.Generator) -> tuple[Any, Any]:
        self.calls += 1
        return BALL(rng)

    def __reduce__(self) -> Any:
        return Counting, ()


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path: Path, torn: bool) -> None:
    whole = study_of(SOFTMAX, Counting(), n_pairs=40, rng=10)
    with pytest.raises(KeyboardInterrupt):
        study_of(SOFTMAX, Counting(), n_pairs=40, rng=10, store=Interrupting(tmp_path / "s", 25))
    chunks = tmp_path / "s" / "chunks.jsonl"
    if torn:
        with open(chunks, "ab") as stream:
            stream.write(b"[[39], [0.12")
    sampler = Counting()
    if torn:
        with pytest.warns(StoreWarning, match="line 26 torn"):
            resumed = study_of(SOFTMAX, sampler, n_pairs=40, rng=10, store=tmp_path / "s")
    else:
        resumed = study_of(SOFTMAX, sampler, n_pairs=40, rng=10, store=tmp_path / "s")
    assert sampler.calls == 15 + 1  # what was missing, and the best pair once more
    assert np.array_equal(resumed.numerators, whole.numerators)
    assert np.array_equal(resumed.denominators, whole.denominators)
    assert resumed.best.value == whole.best.value
    sampler = Counting()
    longer = study_of(SOFTMAX, sampler, n_pairs=50, rng=10, store=str(tmp_path / "s"), n_jobs=1)
    assert sampler.calls == 11
    assert np.array_equal(longer.ratios[:40], whole.ratios)


def test_a_store_of_another_study_is_refused(tmp_path: Path) -> None:
    study_of(SOFTMAX, BALL, n_pairs=4, rng=0, store=tmp_path)
    good: dict[str, Any] = {"attention": SOFTMAX, "sampler": BALL, "n_pairs": 4, "rng": 0, "store": tmp_path}
    others: list[dict[str, Any]] = [
        {"rng": 1},
        {"p": 1},
        {"sampler": samplers.uniform_ball_pairs(5, 3, 1.5)},
        {"attention": SoftmaxAttention(SOFTMAX.A, 2 * SOFTMAX.V)},
        {"attention": MaskedAttention(SOFTMAX), "sampler": samplers.sequence_pairs(5, 3, 1.0)},
    ]
    for change in others:
        with pytest.raises(StoreError, match="must belong to this study"):
            study_of(**(good | change))
    same = SoftmaxAttention(SOFTMAX.A.copy(), SOFTMAX.V.copy())
    study_of(same, samplers.uniform_ball_pairs(5, 3, 1.0), n_pairs=4, rng=0, store=tmp_path)
    memory = MemoryStore()
    study_of(SOFTMAX, BALL, n_pairs=4, rng=0, store=memory)
    assert memory.get(3) is not None
    with pytest.raises(StoreError, match="must belong to this study"):
        study_of(SOFTMAX, BALL, n_pairs=4, rng=1, store=memory)


def records(folder: Path) -> list[str]:
    return (folder / "chunks.jsonl").read_text().splitlines()


@pytest.mark.parametrize("damage", ["nonsense", "digit", "foreign", "nested", "copy of another index"])
def test_damaged_and_foreign_records_are_named_and_computed_again(tmp_path: Path, damage: str) -> None:
    whole = study_of(SOFTMAX, BALL, n_pairs=6, rng=0)
    study_of(SOFTMAX, BALL, n_pairs=6, rng=0, store=tmp_path / "a")
    study_of(SOFTMAX, BALL, n_pairs=6, rng=1, store=tmp_path / "b")
    lines = records(tmp_path / "a")
    record = json.loads(lines[1])
    if damage == "digit":
        record["numerators"][0] *= 1.0 + 1e-12
    elif damage == "copy of another index":
        record["indices"] = [3]
    lines[1] = {
        "nonsense": "\x00 nonsense",
        "foreign": records(tmp_path / "b")[1],
        "nested": "[" * 100_000,
    }.get(damage, json.dumps(record))
    (tmp_path / "a" / "chunks.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.warns(StoreWarning, match=r"chunks\.jsonl: line 2"):
        again = study_of(SOFTMAX, BALL, n_pairs=6, rng=0, store=tmp_path / "a")
    assert np.array_equal(again.numerators, whole.numerators)
    # repaired: the next run has nothing to say
    assert np.array_equal(study_of(SOFTMAX, BALL, n_pairs=6, rng=0, store=tmp_path / "a").ratios, whole.ratios)


def test_a_damaged_header_and_a_file_are_refused(tmp_path: Path) -> None:
    study_of(SOFTMAX, BALL, n_pairs=4, rng=0, store=tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        study_of(SOFTMAX, BALL, n_pairs=4, rng=0, store=tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="must be a folder"):
        study_of(SOFTMAX, BALL, n_pairs=4, rng=0, store=file)


class Full(DirectoryStore):
    """A disk with room for two chunks: the third write stops in the middle."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.left = 2

    def put(self, indices: Sequence[int], terms: Sequence[tuple[float, float]]) -> None:
        self.left -= 1
        if self.left >= 0:
            super().put(indices, terms)
            return
        write = os.write
        os.write = lambda handle, data: write(handle, data[:20])  # type: ignore[assignment]
        try:
            super().put(indices, terms)
        finally:
            os.write = write


def test_a_full_disk_leaves_the_earlier_records(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="free some space"):
        study_of(SOFTMAX, BALL, n_pairs=6, rng=0, store=Full(tmp_path))
    assert len(records(tmp_path)) == 2
    resumed = study_of(SOFTMAX, BALL, n_pairs=6, rng=0, store=tmp_path)
    assert np.array_equal(resumed.ratios, study_of(SOFTMAX, BALL, n_pairs=6, rng=0).ratios)


SCRIPT = """
import sys
import numpy as np
from otattn.attention import SoftmaxAttention
from otattn.stability import samplers, stability_study

rng = np.random.default_rng(0)
attention = SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(3, 3)))
study = stability_study(attention, samplers.uniform_ball_pairs(24, 3, 1.0), n_pairs=400, rng=5, store=sys.argv[1],
                        n_jobs=int(sys.argv[2]), progress=False)
print(study.numerators.tobytes().hex() + study.denominators.tobytes().hex())
"""


def start(folder: Path, jobs: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_second_process_is_told_to_wait(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.open("study")
    other = start(tmp_path)
    _, err = other.communicate(timeout=120)
    assert other.returncode != 0
    assert f"in use by another process (number {os.getpid()})" in err
    with pytest.raises(StoreError, match="another study of this process"):
        DirectoryStore(tmp_path).open("study")
    store.close()
    store.open("study")
    store.close()


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    whole, _ = start(tmp_path / "whole").communicate(timeout=300)
    kills = folders = 0
    while kills < 20 or folders == 0:
        run = start(tmp_path / f"killed {folders}")
        chunks = tmp_path / f"killed {folders}" / "chunks.jsonl"
        before = chunks.stat().st_size if chunks.exists() else 0
        deadline = time.monotonic() + 120
        # let it write something, then strike at a random moment
        while run.poll() is None and time.monotonic() < deadline:
            if chunks.exists() and chunks.stat().st_size > before:
                break
            time.sleep(0.002)
        time.sleep(float(rng.exponential(0.01)))
        if kills < 20 and run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            kills += 1
        out, err = run.communicate(timeout=300)
        if run.returncode == -signal.SIGKILL:
            continue
        assert run.returncode == 0, err
        assert out == whole
        folders += 1
    two, _ = start(tmp_path / "two workers", 2).communicate(timeout=300)
    assert two == whole
