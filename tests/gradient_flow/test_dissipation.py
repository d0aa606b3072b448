"""The energy balance along flows."""

import json

import numpy as np
import pytest

from otattn.attention import (
    ExponentialAttention,
    LinearAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.errors import ConvergenceError
from otattn.gradient_flow import energy_dissipation
from otattn.measures import DiscreteMeasure

KINDS = [
    SoftmaxAttention,
    SinkhornAttention,
    ExponentialAttention,
    LinearAttention,
    ReLUAttention,
    SigmoidAttention,
]


def _setting(seed: int, d: int, n: int = 7) -> tuple[np.ndarray, DiscreteMeasure]:
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((d, d)) / np.sqrt(d)
    return (B + B.T) / np.sqrt(2.0), DiscreteMeasure.normalized(rng.standard_normal((n, d)), 0.2 + rng.random(n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("c", [1.0, -0.5])
def test_energy_balance(kind: type, c: float) -> None:
    for d in (1, 2, 4):
        A, mu = _setting(d, d)
        result = energy_dissipation(kind(A, c * A), mu)
        assert result.defect < 1e-6
        assert result.coefficient == pytest.approx(c, rel=1e-12)
        steps = np.diff(result.energies)
        assert (steps > 0).all() if c > 0 else (steps < 0).all()
        # the identity is not passed by standing still
        assert abs(result.energies[-1] - result.energies[0]) > 1e-4 * abs(result.energies[0])


def test_balance_over_a_long_time() -> None:
    A, mu = _setting(11, 3)
    # the energy falls from 0.1 to 1e-45 on the way: the absolute error of the integrator is what is left
    result = energy_dissipation(SoftmaxAttention(A, -A), mu, t_span=(0.0, 5.0), n_times=9)
    assert result.defect < 1e-8
    assert result.energies[-1] < 1e-30 * result.energies[0]
    assert (np.diff(result.energies) < 0).all()
    result = energy_dissipation(SinkhornAttention(A, -A), mu, t_span=(0.0, 5.0))
    assert result.defect < 1e-8


def test_closed_form_of_one_token() -> None:
    """``x' = a x`` for softmax with ``V = A = a`` and one token; ``E = exp(a x^2) / 2``."""
    a = 0.5
    result = energy_dissipation(SoftmaxAttention([[a]], [[a]]), [[1.0]], t_span=(0.0, 1.0))
    x = np.exp(a * result.times)
    assert np.allclose(result.energies * np.exp(result.log_scale), 0.5 * np.exp(a * x * x), rtol=1e-9)
    assert result.mobility


def test_the_wrong_mobility_fails() -> None:
    """Without the weight Z the balance of softmax is off: the identity tells structures apart."""
    A, mu = _setting(12, 2)
    attention = SoftmaxAttention(A, A)
    result = energy_dissipation(attention, mu)
    speed = attention(mu.points, mu)
    plain = float(mu.weights @ np.sum(speed**2, axis=1)) * result.times[1] * np.exp(-result.log_scale)
    first = result.energies[1] - result.energies[0]
    assert abs(plain - first) > 0.1 * abs(first)


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_huge_logits(scale: float) -> None:
    A, mu = _setting(13, 3)
    result = energy_dissipation(SoftmaxAttention(scale * A, -scale * A), mu)
    assert result.log_scale > scale
    assert result.defect < 1e-8


def test_exponentials_beyond_the_square_root_of_float64() -> None:
    """Velocities of 1e200: their squares are not representable, the balance is."""
    A = np.array([[1.0, 0.3], [0.3, 0.5]])
    mu = np.array([[21.0, 1.0], [20.0, -2.0], [1.0, 0.5]])
    result = energy_dissipation(ExponentialAttention(A, A), mu)
    assert result.log_scale > 400.0
    assert result.defect < 1e-6


def test_stationary_measures() -> None:
    result = energy_dissipation(LinearAttention(np.eye(2), np.eye(2)), np.zeros((3, 2)))
    assert result.defect == 0.0
    assert np.array_equal(result.work, np.zeros(len(result.times)))


def test_heads_and_unwrapping() -> None:
    A, mu = _setting(14, 3)
    eye = np.eye(3)
    one = energy_dissipation(MultiHeadAttention([SoftmaxAttention(A, eye)], [A]), mu)
    assert one.mobility
    assert one.defect < 1e-8
    two = energy_dissipation(MultiHeadAttention([SinkhornAttention(A, A), SigmoidAttention(-A, A)]), mu)
    assert two.defect < 1e-8


def test_results_verify_and_export() -> None:
    A, mu = _setting(15, 2)
    result = energy_dissipation(SinkhornAttention(A, A), mu)
    assert result.verify()
    data = json.loads(json.dumps(result.to_dict()))
    assert data["energy"].startswith("SinkhornEnergy(")
    assert "ascent of SinkhornEnergy" in repr(result)
    object.__setattr__(result, "work", 1.01 * result.work)
    assert not result.verify()


def test_bad_input() -> None:
    A, mu = _setting(16, 2)
    with pytest.raises(ValueError, match="known energy"):
        energy_dissipation(SoftmaxAttention(A, np.eye(2)), mu)
    with pytest.raises(ValueError, match="t_span"):
        energy_dissipation(SoftmaxAttention(A, A), mu, t_span=(0.0, -1.0))
    with pytest.raises(ValueError, match="n_times must be at least 2"):
        energy_dissipation(SoftmaxAttention(A, A), mu, n_times=1)
    # x' = x^3 blows up at t = 1/2
    with pytest.raises((ConvergenceError, OverflowError)):
        energy_dissipation(LinearAttention([[1.0]], [[1.0]]), [[1.0]], t_span=(0.0, 0.6))
