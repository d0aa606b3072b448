r"""Matrices of balls: products without rounding to speak of, and eigenvalue bounds that are proved.

Entries are Arb balls (python-flint, extra ``proof``) of 192 bits, so float matrices enter exactly and their products keep
every digit that matters, whatever cancels. A bound of eigenvalues is proved from a factorisation in float64 that nobody
has to trust: when ``E = M - L L^T`` is formed in balls, ``M`` is positive semidefinite as soon as
``||E - s I||_F <= s``, since ``M = L L^T + s I + (E - s I)``. Candidates for eigenvalues come from LAPACK; only those that
pass this test are returned.

The class has the few operations of numpy arrays that the theorems use, so that one formula serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array
from otattn.attention.head import FLOATS, Arithmetic
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.intervals import Interval

BITS = 192
_LADDER = (1.0, 8.0, 64.0, 4096.0)
"""Multiples of the usual backward error that are tried as the margin of an eigenvalue."""


def _flint() -> Any:
    try:
        import flint
    except ImportError as exc:
        raise ImportError(
            "a rigorous proof needs python-flint, which is not installed; install it with pip install 'otattn[proof]'."
        ) from exc
    return flint


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """The precision of the balls within the block."""
    flint = _flint()
    with flint.ctx.workprec(BITS):
        yield


class BallMatrix:
    """A matrix ``(m, n)`` or vector ``(n,)`` of real numbers, each known to lie in a ball."""

    __array_ufunc__ = None
    __slots__ = ("balls", "ndim")

    def __init__(self, balls: Any, ndim: int = 2) -> None:
        self.balls, self.ndim = balls, ndim

    @classmethod
    def exact(cls, x: Any) -> BallMatrix:
        """The floats of an array, as they are (a vector is kept as a row)."""
        if isinstance(x, BallMatrix):
            return x
        a = np.asarray(x, dtype=np.float64)
        if not np.isfinite(a).all():
            raise CertificateError("a matrix must be finite for a rigorous proof, received nan or inf.")
        rows = np.atleast_2d(a)
        flint = _flint()
        balls = flint.arb_mat(rows.tolist()) if rows.size else flint.arb_mat(*rows.shape)
        return cls(balls, a.ndim)

    @classmethod
    def between(cls, x: Interval) -> BallMatrix:
        """Balls around the intervals of a matrix."""
        return cls(_flint().arb_mat([[_ball(v) for v in row] for row in x]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as of a numpy array."""
        m, n = self.balls.nrows(), self.balls.ncols()
        return (m, n) if self.ndim == 2 else (n,)

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(self.balls.nrows() * self.balls.ncols())

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def T(self) -> BallMatrix:
        """The transpose."""
        return BallMatrix(self.balls.transpose()) if self.ndim == 2 else self

    def mid(self) -> Array:
        """The centres, rounded to float64."""
        m, n = self.balls.nrows(), self.balls.ncols()
        out = np.array([float(x) for x in self.balls.entries()]).reshape(m, n)
        return out if self.ndim == 2 else out[0]

    def interval(self) -> Interval:
        """The entries as float64 intervals around the balls."""
        ends = [_ends(x) for x in self.balls.entries()]
        lo, hi = (np.array([e[k] for e in ends]).reshape(self.shape) for k in (0, 1))
        return Interval.between(lo, hi)

    def any(self) -> bool:
        """True unless every entry is exactly zero."""
        return not all(x.is_zero() for x in self.balls.entries())

    def __matmul__(self, other: Any) -> Any:
        right = BallMatrix.exact(other)
        if self.ndim == 1 and right.ndim == 1:
            return _scalar((self.balls * right.balls.transpose())[0, 0])
        if right.ndim == 1:
            return BallMatrix((self.balls * right.balls.transpose()).transpose(), 1)
        return BallMatrix(self.balls * right.balls, self.ndim)

    def __rmatmul__(self, other: Any) -> Any:
        return BallMatrix.exact(other) @ self

    def __neg__(self) -> BallMatrix:
        return BallMatrix(-self.balls, self.ndim)

    def __add__(self, other: Any) -> BallMatrix:
        return BallMatrix(self.balls + BallMatrix.exact(other).balls, self.ndim)

    def __radd__(self, other: Any) -> BallMatrix:
        return self + other

    def __sub__(self, other: Any) -> BallMatrix:
        return BallMatrix(self.balls - BallMatrix.exact(other).balls, self.ndim)

    def __rsub__(self, other: Any) -> BallMatrix:
        return BallMatrix.exact(other) - self

    def __mul__(self, other: Any) -> BallMatrix:
        """By a number, by a vector (columns scaled), or by a column ``(m, 1)`` (rows scaled)."""
        if isinstance(other, np.ndarray) and other.ndim > 0:
            return self._scaled(other)
        return BallMatrix(self.balls * _ball(other), self.ndim)

    __rmul__ = __mul__

    def _scaled(self, factors: Array) -> BallMatrix:
        flint = _flint()
        if factors.ndim == 2 and factors.shape[1] == 1:
            return BallMatrix.exact(np.diag(factors[:, 0])) @ self
        if self.ndim == 1:
            return BallMatrix(
                flint.arb_mat([[x * f for x, f in zip(self.balls.entries(), map(float, factors), strict=True)]]), 1
            )
        return self @ BallMatrix.exact(np.diag(factors))

    def __truediv__(self, other: Any) -> BallMatrix:
        return BallMatrix(self.balls * (1 / _ball(other)), self.ndim)

    def __getitem__(self, key: Any) -> BallMatrix:
        """Rows, columns or entries, by what numpy understands; a single entry is refused."""
        index = np.arange(self.size).reshape(self.shape)[key]
        if np.ndim(index) == 0:
            raise TypeError("a single entry of a ball matrix is not a number; take a slice.")
        entries = self.balls.entries()
        rows = [[entries[i] for i in row] for row in np.atleast_2d(index)]
        return BallMatrix(_flint().arb_mat(rows), np.ndim(index))

    def column(self) -> BallMatrix:
        """A vector as a matrix of one column."""
        return BallMatrix(self.balls.transpose())

    def bordered(self, b: BallMatrix) -> BallMatrix:
        """The symmetric matrix with one more row and column, ``[[self, b], [b^T, 0]]``."""
        border = b.balls.entries()
        rows = [row + [x] for row, x in zip(self.balls.tolist(), border, strict=True)]
        return BallMatrix(_flint().arb_mat([*rows, [*border, _flint().arb(0)]]))

    def norm(self) -> Any:
        """Frobenius norm, as an interval."""
        ends = (
            sum((end(x) ** 2 for x in self.balls.entries()), _flint().arb(0)).sqrt()
            for end in (lambda x: x.abs_lower(), lambda x: x.abs_upper())
        )
        low, high = (_ends(x) for x in ends)
        return Interval.between(np.float64(low[0]), np.float64(high[1]))

    def spectral_norm(self) -> Any:
        """An upper bound of the largest singular value, proved, above it by rounding only."""
        unit = _unit(self)
        if unit is None:
            return Interval.exact(0.0)
        M = BallMatrix(self.balls * (1 / unit), 2)
        gram = M @ M.T if M.shape[0] <= M.shape[1] else M.T @ M
        return _scalar(_top(gram).sqrt() * unit)

    def largest_eigenvalue(self) -> Any:
        """An upper bound of the largest eigenvalue of a symmetric matrix, proved, above it by rounding only."""
        unit = _unit(self)
        if unit is None:
            return Interval.exact(0.0)
        return _scalar(_top(BallMatrix(self.balls * (1 / unit))) * unit)


