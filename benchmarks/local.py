"""Local constants of BERT-sized layers: otattn against power iteration in PyTorch and against scipy's svds.

Every method gets the same layer and the same tokens and returns the largest singular value of the Jacobian of
the multi-head softmax attention map (biases and output matrix included). The runs are interleaved in one process.
"otattn whole call" is ``local_lipschitz(layer, tokens, tol=2e-5)``, which also makes sure that the splitting part is
not the larger one; ratios are to it. "otattn fast" and "otattn precise" are its particle part alone.

    python benchmarks/local.py [--repeats 5] [--sizes 64 256 1024] [--out benchmarks/results]

PyTorch is needed here only (benchmarks/requirements-local.txt). Its iteration is written from the definition, in
float32: ``u = J v`` is output 1 of ``torch.func.jvp`` (the tangent), ``J^T u`` comes from ``torch.func.vjp``. The
clock is read at three stops of one run:

- "known error 2e-5": the first step whose true error is at most 2e-5. It needs the converged value, which a user
  has not: the least that this iteration can take for the accuracy that otattn fast promises;
- "change 1e-6": the value changes by less than 1e-6 in a step, the usual rule, which proves nothing;
- "residual 4e-5": ``|J^T J v - s^2 v| <= 4e-5 s^2``, which proves an error of 2e-5, as otattn fast does.

A second run, where affordable, hoists the forward pass of the vjp out of the loop. "otattn device=..." is the whole call with its
iterations in torch, on a GPU where there is one and else on the CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds

from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.data import load_sample
from otattn.lipschitz import local_lipschitz
from otattn.operators import FusedJacobian, top_singular

Array = NDArray[np.float64]
FAST_ERROR = 2e-5
CHANGE = 1e-6
RESIDUAL = 2 * FAST_ERROR
MAX_STEPS = 1000
TARGETS = {"n = 64": 6.0, "n = 256": 8.0, "n = 1024": 15.0}


@dataclass(frozen=True, eq=False)
class Problem:
    """A layer and its tokens."""

    name: str
    attention: MultiHeadAttention
    tokens: Array


def synthetic(n: int, *, d: int = 768, heads: int = 12, seed: int = 0) -> Problem:
    """Gaussian weights of deviation 0.05, tokens normalised to deviation 0.7 with correlation 0.5."""
    rng = np.random.default_rng(seed)
    k = d // heads
    Q, K, V, W = (0.05 * rng.normal(size=(d, d)) for _ in range(4))
    bq, bk, bv = (0.1 * rng.normal(size=d) for _ in range(3))
    X = np.sqrt(0.5) * rng.normal(size=d) + np.sqrt(0.5) * rng.normal(size=(n, d))
    X = 0.7 * (X - X.mean(axis=1, keepdims=True)) / X.std(axis=1, keepdims=True)
    rows = [slice(h * k, (h + 1) * k) for h in range(heads)]
    parts = [
        SoftmaxAttention.from_qkv(Q[r], K[r], V[r], query_bias=bq[r], key_bias=bk[r], value_bias=bv[r]) for r in rows
    ]
    return Problem(f"n = {n}", MultiHeadAttention(parts, [W[:, r] for r in rows]), X)


def sample() -> Problem:
    """The trained layer that comes with otattn (MiniLM, 12 heads, d = 384) on its first window of 128 tokens."""
    layer = load_sample()
    return Problem("sample layer, n = 128", layer.attention, layer.tokens(0))


@dataclass(frozen=True)
class Reading:
    """One way to the constant, once: what it gave, after how many products with ``J^T J``, in what time."""

    value: float
    steps: int
    wall: float
    cpu: float


class Clock:
    """Wall and processor time since its making."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self, value: float, steps: int) -> Reading:
        return Reading(value, steps, time.perf_counter() - self.wall, time.process_time() - self.cpu)


