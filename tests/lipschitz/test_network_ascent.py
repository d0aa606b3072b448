"""Adversarial tokens of whole networks: the gradient by two adjoint products, and what the ascent finds with it."""

import numpy as np
import pytest
from attention_maps import MAPS, D

import otattn as oa
from otattn.lipschitz.lower.explicit import Layout
from otattn.lipschitz.lower.extremal import extremal
from otattn.lipschitz.lower.problem import problem_of

NAMES = ["network-bert", "network-gpt2", "network-llama", "block-post", "block-masked-pre", "residual", "mlp-gelu"]
DOMAINS = [oa.Ball(2.0, D), oa.LayerNormDomain(np.ones(D)), oa.Box(-np.ones(D), np.ones(D))]


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        pytest.param(name, domain, id=f"{type(domain).__name__}-{name}", marks=() if i % 3 == k else pytest.mark.slow)
        for i, name in enumerate(NAMES)
        for k, domain in enumerate(DOMAINS)
    ],
)
def test_the_slope_is_that_of_the_constant(name, domain):
    rng = np.random.default_rng(5)
    attention = MAPS[name](rng)
    problem = problem_of(attention, domain=domain, n=5)
    chart, layout = problem.chart, Layout(problem, "sequence" if attention.causal else "measure")
    logs = np.log([1.0, 1.0, 3.0]) if not attention.causal else np.zeros(5)
    checked = 0
    for _ in range(4):
        omega = chart.parameters(chart.sample((len(logs),), rng))
        z = chart.latents(omega)
        found = extremal(problem, layout.measure(z, logs), np.ones(len(logs)))  # no atom may split
        slope, direction, h = chart.pull(omega, found.slope(z)), rng.standard_normal(omega.shape), 1e-6

        def value(t, omega=omega, direction=direction):
            mu = layout.measure(chart.latents(omega + t * direction), logs)
            return extremal(problem, mu, np.ones(len(logs))).value

        difference = (value(h) - value(-h)) / (2 * h)
        kink = abs(value(h) - 2 * value(0.0) + value(-h)) > 1e-9 * value(0.0)  # two singular values meet
        if not kink:
            assert abs(float(np.sum(slope * direction)) - difference) <= 1e-5 * (1.0 + abs(difference) + found.value)
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize(
    "name",
    ["block-masked-pre", *(pytest.param(f"network-{name}", marks=pytest.mark.slow) for name in ("bert", "llama"))],
)
def test_the_ascent_beats_random_tokens(name):
    rng = np.random.default_rng(0)
    attention = MAPS[name](rng)
    mu = oa.adversarial_tokens(attention, n=4, radius=2.0, method="ascent", rng=0)
    assert np.linalg.norm(mu.points, axis=1).max() <= 2.0
    found = oa.local_lipschitz(attention, mu).value
    draws = oa.samplers.sequence_pairs(4, D, 2.0) if attention.causal else oa.samplers.uniform_ball_pairs(4, D, 2.0)
    drawn = [oa.local_lipschitz(attention, draws(rng)[0]).value for _ in range(12)]
    assert found > 1.5 * max(drawn)
