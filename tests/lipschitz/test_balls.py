"""Ball matrices against fractions and many digits: what is proved is true, and what is nearly true is proved."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest

pytest.importorskip("flint", reason="python-flint is needed for ball arithmetic")

from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import BallMatrix, exact_arithmetic, orthonormal_columns, proves_psd
from otattn.lipschitz.arithmetic.intervals import Interval


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    with exact_arithmetic(), mp.workdps(80):
        yield


def precise(x: np.ndarray) -> mp.matrix:
    return mp.matrix([[mp.mpf(float(t)) for t in row] for row in np.atleast_2d(x)])


def singular(x: np.ndarray) -> mp.mpf:
    M = precise(x)
    gram = M.T * M if M.rows >= M.cols else M * M.T
    return mp.sqrt(max(mp.mpf(0), max(mp.eigsy(gram, eigvals_only=True))))


def fractions(x: np.ndarray) -> list[list[Fraction]]:
    return [[Fraction(float(t)) for t in row] for row in x]


def product(A: list[list[Fraction]], B: list[list[Fraction]]) -> list[list[Fraction]]:
    return [
        [sum((a * b for a, b in zip(row, col, strict=True)), Fraction(0)) for col in zip(*B, strict=True)] for row in A
    ]


def matrices() -> dict[str, np.ndarray]:
    """Ordinary, graded, dependent, tiny, huge."""
    rng = np.random.default_rng(5)
    out = {f"plain{k}": rng.standard_normal(shape) for k, shape in enumerate([(1, 1), (2, 3), (4, 2), (6, 6)])}
    out["graded"] = np.diag(10.0 ** np.arange(0, -40, -8)) @ rng.standard_normal((5, 5))
    out["graded_both"] = out["graded"] @ np.diag(10.0 ** np.arange(20, -20, -8))
    out["rank_one"] = np.outer([1.0, 2.0, 3.0], [0.1, -0.7, 0.3])
    out["tiny"], out["huge"] = 1e-170 * out["plain3"], 1e155 * out["plain3"]
    out["least"] = np.full((2, 2), 5e-324)
    out["mixed"] = np.array([[1e300, 1e-300], [0.0, 1e-300]])
    out["nearly_dependent"] = np.array([[1.0, 1.0], [1.0, 1.0 + 2.0**-50]])
    out["equal"] = np.eye(3)
    out["block"] = np.diag([1.0, 0.0, 1e-12])
    return out


@pytest.mark.parametrize("name", matrices())
def test_spectral_norm_is_above_and_near_the_exact_one(name: str) -> None:
    M = matrices()[name]
    exact, found = singular(M), BallMatrix.exact(M).spectral_norm()
    assert exact <= mp.mpf(float(found.hi)) <= exact * (1 + mp.mpf(10) ** -12) + mp.mpf(1e-323)


@pytest.mark.parametrize("name", matrices())
def test_largest_eigenvalue_is_above_and_near_the_exact_one(name: str) -> None:
    M = matrices()[name]
    if M.shape[0] != M.shape[1]:
        M = M @ M.T
    for S in (0.5 * M + 0.5 * M.T, -0.5 * M @ M.T if np.abs(M).max() < 1e100 else -M - M.T):
        values = mp.eigsy(precise(S), eigvals_only=True)
        size = max(abs(values[0]), abs(values[len(values) - 1]))
        found = BallMatrix.exact(S).largest_eigenvalue()
        assert max(values) <= mp.mpf(float(found.hi)) <= max(values) + size * mp.mpf(10) ** -12 + mp.mpf(1e-323)


def test_zero_matrices_have_no_norm() -> None:
    zero = BallMatrix.exact(np.zeros((3, 2)))
    assert float(zero.spectral_norm().hi) == float(zero.norm().hi) == 0.0
    assert not zero.any()
    assert BallMatrix.exact([[0.0, 5e-324]]).any()
    assert float(BallMatrix.exact(np.zeros((2, 2))).largest_eigenvalue().hi) == 0.0


@pytest.mark.parametrize("name", matrices())
def test_products_hold_the_exact_numbers(name: str) -> None:
    M = matrices()[name]
    exact = product(fractions(M), fractions(M.T))
    found = (BallMatrix.exact(M) @ M.T).interval()
    for i, row in enumerate(exact):
        for j, x in enumerate(row):
            lo, hi = float(found.lo[i, j]), float(found.hi[i, j])
            assert lo == -np.inf or Fraction(lo) <= x
            assert hi == np.inf or x <= Fraction(hi)
            # whatever cancels: two neighbours of the exact number, or the least and the largest floats
            if hi < np.inf and lo > -np.inf:
                assert hi - lo <= 1e-15 * abs(float(x)) + 1e-322


def test_frobenius_norm() -> None:
    for M in matrices().values():
        exact = mp.norm(mp.matrix([mp.mpf(float(t)) for t in M.ravel()]))
        found = BallMatrix.exact(M).norm()
        assert mp.mpf(float(found.lo)) <= exact <= mp.mpf(float(found.hi))


# --- positive semidefinite


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("grading", [0.0, 6.0, 60.0])
def test_nearly_singular_matrices_of_either_sign(size: int, grading: float) -> None:
    """``D (G - x I) D`` with G an exact Gram matrix of integers: the sign of its least eigenvalue is known exactly."""
    rng = np.random.default_rng(size)
    B = rng.integers(-9, 10, (size, size + 1)).astype(float)
    G, D = B @ B.T, np.diag(2.0 ** np.round(grading * rng.uniform(-1.0, 1.0, size)))
    least = min(mp.eigsy(precise(G), eigvals_only=True))
    assert least > 0
    whole = BallMatrix.exact(G)
    for excess, answer in ((-1e-10, True), (1e-10, False), (1e-13, False)):
        shifted = whole - float(least) * (1.0 + excess) * np.eye(size)
        assert proves_psd(BallMatrix.exact(D) @ shifted @ D) is answer


@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_least_eigenvalue_below_zero_is_never_proved(size: int) -> None:
    rng = np.random.default_rng(3)
    U = np.linalg.qr(rng.standard_normal((size, size)))[0]
    for low in (-1e-13, -1e-11, -1.0, -1e-300):
        # the exact product of the floats, with eigenvectors near U
        D = np.diag(np.append(np.ones(size - 1), low))
        M = BallMatrix.exact(U) @ D @ U.T
        assert not proves_psd(M)
        assert not proves_psd(M * 1e-200)
    assert not proves_psd(BallMatrix.exact([[1.0, 0.0], [0.0, -1e-13]]))
    assert not proves_psd(BallMatrix.exact([[0.0, 1e-300], [1e-300, 1.0]]))
    assert not proves_psd(BallMatrix.exact([[0.0, 0.0], [0.0, -5e-324]]))


def test_semidefinite_matrices_that_are_proved() -> None:
    assert proves_psd(BallMatrix.exact(np.zeros((3, 3))))
    assert proves_psd(BallMatrix.exact(np.diag([1e-300, 0.0, 1e300])))
    assert proves_psd(BallMatrix.exact(np.diag([5e-324, 1.0])))
    assert proves_psd(BallMatrix.exact([[1e-200, 1e-110], [1e-110, 2.0]]) + np.diag([0.0, 1e-10]))


def test_wide_balls_are_not_taken_for_their_centres() -> None:
    wide = BallMatrix.between(Interval.between([[1.0, 0.0], [0.0, -1e-3]], [[1.0, 0.0], [0.0, 1.0]]))
    assert not proves_psd(wide)
    coupled = BallMatrix.between(Interval.between([[1.0, 0.9], [0.9, 1.0]], [[1.0, 1.1], [1.1, 1.0]]))
    assert not proves_psd(coupled)
    safe = BallMatrix.between(Interval.between([[1.0, 0.3], [0.3, 1.0]], [[1.1, 0.6], [0.6, 1.1]]))
    assert proves_psd(safe)


def test_a_wide_ball_on_a_small_diagonal_entry_does_not_drown_the_rest() -> None:
    """Scaled to one, the entry 1e-14 has a ball of relative radius 0.04, next to a block that is nearly singular."""
    S = np.zeros((3, 3))
    S[:2, :2] = np.outer([0.995, 0.0995], [0.995, 0.0995])
    M = np.eye(3) * (1.0 + 1e-14) * float(S[0, 0] + S[1, 1]) - S
    M[2, 2] = 1e-14
    low, high = M.copy(), M.copy()
    low[2, 2], high[2, 2] = M[2, 2] - 4e-16, M[2, 2] + 4e-16
    assert proves_psd(BallMatrix.between(Interval.between(low, high)))


# --- bases


def gap(U: BallMatrix) -> float:
    """The largest entry of ``|U U^T - I|`` that the balls allow."""
    rest = (U @ U.T - np.eye(len(U))).interval()
    return float(np.maximum(np.abs(rest.lo), np.abs(rest.hi)).max())


def test_orthonormal_columns_span_what_was_given() -> None:
    rng = np.random.default_rng(8)
    for rows in (
        rng.standard_normal((3, 7)),
        np.array([[1.0, 1.0, 0.0], [1.0, 1.0 + 1e-9, 0.0]]),
        np.array([[1e-200, 0.0], [1e200, 1e200]]),
    ):
        U = orthonormal_columns([rows[:1], rows[1:]]).T
        assert U is not None
        assert gap(U) < 1e-25
        size = float(np.abs(rows).max())
        missed = (BallMatrix.exact(rows) - (BallMatrix.exact(rows) @ U.T) @ U).interval()
        assert float(np.abs(missed.hi).max()) <= 1e-15 * size
        assert (missed.lo <= 0.0).all()
        assert (missed.hi >= 0.0).all()


@pytest.mark.parametrize(
    "rows", [[[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]
)
def test_dependent_rows_have_no_basis(rows: list[list[float]]) -> None:
    assert orthonormal_columns([np.array(rows)]) is None


# --- conversions


def test_ends_of_balls_are_outward() -> None:
    third = (BallMatrix.exact([[1.0]]) / 3.0).interval()
    assert Fraction(float(third.lo[0, 0])) < Fraction(1, 3) < Fraction(float(third.hi[0, 0]))
    tiny = (BallMatrix.exact([[1e-300]]) * 1e-300).interval()
    assert float(tiny.hi[0, 0]) > 0.0
    assert float(tiny.lo[0, 0]) <= 0.0
    large = (BallMatrix.exact([[1e300]]) * 1e300).interval()
    assert float(large.hi[0, 0]) == np.inf
    assert np.isfinite(large.lo[0, 0])


@pytest.mark.parametrize("factor", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_none_are_refused(factor: float) -> None:
    M = BallMatrix.exact(np.eye(2))
    with pytest.raises(CertificateError, match="finite"):
        M * factor
    with pytest.raises(CertificateError, match="finite"):
        M / factor
    with pytest.raises(CertificateError, match="finite"):
        BallMatrix.exact([[factor]])
    with pytest.raises(CertificateError, match="finite"):
        M * Interval.between(1.0, np.inf)


def test_scaling_by_vectors_is_that_of_numpy() -> None:
    M, row, column = np.arange(6.0).reshape(2, 3), np.array([2.0, 3.0, 5.0]), np.array([[7.0], [11.0]])
    np.testing.assert_array_equal((BallMatrix.exact(M) * row).mid(), M * row)
    np.testing.assert_array_equal((column * BallMatrix.exact(M)).mid(), column * M)
    np.testing.assert_array_equal((BallMatrix.exact(row) * row).mid(), row * row)
    np.testing.assert_array_equal((M @ BallMatrix.exact(row)).mid(), M @ row)
    np.testing.assert_array_equal(BallMatrix.exact(M)[:, [True, False, True]].mid(), M[:, [0, 2]])