def peak_of(name: str, method: str) -> int:
    """Bytes by which the resident set grows over one run in a process of its own (torch: three steps)."""
    command = [sys.executable, __file__, "--memory", name, method]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def memory_child(name: str, method: str) -> None:
    """Prints what :func:`peak_of` reads."""
    problem = sample() if name.startswith("sample") else synthetic(int(name.removeprefix("n = ")))
    if method.startswith("torch"):
        power = TorchPower(problem, 0.0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident_peak()
    if method.startswith("torch"):
        power.run(("change 1e-6",), hoisted="hoisted" in method, max_steps=3)
    elif method.startswith("scipy"):
        arpack(problem)
    elif method.endswith("whole call"):
        whole(problem)
    elif "device" in method:
        whole(problem, gpu_or_cpu())
    else:
        ours(problem, method.removeprefix("otattn "))
    print(resident_peak() - before)


def resident_peak() -> int:
    """Peak resident set of this process in bytes (Linux)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def whole(problem: Problem, device: str | None = None) -> Reading:
    """The call that users make, at the accuracy of "fast"."""
    clock = Clock()
    local = local_lipschitz(problem.attention, problem.tokens, tol=FAST_ERROR, device=device)
    return clock.read(local.value, local.iterations)


def gpu_or_cpu() -> str:
    """What the device path runs on here."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def ours(problem: Problem, precision: Any) -> Reading:
    """From the attention object to the constant: stacking, casting and softmax included."""
    clock = Clock()
    result = top_singular(FusedJacobian(problem.attention, problem.tokens), precision=precision)
    return clock.read(result.value, result.iterations)


def arpack(problem: Problem) -> Reading:
    """scipy's svds (ARPACK) on the plain float64 operator."""
    clock = Clock()
    J = problem.attention.jacobian(problem.tokens)
    count = 0

    def matvec(x: Array) -> Array:
        nonlocal count
        count += 1
        return J.matvec(x)

    counted = LinearOperator(J.shape, matvec=matvec, rmatvec=J.rmatvec, dtype=J.dtype)
    start = np.random.default_rng(0).normal(size=min(J.shape))
    value = svds(counted, k=1, v0=start, return_singular_vectors=False)
    return clock.read(float(value[0]), count)


class TorchPower:
    """Power iteration on ``J^T J`` in float32; the weights are converted before the clock starts."""

    def __init__(self, problem: Problem, truth: float) -> None:
        import torch

        self.torch, self.truth = torch, truth
        heads, outputs = problem.attention.heads, problem.attention.outputs
        assert outputs is not None

        def tensor(array: Array) -> Any:
            return torch.tensor(np.ascontiguousarray(array), dtype=torch.float32)

        q, k, b = zip(*(h.factors for h in heads), strict=True)  # type: ignore[attr-defined]
        self.Q, self.K = tensor(np.concatenate(q)), tensor(np.concatenate(k))
        self.V = tensor(np.concatenate([h.V for h in heads]))  # type: ignore[attr-defined]
        self.W = tensor(np.concatenate(outputs, axis=1))
        self.bq = tensor(np.concatenate(b))
        self.bv = tensor(np.concatenate([h.value_bias for h in heads]))  # type: ignore[attr-defined]
        self.X, self.heads = tensor(problem.tokens), len(heads)

    def attention(self, X: Any) -> Any:
        """Multi-head softmax attention as it is taught."""
        n = X.shape[0]

        def split(Z: Any) -> Any:
            return Z.reshape(n, self.heads, -1).transpose(0, 1)

        Q, K, V = split(X @ self.Q.T + self.bq), split(X @ self.K.T), split(X @ self.V.T + self.bv)
        P = self.torch.softmax(Q @ K.transpose(1, 2), dim=-1)
        return (P @ V).transpose(0, 1).reshape(n, -1) @ self.W.T

    def run(self, stops: tuple[str, ...], *, hoisted: bool = False, max_steps: int = MAX_STEPS) -> dict[str, Reading]:
        """The clock at each stop (at the last step for a stop that is never reached)."""
        torch, clock = self.torch, Clock()
        v = torch.randn(self.X.shape, generator=torch.Generator().manual_seed(0))
        v /= v.norm()
        pull = torch.func.vjp(self.attention, self.X)[1] if hoisted else None
        before, found = 0.0, {}
        for step in range(1, max_steps + 1):
            # output 1 of jvp is the tangent (output 0 is the value)
            u = torch.func.jvp(self.attention, (self.X,), (v,))[1]
            sigma = float(u.norm())
            w = (torch.func.vjp(self.attention, self.X)[1] if pull is None else pull)(u)[0]
            reached = {
                "known error 2e-5": abs(sigma - self.truth) <= FAST_ERROR * self.truth,
                "change 1e-6": abs(sigma - before) <= CHANGE * sigma,
                "residual 4e-5": float((w - sigma**2 * v).norm()) <= RESIDUAL * sigma**2,
            }
            for stop in stops:
                if stop not in found and (reached[stop] or step == max_steps):
                    found[stop] = clock.read(sigma, step)
            if len(found) == len(stops):
                break
            v, before = w / w.norm(), sigma
        return found


@dataclass
class Method:
    """The readings of one way over the rounds."""

    name: str
    peak: int = 0
    readings: list[Reading] = field(default_factory=list)

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    def median(self, what: str = "wall") -> float:
        return statistics.median(getattr(r, what) for r in self.readings)

    def ratio(self, base: Method, what: str = "wall") -> float:
        """Median over the rounds of this time over that of ``base`` in the same round."""
        pairs = zip(self.readings, base.readings, strict=True)
        return statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)


