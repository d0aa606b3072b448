"""The largest singular value against dense decompositions, closed forms and its own error bar."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import diags_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from otattn.attention import (
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.attention import memory as attention_memory
from otattn.data import load_sample
from otattn.errors import ConvergenceError
from otattn.measures import DiscreteMeasure
from otattn.operators import FusedJacobian, SingularValueError, measure_jacobian, top_singular

SPECTRA = {
    "random": np.sort(np.random.default_rng(0).random(150))[::-1],
    "geometric": 0.8 ** np.arange(80),
    "clustered above": np.r_[1.0 - 1e-3 * np.arange(20), np.linspace(0.5, 0.0, 60)],
    "near double": np.r_[1.0, 1.0 - 1e-6, np.linspace(0.9, 0.0, 60)],
    "double": np.r_[2.0, 2.0, np.linspace(1.9, 0.0, 60)],
    "alone above a cluster": np.r_[1.0, np.full(199, 0.999)],
    "identity": np.ones(40),
    "rank one": np.r_[3.0, np.zeros(50)],
    "tiny": 1e-200 * np.r_[1.0, 0.5, 0.3],
    "huge": 1e200 * np.r_[1.0, 0.5, 0.3],
}


def matrix(values, *, rows=None, seed=0):
    rng = np.random.default_rng(seed)
    n = len(values)
    m = n if rows is None else rows
    U = np.linalg.qr(rng.normal(size=(m, n)))[0]
    W = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return (U * values) @ W.T


def check(result, operator, truth):
    assert result.converged
    # never above the largest singular value, and within what was promised
    assert result.value <= truth * (1 + 1e-13)
    assert abs(result.value - truth) <= result.tol * truth
    assert result.verify(operator)
    right, left = result.right.ravel(), result.left.ravel()
    assert np.linalg.norm(right) == pytest.approx(1.0, abs=1e-12)
    image = aslinearoperator(np.asarray(operator) if isinstance(operator, list) else operator).matvec(right)
    np.testing.assert_allclose(image, result.value * left, rtol=0, atol=1e-12 * truth)


@pytest.mark.parametrize("precision", ["fast", "precise"])
@pytest.mark.parametrize("name", SPECTRA)
def test_known_spectra(name, precision):
    values = SPECTRA[name]
    for rows in (len(values), len(values) + 7):
        M = matrix(values, rows=rows)
        result = top_singular(M, precision=precision)
        check(result, M, values.max())
        wide = top_singular(M.T, precision=precision)
        check(wide, M.T, values.max())


@pytest.mark.parametrize("seed", range(20))
def test_error_bar_holds_the_truth(seed):
    rng = np.random.default_rng(seed)
    M = rng.normal(size=(30, 25))
    truth = float(np.linalg.norm(M, 2))
    for tol in (1e-4, 1e-7, 1e-11):
        result = top_singular(M, tol=tol, rng=seed)
        assert abs(result.value - truth) <= result.error_bar <= 1.01 * tol * truth
        assert result.gap_estimate <= result.error_bar


def test_residual_bound_is_what_it_says():
    """Some singular value lies within the error bar, however early the iteration stops."""
    values = SPECTRA["random"]
    M = matrix(values)
    for steps in (1, 2, 4, 8, 16, 32):
        result = top_singular(M, max_iter=steps, allow_unconverged=True)
        assert result.iterations <= steps
        assert np.abs(values - result.value).min() <= result.error_bar
        assert result.value <= values.max() * (1 + 1e-13)


def test_early_stop_is_never_the_constant():
    M = matrix(SPECTRA["clustered above"])
    with pytest.raises(SingularValueError, match="lower value") as caught:
        top_singular(M, precision="precise", max_iter=10)
    assert isinstance(caught.value, ConvergenceError)
    assert 0.5 < caught.value.lower <= 1.0
    assert caught.value.residual > 2e-9
    assert not caught.value.result.converged
    result = top_singular(M, precision="precise", max_iter=10, allow_unconverged=True)
    assert not result.converged
    assert result.lower == result.value == caught.value.lower
    assert "NOT converged" in repr(result)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_too_few_steps_are_not_believed(budget):
    # a random start in a tight cluster has a tiny residual at once
    values = np.r_[1.0, np.full(20_000, 1.0 - 1e-4)]
    operator = aslinearoperator(diags_array(values))
    assert not top_singular(operator, max_iter=budget, allow_unconverged=True).converged
    assert top_singular(operator).value == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("dim", [2, 40, 300])
@pytest.mark.parametrize("precision", ["fast", "precise"])
def test_identical_tokens(dim, precision):
    """Case L4: the norm is that of the value matrix, although it stands 0.1 percent above a cluster."""
    values = np.full(dim, 0.999)
    values[0] = 1.0
    layer = SoftmaxAttention(np.eye(dim), np.diag(values))
    X = np.tile(np.linspace(-1.0, 1.0, dim), (8, 1))
    for operator in (FusedJacobian(layer, X), layer.jacobian(X)):
        assert top_singular(operator, precision=precision).value == pytest.approx(1.0, abs=1e-8)


def test_zero_operators():
    layer = SoftmaxAttention(np.eye(3), np.zeros((2, 3)))
    for operator in (np.zeros((4, 6)), FusedJacobian(layer, np.eye(3)), layer.jacobian(np.eye(3))):
        result = top_singular(operator)
        assert result.value == 0.0
        assert result.converged
        assert result.error_bar == 0.0
        assert not result.left.any()
        assert result.verify(operator)


@pytest.mark.parametrize("size", [1e-250, 1e-100, 1e-20])
def test_small_operators_do_not_vanish(size):
    """Heads that cancel, or values and outputs that miss each other, leave a small operator: not a zero one."""
    X = np.random.default_rng(4).normal(size=(6, 3))
    unit, small = SoftmaxAttention(np.eye(3), np.eye(3)), SoftmaxAttention(np.eye(3), size * np.eye(3))
    layer = MultiHeadAttention([unit, small], [np.zeros((3, 3)), np.eye(3)])
    truth = size * float(np.linalg.norm(unit.jacobian(X).to_dense(), 2))
    for precision in ("fast", "precise"):
        result = top_singular(FusedJacobian(layer, X), precision=precision)
        assert result.value == pytest.approx(truth, rel=result.tol)


def test_one_by_one_and_single_row():
    assert top_singular([[-3.0]]).value == pytest.approx(3.0, rel=1e-15)
    row = np.arange(1.0, 6.0)
    assert top_singular(row[None]).value == pytest.approx(np.linalg.norm(row), rel=1e-12)


def test_restarts_keep_the_memory_and_the_answer(monkeypatch):
    values = np.r_[1.0 - 1e-3 * np.arange(20), np.linspace(0.9, 0.0, 380)]
    M = matrix(values)
    monkeypatch.setattr(attention_memory, "MEMORY_BUDGET", 10 * M.shape[1] * 8)  # ten vectors
    result = top_singular(M, precision="precise")
    assert result.iterations > 40
    check(result, M, 1.0)


@pytest.mark.parametrize("precision", ["fast", "precise"])
def test_restarts_in_both_precisions(monkeypatch, precision):
    maps, X = layers()
    J, free = FusedJacobian(maps["layer"], X), top_singular(FusedJacobian(maps["layer"], X), tol=1e-12)
    J.prepare()
    monkeypatch.setattr(attention_memory, "MEMORY_BUDGET", 8 * X.size)  # the least basis of all
    result = top_singular(J, precision=precision)
    assert result.converged
    assert result.value == pytest.approx(free.value, rel=result.tol)
    with pytest.raises(SingularValueError):
        top_singular(J, tol=1e-12, max_iter=12)


def test_same_seed_same_bits():
    M = matrix(SPECTRA["random"])
    a, b, c = top_singular(M), top_singular(M, rng=0), top_singular(M, rng=np.random.default_rng(5))
    assert a.value == b.value
    np.testing.assert_array_equal(a.right, b.right)
    assert c.value == pytest.approx(a.value, rel=4e-5)


def layers():
    rng = np.random.default_rng(1)
    d, k = 24, 6
    heads = [
        SoftmaxAttention.from_qkv(
            0.4 * rng.normal(size=(k, d)), 0.4 * rng.normal(size=(k, d)), 0.4 * rng.normal(size=(k, d))
        )
        for _ in range(4)
    ]
    layer = MultiHeadAttention(heads, [0.4 * rng.normal(size=(d, k)) for _ in heads])
    return {"head": heads[0], "layer": layer, "masked": MaskedAttention(layer)}, rng.normal(size=(20, d))


@pytest.mark.parametrize("name", ["head", "layer", "masked"])
@pytest.mark.parametrize("precision", ["fast", "precise"])
def test_synthetic_layers(name, precision):
    maps, X = layers()
    J = FusedJacobian(maps[name], X)
    truth = float(np.linalg.norm(maps[name].jacobian(X).to_dense(), 2))
    result = top_singular(J, precision=precision)
    check(result, J, truth)
    assert result.right.shape == (20, 24)
    assert result.left.shape == (20, J.e)
    generic = top_singular(maps[name].jacobian(X), precision=precision)
    check(generic, maps[name].jacobian(X), truth)
    # an operator made in float32 is judged in float64 all the same
    assert top_singular(J.astype(np.float32), precision=precision).value == pytest.approx(truth, rel=result.tol)


def test_weighted_measure():
    maps, X = layers()
    w = np.random.default_rng(2).random(20)
    w[[0, 5]] = 0.0
    mu = DiscreteMeasure(X, w / w.sum())
    live = mu.weights > 0
    J = maps["layer"].jacobian(mu.support()).reweighted(mu.weights[live])
    result = top_singular(measure_jacobian(maps["layer"], mu), precision="precise")
    assert result.value == pytest.approx(np.linalg.norm(J.to_dense(), 2), rel=1e-9)
    assert not result.right[~live].any()


@pytest.mark.parametrize("head", [0, 5, 11])
def test_sample_heads(head):
    sample = load_sample()
    X = sample.tokens(1, 16)
    attention = sample.heads[head]
    truth = float(np.linalg.norm(attention.jacobian(X).to_dense(), 2))
    fast = top_singular(FusedJacobian(attention, X))
    assert abs(fast.value - truth) <= 2e-5 * truth
    assert abs(fast.value - truth) <= fast.error_bar
    assert top_singular(FusedJacobian(attention, X), precision="precise").value == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_sample_layer_fast_against_precise(causal):
    sample = load_sample()
    attention = MaskedAttention(sample.attention) if causal else sample.attention
    X = sample.tokens(2, 48)
    precise = top_singular(FusedJacobian(attention, X), precision="precise")
    fast = top_singular(FusedJacobian(attention, X))
    assert abs(fast.value - precise.value) <= 2e-5 * precise.value
    assert fast.iterations < precise.iterations
    assert precise.value == pytest.approx(top_singular(attention.jacobian(X), tol=1e-11).value, rel=1e-9)


def test_every_other_attention():
    rng = np.random.default_rng(3)
    A, V = 0.3 * rng.normal(size=(4, 4)), rng.normal(size=(4, 4))
    X = rng.normal(size=(7, 4))
    for layer in (L2Attention(A, A, V), SinkhornAttention(A, V, tol=1e-12)):
        J = measure_jacobian(layer, X)
        assert top_singular(J, precision="precise").value == pytest.approx(np.linalg.norm(J.to_dense(), 2), rel=1e-9)


def test_float32_failure_falls_back_to_float64(monkeypatch):
    maps, X = layers()
    J = FusedJacobian(maps["head"], X)
    truth = top_singular(J, precision="precise").value
    honest = FusedJacobian.scaled_gram

    def broken(self, direction):
        out = honest(self, direction)
        return out * np.nan if self.dtype == np.float32 else out

    monkeypatch.setattr(FusedJacobian, "scaled_gram", broken)
    assert top_singular(J).value == pytest.approx(truth, rel=2e-5)


def test_float32_error_is_caught_by_float64(monkeypatch):
    """A wrong float32 operator (here: of another scale in one token) must not spoil the answer."""
    maps, X = layers()
    J = FusedJacobian(maps["layer"], X)
    truth = top_singular(J, precision="precise").value
    honest = FusedJacobian.scaled_gram

    def wrong(self, direction):
        out = honest(self, direction)
        if self.dtype == np.float32:
            mask = np.ones((self.n, 1), np.float32)
            mask[0] = 1.5
            out = mask * honest(self, mask * np.asarray(direction).reshape(self.n, self.d))
        return out

    monkeypatch.setattr(FusedJacobian, "scaled_gram", wrong)
    result = top_singular(J)
    assert result.value == pytest.approx(truth, rel=2e-5)


def test_refusals():
    M = np.eye(3)
    with pytest.raises(ValueError, match="fast"):
        top_singular(M, precision="exact")
    for tol in (1e-15, 0.5):
        with pytest.raises(ValueError, match="tol must lie"):
            top_singular(M, tol=tol)
    with pytest.raises(ValueError, match="max_iter"):
        top_singular(M, max_iter=0)
    with pytest.raises(TypeError, match="rng"):
        top_singular(M, rng="seed")
    with pytest.raises(ValueError, match="real"):
        top_singular(1j * M)
    poisoned = LinearOperator((3, 3), matvec=lambda x: x * np.nan, rmatvec=lambda x: x, dtype=np.dtype(float))
    with pytest.raises(ValueError, match="finite"):
        top_singular(poisoned)
