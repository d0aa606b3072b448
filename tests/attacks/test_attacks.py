"""Every public function that proves or certifies a number, attacked with fixed seeds."""

import zlib

import numpy as np
import pytest
from registry import (
    ATTACKERS,
    LONGER,
    METHODS,
    NO_PROMISE,
    OTHERS,
    OTHERS_LONGER,
    RUNS,
    VARIANTS,
    promised,
    promises,
    public_functions,
    public_methods,
)

import otattn as oa

ALL = ATTACKERS | VARIANTS
SECONDS = {"relaxations.two_tokens", "enclosure_table"}
"""One attack takes seconds."""


def attacked(name: str, seed: int, runs: int) -> None:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    outcomes = [ALL[name](rng) for _ in range(runs)]
    violations = [o.report for o in outcomes if o.state == "violated"]
    assert not violations, "\n".join(violations)
    assert runs < 4 or any(o.state == "held" for o in outcomes), f"{name} refused every problem"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SECONDS else name for name in sorted(ALL)]
)
def test_nothing_proven_is_exceeded(name: str) -> None:
    attacked(name, 0, RUNS.get(name, OTHERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL))
def test_nothing_proven_is_exceeded_by_many_more(name: str) -> None:
    attacked(name, 1, LONGER * RUNS[name] if name in RUNS else OTHERS_LONGER)


def test_what_is_promised_is_attacked() -> None:
    assert promised() == {name for name in ATTACKERS if name not in METHODS}
    assert public_methods() <= set(METHODS)
    assert set(METHODS.values()) <= set(ATTACKERS)
    functions = public_functions()
    assert all(promises(name, functions[name]) for name in NO_PROMISE)
    assert set(RUNS) <= set(ALL)


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, None))])
@pytest.mark.parametrize("sign", [0.0, 1.0, -1.0])
def test_one_dimension_and_zero_matrices(n, sign: float) -> None:
    """The corners with every theorem switched on; one token has the constant of V."""
    for V in ([[1.0]], [[0.0]], [[1.0], [2.0]]):
        attention = oa.SoftmaxAttention([[4.0 * sign]], V)
        found = oa.enclose_lipschitz(attention, radius=1.0, n=n)
        assert found.lower.value <= found.upper.value
        if n == 1:
            assert found.upper.value == pytest.approx(np.linalg.norm(V, 2), rel=1e-9)