def _top(S: BallMatrix) -> Any:
    """A ball at or above the largest eigenvalue of a symmetric matrix with entries of about one."""
    flint = _flint()
    mid = S.mid()
    w = np.linalg.eigvalsh(0.5 * (mid + mid.T))
    size, n = max(abs(float(w[0])), abs(float(w[-1]))), len(w)
    radius = upper_end(_radii(S).norm())
    for factor in _LADDER:
        bound = float(w[-1]) + factor * (8.0 * n * EPS * size + 4.0 * radius)
        if proves_psd(BallMatrix.exact(bound * np.eye(n)) - S):
            return flint.arb(max(bound, 0.0)) if w[-1] >= 0 else flint.arb(bound)
    raise CertificateError(
        f"the largest eigenvalue {w[-1]:.17g} of a matrix of size {n} could not be confirmed in balls; please report it."
    )


def proves_psd(M: BallMatrix) -> bool:
    """True when the symmetric matrix is proved positive semidefinite; False proves nothing."""
    flint = _flint()
    entries = M.balls.entries()
    n = M.shape[0]
    # exact zero rows are left out; the others are scaled by powers of two to diagonal entries in [1/2, 2]
    live = [i for i in range(n) if not all(x.is_zero() for x in entries[i * n : (i + 1) * n])]
    if not live:
        return True
    diagonal = [entries[i * n + i] for i in live]
    if not all(x.is_finite() and x > 0 for x in diagonal):
        return False
    powers = [-(_exponent(x) // 2) for x in diagonal]
    # small diagonal entries with wide balls drown the rest when they are scaled: then one scale for all
    for chosen in (powers, [min(powers)] * len(powers)):
        scaled = [
            [entries[i * n + j] * flint.arb(2) ** (pi + pj) for j, pj in zip(live, chosen, strict=True)]
            for i, pi in zip(live, chosen, strict=True)
        ]
        if _factorised(BallMatrix(flint.arb_mat(scaled))):
            return True
    return False


def _factorised(whole: BallMatrix) -> bool:
    """Whether a Cholesky factor in float64 proves a symmetric matrix with entries of at most about two to be PSD."""
    flint = _flint()
    mid = whole.mid()
    mid = 0.5 * (mid + mid.T)
    k = len(mid)
    radius = 0.0
    for factor in (2.0, 16.0, 256.0):
        shift = factor * k * EPS + 2.0 * radius
        try:
            L = np.linalg.cholesky(mid - shift * np.eye(k))
        except np.linalg.LinAlgError:
            return False
        factorised = BallMatrix.exact(L)
        rest = whole - factorised @ factorised.T - shift * np.eye(k)
        # a product with itself is a sum of squares in C; its upper end is one of the squared norm
        square = (rest.balls * rest.balls.transpose()).trace().upper()
        if square <= flint.arb(shift) ** 2:
            return True
        radius = upper_end(_radii(whole).norm())
    return False


def _radii(M: BallMatrix) -> BallMatrix:
    """The radii of the balls, as a matrix."""
    return BallMatrix(_flint().arb_mat([[x.rad() for x in row] for row in M.balls.tolist()]))


def orthonormal_columns(rows: Sequence[Array]) -> BallMatrix | None:
    """``U (d, r)`` whose columns are an exactly orthonormal basis of the span of the given float rows.

    ``U^T = L^{-1} M`` with ``M M^T = L L^T`` in balls. None when the rows are dependent to working precision.
    """
    flint = _flint()
    M = BallMatrix.exact(np.concatenate(rows))
    gram = (M @ M.T).balls.tolist()
    r = len(gram)
    L = [[flint.arb(0)] * r for _ in range(r)]
    for j in range(r):
        known = flint.arb_mat([[x] for x in L[j][:j]]) if j else None
        below = flint.arb_mat([L[i][:j] for i in range(j, r)]) * known if j else None
        column = [gram[i][j] - (below[i - j, 0] if below is not None else 0) for i in range(j, r)]
        pivot = column[0]
        if not pivot > gram[j][j] * flint.arb(2) ** -80:
            return None
        root = pivot.sqrt()
        for i in range(j, r):
            L[i][j] = column[i - j] / root
    return BallMatrix(flint.arb_mat(L).solve(M.balls).transpose())


def upper_end(x: Any) -> float:
    """The upper end of an interval, or the float itself."""
    return float(x.hi) if isinstance(x, Interval) else float(x)


def _ends(x: Any) -> tuple[float, float]:
    if not x.is_finite():
        return -np.inf, np.inf
    # the conversion to float64 rounds: one step outward
    lo, hi = float(x.lower()), float(x.upper())
    if x.is_exact() and lo == hi and _flint().arb(lo) - x == 0:
        return lo, hi
    return float(np.nextafter(lo, -np.inf)), float(np.nextafter(hi, np.inf))


def _scalar(x: Any) -> Any:
    return Interval.between(*(np.float64(end) for end in _ends(x)))


def _ball(x: Any) -> Any:
    """A number or interval as a ball."""
    flint = _flint()
    if isinstance(x, Interval):
        lo, hi = float(x.lo), float(x.hi)
        if not np.isfinite([lo, hi]).all():
            raise CertificateError("a factor must be finite for a rigorous proof, received an unbounded interval.")
        return flint.arb(lo) if lo == hi else flint.arb(lo).union(flint.arb(hi))
    value = float(x)
    if not np.isfinite(value):
        raise CertificateError(f"a factor must be finite for a rigorous proof, received {value!r}.")
    return flint.arb(value)


def _exponent(x: Any) -> int:
    """The binary exponent of a positive ball's upper end."""
    mantissa, exponent = x.upper().man_exp()
    return int(exponent) + int(mantissa).bit_length()


def _unit(M: BallMatrix) -> Any:
    """A power of two of the size of the largest entry, None when all are zero."""
    flint = _flint()
    top = max((x.abs_upper() for x in M.balls.entries()), default=flint.arb(0))
    return None if top.is_zero() else flint.arb(2) ** _exponent(top)


BALLS = Arithmetic(BallMatrix.exact, orthonormal_columns)
"""The arithmetic of heads whose matrices are balls."""


def arithmetic_of(exact: bool) -> Arithmetic:
    """Balls, or floats."""
    return BALLS if exact else FLOATS
