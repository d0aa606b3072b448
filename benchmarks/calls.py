"""The calls that users make, not the kernels inside them: time, processor time, memory, and the peer's time where there is one.

    python -m benchmarks.calls [--quick] [--gallery] [--accept] [--out benchmarks/results]

Calls of one group are interleaved in one process, so that ratios mean something on a busy machine: the ratio is the median over
the rounds of the processor time of the call over that of its base in the same round. The base is a peer's call on the same
problem (POT; power iteration in PyTorch where that is installed), or the part of the call that it should not cost much
more than. A ratio that is more than 1.3 times that of the stored file fails the command, and the file stays as it is unless
``--accept`` is given. ``--only`` measures some groups, and writes a file of these.
Peak memory is the growth of the resident set over one run in a process of its own (Linux).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.common import RESULTS, exponent, machine, table
from benchmarks.local import TorchPower, resident_peak, sample, synthetic
from otattn.operators import measure_jacobian, top_singular

WORSE = 1.3
ROOT = Path(__file__).parents[1]
Call = Callable[[], Any]
Group = Mapping[str, tuple[Call, str | None]]
"""Calls by name, each with the name of the call that it is compared with."""


def local_group(n: int | None) -> Group:
    """The whole local constant of a layer, its particle part, and power iteration by autograd to the same proven error."""
    problem = sample() if n is None else synthetic(n)
    layer, tokens, name = problem.attention, problem.tokens, "sample" if n is None else f"n = {n}"

    def particle() -> Any:
        return top_singular(measure_jacobian(layer, tokens), precision="precise", tol=1e-8)

    whole = f"local constant of a layer, {name}"
    calls: dict[str, tuple[Call, str | None]] = {
        f"particle part, {name}": (particle, None),
        whole: (lambda: oa.local_lipschitz(layer, tokens), f"particle part, {name}"),
    }
    if find_spec("torch") is not None:
        power = TorchPower(problem, 0.0)
        peer = f"torch power iteration, {name}"
        calls[peer] = (lambda: power.run(("residual 4e-5",)), None)
        calls[f"{whole}, error 2e-5"] = (lambda: oa.local_lipschitz(layer, tokens, tol=2e-5), peer)
    return calls


def network_group(n: int) -> Group:
    """Three random blocks: the local constant of their composition."""
    model = oa.models.random("bert", layers=3, dim=64, heads=4, rng=0)
    whole, tokens = model.map(), np.random.default_rng(0).normal(size=(n, 64))
    return {f"local constant of a network, n = {n}": (lambda: oa.local_lipschitz(whole, tokens), None)}


def distance_group() -> Group:
    """Transport beside POT and scipy's assignment."""
    import ot

    rng = np.random.default_rng(0)
    x, y, X, Y = rng.normal(size=(512, 3)), rng.normal(size=(512, 3)), *rng.normal(size=(2, 1024, 3))
    a, b = rng.dirichlet(np.ones(512), size=2)
    mu, nu = oa.DiscreteMeasure(x, a), oa.DiscreteMeasure(y, b)
    return {
        "ot.emd2, n = 512": (lambda: ot.emd2(a, b, ot.dist(x, y), numItermax=10**7), None),
        "wasserstein with weights, n = 512": (lambda: oa.wasserstein(mu, nu), "ot.emd2, n = 512"),
        "wasserstein, n = 1024": (lambda: oa.wasserstein(X, Y), None),
        "transport, n = 1024": (lambda: oa.transport(X, Y), "wasserstein, n = 1024"),
    }


def flow_group() -> Group:
    """Flows, and a batch of flows beside one of them."""
    rng = np.random.default_rng(2)
    roots = rng.uniform(-1.0, 1.0, (100, 2, 2))
    covs = roots @ np.swapaxes(roots, 1, 2) + 0.02 * np.eye(2)
    plane = oa.SoftmaxAttention(np.diag([-1.0, 0.0]), np.diag([0.0, 1.0]))
    span: dict[str, Any] = {"t_span": (0.0, 1e4), "rtol": 1e-8}
    head, X = oa.SoftmaxAttention(np.eye(3), np.eye(3)), rng.normal(size=(64, 3))
    one = oa.GaussianMeasure(np.zeros(2), covs[0])
    return {
        "one Gaussian flow": (lambda: oa.gaussian_flow(plane, one, **span), None),
        "100 Gaussian flows": (lambda: oa.gaussian_flow_batch(plane, covs, **span), "one Gaussian flow"),
        "flow of 64 tokens": (lambda: oa.flow(head, X, t_span=(0.0, 5.0), normalization="sphere"), None),
    }


def bound_group() -> Group:
    """Enclosures and studies."""
    rng = np.random.default_rng(1)
    head = oa.SoftmaxAttention(rng.normal(size=(3, 3)), np.eye(3))
    pairs = oa.samplers.uniform_ball_pairs(16, 3, 1.0)
    return {
        "enclosure, n = 8": (lambda: oa.enclose_lipschitz(head, radius=1.0, n=8, rng=0), None),
        "enclosure, any measure": (lambda: oa.enclose_lipschitz(head, radius=1.0, rng=0), None),
        "study of 1000 pairs": (
            lambda: oa.stability_study(head, pairs, n_pairs=1000, rng=0, progress=False),
            None,
        ),
    }


