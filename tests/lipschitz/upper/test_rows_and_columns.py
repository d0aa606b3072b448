"""The program over the two tokens that move most, under a causal mask: its columns say nothing, its rows still do."""

import numpy as np
import pytest

import otattn as oa
from otattn import bounds
from otattn.lipschitz.relaxations import rows_and_columns


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_masked_heads(n):
    """Not below the bound without a mask, which has the columns too; never exceeded; one token has the norm of V."""
    plain = oa.SoftmaxAttention([[4.0]], [[1.3]])
    masked = oa.MaskedAttention(plain)
    bound, open_ = (rows_and_columns(a, radius=1.0, n=n) for a in (masked, plain))
    assert bound.verify()
    assert bound.value >= open_.value * (1.0 - 1e-2)
    assert bound.value == pytest.approx(1.3, rel=1e-9) if n == 1 else bound.details["column_sum"] == 3.0
    lower = oa.lipschitz_lower_bound(masked, radius=1.0, n=n)
    assert lower.value <= bound.value
    assert not bound.verify(plain)


@pytest.mark.slow
def test_it_wins_for_masked_heads_whose_tokens_see_themselves():
    """``A = 25 I``: a token's own logit leaves little spread to its row, which the row bound does not see."""
    head = oa.MaskedAttention(oa.SoftmaxAttention(np.eye(3), np.eye(3)))
    best = oa.lipschitz_upper_bound(head, radius=5.0, n=8)
    assert best.theorem == "rows_and_columns"
    assert best.value < 0.65 * bounds.row_bound(head, radius=5.0, n=8).value


@pytest.mark.slow
@pytest.mark.parametrize(("form", "bias"), [(4.0, 0.2), (1.944763411029872, 0.0)])
def test_proofs_reach_the_value_where_the_last_digits_decide(form, bias):
    """The order of the cells turned on rounding, and an interval around s = 1 divided by zero: 0.3 to 1 percent above."""
    pytest.importorskip("flint")
    bound = rows_and_columns(oa.SoftmaxAttention([[form]], [[1.0]], bias=[bias]), radius=1.0, n=3)
    assert bound.rigorous_value() <= bound.value * (1.0 + 1e-9)


@pytest.mark.slow
def test_masked_proof_in_balls():
    pytest.importorskip("flint")
    head = oa.MaskedAttention(oa.SoftmaxAttention([[4.0, 0.5], [0.0, 3.0]], np.eye(2), bias=[0.2, -0.1]))
    bound = rows_and_columns(head, radius=1.0, n=4)
    assert bound.verify(rigorous=True)
    assert bound.rigorous_value() <= bound.value
