"""The device path of ``local_lipschitz`` against power iteration by ``torch.func`` on the same device, as it is and compiled.

    python -m benchmarks.torch_compiled [--rounds 3] [--threads 1] [--out benchmarks/results]

The problem is the bundled layer (12 heads, d = 384, n = 128); the device is a GPU where torch sees one, else the CPU. The
power iteration is that of ``benchmarks.local`` (``torch.func.jvp`` and ``vjp`` of the layer, float32), to a residual of
4e-5, which proves an error of 2e-5 as the calls of otattn do. "compiled" is one step of it under ``torch.compile``, which
needs a C++ compiler on a CPU; the time of compiling is stated apart and is not in the ratio. Methods are interleaved; a
ratio is the median over the rounds of the time over that of the device path in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import otattn as oa
from benchmarks.common import RESULTS, machine, table, write
from benchmarks.local import FAST_ERROR, MAX_STEPS, RESIDUAL, TorchPower, gpu_or_cpu, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    device, problem = gpu_or_cpu(), sample()
    power = TorchPower(problem, 0.0)
    for name in ("Q", "K", "V", "W", "bq", "bv", "X"):
        setattr(power, name, getattr(power, name).to(device))

    def step(v: Any) -> tuple[Any, Any]:
        u = torch.func.jvp(power.attention, (power.X,), (v,))[1]
        return u.norm(), torch.func.vjp(power.attention, power.X)[1](u)[0]

    def iterate(one: Callable[[Any], tuple[Any, Any]]) -> tuple[float, int]:
        v = torch.randn(power.X.shape, generator=torch.Generator().manual_seed(0)).to(device)
        v /= v.norm()
        count, sigma = 0, 0.0
        while count < MAX_STEPS:
            count += 1
            size, w = one(v)
            sigma = float(size)
            if float((w - sigma**2 * v).norm()) <= RESIDUAL * sigma**2:
                break
            v = w / w.norm()
        return sigma, count

    def ours(where: str | None) -> tuple[float, int]:
        found = oa.local_lipschitz(problem.attention, problem.tokens, tol=FAST_ERROR, device=where)
        return found.particle, found.iterations

    compiled = torch.compile(step)
    begun = time.perf_counter()
    compiled(power.X)
    setup = time.perf_counter() - begun
    methods: dict[str, Callable[[], tuple[float, int]]] = {
        f"otattn, device={device}": lambda: ours(device),
        "otattn, numpy": lambda: ours(None),
        "torch.func": lambda: iterate(step),
        "torch.func, compiled": lambda: iterate(compiled),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    last = {}
    for _ in range(args.rounds + 1):
        for name, call in methods.items():
            wall, cpu = time.perf_counter(), time.process_time()
            last[name] = call()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    cells, base = [], next(iter(methods))
    for name, times in found.items():
        rounds = list(zip(times[1:], found[base][1:], strict=True))  # the first one loads and allocates
        wall, cpu = (statistics.median(t[i] for t, _ in rounds) for i in range(2))
        ratios = [statistics.median(t[i] / b[i] for t, b in rounds) for i in range(2)]
        value, steps = last[name]
        cells.append(
            [name, f"{wall:.3g} s", f"{cpu:.3g} s", f"{ratios[0]:.2f}", f"{ratios[1]:.2f}", f"{steps}", f"{value:.7g}"]
        )
    lines = [
        "# The device path and compiled power iteration",
        "",
        "Written by `python -m benchmarks.torch_compiled`, whose docstring says what is timed.",
        "",
        *machine(seeds="0"),
        f"Torch {torch.__version__}, {args.threads} threads, device {device}; compiling took {setup:.3g} s (not in the table).",
        "",
        *table(["method", "wall", "CPU", "wall, ratio", "CPU, ratio", "products", "value"], cells),
    ]
    write("torch_compiled", lines, args.out, None)


if __name__ == "__main__":
    main()
