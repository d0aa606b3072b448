r"""What a Gaussian flow tends to, and the rank of it.

Blow-ups and growth are found in a time whose unit grows with the elapsed time. A flow that does neither is followed
again, over decades of time, until each eigenvalue is seen to stay or to vanish by the criterion of
:mod:`otattn.dynamics.gaussian_settling`; else it is called unsettled, and what is said of its limit is a guess from its
last trends ``d log lambda / d log t``. Decay is algebraic in many cases, and may begin late.

For ``V = I`` and symmetric A a limit has ``Sigma A Sigma = 0``: the form of A vanishes on its range, whose dimension is
therefore at most ``dim ker A + min(#positive, #negative eigenvalues)``, at most ``ceil(d/2)`` for invertible A. For
negative semi-definite A and V with eigenvalues of positive real part the rank is known
(:mod:`otattn.dynamics.low_rank_flow`): a flow that disagrees with it is never called settled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array, symmetrize
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.dynamics.gaussian_closed_form import CovarianceClosedForm, covariance_closed_form
from otattn.dynamics.gaussian_fields import GaussianField, gaussian_field
from otattn.dynamics.gaussian_integrator import split_states
from otattn.dynamics.gaussian_relaxation import DROWNED, LEFT_BEHIND, Relaxation, directions
from otattn.dynamics.gaussian_settling import Followed, follow, follow_alone
from otattn.dynamics.low_rank_flow import low_rank_flow, ranks_by_algebra
from otattn.measures import GaussianMeasure

__all__ = ["GaussianLimit", "LimitStatus", "gaussian_limit", "gaussian_limits", "isotropic_dimension", "scaled_factor"]

Kind = Literal["zero", "finite", "divergent", "blow_up"]
LimitStatus = Literal["closed_form", "followed", "rank_only", "unsettled"]

TREND = 0.25
"""Exponent in t below which an eigenvalue counts as constant."""
TURNED, ROUGH_TOL = 2.0, 1e-7
"""Where trends do not tell: change of ``log tr Sigma / 2`` that counts as growth or decay, and least relative eigenvalue
(after a blow-up 1e-10 of the time is left, so that what does not belong to the limit is about as small)."""
RANK_ROUNDINGS = 16.0


@dataclass(frozen=True, eq=False)
class GaussianLimit(Result):
    """The limit of the covariance of a Gaussian flow.

    Attributes
    ----------
    kind : {"zero", "finite", "divergent", "blow_up"}
        Where the covariance goes; "divergent" as t grows, "blow_up" in finite time.
    covariance : ndarray (d, d)
        The limit; of ``Sigma / tr Sigma`` when Sigma diverges or blows up.
    rank : int
        Its rank.
    blow_up_time : float
        From the start; inf when there is none.
    eigenvalues, trends : ndarray (d,)
        Of the last covariance computed (in units of its largest eigenvalue), and ``d log lambda_i / d log t`` there
        (zeros for a closed form).
    time : float
        Elapsed time of that covariance; inf for a closed form.
    status : {"closed_form", "followed", "rank_only", "unsettled"}
        "followed": followed to where each eigenvalue was seen to stay or to vanish over decades of time (a flow that blows
        up: to 1e-10 of its time; one that grows: to where what is left out is below 1e-7). "rank_only": the covariance still
        moved, but a theorem gives the rank of its limit points. "unsettled": kind, covariance and rank are guesses.
    tol : float
        Relative size below which an eigenvalue counts as zero.
    """

    kind: Kind
    covariance: Array
    rank: int
    blow_up_time: float
    eigenvalues: Array
    trends: Array
    time: float
    status: LimitStatus
    tol: float

    @property
    def settled(self) -> bool:
        """True for a closed form, or a flow that was followed to its limit: kind, rank and covariance are decided."""
        return self.status in ("closed_form", "followed")

    @property
    def exact(self) -> bool:
        """True for a closed form."""
        return self.status == "closed_form"

    def __repr__(self) -> str:
        return (
            f"GaussianLimit({self.kind}, rank {self.rank} of {len(self.covariance)}, {self.status}, t={self.time:.3g})"
        )


def gaussian_limit(attention: AttentionMap, gaussian: GaussianMeasure, *, tol: float = 1e-9) -> GaussianLimit:
    """The limit of the covariance under the Gaussian flow of an attention map.

    Parameters
    ----------
    attention : AttentionMap
        Softmax, L2, Sinkhorn, linear, or several such heads.
    gaussian : GaussianMeasure
    tol : float
        Relative size below which an eigenvalue of the limit counts as zero.

    Returns
    -------
    GaussianLimit

    Raises
    ------
    NotGaussianPreservingError
        The map does not keep Gaussians Gaussian.
    TypeError
        Parameters that depend on time.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> A = [[-1.0, 0.0], [0.0, 0.0]]                              # one direction dies like 1/t, the other stays
    >>> limit = gaussian_limit(SoftmaxAttention(A, np.eye(2)), GaussianMeasure([0.0, 0.0], np.eye(2)))
    >>> limit.kind, limit.rank, limit.covariance.round(12).tolist()
    ('finite', 1, [[0.0, 0.0], [0.0, 1.0]])

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, "A Unified Perspective on the Dynamics of Deep Transformers", 2025.
    """
    if not isinstance(attention, AttentionMap):
        raise TypeError(f"attention must be an attention map (constant in time), received {type(attention).__name__}.")
    attention._check_dim(gaussian.dim)
    size = check.positive(tol, "tol")
    form = covariance_closed_form(attention, gaussian)
    if form is not None:
        return _exact(form, size)
    M, s = scaled_factor(gaussian.cov[None])
    return gaussian_limits(gaussian_field(attention), M, s, gaussian.mean[None], tol=size)[0]


def gaussian_limits(gaussians: GaussianField, M: Array, s: Array, alpha: Array, *, tol: float) -> list[GaussianLimit]:
    """Limits of a stack of Gaussians by integration."""
    if gaussians.autonomous_covariance:
        alpha = np.zeros_like(alpha)  # the mean may leave float64 where the covariance settles
    alive = (M**2).sum(axis=(1, 2)) > 0
    if not alive.all():  # a Dirac mass stays one
        some: Iterator[GaussianLimit] = iter(())
        if alive.any():
            index = np.flatnonzero(alive)
            some = iter(gaussian_limits(gaussians.take(index), M[index], s[index], alpha[index], tol=tol))
        return [next(some) if a else _dirac(alpha.shape[1], tol) for a in alive]
    work = Relaxation(gaussians, M, s, alpha)
    left = np.zeros(len(M), dtype=bool)
    left[work.left] = True
    open_ = np.isinf(work.blow_up_times)
    if not left.all():
        first = _guesses(work, tol)
        # growth is not for the other look, which waits for rest
        open_ &= np.array([left[b] or l.kind != "divergent" for b, l in enumerate(first)])
    index = np.flatnonzero(open_)
    limits: dict[int, GaussianLimit] = {}
    if index.size:
        known = ranks_by_algebra(gaussians.take(index), M[index])
        found = _follow(gaussians.take(index), M[index], s[index], alpha[index])
        limits = {int(b): _seen(found, k, known[k], tol) for k, b in enumerate(index) if found.settled[k]}
    work.finish(np.array([b for b in work.left if int(b) not in limits], dtype=np.intp))
    rest = _guesses(work, tol)
    for k, b in enumerate(index):
        if int(b) not in limits:
            limits[int(b)] = _with_rank(rest[b], known[k])
    return [limits.get(b, rest[b]) for b in range(len(M))]


def _follow(gaussians: GaussianField, M: Array, s: Array, alpha: Array) -> Followed:
    """All at once in the columns that move, or one by one where the field has none that rest."""
    with np.errstate(over="ignore"):
        L = np.exp(s)[:, None, None] * M
    flow = low_rank_flow(gaussians, L) if np.isfinite(L).all() and (L**2).sum(axis=(1, 2)).min() > 0 else None
    return follow_alone(gaussians, M, s, alpha) if flow is None else follow(flow)


def _seen(found: Followed, k: int, known: int | None, tol: float) -> GaussianLimit:
    """The limit of a flow that has settled."""
    lam = found.values[k] ** 2
    kept = found.stays[k] & (lam > tol * lam[0])
    U = found.vectors[k][:, kept]
    rank = int(kept.sum())
    status: LimitStatus = "followed" if known in (None, rank) else "unsettled"
    S, time = symmetrize((U * lam[kept]) @ U.T), float(found.times[k])
    return _verdict(
        "finite" if rank else "zero", S, rank, math.inf, lam[::-1], found.trends[k][::-1], time, status, tol
    )


def _with_rank(guess: GaussianLimit, known: int | None) -> GaussianLimit:
    """A guess, with the rank that a theorem gives; the guess of a limit is nothing that may count as settled."""
    if known is not None:
        return replace(guess, kind="finite" if known else "zero", rank=known, status="rank_only")
    settled = guess.kind in ("divergent", "blow_up") and guess.settled
    return guess if settled else replace(guess, status="unsettled")


def _guesses(run: Relaxation, tol: float) -> list[GaussianLimit]:
    """Verdicts from the last state and its trends."""
    F, scale, alpha, t = split_states(run.y, run.d)
    with np.errstate(over="ignore", invalid="ignore"):
        rates = run.gaussians.rates(F, scale, alpha, t)[0]
    shape = F @ np.swapaxes(F, 1, 2)
    lam, trends, total = directions(F, rates, t)
    vectors = np.linalg.eigh(shape)[1]
    out = []
    for b in range(len(F)):
        where = float(run.blow_up_times[b]), float(t[b]), bool(run.settled[b]), bool(run.turning[b])
        grown = float(scale[b] - run.start[b])
        out.append(_limit(lam[b], vectors[b], trends[b], float(total[b]), float(scale[b]), grown, where, tol))
    return out


def _dirac(d: int, tol: float) -> GaussianLimit:
    return _verdict("zero", np.zeros((d, d)), 0, math.inf, np.zeros(d), np.zeros(d), math.inf, "closed_form", tol)


def _limit(
    lam: Array,
    vectors: Array,
    trends: Array,
    total: float,
    scale: float,
    grown: float,
    where: tuple[float, float, bool, bool],
    tol: float,
) -> GaussianLimit:
    """The verdict on one member: which eigenvalues of ``M M^T`` belong to the limit."""
    blow_up, t, settled, turning = where
    large = lam > tol * lam[-1]
    relative = trends - total
    if blow_up == math.inf and (not settled or (abs(total) <= TREND and grown > DROWNED)):
        # the trend of the trace swings, or has drowned in rounding: its growth so far tells
        settled = False
        total = 2.0 * grown if abs(grown) > TURNED else 0.0
        large = lam > max(tol, ROUGH_TOL) * lam[-1]
        relative = np.zeros_like(lam) if turning else relative
    kind: Kind
    if not lam[-1] > 0:
        kind, kept = "zero", np.zeros_like(large)
    elif blow_up < math.inf:
        kind, kept = "blow_up", lam > max(tol, ROUGH_TOL) * lam[-1]
    elif total > TREND:
        kind, kept = "divergent", large & (relative > -TREND)
        # trends alone do not show that a direction is left behind
        settled &= bool((lam[~kept] <= LEFT_BEHIND * lam[-1]).all())
    elif total < -TREND:
        kind, kept = "zero", np.zeros_like(large)
    else:
        kind, kept = "finite", large & (relative > -TREND)
    part = symmetrize((vectors[:, kept] * lam[kept]) @ vectors[:, kept].T)
    if kind == "finite":
        part = math.exp(2.0 * scale) * part
    elif kept.any():
        part = part / np.trace(part)
    status: LimitStatus = "followed" if settled else "unsettled"
    return _verdict(kind, part, int(kept.sum()), blow_up, lam, trends, t, status, tol)


def _exact(form: CovarianceClosedForm, tol: float) -> GaussianLimit:
    S = form.limit()
    lam = np.maximum(np.linalg.eigvalsh(S), 0.0)
    blow_up = form.blow_up_time
    # a limit of rank zero comes out as rounding of the start
    start = float((form.root**2).sum())
    rank = 0 if lam[-1] <= 1e-13 * start and blow_up == math.inf else int((lam > tol * lam[-1]).sum())
    kind: Kind = "blow_up" if blow_up < math.inf else "finite" if rank else "zero"
    S, still = S if rank else np.zeros_like(S), np.zeros_like(lam)
    return _verdict(kind, S, rank, blow_up, lam, still, math.inf, "closed_form", tol)


def _verdict(
    kind: Kind,
    S: Array,
    rank: int,
    blow_up: float,
    lam: Array,
    trends: Array,
    time: float,
    status: LimitStatus,
    tol: float,
) -> GaussianLimit:
    """The limit of eigenvalues ``lam``, ascending."""
    relative = check.frozen(lam / max(float(lam[-1]), 1e-300))
    return GaussianLimit(kind, check.frozen(S), rank, blow_up, relative, check.frozen(trends), time, status, tol)


def scaled_factor(covs: Array) -> tuple[Array, Array]:
    """``M`` (Frobenius norm 1, or 0) and ``s`` with ``Sigma = e^{2s} M M^T``, for a stack of covariances.

    Eigenvalues within rounding of zero are zeros, so that a degenerate Gaussian stays degenerate.
    """
    w, E = np.linalg.eigh(symmetrize(covs))
    floor = RANK_ROUNDINGS * covs.shape[-1] * np.finfo(np.float64).eps * np.abs(w).max(axis=1, keepdims=True)
    L = E * np.sqrt(np.where(w > floor, w, 0.0))[:, None, :]
    size = np.linalg.norm(L, axis=(1, 2))
    safe = np.where(size > 0, size, 1.0)
    return L / safe[:, None, None], np.log(safe)


def isotropic_dimension(A: ArrayLike, *, tol: float = 1e-9) -> int:
    """``dim ker A + min(#positive, #negative eigenvalues)`` of the symmetric part of A: no limit for V = I has a larger rank.

    Examples
    --------
    >>> isotropic_dimension([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    2
    """
    S = check.matrix(A, "A")
    w = np.linalg.eigvalsh(symmetrize(S))
    cut = tol * max(float(np.abs(w).max()), 1e-300)
    positive, negative = int((w > cut).sum()), int((w < -cut).sum())
    return len(w) - positive - negative + min(positive, negative)
