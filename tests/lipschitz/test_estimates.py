"""The three estimates: values that cannot cancel, where they are attained, what is said of maps without a theorem."""

import math

import mpmath as mp
import numpy as np
import pytest

import otattn as oa
from otattn import bounds
from otattn.lipschitz.constants.rows import density_constant, fixed_query_constant

I2 = np.eye(2)
TURN = np.array([[0.0, -1.0], [1.0, 0.0]])
SOFTMAX = oa.SoftmaxAttention(TURN, I2)
VARIANTS = {
    "softmax": (SOFTMAX, True),
    "l2": (oa.L2Attention(I2, 0.5 * I2, I2), True),
    "sinkhorn": (oa.SinkhornAttention(0.3 * I2, I2), True),
    "sigmoid": (oa.SigmoidAttention(I2, I2), True),
    "masked": (oa.MaskedAttention(SOFTMAX), True),
    "heads": (oa.MultiHeadAttention([SOFTMAX, oa.SigmoidAttention(I2, I2)], [I2, TURN], output_bias=[1.0, 0.0]), True),
    "relu": (oa.ReLUAttention(I2, I2), False),
    "linear": (oa.LinearAttention(I2, I2), False),
    "exponential": (oa.ExponentialAttention(I2, I2), False),
    "heads with linear": (oa.MultiHeadAttention([SOFTMAX, oa.LinearAttention(I2, I2)]), False),
    "rotary": (oa.RotaryAttention(I2, I2, I2), None),
    "norm": (oa.LayerNorm(np.ones(2), eps=0.1), None),
    "own": (oa.FunctionAttention(lambda x, mu: 0.5 * x, 2), None),
}


LATER = ("heads with linear", "sinkhorn", "exponential")
"""Variants whose ascent takes longest."""


