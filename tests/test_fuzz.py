"""Any input gives a value or a named error: no other exception, no warning, no hang, no nan."""

import pytest
from fuzz_calls import Hang, limited, one_call
from hypothesis import given, settings
from hypothesis import strategies as st

QUICK = (
    "DiscreteMeasure",
    "wasserstein",
    "wasserstein_batch",
    "covariance_distance",
    "attention",
    "pushforward",
    "bounds.table",
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_quick_functions(seed: int) -> None:
    one_call(seed, names=QUICK)


def test_every_function_is_called_and_gives_both_outcomes() -> None:
    outcomes = {one_call(seed) for seed in range(900)}
    names = {name for name, _ in outcomes}
    assert len(names) >= 40
    with_values = {name for name, outcome in outcomes if outcome == "value"}
    assert len(with_values) >= 38
    assert {"ValueError", "TypeError"} <= {outcome for _, outcome in outcomes}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_thousands_of_calls(block: int) -> None:
    for seed in range(10_000 + 500 * block, 10_000 + 500 * (block + 1)):
        one_call(seed)


def test_the_time_limit_can_fail() -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises(Hang), limited(1):
        spin()
