"""Structured witnesses: closed forms of their leading constants, and the attention they were built to have."""

import math

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.lower import mean_field_witnesses, witnesses
from otattn.lipschitz.lower.problem import problem_of

SKEW = np.array([[0.0, 2.0], [-2.0, 0.0]])


def setting(A, V=None, radius=1.0):
    attention = oa.SoftmaxAttention(A, np.eye(len(A)) if V is None else V)
    problem = problem_of(attention, radius=radius, n=5)
    return attention, problem, problem.forms[0]


@pytest.mark.parametrize(
    ("A", "V", "radius", "constant"),
    [
        (-3.0 * np.eye(3), None, 1.0, 3.0 / math.sqrt(2.0)),
        (3.0 * np.eye(3), None, 2.0, 4.0 * 3.0 / (2.0 * math.sqrt(2.0))),
        (SKEW, None, 1.0, 2.0 / math.sqrt(2.0)),
        (-np.eye(2), np.diag([5.0, 1.0]), 1.0, 5.0 / math.sqrt(2.0)),
    ],
    ids=["minus identity", "identity", "skew", "values"],
)
def test_two_anchor_constant_closed_forms(A, V, radius, constant) -> None:
    _, problem, form = setting(np.asarray(A), V, radius)
    value, _ = witnesses.two_anchor_constant(problem, form, np.random.default_rng(0))
    assert value == pytest.approx(constant, rel=1e-6)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_field_direction_attains_the_certified_supremum(d: int) -> None:
    rng = np.random.default_rng(d)
    attention, problem, form = setting(rng.normal(size=(d, d)), rng.normal(size=(d, d)), 1.7)
    value, _ = witnesses.field_direction(problem, form, rng)
    upper = oa.relaxations.field_certificate(attention, domain=oa.Ball(1.7, d)).value
    assert upper * (1 - 1e-8) <= value <= upper * (1 + 1e-12)


def test_published_positions() -> None:
    A = np.diag([3.0, -1.0])
    attention, problem, form = setting(A, radius=2.0)
    antipodal = witnesses.castin_antipodal(problem, form)
    x = problem.chart.lift(antipodal.latents)[0]
    assert np.abs(x) == pytest.approx(np.array([[0.0, 2.0], [0.0, 2.0]]), abs=1e-12)
    assert x[0] == pytest.approx(-x[1])
    assert np.exp(antipodal.log_weights[0]) == pytest.approx([1.0, 4.0])
    half = problem.chart.lift(witnesses.castin_half(problem, form).latents)[0]
    assert np.abs(half) == pytest.approx(np.array([[2.0, 0.0], [1.0, 0.0]]), abs=1e-12)
    # the local constant there is at least the published lower bound of the theorem
    mu = oa.adversarial_tokens(attention, n=5, radius=2.0, method="castin-antipodal")
    published = oa.bounds.castin2024_discrete_lower(attention, radius=2.0, n=5)
    values = [oa.local_lipschitz(attention, mu.tokens(5)).value]
    values.append(
        oa.local_lipschitz(attention, oa.adversarial_tokens(attention, n=5, radius=2.0, method="castin-half")).value
    )
    assert max(values) >= published.value * (1 - 1e-12)


def attended(attention, mu, k):
    """The shares of attention that the query at atom k gives, from the definition."""
    logits = mu.points @ attention.A @ mu.points[k] + np.log(mu.weights)
    share = np.exp(logits - logits.max())
    return share / share.sum()


def test_three_atoms_have_the_shares_that_were_asked_for() -> None:
    rng = np.random.default_rng(4)
    attention, problem, form = setting(rng.normal(size=(3, 3)), radius=1.5)
    batch = mean_field_witnesses.three_atoms(problem, form, np.random.default_rng(0))
    wanted = {(r, q) for q in (0.15, 0.25, 0.4) for r in (0.15, 0.3, 0.5, 1.0 - q - 1e-6)}
    seen = set()
    for latents, lw in zip(batch.latents, batch.log_weights, strict=True):
        mu = oa.DiscreteMeasure.normalized(problem.chart.lift(latents), np.exp(lw))
        share = attended(attention, mu, 0)
        seen.add(min(wanted, key=lambda w: abs(w[0] - share[0]) + abs(w[1] - share[1])))
        assert min(abs(r - share[0]) + abs(q - share[1]) for r, q in wanted) < 1e-9
    assert seen == wanted


def test_the_far_query_of_the_field_attends_to_the_pair_only() -> None:
    rng = np.random.default_rng(9)
    for attention in (
        oa.SoftmaxAttention(rng.normal(size=(3, 3)), np.eye(3)),
        oa.L2Attention(3.0 * rng.normal(size=(3, 3)), 3.0 * rng.normal(size=(3, 3)), np.eye(3)),
    ):
        problem = problem_of(attention, radius=1.5)
        batch = mean_field_witnesses.field_measure(problem, problem.forms[0], np.random.default_rng(0))
        mu = oa.DiscreteMeasure.normalized(problem.chart.lift(batch.latents[0]), np.exp(batch.log_weights[0]))
        # Gamma(x) = V sum_j share_j x_j, with shares (0, 1/2, 1/2) of (x, Eu, -Eu)
        assert np.abs(attention(mu.points[:1], mu)).max() < 1e-12
        assert mu.weights[0] < 1e-20


@pytest.mark.parametrize("a", [3.0, 7.0])
def test_self_block_of_the_identity(a: float) -> None:
    # x = -z = R u with share q of x: q + 2 a q (1 - q) * 2 has the maximum (6 a + 1)^2 / (24 a) in the limit of a light x;
    # the local constant counts the other blocks too, so the bound found is at least this
    bound = oa.lipschitz_lower_bound(oa.SoftmaxAttention(a * np.eye(2), np.eye(2)), radius=1.0, rng=0)
    assert bound.value >= (6 * a + 1) ** 2 / (24 * a) * (1 - 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "a"), [(0, 4.0), (1, 9.0), (2, 4.0), (3, 16.0)])
def test_random_values_reach_a_long_ascent(seed: int, a: float) -> None:
    rng = np.random.default_rng(seed)
    A, V = rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
    attention = oa.SoftmaxAttention(a * A / np.linalg.norm(A, 2), V / np.linalg.norm(V, 2))
    fast = oa.lipschitz_lower_bound(attention, radius=1.0, rng=0)
    long = oa.lipschitz_lower_bound(attention, radius=1.0, rng=1, effort="deep")
    assert fast.value >= 0.95 * long.value
    assert max(fast.value, long.value) <= oa.lipschitz_upper_bound(attention, radius=1.0).value


@pytest.mark.parametrize("size", [1e-170, 1e-300])
@pytest.mark.parametrize("n", [None, 4])
def test_tiny_values_scale_the_lower_bound(size, n):
    """Squares of values below 1e-162 vanish: the field's direction was a nan."""
    form = 9.0 * np.array([[0.0, 1.0], [-1.0, 0.0]])
    one, tiny = (
        oa.lipschitz_lower_bound(oa.SoftmaxAttention(form, s * np.eye(2)), radius=1.0, n=n, rng=0, effort="fast").value
        for s in (1.0, size)
    )
    assert tiny / size == pytest.approx(one, rel=1e-6)
