"""No n x n array above the memory budget: 50,000 tokens in a process of their own, whose peak is measured."""

import json
import subprocess
import sys

import numpy as np
import pytest

from otattn.attention import SoftmaxAttention, base, kernels

SCRIPT = """
import json, resource, sys, time
import numpy as np
from otattn.attention import MaskedAttention, SigmoidAttention, SoftmaxAttention

rng = np.random.default_rng(0)
n, m, d = 50_000, 16_000, 64
X = rng.standard_normal((n, d))
A, V = rng.standard_normal((d, d)) / d, rng.standard_normal((d, d))
attention = SoftmaxAttention(A, V)
seconds = {}

def timed(name, call):
    start = time.perf_counter()
    out = call()
    seconds[name] = round(time.perf_counter() - start, 1)
    return out

if sys.argv[1] == "softmax":
    out = timed("forward", lambda: attention.on_tokens(X))
    J = attention.jacobian(X[:m])  # its 2 GB of weights are beyond the budget too: recomputed block by block
    v = rng.standard_normal((m, d))
    Jv = timed("jvp", lambda: J.jvp(v))
    Jg = timed("vjp", lambda: J.vjp(Jv))
    # two independent routes to |J v|^2
    check = [float(np.sum(Jv * Jv)), float(np.sum(v * Jg))]
    # a row of the result by hand
    P = np.exp(X @ (A @ X[7]) - (X @ (A @ X[7])).max())
    row = float(np.abs(out[7] - V @ (P @ X) / P.sum()).max())
else:
    D = timed("field", lambda: attention.field_jacobian(X[:200], X))
    P = np.exp(X @ (A @ X[7]) - (X @ (A @ X[7])).max())
    P /= P.sum()
    Y = X - P @ X
    row = float(np.abs(D[7] - V @ ((P[:, None] * Y).T @ Y) @ A).max())
    check = [1.0, 1.0]
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "seconds": seconds, "check": check, "row": row}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["softmax", "field"])
def test_fifty_thousand_tokens_stay_below_the_budget(part: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, part], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    unit = 1 if sys.platform == "darwin" else 1024
    assert result["peak"] * unit < 1.5e9, result
    assert result["row"] < 1e-12, result
    assert result["check"][0] == pytest.approx(result["check"][1], rel=1e-11)


def test_blocks_fit_the_budget_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 100, 5000, 50_000, 10_000_000):
        rows = base.block_rows(n, n)
        assert 1 <= rows <= n
        assert rows == 1 or 4 * 8 * rows * n <= base.MEMORY_BUDGET
        cut = list(kernels.blocks(n, n, None)) if n <= 50_000 else []
        assert sum(s.stop - s.start for s in cut) in (0, n)
    monkeypatch.setattr(base, "MEMORY_BUDGET", 2**20)
    assert base.block_rows(1000, 1000) == 32


def test_nothing_of_size_n_squared_is_kept_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    X = rng.standard_normal((100, 3))
    attention = SoftmaxAttention(np.eye(3), np.eye(3))
    monkeypatch.setattr(base, "MEMORY_BUDGET", 8 * 100 * 100)
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
    assert largest <= base.MEMORY_BUDGET // 4
