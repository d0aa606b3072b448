"""A killed worker ends the study in our words and loses nothing finished; a killed study takes its workers with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import otattn as oa
from otattn.errors import WorkerError
from otattn.stability import DirectoryStore

SOFTMAX = oa.SoftmaxAttention([[1.0, 0.5], [0.0, -1.0]], [[1.0, 0.0], [0.3, 1.0]])
PAIRS = 40


class Deadly:
    """Pairs of points; the worker that draws the given pair dies as long as the file ``deadly`` is there."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def __call__(self, rng: np.random.Generator) -> tuple[Any, Any]:
        X, Y = rng.normal(size=(2, 3, 2))
        with open(self.folder / "drawn", "ab") as out:
            out.write(b".")
        if (self.folder / "deadly").exists() and (self.folder / "drawn").stat().st_size > PAIRS // 2:
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return X, Y


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_killed_worker_is_named_and_the_study_goes_on(tmp_path: Path, how: str) -> None:
    (tmp_path / "deadly").touch()
    sampler = Deadly(tmp_path, how)
    options: dict[str, Any] = {"n_pairs": PAIRS, "rng": 0, "n_jobs": 2, "progress": False}
    with pytest.raises(
        WorkerError, match=r"\d+ of 40 pairs are kept in .*, and the same call goes on from there"
    ) as caught:
        oa.stability_study(SOFTMAX, sampler, store=tmp_path / "s", **options)
    lines = (tmp_path / "s" / "chunks.jsonl").read_text().splitlines()
    assert f"{len(lines)} of 40" in str(caught.value)
    assert 0 < len(lines) < PAIRS
    (tmp_path / "drawn").unlink()
    with pytest.raises(WorkerError, match=r"pairs were finished and are lost, because no store was given"):
        oa.stability_study(SOFTMAX, sampler, **options)
    (tmp_path / "deadly").unlink()
    (tmp_path / "drawn").unlink()
    study = oa.stability_study(SOFTMAX, sampler, store=tmp_path / "s", **options)
    assert (tmp_path / "drawn").stat().st_size == PAIRS - len(lines) + 1  # the missing ones, and the best pair again
    alone = oa.stability_study(SOFTMAX, sampler, **(options | {"n_jobs": 1}))
    assert np.array_equal(study.ratios, alone.ratios)
    assert study.best.value == study.ratios.max() == alone.best.value


SCRIPT = """
import os, sys, time
from pathlib import Path
import joblib
import otattn as oa

class Slow:
    def __call__(self, rng):
        Path(sys_argv_folder, str(os.getpid())).touch()
        time.sleep(float(sys_argv_pause))
        return rng.normal(size=(3, 2)), rng.normal(size=(3, 2))

sys_argv_folder, backend, sys_argv_pause = sys.argv[1:]
attention = oa.SoftmaxAttention([[1.0, 0.5], [0.0, -1.0]], [[1.0, 0.0], [0.3, 1.0]])
with joblib.parallel_config(backend=backend):
    oa.stability_study(attention, Slow(), n_pairs=100_000, rng=0, n_jobs=2, progress=False,
                       store=sys_argv_folder + "-store", key="slow")
"""


def alive(pid: int) -> bool:
    """Whether the process runs; one that waits for its parent to take note does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    ("backend", "pause"),
    [
        pytest.param("loky", "0.01", marks=pytest.mark.slow),
        pytest.param("loky", "1000", marks=pytest.mark.slow),
        ("multiprocessing", "0.01"),
    ],
)
def test_the_workers_of_a_killed_study_end(tmp_path: Path, backend: str, pause: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "pids"
    folder.mkdir()
    run = subprocess.Popen(
        [sys.executable, str(script), str(folder), backend, pause], env=env, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(folder.iterdir())) < 2 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = [int(f.name) for f in folder.iterdir()]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
    finally:
        run.kill()
        run.wait()
    store = DirectoryStore(tmp_path / "pids-store")
    store.open(json.loads((store.path / "study.json").read_text())["fingerprint"])  # no worker holds the lock
    store.close()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
