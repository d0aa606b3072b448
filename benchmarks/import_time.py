"""What ``import otattn`` costs beside ``import numpy``: seconds of CPU in fresh interpreters, in turn.

Run: ``python -m benchmarks.import_time [--rounds 15] [--out DIR]``; writes ``import_time.md``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

CODES = {
    "import numpy": "import numpy",
    "import otattn": "import otattn",
    "import otattn; otattn.SoftmaxAttention": "import otattn; otattn.SoftmaxAttention",
    "import otattn; otattn.enclose_lipschitz": "import otattn; otattn.enclose_lipschitz",
}


def seconds(code: str) -> float:
    """CPU time of one fresh interpreter that runs ``code``, its own start left out."""
    timed = f"import time; t = time.process_time(); {code}; print(time.process_time() - t)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    times: dict[str, list[float]] = {name: [] for name in CODES}
    for _ in range(args.rounds + 1):  # the first round fills the caches
        for name, code in CODES.items():
            times[name].append(seconds(code))
    numpy = statistics.median(times["import numpy"][1:])
    lines = [
        "# What the import costs",
        "",
        f"Median of {args.rounds} fresh interpreters, seconds of CPU; numpy is in each of them but the second.",
        "",
        "| what | seconds | numpy's import |",
        "|---|---|---|",
    ]
    for name, found in times.items():
        middle = statistics.median(found[1:])
        lines.append(f"| `{name}` | {middle:.3f} | {middle / numpy:.2f} |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "import_time.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
