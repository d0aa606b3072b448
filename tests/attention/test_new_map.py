"""A new attention map is one class and its registrations: everything else of the library takes it as it is."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

import otattn as oa
from otattn.attention import AttentionMap, JacobianOperator
from otattn.gradient_flow.energy import Energy
from otattn.gradient_flow.known import KnownStructure, known_structure
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.theorem import THEOREMS, theorem

BALL = oa.Ball(1.5, 2)
X = np.random.default_rng(5).normal(size=(4, 2))


class Values(AttentionMap):
    """The least that a map must have: its values."""

    def _apply(self, x, mu, times, block_size):
        return np.broadcast_to(mu.weights @ np.tanh(mu.points), x.shape)


class Consensus(AttentionMap):
    """``Gamma_mu(x) = int (y - x) exp(-|y - x|^2 / 2) dmu(y)``: tokens attract each other at short range."""

    def _parts(self, x, mu):
        gaps = mu.points - x[:, None]
        weights = mu.weights * np.exp(-0.5 * np.sum(gaps**2, axis=2))
        return gaps, weights

    def _blocks(self, x, mu):
        """``w_j k_ij (I - g g^T)`` with ``g = y_j - x_i``."""
        gaps, weights = self._parts(x, mu)
        return weights[..., None, None] * (np.eye(x.shape[1]) - gaps[..., :, None] * gaps[..., None, :])

    def _apply(self, x, mu, times, block_size):
        gaps, weights = self._parts(x, mu)
        return np.sum(weights[..., None] * gaps, axis=1)

    def _field(self, x, mu, times, block_size):
        return -self._blocks(x, mu).sum(axis=1)

    def _jacobian(self, mu, times, block_size):
        T = self._blocks(mu.points, mu)
        return JacobianOperator(
            mu.n,
            mu.dim,
            mu.dim,
            jvp=lambda v: np.einsum("ijab,jb->ia", T, v) - np.einsum("ijab,ib->ia", T, v),
            vjp=lambda g: np.einsum("ijab,ia->jb", T, g) - np.einsum("ijab,ia->ib", T, g),
        )


class Attraction(Energy):
    """``E(mu) = 1/2 iint exp(-|x - y|^2 / 2) dmu dmu``, whose gradient is the velocity of :class:`Consensus`."""

    dim = 2

    def _value(self, mu):
        return 0.5 * float(mu.weights @ self._variation(mu.points, mu)[0]), 0.0

    def _variation(self, x, mu):
        return Consensus()._parts(x, mu)[1].sum(axis=1), 0.0

    def _gradient(self, x, mu):
        return Consensus()._apply(x, mu, None, None), 0.0


@known_structure.register
def _consensus_energy(attention: Consensus) -> KnownStructure:
    return KnownStructure(Attraction(), 1.0, False)


@pytest.fixture
def consensus_bound() -> Iterator[str]:
    """A theorem about the new map, for the time of a test.

    ``F`` is 2-Lipschitz in every W_p: along a coupling that moves atoms by v the velocity of an image is ``int k (I - g g^T)
    (v(y) - v(x)) dmu(y)``, and ``k |I - g g^T| <= max(1, sup (s^2 - 1) exp(-s^2 / 2)) = 1``.
    """
    key = "consensus_bound"

    @theorem(
        key,
        statement="2",
        hypotheses="consensus attention; any domain, measure and p",
        applies=lambda attention, domain, n, p: (
            None if isinstance(attention, Consensus) else f"attention must be Consensus, received {attention.kind}"
        ),
        measures=True,
        rigorous=False,
        everywhere=True,
    )
    def evaluate(attention, domain, n, p, exact):
        return Bound(2.0, "upper", theorem=key, p=p, n=n, domain=domain)

    yield key
    del THEOREMS[key]


def test_values_alone_give_a_study_a_flow_and_errors_that_name_the_missing_method() -> None:
    toy = Values()
    study = oa.stability_study(toy, oa.samplers.uniform_ball_pairs(3, 2, 1.0), n_pairs=5, rng=0, progress=False)
    assert 0.0 < study.best.value < 1.0
    assert oa.flow(toy, X, t_span=(0.0, 0.5)).status == "success"
    for call, method in (
        (lambda: toy.jacobian(X), "_jacobian"),
        (lambda: oa.local_lipschitz(toy, X), "_jacobian"),
        (lambda: oa.lipschitz_lower_bound(toy, domain=BALL, n=3), "_jacobian"),
        (lambda: toy.field_jacobian(X, X), "_field"),
        (lambda: oa.check_gradient_flow(toy, X, rng=0), "_field"),
    ):
        with pytest.raises(oa.NoJacobianError, match=f"received Values, .* a class with {method}"):
            call()
    with pytest.raises(oa.NotGaussianPreservingError, match="Values"):
        toy.pushforward(oa.GaussianMeasure([0.0], [[1.0]]))
    with pytest.raises(TypeError, match="received Values"):
        oa.MaskedAttention(toy)


def test_its_jacobian() -> None:
    toy, rng = Consensus(), np.random.default_rng(0)
    mu = oa.DiscreteMeasure(X, [0.1, 0.2, 0.3, 0.4])
    J, v, g = toy.jacobian(mu), rng.normal(size=X.shape), rng.normal(size=X.shape)
    assert np.sum(J.jvp(v) * g) == pytest.approx(np.sum(v * J.vjp(g)), rel=1e-13)
    start, slope = toy(X, mu), J.jvp(v)
    rests = [
        np.linalg.norm(toy.pushforward(mu._with_points(X + h * v)).points - start - h * slope) for h in (1e-2, 1e-3)
    ]
    assert 90.0 < rests[0] / rests[1] < 110.0
    at = rng.normal(size=(3, 2))
    field, u = toy.field_jacobian(at, mu), rng.normal(size=(3, 2))
    rests = [
        np.linalg.norm(toy(at + h * u, mu) - toy(at, mu) - h * np.einsum("mab,mb->ma", field, u)) for h in (1e-2, 1e-3)
    ]
    assert 90.0 < rests[0] / rests[1] < 110.0


@pytest.mark.parametrize("n", [4, None])
def test_its_lower_bound_is_the_local_constant_at_the_witness(n: int | None) -> None:
    toy = Consensus()
    bound = oa.lipschitz_lower_bound(toy, domain=BALL, n=n, rng=0)
    assert 1.0 - 1e-6 <= bound.value <= 2.0  # equal tokens move apart with speed one; 2 bounds the constant
    assert bound.value == pytest.approx(oa.local_lipschitz(toy, bound.witness).value, rel=1e-9)
    assert np.linalg.norm(bound.witness.points, axis=1).max() <= BALL.radius * (1 + 1e-12)


def test_its_study_and_its_ratio() -> None:
    sampler = oa.samplers.perturbation_pairs(X, 1e-3)
    study = oa.stability_study(Consensus(), sampler, n_pairs=20, rng=1, progress=False)
    local = oa.local_lipschitz(Consensus(), X)
    assert 0.1 * local.value < study.best.value <= local.value * 1.01
    assert oa.stability_ratio(Consensus(), X, X + 0.1).value == pytest.approx(
        0.0, abs=1e-12
    )  # translations move nothing


def test_its_flow_is_a_gradient_flow_of_the_energy_that_is_registered() -> None:
    report = oa.check_gradient_flow(Consensus(), X, rng=0)
    assert report.verdict == "Wasserstein gradient flow"
    assert report.twisted_defect is None
    assert report.bures_defect is None
    assert isinstance(report.energy, Attraction)
    assert report.dissipation_defect is not None
    assert report.dissipation_defect < 1e-7
    run = oa.flow(Consensus(), X, t_span=(0.0, 20.0))
    energies = [Attraction()(run.measure(k)) for k in range(len(run))]
    assert (np.diff(energies) > -1e-9).all()
    assert energies[-1] > energies[0] + 0.01
    # a sum of two is known by the same registration
    double = known_structure(oa.MultiHeadAttention([Consensus(), Consensus()]))
    assert double is not None
    assert double.energy(X) == pytest.approx(2.0 * Attraction()(X), rel=1e-14)
    assert known_structure(oa.MultiHeadAttention([oa.FunctionAttention(lambda x, mu: x, 2)], [np.eye(2)])) is None
    with pytest.raises(ValueError, match="received Consensus"):
        oa.flow_radius_bound(Consensus(), 1.0, 1.0)
    with pytest.raises(ValueError, match="received Consensus"):
        oa.flow(Consensus(), X, t_span=(0.0, 1.0), normalization="rescaled")
    with pytest.raises(ValueError, match="received Consensus"):
        oa.token_leaders(run)


def test_the_catalogue_says_why_no_theorem_applies() -> None:
    catalogue = oa.theorems(Consensus(), domain=BALL, n=4)
    assert all(not row["applies"] and row["reason"] for row in catalogue.rows())
    assert sum("Consensus" in row["reason"] for row in catalogue.rows()) > 10
    with pytest.raises(ValueError, match="no upper bound applies to Consensus"):
        oa.lipschitz_upper_bound(Consensus(), domain=BALL, n=4)


@pytest.mark.parametrize("attention", [Consensus(), oa.FunctionAttention(lambda x, mu: x)], ids=["class", "function"])
def test_a_bound_at_one_measure_says_why_not(attention: AttentionMap) -> None:
    with pytest.raises(ValueError, match="at_measure_bound does not apply: attention must be built of softmax"):
        oa.at_measure_bound(attention, X)


def test_a_theorem_that_is_registered_is_used_everywhere(consensus_bound: str) -> None:
    rows = {row["theorem"]: row for row in oa.theorems(Consensus(), domain=BALL, n=4).rows()}
    assert rows[consensus_bound]["applies"]
    soft = oa.SoftmaxAttention(np.eye(2), np.eye(2))
    assert {r["theorem"]: r["reason"] for r in oa.theorems(soft, n=4, radius=1.0).rows()}[consensus_bound] == (
        "attention must be Consensus, received SoftmaxAttention"
    )
    for p in (1, 2, math.inf):
        assert oa.lipschitz_upper_bound(Consensus(), domain=BALL, n=4, p=p).theorem == consensus_bound
    enclosure = oa.enclose_lipschitz(Consensus(), domain=BALL, n=4, rng=0)
    assert enclosure.lower.value <= enclosure.upper.value == 2.0