def measure(problem: Problem, repeats: int, *, everything: bool) -> tuple[float, list[Method]]:
    """The converged value and the methods, interleaved."""
    truth = top_singular(FusedJacobian(problem.attention, problem.tokens), tol=1e-11).value
    power = TorchPower(problem, truth)
    oracle, stops = "known error 2e-5", ("known error 2e-5", "change 1e-6", "residual 4e-5")
    runs: list[Callable[[], dict[str, Reading]]] = [
        lambda: {"otattn whole call": whole(problem)},
        lambda: {"otattn fast": ours(problem, "fast")},
        lambda: {"otattn precise": ours(problem, "precise")},
        lambda: {f"otattn device={gpu_or_cpu()}": whole(problem, gpu_or_cpu())},
        lambda: {f"torch, {k}": r for k, r in power.run(stops).items()},
    ]
    if everything:
        runs.append(lambda: {f"torch, vjp hoisted, {oracle}": power.run((oracle,), hoisted=True)[oracle]})
        runs.append(lambda: {"scipy svds, float64": arpack(problem)})
    methods: dict[str, Method] = {}
    whole(problem)
    whole(problem, gpu_or_cpu())
    power.run(stops, max_steps=2)  # the first calls load and allocate
    for _ in range(repeats):
        for run in runs:
            for name, reading in run().items():
                methods.setdefault(name, Method(name)).readings.append(reading)
    for method in methods.values():
        method.peak = peak_of(problem.name, method.name)
    return truth, list(methods.values())


