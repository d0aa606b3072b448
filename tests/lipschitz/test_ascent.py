"""The batched ascent: descent of known functions, gradients of every weighting, values that never fall."""

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.lower.ascent import (
    Candidates,
    Objective,
    ascend,
    lbfgs,
    round_multiplicities,
    symmetric_part,
)
from otattn.lipschitz.lower.problem import problem_of


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
    attention = oa.SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(2, 3)), bias=rng.normal(size=3))
    problem = problem_of(attention, radius=1.3, n=n)
    latents = 0.8 * problem.chart.sample((count, 3), rng)
    logs = np.log(np.array([[1.0, 3.0, n - 4.0]] * count)) if weighting != "free" else rng.normal(size=(count, 3))
    return problem, Candidates(latents, logs)


@pytest.mark.parametrize("weighting", ["fixed", "free", "tokens"])
@pytest.mark.parametrize("split_atom", [None, 1])
def test_gradients_by_finite_differences(weighting, split_atom) -> None:
    rng = np.random.default_rng(5)
    problem, candidates = start(weighting, rng)
    objective = Objective(problem, weighting, candidates.log_weights, split_atom)
    x = objective.pack(candidates)
    _, gradient = objective(x)
    direction, h = rng.normal(size=x.shape), 1e-6
    slope = (objective(x + h * direction)[0] - objective(x - h * direction)[0]) / (2 * h)
    assert np.sum(gradient * direction, axis=1) == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("domain", [oa.Ball(1.3), oa.LayerNormDomain([1.0, 0.5, 2.0], [0.1, 0.0, -0.1])], ids=repr)
def test_gradients_of_causal_blocks_by_finite_differences(domain) -> None:
    rng = np.random.default_rng(8)
    head = oa.SoftmaxAttention(rng.normal(size=(3, 3)), rng.normal(size=(2, 3)), bias=rng.normal(size=3))
    problem = problem_of(oa.MaskedAttention(head), domain=domain, n=6)
    groups = np.array([0, 1, 1, 2, 2, 2])
    blocks = Candidates(problem.chart.clip(problem.chart.sample((2, 3), rng)), np.log([[1.0, 2.0, 3.0]] * 2))
    objective = Objective(problem, "fixed", blocks.log_weights, None, groups)
    x = objective.pack(blocks)
    value, gradient = objective(x)
    direction, h = rng.normal(size=x.shape), 1e-6
    slope = (objective(x + h * direction)[0] - objective(x - h * direction)[0]) / (2 * h)
    assert np.sum(gradient * direction, axis=1) == pytest.approx(slope, rel=1e-5, abs=1e-7)
    # the value is the norm of the Jacobian of the six tokens on the displacements that the domain allows
    z = objective.candidates(x).latents
    for b in range(2):
        points = problem.chart.lift(z[b])[groups]
        J = problem.attention.jacobian(oa.SpaceTimeMeasure.from_sequence(points)).to_dense().reshape(12, 6, 3)
        J = J @ problem.chart.basis
        if problem.chart.kind == "sphere":
            normals = problem.chart.normals(z[b])[groups]
            J = J - np.sum(J * normals, axis=2, keepdims=True) * normals
        assert -value[b] == pytest.approx(np.log(np.linalg.norm(J.reshape(12, -1), 2)), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("weighting", ["fixed", "free", "tokens"])
def test_an_ascent_does_not_fall_and_stays_in_the_domain(weighting) -> None:
    rng = np.random.default_rng(6)
    problem, candidates = start(weighting, rng, count=8)
    before = symmetric_part(problem, candidates)
    values, moved = ascend(problem, candidates, weighting=weighting, steps=40)
    assert (values >= before * (1 - 1e-3)).all()
    assert values.max() > 1.05 * before.max()
    assert np.linalg.norm(moved.latents, axis=2).max() <= 1 + 1e-12
    if weighting == "tokens":
        assert np.exp(moved.log_weights).sum(axis=1) == pytest.approx(np.full(8, 9.0))
    assert symmetric_part(problem, moved) == pytest.approx(values, rel=1e-9)


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
