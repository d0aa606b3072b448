"""Kill a running study at random moments, resume it, compare with an unbroken run.

Run: ``python -m benchmarks.kills [--kills 100]``; writes ``benchmarks/results/kills.md``. Each run works on a study of 400
pairs with a store in a temporary folder and is killed (SIGKILL) soon after it has written something new; a study that
comes to its end is compared, bit by bit, and the next one begins.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from tqdm import tqdm

RESULTS = pathlib.Path(__file__).parent / "results"
SCRIPT = """
import sys
import numpy as np
from otattn.attention import SoftmaxAttention
from otattn.stability import samplers, stability_study

rng = np.random.default_rng(0)
attention = SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(3, 3)))
study = stability_study(attention, samplers.uniform_ball_pairs(24, 3, 1.0), n_pairs=400, rng=5, store=sys.argv[1], progress=False)
print(study.numerators.tobytes().hex() + study.denominators.tobytes().hex())
"""


def start(folder: pathlib.Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    kills = studies = equal = torn = 0
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, tqdm(total=options.kills, desc="kills") as bar:
        root = pathlib.Path(name)
        whole, _ = start(root / "whole").communicate()
        while kills < options.kills or studies == 0:
            folder = root / f"study {studies}"
            chunks = folder / "chunks.jsonl"
            run = start(folder)
            before = chunks.stat().st_size if chunks.exists() else 0
            while run.poll() is None and not (chunks.exists() and chunks.stat().st_size > before):
                time.sleep(0.001)
            time.sleep(float(rng.exponential(0.01)))
            if kills < options.kills and run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                kills += 1
                bar.update()
            out, err = run.communicate()
            torn += "StoreWarning" in err
            if run.returncode == -signal.SIGKILL:
                continue
            if run.returncode != 0:
                raise RuntimeError(err)
            studies += 1
            equal += out == whole
    lines = [
        "# Kills",
        "",
        f"{kills} kills (SIGKILL) of studies of 400 pairs, {studies} studies finished, {equal} of them bit-identical to an "
        f"unbroken run; {torn} torn last records were named and computed again; {time.perf_counter() - begun:.0f} s; seed 1.",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kills.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(lines[-1])


if __name__ == "__main__":
    main()
