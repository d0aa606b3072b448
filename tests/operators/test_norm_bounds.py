"""Norms from both sides: against 50 digits, against known spectra, and against starts that miss the top vector."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy.sparse import diags_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from scipy.stats import binom

from otattn.attention import SoftmaxAttention
from otattn.attention import memory as attention_memory
from otattn.operators import FusedJacobian, NormBounds, spectral_norm_bounds
from otattn.operators import norm_bounds as module
from otattn.operators.proved_norm import proved_norm, radius_norm

LARGE = 3000


def diagonal(values):
    """A diagonal operator, which is not written out as a matrix."""
    w = np.asarray(values, dtype=float)
    return LinearOperator((len(w), len(w)), matvec=lambda x: w * x, rmatvec=lambda x: w * x, dtype=np.dtype(float))


def exact_norm(M):
    with mpmath.workdps(50):
        gram = mpmath.matrix(M.tolist())
        gram = gram.T * gram if M.shape[0] >= M.shape[1] else gram * gram.T
        return mpmath.sqrt(max(mpmath.eigsy(gram, eigvals_only=True)))


SPECTRA = {
    "uniform": (np.linspace(0.0, 1.0, LARGE), 1e-4),
    "geometric": (0.97 ** np.arange(LARGE), 1e-6),
    "gap": (np.r_[1.0, np.linspace(0.0, 0.9, LARGE)], 1e-6),
    "near double": (np.r_[1.0, 1.0 - 1e-6, np.linspace(0.0, 0.9, LARGE)], 1e-6),
    "double": (np.r_[1.0, 1.0, np.linspace(0.0, 0.9, LARGE)], 1e-6),
    "identity": (np.ones(LARGE), 1e-6),
    "rank one": (np.r_[1.0, np.zeros(LARGE)], 1e-6),
    "alone above a cluster": (np.r_[1.001, np.full(20 * LARGE, 1.0)], 1e-6),
    "clustered": (np.r_[1.0 - 1e-3 * np.arange(20), np.linspace(0.0, 0.5, LARGE)], 1e-6),
}


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150, 1e-300])
@pytest.mark.parametrize("name", SPECTRA)
def test_known_spectra(name, scale):
    values, tol = SPECTRA[name]
    truth = float(scale * values.max())
    lower, upper, how = spectral_norm_bounds(diagonal(scale * values), tol=tol)
    assert how == "probabilistic"
    assert lower <= truth <= upper
    assert upper <= (1.0 + tol) * lower * (1.0 + 1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 2), (5, 3), (3, 7), (9, 9)])
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150, 3e-308, 5e-322, 1e307])
def test_proved_against_fifty_digits(shape, scale):
    rng = np.random.default_rng([*shape, 7])
    for M in (rng.normal(size=shape), rng.random(shape), np.ones(shape), rng.normal(size=shape) ** 9):
        given = M / np.abs(M).max() * scale
        truth, upper = exact_norm(given), proved_norm(given)
        assert mpmath.mpf(upper) >= truth
        if scale > 1e-300:
            assert upper <= float(truth) * (1.0 + 1e-12)
        lower, high, how = spectral_norm_bounds(given)
        assert how == "proved"
        assert high == upper
        assert mpmath.mpf(lower) <= truth


@pytest.mark.parametrize("seed", range(20))
def test_proved_where_the_trial_value_is_wrong(monkeypatch, seed):
    """The factorisation decides, not the iteration that proposes."""
    from otattn.operators import proved_norm as room

    M = np.random.default_rng(seed).normal(size=(12, 9))
    good = proved_norm(M)
    monkeypatch.setattr(room, "_trial", lambda S: 0.3 * float(np.linalg.eigvalsh(S)[-1]))
    bad = room.proved_norm(M)
    assert exact_norm(M) <= mpmath.mpf(bad)
    assert good <= bad <= 1.5 * good


def test_proved_norm_of_a_larger_matrix():
    rng = np.random.default_rng(0)
    values = np.r_[2.0, np.linspace(1.9, 0.0, 299)]
    M = (np.linalg.qr(rng.normal(size=(400, 300)))[0] * values) @ np.linalg.qr(rng.normal(size=(300, 300)))[0]
    for given in (M, M.T):
        assert 2.0 <= proved_norm(given) * (1.0 + 1e-14) <= 2.0 * (1.0 + 1e-9)


def test_radius_norm():
    R = np.array([[3.0, 0.0], [4.0, 0.0]])
    assert 5.0 <= radius_norm(R) <= np.sqrt(28.0) * (1 + 1e-14)
    assert radius_norm(np.zeros((2, 3))) <= 1e-300


def rate(failure, dimension, runs, **options):
    """How often the bound of one step misses a top value that stands alone above a cluster."""
    operator = diagonal(np.r_[1.5, np.ones(dimension - 1)])
    found = [spectral_norm_bounds(operator, failure=failure, rng=seed, **options) for seed in range(runs)]
    assert all(b.how == "probabilistic" and b.lower <= 1.5 for b in found)
    return sum(b.upper < 1.5 for b in found)


@pytest.mark.parametrize("failure", [0.1, *(pytest.param(failure, marks=pytest.mark.slow) for failure in (0.3, 0.03))])
def test_failures_are_as_rare_as_stated(failure):
    """After one step the bound fails exactly where the start has less of the top vector than it was granted.

    The number of failures is binomial; its probability differs from the stated one by at most a few percent of it.
    """
    runs = 400
    misses = rate(failure, 2000, runs, max_iter=1)
    assert misses <= binom.ppf(1.0 - 1e-6, runs, failure)
    # it is sharp: a bound that is wider than it need be would be of no use
    assert misses >= binom.ppf(1e-6, runs, 0.9 * failure)


def test_small_failure_never_seen():
    assert rate(1e-9, 2000, 100, max_iter=1) == 0


@pytest.mark.parametrize("failure", [0.1, 0.01])
def test_stopping_does_not_spend_the_probability(failure):
    """The event belongs to the start: whatever the number of steps at which the iteration likes to stop."""
    runs, values = 150, np.r_[1.0, np.full(2000, 1.0 - 1e-5), np.linspace(0.0, 0.5, 50)]
    operator = diagonal(values)
    misses = sum(spectral_norm_bounds(operator, failure=failure, rng=s, tol=0.3).upper < 1.0 for s in range(runs))
    assert misses <= binom.ppf(1.0 - 1e-6, runs, failure)


@pytest.mark.parametrize("dimension", [2, 3, 10, 300])
def test_share_of_a_uniform_start(dimension):
    """``P(|<v, q>| < t)`` itself, from its distribution: the square is a beta variable."""
    from scipy.stats import beta

    for failure in (0.9, 0.1, 1e-3):
        t = module._threshold(failure, dimension)
        assert (0.55 if dimension < 4 else 0.75) * failure <= beta.cdf(t**2, 0.5, 0.5 * (dimension - 1)) <= failure


@pytest.mark.parametrize("size", [1, 2, 5])
def test_few_dimensions(monkeypatch, size):
    monkeypatch.setattr(module, "DENSE_PRODUCTS", 0)
    values = np.linspace(1.0, 3.0, size)
    bounds = spectral_norm_bounds(diagonal(values))
    assert bounds.how == "probabilistic"
    assert bounds.lower <= values.max() <= bounds.upper <= values.max() * (1.0 + 1e-6)


def test_zero_operators():
    for operator in (np.zeros((3, 5)), diagonal(np.zeros(4)), diagonal(np.zeros(LARGE))):
        assert spectral_norm_bounds(operator)[:2] == (0.0, 0.0)
    assert spectral_norm_bounds(np.zeros((3, 5))).how == "proved"


def test_matrices_and_operators_are_named_for_what_they_are():
    M = np.random.default_rng(0).normal(size=(6, 4))
    assert spectral_norm_bounds(M).how == "proved"
    assert spectral_norm_bounds(M.tolist()) == spectral_norm_bounds(M)
    assert spectral_norm_bounds(diags_array(np.arange(1.0, 5.0))).how == "proved"
    for operator in (aslinearoperator(M), aslinearoperator(M.T)):
        bounds = spectral_norm_bounds(operator)
        assert isinstance(bounds, NormBounds)
        assert bounds.how == "computed"
        assert bounds.upper == pytest.approx(float(exact_norm(M)), rel=1e-12)


def test_jacobians_of_attention():
    rng = np.random.default_rng(1)
    attention, X = SoftmaxAttention(0.3 * rng.normal(size=(8, 8)), rng.normal(size=(8, 8))), rng.normal(size=(40, 8))
    truth = float(np.linalg.norm(attention.jacobian(X).to_dense(), 2))
    fused = FusedJacobian(attention, X)
    kinds = [(attention.jacobian(X), "computed"), (fused, "probabilistic"), (fused.astype(np.float32), "probabilistic")]
    for J, kind in kinds:
        lower, upper, how = spectral_norm_bounds(J)
        assert how == kind
        assert lower <= truth * (1 + 1e-13)
        assert truth <= upper * (1 + 1e-13)
        assert upper <= (1 + 1.001e-6) * lower


def test_a_wide_bound_is_still_a_bound(monkeypatch):
    values = np.linspace(0.0, 1.0, LARGE)
    for steps in (1, 2, 5, 30):
        lower, upper, _ = spectral_norm_bounds(diagonal(values), max_iter=steps)
        assert lower <= 1.0 <= upper
    # no memory for the basis: it is not kept, and the bound holds without orthogonality
    monkeypatch.setattr(attention_memory, "MEMORY_BUDGET", 20 * 8 * LARGE)
    lower, upper, _ = spectral_norm_bounds(diagonal(values), tol=1e-4)
    assert 0.99 <= lower <= 1.0 <= upper <= 1.0 + 2e-4


def test_what_rounding_hides_is_not_promised():
    """A start with ``1e-17`` of the top vector is not told from rounding: rarer failures take more runs instead."""
    values = np.r_[1.5, np.ones(LARGE - 1)]
    for failure in (1e-9, 1e-30, 1e-100):
        lower, upper, _ = spectral_norm_bounds(diagonal(values), failure=failure)
        assert lower <= 1.5 <= upper <= 1.5 * (1.0 + 1e-6)


def test_noisy_products_are_counted(monkeypatch):
    """Products that round by 1e-10 need that in the model; then the bound holds, and is as wide."""
    w, noise = np.r_[1.0, np.linspace(0.0, 0.9, LARGE)], np.random.default_rng(0)

    def product(x):
        y = w * x
        kick = noise.normal(size=y.size)
        return y + 1e-11 * np.linalg.norm(x) * kick / np.linalg.norm(kick)

    operator = LinearOperator((w.size, w.size), matvec=product, rmatvec=product, dtype=np.dtype(float))
    monkeypatch.setattr(module, "PRODUCT_ROUNDING", 4e-11 / np.finfo(float).eps)
    lower, upper, _ = spectral_norm_bounds(operator, tol=1e-4)
    assert lower <= 1.0 <= upper <= 1.0 + 1e-3


@pytest.mark.parametrize("name", ["geometric", "gap", "identity", "alone above a cluster"])
def test_products_in_single_precision(name):
    """They round a billion times more: more runs, each of which is granted more, and a wider bound."""
    w = SPECTRA[name][0].astype(np.float32)
    operator = LinearOperator((w.size, w.size), matvec=lambda x: w * x.astype(np.float32), dtype=np.dtype(np.float32))
    operator.rmatvec = operator.matvec
    lower, upper, how = spectral_norm_bounds(operator, tol=1e-2)
    assert how == "probabilistic"
    assert lower <= float(w.max()) <= upper <= 1.01 * lower


def test_a_start_that_the_operator_knows_is_not_random():
    """The probability is over the starts: an operator made from them escapes, and is found with any others."""
    rng = np.random.default_rng(0)
    starts = np.stack([rng.standard_normal(LARGE) for _ in range(2)])
    starts /= np.linalg.norm(starts, axis=1, keepdims=True)
    v = np.random.default_rng(99).normal(size=LARGE)
    for _ in range(2):
        v -= np.linalg.lstsq(starts.T, v, rcond=None)[0] @ starts
    v /= np.linalg.norm(v)

    def product(x):
        return x + v * (v @ x)  # the identity, and 2 in the direction v

    operator = LinearOperator((LARGE, LARGE), matvec=product, rmatvec=product, dtype=np.dtype(float))
    assert spectral_norm_bounds(operator, rng=0).upper < 1.9
    for seed in range(1, 6):
        assert 2.0 <= spectral_norm_bounds(operator, rng=seed).upper <= 2.0 * (1 + 1e-6)


def test_whole_numbers_that_float64_does_not_hold():
    assert spectral_norm_bounds(np.array([[2**53 - 1]])).how == "proved"
    assert spectral_norm_bounds(np.array([[2**53 + 1]])).how == "computed"


def test_refusals():
    with pytest.raises(ValueError, match="probability"):
        spectral_norm_bounds(np.eye(2), failure=1.0)
    with pytest.raises(ValueError, match="failure"):
        spectral_norm_bounds(np.eye(2), failure=0.0)
    with pytest.raises(ValueError, match="max_iter"):
        spectral_norm_bounds(np.eye(2), max_iter=0)
    with pytest.raises(ValueError, match="real"):
        spectral_norm_bounds(1j * np.eye(2))
    with pytest.raises(ValueError, match="finite"):
        spectral_norm_bounds(diagonal(np.r_[np.nan, np.ones(LARGE)]))
    with pytest.raises(OverflowError, match="finite"):
        proved_norm(np.array([[np.inf]]))
