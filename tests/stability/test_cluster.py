"""A study on a real dask cluster of two worker processes, one of which is killed on the way."""

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, threading, time
import joblib
import numpy as np
from dask.distributed import Client, LocalCluster
from otattn.attention import SoftmaxAttention
from otattn.stability import samplers, stability_study


def main():
    rng = np.random.default_rng(0)
    attention = SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(3, 3)))
    sampler = samplers.uniform_ball_pairs(150, 3, 1.0)
    alone = stability_study(attention, sampler, n_pairs=256, rng=1, progress=False)
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            pids = sorted(client.run(os.getpid).values())
            assert len(set(pids)) == 2 and os.getpid() not in pids
            started = threading.Event()

            class Watched:
                def open(self, fingerprint): self.terms = {}
                def get(self, index): return self.terms.get(index)
                def put(self, indices, terms):
                    self.terms.update(zip(indices, terms))
                    started.set()
                def close(self): pass

            def kill():
                started.wait(100)
                os.kill(pids[0], signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with joblib.parallel_config(backend="dask", wait_for_workers_timeout=60):
                study = stability_study(attention, sampler, n_pairs=256, rng=1, n_jobs=-1, store=Watched(), progress=False)
            killer.join()
            after = set(client.run(os.getpid).values())
            print("killed:", pids[0] not in after, "equal:", np.array_equal(study.ratios, alone.ratios))


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None,
    reason="dask.distributed is not installed: pip install otattn[cluster]",
)
def test_a_killed_worker_changes_nothing(tmp_path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    # the package may be installed or lie in the current folder
    paths = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert "killed: True equal: True" in run.stdout, run.stdout + run.stderr[-3000:]