def table(problem: Problem, truth: float, methods: list[Method]) -> list[str]:
    """One problem in Markdown."""
    lines = [
        f"### {problem.name}, d = {problem.attention.in_dim}, {len(problem.attention.heads)} heads",
        "",
        f"Converged value (float64, 1e-11): {truth:.12g}; {len(methods[0].readings)} rounds.",
        "",
        "| method | median | CPU | ratio to the whole call (wall, CPU) | steps | relative error | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    base = methods[0]
    for m in methods:
        steps = f"{m.last.steps}" if m.last.steps < MAX_STEPS else f"{MAX_STEPS} (not reached)"
        lines.append(
            f"| {m.name} | {m.median():.3g} s | {m.median('cpu'):.3g} s | {m.ratio(base):.2f}, "
            f"{m.ratio(base, 'cpu'):.2f} | {steps} | {abs(m.last.value - truth) / truth:.1e} | "
            f"{m.peak / 2**20:.0f} MB |"
        )
    return [*lines, ""]


def verdicts(results: list[tuple[Problem, float, list[Method]]]) -> list[str]:
    """The ratios beside the targets."""
    lines = [
        "## Targets",
        "",
        "| problem | target | same proof (residual 4e-5) | usual rule (change 1e-6) | least (known error 2e-5) | "
        "error whole call | error precise |",
        "|---|---|---|---|---|---|---|",
    ]
    for problem, truth, methods in results:
        named = {m.name: m for m in methods}
        call, precise = named["otattn whole call"], named["otattn precise"]
        cells = []
        for stop in ("residual 4e-5", "change 1e-6", "known error 2e-5"):
            method = named[f"torch, {stop}"]
            error = abs(method.last.value - truth) / truth
            cells.append(f"{method.ratio(call):.1f}x (error {error:.0e})")
        target = TARGETS.get(problem.name)
        errors = [f"{abs(m.last.value - truth) / truth:.1e}" for m in (call, precise)]
        goal = "-" if target is None else f"{target:g}x"
        lines.append("| " + " | ".join([problem.name, goal, *cells, *errors]) + " |")
    return [*lines, ""]


def picture(results: list[tuple[Problem, float, list[Method]]], path: Path) -> None:
    """Relative error against median time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.0 * len(results), 3.8), squeeze=False, sharey=True)
    for ax, (problem, truth, methods) in zip(axes[0], results, strict=True):
        for i, m in enumerate(methods):
            error = max(abs(m.last.value - truth) / truth, 1e-16)
            marker = {"o": "o", "t": "s"}.get(m.name[0], "^")
            ax.loglog(m.median(), error, marker, color=f"C{i}", label=m.name)
        ax.axhline(FAST_ERROR, color="0.7", lw=0.8)
        ax.set(title=problem.name, xlabel="median time (s)")
    axes[0][0].set_ylabel("relative error")
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def processor() -> str:
    """The name of the processor and the number of its cores."""
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [x.split(":", 1)[1] for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = models[0].strip() if models else name
    return f"{name}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (half as many from n = 1000 on)")
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--threads", type=int, default=2, help="of torch (otattn takes those of the BLAS)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        memory_child(*args.memory)
        return

    import torch

    torch.set_num_threads(args.threads)
    results = []
    for problem in [*(synthetic(n) for n in args.sizes), sample()]:
        large = len(problem.tokens) >= 1000
        repeats = max(1, args.repeats // 2) if large else args.repeats
        results.append((problem, *measure(problem, repeats, everything=not large)))
        print("\n".join(table(*results[-1])), flush=True)
        write(results, args.out, args.threads)
    print("\n".join(verdicts(results)))


def write(results: list[tuple[Problem, float, list[Method]]], out: Path, threads: int) -> None:
    """What has been measured so far, as Markdown and a picture (an interrupted run keeps its finished problems)."""
    import torch

    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    head = [
        "# The local constant of a layer",
        "",
        "Written by `python benchmarks/local.py`, whose docstring says what is timed. The runs are interleaved in one",
        "process; a ratio is the median over the rounds of (time of the method / time of the whole call in that round).",
        "Memory is the growth of the resident set over one run in a process of its own. Steps are products with J^T J.",
        "",
        f"- {processor()}; torch {threads} threads; load of the machine at the end: {load}",
        f"- Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}, "
        f"torch {torch.__version__}",
        f"- device: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'the CPU (torch sees no GPU)'}",
        "- seeds: layer and tokens 0, starting vectors 0",
        "",
    ]
    out.mkdir(parents=True, exist_ok=True)
    body = [line for result in results for line in table(*result)]
    (out / "local.md").write_text("\n".join([*head, *verdicts(results), "## Measurements", "", *body]))
    picture(results, out / "local.png")


if __name__ == "__main__":
    main()
