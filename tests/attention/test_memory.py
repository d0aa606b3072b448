"""No n x n array above the memory budget: 50,000 tokens in a process of their own, whose peak is measured."""

import json
import subprocess
import sys

import numpy as np
import pytest

from otattn.attention import SoftmaxAttention, kernels, memory

SCRIPT = """
import json, resource, sys
import numpy as np
from otattn.attention import SoftmaxAttention, kernels

rng = np.random.default_rng(0)
n, d = 50_000, 64
X = rng.standard_normal((n, d))
A, V = rng.standard_normal((d, d)) / d, rng.standard_normal((d, d))
attention = SoftmaxAttention(A, V)
part, blocks = sys.argv[1], int(sys.argv[2])

class Stop(Exception):
    pass

# every block allocates what the one before it did, so a few of them show the peak
original, left = kernels.NormalisedKernel.weights_of, blocks

def counted(self, *args):
    global left
    left -= 1
    if left < 0:
        raise Stop
    return original(self, *args)

kernels.NormalisedKernel.weights_of = counted
P = np.exp(X @ (A @ X[7]) - (X @ (A @ X[7])).max())
P /= P.sum()
row = 0.0
try:
    if part == "forward":
        row = float(np.abs(attention(X[:20], X)[7] - V @ (P @ X)).max())
        attention.on_tokens(X)
    elif part == "field":
        field = attention.field_jacobian(X[:20], X)
        Y = X - P @ X
        row = float(np.abs(field[7] - V @ ((P[:, None] * Y).T @ Y) @ A).max())
    elif part == "jvp":
        attention.jacobian(X).jvp(X)
    else:
        attention.jacobian(X).vjp(X)
except Stop:
    pass
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "row": row}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["forward", "jvp", "vjp", "field"])
def test_fifty_thousand_tokens_stay_below_the_budget(part: str) -> None:
    command = [sys.executable, "-c", SCRIPT, part, "1000" if part == "field" else "3"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    unit = 1 if sys.platform == "darwin" else 1024
    assert result["peak"] * unit < 1.5e9, result
    assert result["row"] < 1e-12, result


def test_blocks_fit_the_budget_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 100, 5000, 50_000, 10_000_000):
        rows = memory.block_rows(n, n)
        assert 1 <= rows <= n
        assert rows == 1 or 4 * 8 * rows * n <= memory.MEMORY_BUDGET
        cut = list(kernels.blocks(n, n, None)) if n <= 50_000 else []
        assert sum(s.stop - s.start for s in cut) in (0, n)
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 2**20)
    assert memory.block_rows(1000, 1000) == 32


def test_nothing_of_size_n_squared_is_kept_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    X = rng.standard_normal((100, 3))
    attention = SoftmaxAttention(np.eye(3), np.eye(3))
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 8 * 100 * 100)
    largest = 0
    original = kernels.NormalisedKernel.weights_of

    def watched(self: kernels.NormalisedKernel, Q: np.ndarray, times: np.ndarray | None, rows: slice) -> np.ndarray:
        nonlocal largest
        P = original(self, Q, times, rows)
        largest = max(largest, P.nbytes)
        return P

    monkeypatch.setattr(kernels.NormalisedKernel, "weights_of", watched)
    J = attention.jacobian(X)
    J.vjp(J.jvp(X))
    attention.field_jacobian(X, X)
    assert largest <= memory.MEMORY_BUDGET // 4