@pytest.mark.parametrize("name", [pytest.param(v, marks=pytest.mark.slow if v in LATER else ()) for v in VARIANTS])
def test_every_variant_has_estimates_or_a_reason(name: str) -> None:
    attention, passes = VARIANTS[name]
    found = oa.estimates(attention, oa.Ball(1.2, 2), n=4)
    assert found.passes is passes
    assert found.verdict
    assert found.verify()
    rows = found.rows()
    assert [row["estimate"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["proven"] is None) == (row["by"] == "no theorem") == bool(row["reason"])
        assert row["measured"] is not None
    if passes is not None:
        assert all(0.0 < row["measured"] <= row["proven"] * (1 + 1e-9) for row in rows)


def test_sigmoid_passes_and_says_which_source_is_right() -> None:
    found = oa.estimates(oa.SigmoidAttention(I2, I2), radius=3.0, ascent=False)
    assert found.passes
    assert "talk" in found.verdict
    assert "abstract" in found.verdict
    # linear growth: the value over the radius does not grow, that of linear attention does
    for R in (1.0, 10.0, 1e3):
        assert bounds.value_bound(oa.SigmoidAttention(I2, I2), radius=R).value <= R * (1 + 1e-9)
        assert bounds.value_bound(oa.LinearAttention(I2, I2), radius=R).value == pytest.approx(R**3, rel=1e-9)


def ends_of(p: float, t: float) -> mp.mpf:
    """The exact constant of V = I in the plane for any measure (p = 1, inf)."""
    return mp.sqrt(1 + mp.mpf(t) ** 2) if p == math.inf else (1 + 2 * mp.mpf(t)) * mp.exp(2 * mp.mpf(t))


@pytest.mark.parametrize("p", [1.0, math.inf])
@pytest.mark.parametrize("t", [1e-6, 0.3, 2.0, 30.0, 1e5])
def test_formulas_at_the_ends(p: float, t: float) -> None:
    """A and V orthogonal up to a factor, radius 2, values 3."""
    bound = bounds.fixed_query_bound(oa.SoftmaxAttention(0.25 * t * TURN, 3.0 * TURN), radius=2.0, p=p)
    with mp.workdps(40):
        exact = mp.log(3 * ends_of(p, t))
        assert 0 <= bound.log_value - exact <= 1e-9 * max(1, abs(exact))
    assert bound.verify()


def two_atoms(t: float) -> mp.mpf:
    """The largest square over q of the constant of two atoms ``+-R g / |g|``, from below, by a fine grid in 30 digits."""
    with mp.workdps(30):
        t = mp.mpf(t)

        def square(q):
            first, second = q * mp.exp(-t) + (1 - q) * mp.exp(t), q * mp.exp(t) * (1 + 2 * t * (1 - q)) ** 2
            return first * (second + (1 - q) * mp.exp(-t) * (1 - 2 * t * q) ** 2)

        return mp.sqrt(max(square(mp.mpf(k) / 500) for k in range(501)))


@pytest.mark.parametrize("t", [0.05, 0.5, 2.0, 40.0])
def test_second_order_is_nearly_attained_by_two_atoms(t: float) -> None:
    log_value = float(fixed_query_constant(t))
    below = float(mp.log(two_atoms(t)))
    assert below <= log_value <= below + (1e-4 if t >= 2.0 else 0.11)
    best = min(log_value, float(density_constant(t, None)[1]))
    assert best <= below + 0.03


@pytest.mark.parametrize(
    ("n", "printed", "reached"), [(2, 9.0, 9.0553), (3, 9.0, 11.087), (8, 9.0, 18.10), (100, 9.0, 63.7)]
)
def test_the_refined_estimate_as_printed_is_false(n: int, printed: float, reached: float) -> None:
    """``||A|| R^2`` for n atoms: two light anchors across the query exceed it; the corrected value is one percent above them."""
    attention = oa.SoftmaxAttention(9.0 * I2, I2)
    bound = bounds.fixed_query_bound(attention, radius=1.0, n=n).value
    # the query e_1; anchors at equal logits, the others behind
    lift = 0.0 if n == 2 else 0.05
    side = math.sqrt(1 - lift * lift)
    y = np.array([[lift, side], [lift, -side], *[[-1.0, 0.0]] * (n - 2)])
    g = np.array([9.0, 0.0])
    P = np.exp(y @ g - (y @ g).max())
    P /= P.sum()
    blocks = [q * (I2 + np.outer(z - P @ y, g)) for q, z in zip(P, y, strict=True)]
    value = math.sqrt(n) * float(np.linalg.norm(np.concatenate(blocks, axis=1), 2))
    assert printed < value <= bound
    assert value >= 0.94 * reached
    assert reached <= bound <= 1.02 * reached


def test_one_atom_is_linear_and_zero_values_stay_zero() -> None:
    for attention in (SOFTMAX, oa.L2Attention(I2, I2, I2), oa.SinkhornAttention(I2, I2), oa.MaskedAttention(SOFTMAX)):
        for p in (1.0, 1.5, 2.0, 3.0, math.inf):
            assert bounds.fixed_query_bound(attention, radius=2.0, n=1, p=p).value == pytest.approx(1.0, rel=1e-9)
    nothing = oa.SoftmaxAttention(I2, np.zeros((1, 2)))
    assert [oa.estimates(nothing, radius=1.0, ascent=False).proven[k].value for k in range(3)] == [0.0, 0.0, 0.0]


def test_the_mask_costs_the_root_of_n() -> None:
    """Token 2 of n sees two atoms of mass 1/n each: ``sqrt(n/2)`` times their constant; no constant for any measure."""
    masked = oa.MaskedAttention(oa.SoftmaxAttention(9.0 * I2, I2))
    two = bounds.fixed_query_bound(masked.attention, radius=1.0, n=2).value
    for n in (2, 50, 10**6):
        assert bounds.fixed_query_bound(masked, radius=1.0, n=n).value == pytest.approx(
            two * math.sqrt(n / 2), rel=1e-9
        )
    found = oa.estimates(masked, radius=1.0, ascent=False)
    assert found.measure is None
    assert "theta" in found.reasons[2]
    assert found.passes
    assert bounds.fixed_query_bound(masked, radius=1.0, p=math.inf).value == pytest.approx(
        math.hypot(1.0, 9.0), rel=1e-9
    )


def test_biases_and_offsets() -> None:
    """Estimate 1 sees biases and the origin, estimates 2 and 3 only the shape and the gradient."""
    biased = oa.SoftmaxAttention(I2, I2, value_bias=[3.0, 4.0])
    assert bounds.value_bound(biased, radius=2.0).value == pytest.approx(7.0, rel=1e-9)
    sums = oa.MultiHeadAttention([biased, oa.SoftmaxAttention(I2, I2, value_bias=[-3.0, -4.0])], output_bias=[1.0, 0.0])
    assert bounds.value_bound(sums, radius=2.0).value == pytest.approx(5.0, rel=1e-9)
    # a sink may take away one of two biases that cancel
    sinks = oa.MultiHeadAttention(
        [oa.ScoreAttention(I2, I2, I2, value_bias=b, sink=0.0) for b in ([3.0, 4.0], [-3.0, -4.0])]
    )
    assert bounds.value_bound(sinks, radius=2.0).value >= 9.0
    far = oa.Ellipsoid(I2, [100.0, 0.0])
    assert bounds.value_bound(SOFTMAX, domain=far).value == pytest.approx(101.0, rel=1e-9)
    here, there = (bounds.heads_field_bound(SOFTMAX, domain=d).value for d in (oa.Ball(1.0), far))
    assert there == pytest.approx(here, rel=1e-9)
    # the measure's slope knows the query, whose gradient grows with the offset
    assert bounds.fixed_query_bound(SOFTMAX, domain=far, p=math.inf).value == pytest.approx(
        math.hypot(1.0, 101.0), rel=1e-9
    )


def test_sinkhorn_has_the_exponential_at_a_fixed_query_only() -> None:
    """The rate ``e^{2a}`` is in estimate 3, not in F."""
    for a in (2.0, 4.0, 8.0):
        attention = oa.SinkhornAttention(a * I2, I2)
        assert bounds.fixed_query_bound(attention, radius=1.0).value > math.exp(2 * a)
        assert bounds.sinkhorn_bound(attention, radius=1.0).value < 3 * a
    with pytest.raises(ValueError, match=r"p must lie in \[2, inf\]"):
        bounds.fixed_query_bound(attention, radius=1.0, p=1.0)


def test_several_heads_are_combined_not_summed() -> None:
    heads = [oa.SoftmaxAttention(np.zeros((2, 2)), np.diag(v)) for v in ([3.0, 0.0], [0.0, 4.0])]
    attention = oa.MultiHeadAttention(heads)
    assert bounds.fixed_query_bound(attention, radius=1.0, n=1).value == pytest.approx(5.0, rel=1e-6)
    assert bounds.value_bound(attention, radius=1.0).value == pytest.approx(5.0, rel=1e-6)


FLAT = oa.Box([-1.0, 0.0], [0.5, 0.0])
SHIFTED = oa.Ellipsoid([[1.0, 0.2], [0.0, 0.3]], [0.5, 1.0])


@pytest.mark.parametrize(
    ("domain", "p"),
    [
        (oa.Ball(1.5), 2.0),
        *(
            pytest.param(d, p, marks=pytest.mark.slow)
            for d, p in ((SHIFTED, 1.5), (FLAT, 3.0), (oa.PointSet(I2), math.inf))
        ),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "l2", "sinkhorn", "masked", "heads", "exponential"])
def test_rigorous_on_every_domain(name: str, domain, p: float) -> None:
    pytest.importorskip("flint")
    attention, _ = VARIANTS[name]
    for bound in oa.estimates(attention, domain, n=5, p=p, ascent=False).proven:
        proved = bound.rigorous_value()
        assert bound.verify(rigorous=True)
        assert bound.value * (1.0 - 1e-8) <= proved <= bound.value


def test_statements_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one of radius and domain"):
        oa.estimates(SOFTMAX)
    with pytest.raises(ValueError, match="exactly one of radius and domain"):
        oa.estimates(SOFTMAX, oa.Ball(1.0), radius=1.0)
    with pytest.raises(ValueError, match="dimension 2"):
        oa.estimates(SOFTMAX, oa.Ball(1.0, 3))
    with pytest.raises(ValueError, match="n must be at least 1"):
        oa.estimates(SOFTMAX, radius=1.0, n=0)
    with pytest.raises(TypeError, match="must be an attention map"):
        oa.estimates(I2, radius=1.0)


def test_tampering_is_noticed() -> None:
    import dataclasses

    found = oa.estimates(SOFTMAX, radius=1.0, n=3)
    low = dataclasses.replace(found.measure, value=found.measured[2].value * 0.99, log_value=math.nan)
    assert not dataclasses.replace(found, measure=low).verify()
    assert not dataclasses.replace(found.measure, value=0.9 * found.measure.value, log_value=math.nan).verify()
