"""Closed forms do not depend on n in time and memory: a thousand tokens cost what a million millions cost."""

import inspect
import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest

from otattn.attention import (
    AttentionMap,
    GatedAttention,
    L2Attention,
    Mask,
    MaskedAttention,
    MultiHeadAttention,
    RotaryAttention,
    ScoreAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.lipschitz import Bound, adversarial_tokens, bounds, lipschitz_lower_bound, lipschitz_upper_bound
from otattn.lipschitz.constants.rows import density_constant
from otattn.lipschitz.lower.clusters import cluster_constant
from otattn.lipschitz.theorem import THEOREMS
from otattn.lipschitz.upper.masked import masked_column_sum
from otattn.measures import Ball

A, V = np.array([[1.0, 0.5], [-0.3, 0.8]]), np.array([[1.0, 0.2], [0.0, 0.7]])
SOFTMAX, L2 = SoftmaxAttention(A, V), L2Attention(np.eye(2), np.eye(2), V)
MASKED = MaskedAttention(SOFTMAX)
HEADS = MultiHeadAttention([SOFTMAX, SoftmaxAttention(-A, V)])
COUNTS = (1, 2, 3, 10, 63, 64, 65, 1000, 19_999, 20_000, 20_001, 10**6, 10**9, 10**12)

# one line for every bound that takes n: name, further options, map
CALLS: list[tuple[str, dict[str, Any], AttentionMap]] = [
    ("castin2024_discrete", {"radius": 1.0}, SOFTMAX),
    ("castin2024_masked", {"radius": 1.0}, MASKED),
    ("castin2024_multi_head", {"radius": 1.0}, HEADS),
    ("castin2024_discrete_lower", {"radius": 1.0}, SoftmaxAttention(A + A.T, V)),
    ("castin2024_discrete_lower", {"radius": 1.0}, MaskedAttention(SoftmaxAttention(A + A.T, V))),
    ("column_bound", {"radius": 1.0}, SOFTMAX),
    ("column_sum", {"radius": 1.0}, SOFTMAX),
    ("density_bound", {"radius": 1.0}, SOFTMAX),
    ("density_bound", {"radius": 1.0, "p": 3}, SOFTMAX),
    ("fixed_query_bound", {"radius": 1.0}, HEADS),
    ("fixed_query_bound", {"radius": 1.0, "p": 1}, SOFTMAX),
    ("fixed_query_bound", {"radius": 1.0, "p": 1.5}, MASKED),
    ("fixed_query_bound", {"radius": 1.0}, L2),
    ("heads_field_bound", {"radius": 1.0}, HEADS),
    ("kim2021_dot_product", {"radius": 1.0}, SOFTMAX),
    ("kim2021_l2", {}, L2),
    ("kim2021_l2", {"p": math.inf}, L2),
    ("l2_tied_bound", {}, L2),
    ("l2_column_bound", {"radius": 1.0}, L2),
    ("l2_column_bound", {"radius": 1.0}, MaskedAttention(L2)),
    ("l2_row_bound", {"radius": 1.0}, L2),
    ("masked_average_bound", {"radius": 1.0}, MASKED),
    ("masked_column_bound", {"radius": 1.0}, MASKED),
    ("masked_column_bound", {"radius": 4.0, "p": 1}, MASKED),
    ("masked_row_bound", {"radius": 1.0}, MASKED),
    ("masked_row_bound", {"radius": 4.0}, MASKED),
    ("multi_head", {"radius": 1.0}, HEADS),
    ("pointwise_bound", {"radius": 1.0}, SigmoidAttention(A, V)),
    ("value_bound", {"radius": 1.0}, HEADS),
    ("rotary_row_bound", {"radius": 1.0}, RotaryAttention(np.eye(2), np.eye(2), V)),
    ("rotary_gram_bound", {"radius": 1.0}, RotaryAttention(np.eye(2), np.eye(2), V)),
    ("gated_bound", {"radius": 1.0}, GatedAttention(SOFTMAX, np.eye(2))),
    ("heads_bound", {"radius": 1.0}, MultiHeadAttention([SOFTMAX, ScoreAttention(A, A, V, cap=0.5)])),
    ("row_bound", {"radius": 1.0}, SOFTMAX),
    ("score_average_bound", {"radius": 1.0}, ScoreAttention(A, A, V, cap=0.5, mask=Mask())),
    ("score_column_bound", {"radius": 1.0}, ScoreAttention(A, A, V, cap=0.5)),
    ("score_column_bound", {"radius": 1.0, "p": 1}, ScoreAttention(A, A, V, cap=0.5, mask=Mask())),
    ("score_column_bound", {"radius": 1.0}, ScoreAttention(A, A, V, mask=Mask(before=500))),
    ("score_column_bound", {"radius": 1.0}, ScoreAttention(A, A, V, mask=Mask(False, before=9, after=500))),
    ("sinkhorn_bound", {"radius": 1.0}, SinkhornAttention(A, V)),
    ("score_row_bound", {"radius": 1.0}, ScoreAttention(A, A, V, sink=1.0, mask=Mask(before=500))),
]
FALLING = {"castin2024_discrete_lower", "kim2021_dot_product"}
"""Lower bounds: the published formula of the first falls again, the second knows whether n is odd."""


def peak(call: Callable[[], object]) -> tuple[object, float]:
    """What a call returns and the most memory that it held, in bytes."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_every_bound_that_takes_a_number_of_tokens_is_listed() -> None:
    takes = {name for name in bounds.__all__ if "n" in inspect.signature(getattr(bounds, name)).parameters}
    without = {key for key, t in THEOREMS.items() if t.reason(SOFTMAX, Ball(1.0), 7, 2.0) is not None}
    fixed = {"field_bound", "whole_block"} | {
        name for name in without if name.endswith(("mean_field", "mean_field_lower"))
    }
    assert takes - fixed == {name for name, _, _ in CALLS} | {"table", "density_constant"}


@pytest.mark.parametrize(("name", "options", "attention"), CALLS, ids=[f"{c[0]}-{i}" for i, c in enumerate(CALLS)])
def test_any_number_of_tokens_costs_the_same(name: str, options: dict[str, Any], attention: AttentionMap) -> None:
    function = getattr(bounds, name)
    values = []
    for n in COUNTS[1:] if name == "kim2021_dot_product" else COUNTS:
        if n <= 1000:  # whose square fits in the memory that is allowed
            bound, memory = function(attention, n=n, **options), 0.0
        else:
            bound, memory = peak(lambda n=n: function(attention, n=n, **options))
        assert isinstance(bound, Bound)
        assert math.isfinite(bound.value)
        assert memory < 1e7
        values.append(bound.value)
    if name not in FALLING:
        # the constant grows with the number of tokens, and so does each bound of it; 1e-9 for the margins of rounding
        assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(values))
    region = None if name in ("kim2021_l2", "l2_tied_bound") else Ball(1.0)
    if (
        name not in FALLING
        and THEOREMS[name].reason(attention, region, None, options.get("p", 2.0)) is None
        and not attention.causal
    ):
        # n tokens are a measure
        assert values[-1] <= function(attention, **options).value * (1 + 1e-9)


@pytest.mark.parametrize("n", [10**3, 10**6, 10**9])
def test_witnesses_of_the_lower_bounds_are_few_atoms(n: int) -> None:
    symmetric = SoftmaxAttention(A + A.T, np.eye(2))
    for attention, low in (
        (SOFTMAX, bounds.kim2021_dot_product(SOFTMAX, n=n, radius=1.5)),
        (symmetric, bounds.castin2024_discrete_lower(symmetric, n=n, radius=1.5)),
    ):
        assert low.witness.n <= 3
        assert low.witness.multiplicities(n).sum() == n
        # the constant at the n tokens, by equal tokens as one atom; 1e-12 for its decomposition
        assert low.value <= cluster_constant(attention, low.witness, n=n) * (1 + 1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 5.0, 12.0, 30.0])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 66, 1000, 10**5, 10**9, 10**12])
def test_masked_column_sum_is_the_difference_of_digamma_functions(spread: float, n: int) -> None:
    with mp.workdps(60):
        c = mp.exp(mp.mpf(spread))
        exact = c * (mp.digamma(n + c) - mp.digamma(c))
        value = mp.mpf(masked_column_sum(spread, n))
        # the closed form of the later terms exceeds them by 1e-8 at most, rounding outward adds less than 1e-9 of the sum
        assert exact <= value <= exact * (1 + mp.mpf(1e-9)) + mp.mpf(1e-8)


@pytest.mark.parametrize("spread", [40.0, 100.0, 600.0, 744.0, 1e5])
def test_masked_column_sum_of_wide_logits_counts_rows(spread: float) -> None:
    for n in (1, 100, 10**9, 10**12):
        with mp.workdps(60):
            # f(x) = 1/(1 + r x) >= 1 - r x
            least = n - mp.exp(-mp.mpf(spread)) * mp.mpf(n) * (n - 1) / 2
        assert least <= masked_column_sum(spread, n) <= n * (1 + 1e-9)


@pytest.mark.parametrize("n", [24_000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0, 3.0])
def test_masked_row_sum_against_all_of_its_terms(radius: float, n: int) -> None:
    masked = MaskedAttention(SoftmaxAttention([[1.0]], [[1.0]]))
    t = radius**2
    phi2 = bounds.row_norm(t) ** 2
    exact = math.fsum(min(phi2, density_constant(t, i)[0] ** 2 / i) for i in range(1, n + 1))
    total = bounds.masked_row_bound(masked, radius=radius, n=n).details["row_sum"]
    # blocks of 1/64 of their length, and one Psi for all rows of a block or beyond the last
    assert exact <= total <= exact * 1.04


def test_rows_beyond_the_blocks_take_the_better_of_two_bounds() -> None:
    # e^{2t} = 6e10 lies between the numbers of rows: the first rows are bounded by phi, the last by Psi_i^2 / i
    masked = MaskedAttention(SoftmaxAttention([[1.0]], [[1.0]]))
    t, n = 12.4, 10**13
    total = bounds.masked_row_bound(masked, radius=math.sqrt(t), n=n).details["row_sum"]
    psi2 = density_constant(t, n)[0] ** 2
    assert total <= 0.7 * min(n * bounds.row_norm(t) ** 2, psi2 * math.log(n / 20_000))
    # Psi grows with i, so what is bounded is at least the terms with Psi_m for rows beyond m
    m, later = 10**11, density_constant(t, 10**11)[0] ** 2
    assert total >= later * math.log(n / (m + 1.0))


@pytest.mark.parametrize("n", [pytest.param(10**9, marks=pytest.mark.slow), 10**12])
def test_tables_of_many_tokens(n: int) -> None:
    for attention in (SOFTMAX, MASKED, L2, HEADS):
        table, memory = peak(lambda a=attention: bounds.table(a, radius=1.0, n=n))
        assert isinstance(table, bounds.BoundTable)
        assert len(table) > 0
        assert memory < 1e7


@pytest.mark.slow
@pytest.mark.parametrize("n", [10**9, 10**12])
def test_best_bounds_of_many_tokens(n: int) -> None:
    best, memory = peak(lambda: lipschitz_upper_bound(MASKED, radius=1.0, n=n))
    assert isinstance(best, Bound)
    assert best.value == bounds.table(MASKED, radius=1.0, n=n)[0].value
    assert memory < 1e7
    constant = density_constant(1.0, n)[0]
    assert density_constant(1.0, 10**6)[0] <= constant <= density_constant(1.0, None)[0]
    assert adversarial_tokens(SoftmaxAttention(-A, V), n=n, radius=8.0, method="two-anchor").n == 3


def test_a_causal_witness_lists_its_tokens_and_refuses_too_many() -> None:
    attention = MaskedAttention(SoftmaxAttention(-np.eye(2), np.eye(2)))
    with pytest.raises(ValueError, match=r"n must be at most 16777216 for a causal map"):
        lipschitz_lower_bound(attention, radius=2.0, n=10**9, rng=0)
    with pytest.raises(ValueError, match=r"received 1000000000000 \(about 3.2e\+13 bytes\)"):
        adversarial_tokens(attention, n=10**12, radius=2.0, method="two-anchor")


def test_two_anchors_say_that_they_are_not_seen_among_so_many() -> None:
    with pytest.raises(ValueError, match=r"exceed a token's own by log\(n / 2\)"):
        adversarial_tokens(SoftmaxAttention(-np.eye(2), np.eye(2)), n=10**9, radius=2.0, method="two-anchor")
