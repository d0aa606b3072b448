"""The batched ascent: descent of known functions, gradients of every weighting, values that never fall."""

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.lower.ascent import Candidates, _Objective, ascend, evaluate, lbfgs, round_multiplicities
from otattn.lipschitz.lower.charts import chart_of
from otattn.lipschitz.lower.forms import forms_of


def test_lbfgs_minimises_every_row_on_its_own() -> None:
    rng = np.random.default_rng(0)
    scale = np.exp(rng.uniform(0.0, 3.0, size=(4, 5)))
    centre = rng.normal(size=(4, 5))

    class Quadratics:
        def __init__(self, s, c):
            self.s, self.c = s, c

        def take(self, index):
            return Quadratics(self.s[index], self.c[index])

        def __call__(self, x):
            r = x - self.c
            return 0.5 * np.sum(self.s * r * r, axis=1), self.s * r

    x, f = lbfgs(Quadratics(scale, centre), np.zeros((4, 5)), steps=200)
    assert np.abs(x - centre).max() < 1e-5
    assert f.max() < 1e-9


def test_lbfgs_on_the_curved_valley() -> None:
    def rosenbrock(x):
        a, b = x[:, 0], x[:, 1]
        f = (1 - a) ** 2 + 100 * (b - a * a) ** 2
        return f, np.stack([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)], axis=1)

    x, _ = lbfgs(rosenbrock, np.array([[-1.2, 1.0]]), steps=400)
    assert x[0] == pytest.approx([1.0, 1.0], abs=1e-4)


def start(weighting, rng, n=9, count=3):
    forms = forms_of(oa.SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(2, 3)), bias=rng.normal(size=3)))
    chart = chart_of(oa.Ball(1.3), 3, forms)
    forms = chart.restrict(forms)
    latents = 0.8 * chart.sample((count, 3), rng)
    logs = np.log(np.array([[1.0, 3.0, n - 4.0]] * count)) if weighting != "free" else rng.normal(size=(count, 3))
    return forms, chart, Candidates(latents, logs)


@pytest.mark.parametrize("weighting", ["fixed", "free", "tokens"])
@pytest.mark.parametrize("split_atom", [None, 1])
def test_gradients_by_finite_differences(weighting, split_atom) -> None:
    rng = np.random.default_rng(5)
    forms, chart, candidates = start(weighting, rng)
    objective = _Objective(forms, chart, weighting, 9, candidates.log_weights, split_atom)
    x = objective.pack(candidates)
    _, gradient = objective(x)
    direction, h = rng.normal(size=x.shape), 1e-6
    slope = (objective(x + h * direction)[0] - objective(x - h * direction)[0]) / (2 * h)
    assert np.sum(gradient * direction, axis=1) == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("weighting", ["fixed", "free", "tokens"])
def test_an_ascent_does_not_fall_and_stays_in_the_domain(weighting) -> None:
    rng = np.random.default_rng(6)
    forms, chart, candidates = start(weighting, rng, count=8)
    before, _ = evaluate(forms, chart, candidates)
    values, moved = ascend(forms, chart, candidates, weighting=weighting, n=9, steps=40)
    assert (values >= before * (1 - 1e-3)).all()
    assert values.max() > 1.05 * before.max()
    assert np.linalg.norm(moved.latents, axis=2).max() <= 1 + 1e-12
    if weighting == "tokens":
        assert np.exp(moved.log_weights).sum(axis=1) == pytest.approx(np.full(8, 9.0))
    assert evaluate(forms, chart, moved)[0] == pytest.approx(values, rel=1e-9)


def test_multiplicities_are_positive_integers_of_sum_n() -> None:
    rng = np.random.default_rng(7)
    for n in (4, 5, 17, 10**6):
        counts = np.exp(round_multiplicities(3.0 * rng.normal(size=(50, 4)), n))
        assert np.abs(counts - np.rint(counts)).max() < 1e-6 * n**0.5
        assert counts.min() >= 1 - 1e-12
        assert counts.sum(axis=1) == pytest.approx(np.full(50, float(n)), rel=1e-12)
    exact = np.log([[2.0, 3.0, 5.0]])
    assert np.exp(round_multiplicities(exact, 10))[0] == pytest.approx([2.0, 3.0, 5.0])
    with pytest.raises(ValueError, match="use fewer atoms"):
        round_multiplicities(np.zeros((1, 4)), 3)
