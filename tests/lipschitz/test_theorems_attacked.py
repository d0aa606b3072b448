"""No upper bound is ever violated: random, structured and climbed configurations against every theorem."""

import numpy as np
import pytest
from bound_attacks import attention_map, climb, configurations, random_domain

import otattn.lipschitz.bounds as bounds
from otattn.attention import L2Attention, MaskedAttention, SoftmaxAttention
from otattn.lipschitz.lower import lipschitz_lower_bound
from otattn.measures import Ball

ROUNDING = 1e-9
"""The steepness of a configuration is itself computed to about 1e-12 relative, with logits up to 1e3."""


def _check(c, *, local=True):
    table = bounds.table(c.attention, domain=c.domain, n=c.n if c.uniform else None, p=c.p)
    uppers = [b for b in table if b.kind == "upper"]
    for b in uppers:
        assert c.value <= b.value * (1.0 + ROUNDING), (c, b)
    if c.p == 2.0 and local:
        mu = c.measure()
        upper = bounds.local_upper_bound(c.attention, mu).value * (1.0 + ROUNDING)
        fields = np.linalg.norm(c.attention.field_jacobian(mu.points, mu), ord=2, axis=(1, 2))
        assert max(c.value, float(fields.max())) <= upper, c
    return len(uppers)


def test_no_bound_is_violated():
    """Some 2000 configurations over every variant, mask, domain and order, with d = 1, n = 1 and zeros."""
    checked = sum(_check(c) for c in configurations(0, 140, steps=15))
    assert checked > 200


@pytest.mark.slow
def test_no_bound_is_violated_by_long_climbs():
    """Longer climbs, other seeds."""
    checked = sum(_check(c) for seed in (1, 2) for c in configurations(seed, 80, steps=60))
    assert checked > 150


def test_softmax_bounds_against_climbs_in_steep_balls():
    """Large logits, where clusters and anchors decide."""
    rng = np.random.default_rng(3)
    for k in range(12):
        A = (np.eye(2), -np.eye(2), np.array([[0.0, 1.0], [-1.0, 0.0]]))[k % 3] * (2.0, 8.0)[k % 2]
        attention = SoftmaxAttention(A, np.eye(2))
        if k % 4 == 3:
            attention = MaskedAttention(attention)
        c = climb(attention, Ball(1.0, 2), 2 + k % 5, 2.0, uniform=True, rng=rng, steps=120)
        _check(c)


def test_fields_and_column_sums():
    """sigma bounds every ``||D_x Gamma||``, ``column_sum`` every column sum of softmax."""
    rng = np.random.default_rng(4)
    for k in range(150):
        d = int(rng.integers(1, 5))
        attention = attention_map("softmax", d, int(rng.integers(1, 4)), rng)
        domain = random_domain(d, rng)
        c = climb(attention, domain, int(rng.integers(1, 9)), 2.0, uniform=k % 2 == 0, rng=rng, steps=0)
        mu = c.measure()
        sigma = bounds.field_bound(attention, domain=domain).value
        fields = np.linalg.norm(attention.field_jacobian(mu.points, mu), ord=2, axis=(1, 2)).max()
        size = np.linalg.norm(attention.A, 2) * np.linalg.norm(attention.V, 2) * domain.max_norm**2
        assert fields <= sigma * (1.0 + 1e-12) + 1e-13 * size
        logits = (mu.points @ attention.A.T) @ mu.points.T
        if attention.bias is not None:
            logits = logits + mu.points @ attention.bias
        P = mu.weights * np.exp(logits - logits.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        top = float(((mu.weights @ P) / mu.weights).max())
        T = bounds.column_sum(attention, domain=domain, n=mu.n if c.uniform else None)
        assert top <= T.value * (1.0 + ROUNDING)


@pytest.mark.slow
def test_no_bound_is_violated_by_the_witnesses_of_lower_bounds():
    """The structured and ascended witnesses, discrete and mean-field, masked, L2."""
    rng = np.random.default_rng(5)
    for k in range(12):
        d = int(rng.integers(1, 4))
        A = rng.standard_normal((d, d)) * np.exp(rng.uniform(-0.5, 2.0))
        attention = SoftmaxAttention(A if k % 3 else (-1) ** k * np.eye(d) * 4.0, rng.standard_normal((d, d)))
        if k % 4 == 2:
            attention = MaskedAttention(attention)
        if k % 4 == 3:
            attention = L2Attention(A, A if k % 8 == 3 else rng.standard_normal((d, d)), np.eye(d))
        n = None if k % 4 == 1 else int(rng.integers(2, 12))
        low = lipschitz_lower_bound(attention, radius=1.0, n=n, rng=k).value
        uppers = [b for b in bounds.table(attention, radius=1.0, n=n) if b.kind == "upper"]
        assert uppers
        assert low <= min(b.value for b in uppers) * (1.0 + ROUNDING), (attention, n)
