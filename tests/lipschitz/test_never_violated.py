"""No proven upper bound is ever below a local constant: many configurations for each map, domain, order and size."""

import numpy as np
import pytest
from bound_attacks import KINDS, _measure, attention_map, climb, extreme_points, pull, random_domain, steepness

import otattn as oa
from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.upper import upper_bounds
from otattn.measures import PointSet

ROUNDING = 1e-9
"""Steepness is computed to about 1e-12 relative at logits up to 1e3."""


def attack(rng, *, configurations, climbs, relaxed):
    """One random map, domain, order and size: its least upper bound against random and climbed configurations."""
    d, e = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    attention = attention_map(str(rng.choice(KINDS, p=[0.5, 0.2, 0.15, 0.15])), d, e, rng)
    if rng.random() < 0.3:
        attention = MaskedAttention(attention)
    p = float(rng.choice([2.0, 2.0, 2.0, 1.0, 1.4, 3.0, np.inf]))
    n = int(rng.choice([1, 2, 2, 3, 3, 4, 6, 8]))
    uniform = bool(rng.random() < 0.6)
    domain = random_domain(d, rng)
    size = {"domain": domain, "n": n if uniform else None, "p": p}
    uppers = [b for b in oa.bounds.table(attention, **size) if b.kind == "upper"]
    if relaxed:
        uppers = upper_bounds(attention, **size)
    if not uppers:
        return 0, 0
    least = min(b.value for b in uppers) * (1.0 + ROUNDING)
    tested = 0
    for k in range(configurations):
        X = extreme_points(domain, n, d, rng)
        if k % 3 == 1 and not isinstance(domain, PointSet):
            X = pull(domain, X + 0.3 * rng.standard_normal(X.shape))
        if k % 5 == 4:
            X[rng.integers(n)] = X[0]  # coinciding tokens
        w = np.full(n, 1.0 / n) if uniform else rng.dirichlet(np.full(n, 0.4)) + 1e-9
        value = steepness(attention, _measure(attention, X, w / w.sum()), p)
        assert value <= least, (attention, domain, size, X, w, value, uppers[0])
        tested += 1
    for _ in range(climbs):
        c = climb(attention, domain, n, p, uniform=uniform, rng=rng, steps=20)
        assert c.value <= least, (c, uppers[0])
    return tested, climbs


def test_no_bound_is_violated_by_random_and_climbed_configurations() -> None:
    rng = np.random.default_rng(10)
    counts = np.array([attack(rng, configurations=12, climbs=1, relaxed=k % 30 == 29) for k in range(90)])
    assert counts.sum(axis=0)[0] > 700


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_bound_is_violated_by_twenty_thousand_configurations(part: int) -> None:
    """A quarter each: 5,000 random and 125 climbed configurations."""
    rng = np.random.default_rng(11 + part)
    tested = np.zeros(2, dtype=int)
    k = 0
    while (tested < [5_000, 125]).any():
        tested += attack(rng, configurations=30, climbs=1, relaxed=k % 20 == 19)
        k += 1
    assert (tested >= [5_000, 125]).all()


@pytest.mark.parametrize("n", [1, 2, 3, None])
@pytest.mark.parametrize("sign", [0.0, 1.0, -1.0])
def test_dimension_one_and_zero_matrices(n, sign) -> None:
    """The corner cases with everything switched on, against the searched lower bound."""
    for V in ([[1.0]], [[0.0]], [[1.0], [2.0]]):
        attention = SoftmaxAttention([[4.0 * sign]], V)
        upper = oa.lipschitz_upper_bound(attention, radius=1.0, n=n)
        lower = oa.lipschitz_lower_bound(attention, radius=1.0, n=n, rng=0)
        assert lower.value <= upper.value * (1.0 + ROUNDING)
        if n == 1:
            assert upper.value == pytest.approx(np.linalg.norm(V, 2), rel=1e-9)
