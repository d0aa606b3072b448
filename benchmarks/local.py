"""Local constants of BERT-sized layers: otattn against power iteration in PyTorch and against scipy's svds.

Every method gets the same layer and the same tokens and returns the largest singular value of the Jacobian of the
multi-head softmax attention map (biases and output matrix included). The runs are interleaved in one process.

    python benchmarks/local.py [--repeats 5] [--sizes 64 256 1024] [--out benchmarks/results]

PyTorch is only needed here (benchmarks/requirements-local.txt). Its iteration is written from the definition, in
float32: ``u = J v`` is output 1 of ``torch.func.jvp``, ``J^T u`` comes from ``torch.func.vjp``. It is timed with
three stops: at the usual relative change of 1e-6 a step, at the first step whose true error is at most 2e-5 (known
from a converged float64 value, which a user would not have: the least that it can take), and, from the same
run, with the vjp's forward pass hoisted out of the loop.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.sparse.linalg import svds

from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.data import load_sample
from otattn.operators import FusedJacobian, top_singular

Array = NDArray[np.float64]
FAST_ERROR = 2e-5
CHANGE = 1e-6
MAX_STEPS = 1500
TARGETS = {"n=64": 6.0, "n=256": 8.0, "n=1024": 15.0}


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
        SoftmaxAttention.from_qkv(Q[r], K[r], V[r], query_bias=bq[r], key_bias=bk[r], value_bias=bv[r])
        for r in rows
    ]
    return Problem(f"n={n}", MultiHeadAttention(parts, [W[:, r] for r in rows]), X)


def sample() -> Problem:
    """The trained layer that comes with otattn (MiniLM, 12 heads, d = 384) on its first window of 128 tokens."""
    layer = load_sample()
    return Problem("sample layer, n=128", layer.attention, layer.tokens(0))


@dataclass
class Method:
    """A way to the constant; ``run`` returns the value and the number of products with ``J^T J``."""

    name: str
    run: Callable[[], tuple[float, int]]
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    value: float = float("nan")
    steps: int = 0
    peak: int = 0

    def once(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.value, self.steps = self.run()
        self.times.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


class Peak:
    """The largest resident memory of the process above that at entry, sampled every 5 ms."""

    def __enter__(self) -> Peak:
        self.base = self.top = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.top = max(self.top, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.top = max(self.top, _resident())

    @property
    def grown(self) -> int:
        return self.top - self.base


def _resident() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * 4096


def ours(problem: Problem, precision: Any) -> tuple[float, int]:
    """From the attention object to the constant: stacking, casting and softmax included."""
    result = top_singular(FusedJacobian(problem.attention, problem.tokens), precision=precision)
    return result.value, result.iterations


def arpack(problem: Problem) -> tuple[float, int]:
    """scipy's svds (ARPACK) on the plain float64 operator."""
    J = problem.attention.jacobian(problem.tokens)
    count = 0

    def matvec(x: Array) -> Array:
        nonlocal count
        count += 1
        return J.matvec(x)

    counted = scipy.sparse.linalg.LinearOperator(J.shape, matvec=matvec, rmatvec=J.rmatvec, dtype=J.dtype)
    start = np.random.default_rng(0).normal(size=min(J.shape))
    value = svds(counted, k=1, v0=start, return_singular_vectors=False)
    return float(value[0]), count


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

    def run(self, stop: str, *, hoisted: bool = False) -> tuple[float, int]:
        torch = self.torch
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(self.X.shape, generator=generator)
        v /= v.norm()
        pull = torch.func.vjp(self.attention, self.X)[1] if hoisted else None
        before = 0.0
        for step in range(1, MAX_STEPS + 1):
            # output 1 of jvp is the tangent (output 0 is the value)
            u = torch.func.jvp(self.attention, (self.X,), (v,))[1]
            sigma = float(u.norm())
            w = (torch.func.vjp(self.attention, self.X)[1] if pull is None else pull)(u)[0]
            v = w / w.norm()
            if stop == "change" and abs(sigma - before) <= CHANGE * sigma:
                break
            if stop == "oracle" and abs(sigma - self.truth) <= FAST_ERROR * self.truth:
                break
            before = sigma
        return sigma, step


def measure(problem: Problem, repeats: int, *, with_svds: bool) -> tuple[float, list[Method]]:
    """The converged value and the timed methods, interleaved."""
    truth = top_singular(FusedJacobian(problem.attention, problem.tokens), tol=1e-11).value
    power = TorchPower(problem, truth)
    methods = [
        Method("otattn fast", lambda: ours(problem, "fast")),
        Method("otattn precise", lambda: ours(problem, "precise")),
        Method("torch, stop at change 1e-6", lambda: power.run("change")),
        Method("torch, stop at true error 2e-5", lambda: power.run("oracle")),
        Method("torch, true error 2e-5, vjp hoisted", lambda: power.run("oracle", hoisted=True)),
    ]
    if with_svds:
        methods.append(Method("scipy svds, float64", lambda: arpack(problem)))
    for method in methods:
        with Peak() as peak:
            method.run()
        method.peak = peak.grown
    for _ in range(repeats):
        for method in methods:
            method.once()
    return truth, methods