def command_group(names: tuple[str, ...]) -> Group:
    """Commands in processes of their own, the start of Python included."""
    folder = tempfile.mkdtemp()

    def run(*command: str) -> Call:
        return lambda: subprocess.run(
            [sys.executable, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        )  # fmt: skip

    return {
        f"otattn {name}": (run("-m", "otattn", name, "--quiet", "--out", f"{folder}/{name}"), None) for name in names
    }


def gallery_group() -> Group:
    """Every story of the gallery."""

    def run(story: Path) -> Call:
        return lambda: subprocess.run(
            [sys.executable, str(story)], check=True, cwd=tempfile.mkdtemp(), stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return {story.stem: (run(story), None) for story in sorted((ROOT / "examples").glob("plot_*.py"))}


def groups(quick: bool, gallery: bool) -> dict[str, Callable[[], Group]]:
    """What is run, by a key that a child process can name."""
    found: dict[str, Callable[[], Group]] = {"sample": lambda: local_group(None)}
    for n in (32, 128) if quick else (32, 128, 512, 2048):
        found[f"layer {n}"] = lambda n=n: local_group(n)  # type: ignore[misc]
    for n in (32,) if quick else (32, 64, 128):
        found[f"network {n}"] = lambda n=n: network_group(n)  # type: ignore[misc]
    found |= {"distances": distance_group, "flows": flow_group, "bounds": bound_group}
    commands = ("bounds",) if quick else ("local", "bounds", "stability", "flow", "gradient-flow", "depth", "report")
    found["commands"] = lambda: command_group(commands)
    if gallery:
        found["gallery"] = gallery_group
    return found


def processor_time() -> float:
    """Of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(group: Group, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """``(wall, processor)`` of each call in each round; a first round that loads and allocates is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in group}
    for k in range(rounds + 1):
        for name, (call, _) in group.items():
            wall, cpu = time.perf_counter(), processor_time()
            call()
            if k > 0:
                found[name].append((time.perf_counter() - wall, processor_time() - cpu))
    return found


def peak_of(options: argparse.Namespace, key: str, name: str) -> str:
    """MB by which the resident set grows over one call in a process of its own; "-" for commands."""
    if key in ("commands", "gallery") or not Path("/proc/self/clear_refs").exists():
        return "-"
    flags = ["--quick"] if options.quick else []
    command = [sys.executable, "-m", "benchmarks.calls", *flags, "--memory", key, name]
    return f"{int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout) / 2**20:.0f}"


def memory_child(options: argparse.Namespace) -> None:
    """Prints what :func:`peak_of` reads."""
    key, name = options.memory
    call = groups(options.quick, False)[key]()[name][0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident_peak()
    call()
    print(max(0, resident_peak() - before))


def stored_ratios(path: Path) -> dict[str, float]:
    """The ratios in a file that this command wrote, by call."""
    if not path.exists():
        return {}
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: float(row[4]) for row in rows if len(row) == 6 and row[4] not in ("-", "ratio")}


def growth(times: dict[str, float]) -> list[list[str]]:
    """Exponents of processor time in n, for calls at several n."""
    series: dict[str, list[tuple[int, float]]] = {}
    for name, cpu in times.items():
        what, sep, size = name.partition(", n = ")
        if sep and size.isdigit():
            series.setdefault(what, []).append((int(size), cpu))
    return [[what, f"{exponent(*zip(*found, strict=True)):.2f}"] for what, found in series.items() if len(found) > 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--gallery", action="store_true", help="also every story of the gallery")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="some groups, such as sample, distances, flows")
    parser.add_argument("--accept", action="store_true", help="write the file whatever has become slower")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        memory_child(options)
        return 0
    rows: list[list[str]] = []
    medians: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for key, build in groups(options.quick, options.gallery).items():
        if options.only and key not in options.only:
            continue
        group = build()
        times = measure(group, 1 if key in ("commands", "gallery") else 3 if options.quick else 5)
        for name, (_, base) in group.items():
            wall, cpu = (statistics.median(x) for x in zip(*times[name], strict=True))
            medians[name], ratio = cpu, "-"
            if base is not None:
                ratios[name] = statistics.median(a[1] / b[1] for a, b in zip(times[name], times[base], strict=True))
                ratio = f"{ratios[name]:.2f}"
            peak = peak_of(options, key, name)
            rows.append([name, f"{wall:.3g} s", f"{cpu:.3g} s", peak, ratio, base or "-"])
            print(" | ".join(rows[-1]), flush=True)
    path = options.out / "calls.md"
    stored = stored_ratios(path)
    slower = [f"{k}: {r:.2f}, was {stored[k]:.2f}" for k, r in ratios.items() if r > WORSE * stored.get(k, np.inf)]
    for line in slower:
        print(f"slower: {line}", file=sys.stderr)
    if not slower or options.accept:
        lines = [
            "# The calls that users make",
            "",
            "Written by `python -m benchmarks.calls`, whose docstring says what is timed.",
            "",
        ]
        lines += machine(seeds="in the module")
        lines += table(["call", "wall", "CPU", "peak MB", "ratio", "to"], rows)
        lines += ["## Growth of processor time in n", "", *table(["call", "exponent"], growth(medians))]
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    return 1 if slower and not options.accept else 0


if __name__ == "__main__":
    sys.exit(main())
