"""What a training step costs more when the local constant of its attention is part of the loss.

Run: ``python -m benchmarks.torch_penalty [--quick]``; writes ``benchmarks/results/torch_penalty.md``. Needs torch. A step is the
forward pass of a layer and a linear classifier on the mean of its values, the loss, its gradient, and a step of Adam, at n = 128
tokens of dimension d = 64. With the penalty the constant of every sequence of the batch is added to the loss: a warm start, one
power step, the forward pass shared. Plain steps use the fused attention kernel of torch; the penalty cannot, since that has no
second derivative. Processor time of one thread, the steps in turn, round after round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import otattn.torch as ot
from benchmarks.common import arguments, machine, ratio, table

N, D, HIDDEN = 128, 64, 256
CASES = [(kind, heads, batch) for kind in ("encoder layer", "attention") for heads in (1, 4) for batch in (1, 16)]


def steps(kind: str, heads: int, batch: int) -> dict[str, Callable[[], Any]]:
    """A plain training step and one with the penalty, each of its own copy of the layer."""
    import torch

    def step(penalty: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        layer: Any
        if kind == "attention":
            layer = torch.nn.MultiheadAttention(D, heads, batch_first=True)
        else:
            layer = torch.nn.TransformerEncoderLayer(D, heads, HIDDEN, dropout=0.0, batch_first=True)
        classifier = torch.nn.Linear(D, 2)
        optimiser = torch.optim.Adam([*layer.parameters(), *classifier.parameters()], lr=1e-4)
        X, y = torch.randn(batch, N, D), torch.zeros(batch, dtype=torch.long)
        last: list[Any] = [None]

        def run() -> None:
            optimiser.zero_grad()
            if penalty:
                last[0] = ot.local_lipschitz(layer, X, start=last[0], steps=1)
                Y, extra = last[0].output, 0.01 * last[0].value.mean()
            else:
                Y, extra = layer(X, X, X, need_weights=False)[0] if kind == "attention" else layer(X), 0.0
            (torch.nn.functional.cross_entropy(classifier(Y.mean(dim=1)), y) + extra).backward()
            optimiser.step()

        return run

    return {"plain": step(False), "penalty": step(True)}


def timed(methods: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds, the methods in turn; the first three rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for k in range(rounds + 3):
        for name, run in methods.items():
            start = time.process_time()
            run()
            if k >= 3:
                times[name].append(time.process_time() - start)
    return times


def main() -> None:
    options = arguments(__doc__)
    import torch

    torch.set_num_threads(1)
    rows, worst = [], 0.0
    for kind, heads, batch in CASES:
        times = timed(steps(kind, heads, batch), 5 if options.quick else 40)
        factor = ratio(times, "penalty", "plain")
        worst = max(worst, factor)
        plain, penalty = (1e3 * statistics.median(times[name]) for name in ("plain", "penalty"))
        rows.append([kind, heads, batch, f"{plain:.1f} ms", f"{penalty:.1f} ms", f"{factor:.2f}"])
        print(*rows[-1])
    lines = ["# A local constant as a penalty", "", *machine("torch", seeds="0")]
    lines += table(["layer", "heads", "batch", "plain step", "with penalty", "ratio"], rows)
    lines += [f"n = {N}, d = {D}. The largest ratio is {worst:.2f}.", ""]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "torch_penalty.md").write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