def table(problem: Problem, truth: float, methods: list[Method]) -> list[str]:
    """One problem in Markdown. The ratio is the median over rounds of (this method / otattn fast)."""
    lines = [
        f"### {problem.name}, d = {problem.attention.in_dim}, {len(problem.attention.heads)} heads",
        "",
        f"Converged value (float64, 1e-11): {truth:.12g}",
        "",
        "| method | median | fastest | CPU | ratio to otattn fast | steps | relative error | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = methods[0].times
    for m in methods:
        ratio = statistics.median(t / b for t, b in zip(m.times, base, strict=True))
        lines.append(
            f"| {m.name} | {statistics.median(m.times):.3g} s | {min(m.times):.3g} s | "
            f"{statistics.median(m.cpu):.3g} s | {ratio:.2f} | {m.steps} | "
            f"{abs(m.value - truth) / truth:.1e} | {m.peak / 2**20:.0f} MB |"
        )
    return [*lines, ""]


def verdicts(results: list[tuple[Problem, float, list[Method]]]) -> list[str]:
    """Which of the targets are reached: the fastest torch variant that is as accurate counts."""
    lines = ["## Targets", ""]
    for problem, truth, methods in results:
        fast, precise = methods[0], methods[1]
        torch_runs = [m for m in methods if m.name.startswith("torch")]
        change = torch_runs[0]
        parts = []
        for m in torch_runs:
            ratio = statistics.median(t / b for t, b in zip(m.times, fast.times, strict=True))
            parts.append(f"{ratio:.1f}x against {m.name.removeprefix('torch, ')}")
        target = TARGETS.get(problem.name)
        wanted = "" if target is None else f" (target {target:g}x at equal or better accuracy)"
        errors = [abs(m.value - truth) / truth for m in (fast, precise, change)]
        lines.append(
            f"- {problem.name}: {', '.join(parts)}{wanted}; errors {errors[0]:.1e} fast, {errors[1]:.1e} precise, "
            f"{errors[2]:.1e} torch at change 1e-6."
        )
    return [*lines, ""]


def picture(results: list[tuple[Problem, float, list[Method]]], path: Path) -> None:
    """Median time against relative error."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3.8), squeeze=False)
    for ax, (problem, truth, methods) in zip(axes[0], results, strict=True):
        for m in methods:
            error = max(abs(m.value - truth) / truth, 1e-16)
            marker = "o" if m.name.startswith("otattn") else "s" if m.name.startswith("torch") else "^"
            ax.loglog(statistics.median(m.times), error, marker, label=m.name)
        ax.axhline(FAST_ERROR, color="0.7", lw=0.8)
        ax.set(title=problem.name, xlabel="median time (s)", ylabel="relative error")
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def processor() -> str:
    """The name of the processor and the number of its cores that we may use."""
    import os

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--threads", type=int, default=2, help="of torch (otattn takes the BLAS's)")
    parser.add_argument("--svds-up-to", type=int, default=256, help="largest n for scipy's svds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    problems = [*(synthetic(n) for n in args.sizes), sample()]
    results = []
    for problem in problems:
        # fewer rounds where one round takes minutes
        repeats = args.repeats if len(problem.tokens) < 1000 else max(1, args.repeats // 2)
        truth, methods = measure(problem, repeats, with_svds=len(problem.tokens) <= args.svds_up_to)
        results.append((problem, truth, methods))
        print("\n".join(table(problem, truth, methods)), flush=True)
    head = [
        "# The local constant of a layer",
        "",
        "Written by `python benchmarks/local.py`; its docstring says what is timed. Runs are interleaved in one "
        "process, ratios are medians over the rounds of (time of the method / time of otattn fast in that round). "
        "Memory is the growth of the resident set in one run. Steps are products with J^T J.",
        "",
        f"- processor: {processor()}; torch {args.threads} threads; {args.repeats} rounds (half as many for n >= 1000)",
        f"- Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}, "
        f"torch {torch.__version__}",
        "- seeds: layer and tokens 0, starting vectors 0",
        "",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    body = [line for result in results for line in table(*result)]
    (args.out / "local.md").write_text("\n".join([*head, *verdicts(results), "## Measurements", "", *body]))
    picture(results, args.out / "local.png")
    print("\n".join(verdicts(results)))


if __name__ == "__main__":
    main()
