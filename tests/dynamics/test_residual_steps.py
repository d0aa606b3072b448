"""Finite-depth networks: exactly their layers, and of order one to the flow."""

import numpy as np
import pytest

from otattn.attention import ExponentialAttention, MaskedAttention, Residual, SoftmaxAttention
from otattn.dynamics import depth_convergence, residual_steps

RNG = np.random.default_rng(0)
A, V, X = RNG.normal(size=(3, 3)), RNG.normal(size=(3, 3)), RNG.normal(size=(6, 3))


def test_layers_are_residual_maps():
    layer = Residual(SoftmaxAttention(A, V), scale=0.25)
    out = residual_steps(SoftmaxAttention(A, V), X, depth=4)
    x = X
    for k in range(5):
        assert np.allclose(out.points[k], x, rtol=1e-14)
        x = layer.on_tokens(x)
    assert out.times.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert out.defect() < 1e-15
    own = residual_steps(Residual(SoftmaxAttention(A, V), scale=0.25), X, depth=4, t_span=(0, 4))
    assert np.allclose(own.points, out.points, rtol=1e-14)


@pytest.mark.parametrize("normalization", [None, "sphere", "rescaled"])
@pytest.mark.parametrize("masked", [False, True])
def test_order_one_in_the_depth(normalization, masked):
    """Slopes of the two finest pairs: the error is c/L + O(1/L^2), so 0.98 to 1.02 at L = 400."""
    head = SoftmaxAttention(0.5 * A, 0.5 * V)
    attention = MaskedAttention(head) if masked else head
    study = depth_convergence(attention, X, depths=[100, 200, 400], normalization=normalization)
    assert study.order == pytest.approx(1.0, abs=0.03)
    assert study.errors[-1] < 0.02


def test_layers_that_depend_on_depth():
    """x_{k+1} = x_k + h cos(t_k) x_k."""
    out = residual_steps(lambda t: SoftmaxAttention([[0.0]], [[np.cos(t)]]), [[1.0]], depth=10, t_span=(0, 2))
    assert out.points[-1, 0, 0] == pytest.approx(np.prod(1 + 0.2 * np.cos(0.2 * np.arange(10))), rel=1e-13)


def test_overflow_keeps_the_layers_before():
    out = residual_steps(ExponentialAttention([[1.0]], [[1.0]]), [[3.0]], depth=50)
    assert out.status == "overflow"
    assert "layer" in out.message
    assert len(out) + len(out.missed) == 51
    assert np.isfinite(out.points).all()
    with pytest.raises(ValueError, match="must exist"):
        depth_convergence(ExponentialAttention([[1.0]], [[1.0]]), [[3.0]], depths=[10, 20])


def test_bad_depth():
    with pytest.raises(ValueError, match="depth"):
        residual_steps(SoftmaxAttention(A, V), X, depth=0)
    with pytest.raises(ValueError, match="start < end"):
        residual_steps(SoftmaxAttention(A, V), X, depth=3, t_span=(1, 0))
