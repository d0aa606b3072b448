"""Local Lipschitz constants of the token map at a measure, in W_1, W_2 and W_inf."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.attention.base import Measure, as_attention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.local.far_mass import far_mass
from otattn.lipschitz.local.mixed_norms import mixed_local
from otattn.lipschitz.local.splitting import splitting_beside, splitting_part
from otattn.lipschitz.local.upper_side import UpperKind, constant_above
from otattn.measures import Domain
from otattn.measures.like import MeasureLike
from otattn.operators import FusedJacobian, measure_jacobian, top_singular
from otattn.operators.device import check_device
from otattn.operators.layer import FEW_TOKENS, SoftmaxLayer
from otattn.operators.threads import single_blas_thread

__all__ = ["LocalLipschitz", "local_lipschitz"]

Array = NDArray[np.float64]
_TOO_LARGE = "the derivative must fit in float64; scale the tokens, A or V down."
DENSE_ENTRIES = 40_000
"""Jacobians of at most this many entries are decomposed densely."""


@dataclass(frozen=True, eq=False)
class LocalLipschitz(Result):
    """The local Lipschitz constant at a measure, with its parts and its witness.

    Attributes
    ----------
    value, lower : float
        The constant for uniformly small displacements, ``max(particle, splitting)`` for p = 2 (and ``far_mass`` where
        a domain was given); for p = 1 and inf the lower value of an interval. It is attained, so never above the
        constant (up to the rounding of its evaluation).
    particle : float
        Atoms move as wholes: the norm of ``W^{1/2} J W^{-1/2}``, for equal weights that of the Jacobian.
    splitting : float
        An atom splits, its parts move apart: ``max_i ||D_x Gamma_mu(x_i)||`` (0 for maps of sequences, whose atoms do not).
        Where a ceiling of it is below ``particle``, it is computed when it is first asked for, as tables and ``to_dict`` do.
    splitting_ceiling : float
        Not below the splitting part (that part itself where it is computed); printed in its place until it is known.
    far_mass : float or None
        ``sup_y ||D_x Gamma_mu(y)||`` over the domain, from below.
    left, right : ndarray (n, e), (n, d)
        Top singular vectors of ``W^{1/2} J W^{-1/2}`` (p = 2), the extremal direction otherwise.
    residual : float
        ``|J^T J v - sigma^2 v| / sigma^2``, evaluated in float64 (0 for a dense decomposition).
    iterations : int
        Products with the operator (0 for a dense decomposition).
    failure : float
        Largest probability that ``upper`` is below the constant, where it is "probabilistic".
    seed : int
        Of the random starts of that bound.
    known_splitting : float or None
        ``splitting`` where it has been computed. Files keep what is known; a result that is read computes the rest itself.
    known_upper : float or None
        ``upper`` where it was found together with ``value`` (p = 1 and inf, far mass).
    """

    value: float
    lower: float
    particle: float
    splitting_ceiling: float
    known_splitting: float | None
    far_mass: float | None
    left: Array
    right: Array
    residual: float
    iterations: int
    p: float
    attention: AttentionMap
    mu: Measure
    failure: float
    seed: int
    known_upper: float | None

    @property
    def splitting(self) -> float:
        """The splitting part, from the map and the measure that the result keeps."""
        if self.known_splitting is None:
            object.__setattr__(self, "known_splitting", splitting_part(self.attention, self.mu.support()))
        assert self.known_splitting is not None
        return self.known_splitting

    @property
    def upper(self) -> float:
        """An upper bound of the constant; computed when it is first asked for."""
        return self._above[0]

    @property
    def upper_kind(self) -> UpperKind:
        """What ``upper`` is.

        - "proved": softmax heads, masked or not, with ``n min(d, e) <= 2048``. The derivative is enclosed in interval
          arithmetic and its norm proved by a Cholesky factorisation: all rounding is counted.
        - "computed": other maps of that size whose Jacobian is written out. The same proof, of the matrix of floats (of a
          numerical derivative where a :class:`FunctionAttention` has no other: ``attention.jacobian(mu).error`` is not counted).
        - "probabilistic": beyond it. Over the random starts, it is below the norm with probability at most ``failure``,
          for the linear map that the float products compute and under the model of rounding that
          :func:`~otattn.operators.spectral_norm_bounds` states.
        - "margins": p = 1 and inf. A dual certificate of the computed blocks, rounded outward by a margin.
        - "none": with a domain the far mass is searched, and ``upper`` is infinite.
        """
        return self._above[1]

    @cached_property
    def _above(self) -> tuple[float, UpperKind]:
        if self.known_upper is not None:
            return self.known_upper, "margins" if self.far_mass is None else "none"
        upper, kind = constant_above(
            self.attention, self.mu, self.splitting_ceiling, failure=self.failure, seed=self.seed
        )
        return max(upper, self.lower), kind

    def displacement(self) -> Array:
        """The extremal token displacement ``W^{-1/2} right``, ``(n, d)``; zero on atoms of zero weight."""
        w = self.mu.weights[:, None]
        return np.divide(self.right, np.sqrt(w), out=np.zeros_like(self.right), where=w > 0)

    def bound(self) -> Bound:
        """The constant as a :class:`Bound` of kind "local"."""
        details = {"particle": self.particle, "splitting": self.splitting, "residual": self.residual}
        return Bound(
            self.value,
            "local",
            "otattn, local constant",
            self.p,
            self.mu,
            self.mu.n,
            self.displacement(),
            details,
        )

    def verify(self) -> bool:
        """Recompute the particle part from the stored vectors: ``|J right| = particle`` up to 1e-6."""
        if self.p != 2.0:
            return self.lower <= self.upper * (1 + 1e-12)
        live = self.mu.weights > 0
        J = self.attention.jacobian(self.mu.support()).reweighted(self.mu.weights[live])
        return abs(float(np.linalg.norm(J.jvp(self.right[live]))) - self.particle) <= 1e-6 * max(self.particle, 1e-300)

    def to_dict(self) -> dict[str, Any]:
        return _with_splitting(self, super().to_dict())

    def rows(self) -> list[dict[str, Any]]:
        """One record: the constant, its parts, its residual, order and number of atoms."""
        return [{**_with_splitting(self, super().rows()[0]), "n": self.mu.n}]

    def __repr__(self) -> str:
        known = self.known_splitting
        splitting = f"<={self.splitting_ceiling:.6g}" if known is None else f"={known:.6g}"
        return (
            f"LocalLipschitz({self.value:.6g}, p={self.p:g}, particle={self.particle:.6g}, "
            f"splitting{splitting}, n={self.mu.n})"
        )


def _with_splitting(local: LocalLipschitz, table: dict[str, Any]) -> dict[str, Any]:
    """A table with the splitting part in the place of what was known of it."""
    return {
        "splitting" if key == "known_splitting" else key: local.splitting if key == "known_splitting" else value
        for key, value in table.items()
        if key != "splitting_ceiling"
    }


def local_lipschitz(
    attention: AttentionMap,
    mu: MeasureLike,
    *,
    p: float = 2,
    tol: float = 1e-8,
    domain: Domain | None = None,
    failure: float = 1e-9,
    rng: np.random.Generator | int = 0,
    device: Any = None,
) -> LocalLipschitz:
    r"""The local Lipschitz constant of ``F(mu) = (Gamma_mu)_# mu`` in the W_p metric.

    .. math:: \lim_{r \to 0} \sup \{ W_p(F(\mu), F(\nu)) / W_p(\mu, \nu) \}

    over measures obtained from ``mu`` by moving (and splitting) its atoms by at most r. For p = 2 it is the maximum of
    two norms: the symmetric sector, where atoms move as wholes (``particle``), and the antisymmetric one, where parts of
    an atom move in opposite directions, Gamma does not change to first order and the parts follow the field
    (``splitting``; not computed where a ceiling of it, with its rounding counted, is below the first). For p = 1 and inf
    the two add up atom by atom and what remains is the maximum of a convex function on a sphere: a value from below by
    ascent and one from above by duality are returned.

    Parameters
    ----------
    attention : AttentionMap
    mu : measure or array_like (n, d)
    p : {1, 2, inf}
    tol : float
        Largest relative error of the top singular value, by its residual (p = 2).
    domain : Domain, optional
        Also look for ``far_mass``: a W_2-small perturbation may send a tiny mass anywhere in the domain, whose images
        separate with ``||D_x Gamma_mu(y)||``.
    failure : float
        Largest probability that ``upper`` is below the constant, where it is of the kind "probabilistic" (large n).
    rng : Generator or int
        Starting vectors.
    device : str or torch.device, optional
        Where torch iterates for softmax heads and layers, masked or not (p = 2): "cpu", "cuda". What it finds is evaluated
        by numpy in float64 all the same, so that value, residual and tolerance mean what they mean without it. Small
        Jacobians are decomposed, the splitting part and ``upper`` are found without it.

    Raises
    ------
    ConvergenceError
        The singular value solver did not reach ``tol``; the message gives the value reached (a lower value).

    Examples
    --------
    >>> from otattn.attention import LinearAttention
    >>> skew = LinearAttention([[0.0, 1.0], [-1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
    >>> local = local_lipschitz(skew, [[1.0, 0.0]])
    >>> round(local.particle, 12), round(local.splitting, 12)
    (0.0, 1.0)

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024 (particle part); the splitting part is ours.
    """
    order = check.check_order(p)
    check.positive(tol, "tol")
    measure = as_attention(attention).as_measure(_one(mu))
    live = measure.weights > 0
    support = measure.support()
    check.moderate(support.points, "mu")
    generator = check.rng_from(rng)
    check.probability(failure, "failure")
    if order not in (1.0, 2.0, np.inf):
        raise ValueError(f"p must be 1, 2 or inf for a local constant, received {p!r}.")
    if device is not None:
        device = check_device(device, attention)
        if order != 2.0:
            raise ValueError(f"device needs p = 2, received p = {p!r}; leave device out.")
    residual, iterations, known_upper, layer = 0.0, 0, None, None
    try:
        # at few tokens threads of the BLAS double the processor time and save none
        threads = single_blas_thread() if support.n <= FEW_TOKENS else nullcontext()
        with threads, np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            if order == 2.0:
                lower, u, v, residual, iterations, layer = _top_singular(attention, support, tol, generator, device)
                particle = lower
            else:
                lower, known_upper, particle, u, v = mixed_local(attention, support, order, generator)
            splitting, ceiling = splitting_beside(attention, support, None if domain is not None else layer, particle)
    except np.linalg.LinAlgError as exc:
        raise OverflowError(_TOO_LARGE) from exc
    if not np.isfinite([lower, known_upper or 0.0, particle, splitting or 0.0]).all():
        raise OverflowError(_TOO_LARGE)
    lower = max(lower, splitting or 0.0)
    far = None if domain is None else max(splitting or 0.0, far_mass(attention, measure, domain, rng=generator))
    lower = max(lower, far or 0.0)
    if far is not None:  # found from below: nothing is known from above
        known_upper = np.inf
    elif known_upper is not None:
        known_upper = max(known_upper, splitting or 0.0)
    left, right = np.zeros((measure.n, u.shape[1])), np.zeros((measure.n, v.shape[1]))
    left[live], right[live] = u, v
    return LocalLipschitz(
        lower,
        lower,
        particle,
        ceiling,
        splitting,
        far,
        check.frozen(left),
        check.frozen(right),
        residual,
        iterations,
        order,
        attention,
        measure,
        failure,
        int(generator.integers(2**63)),
        known_upper,
    )


def _one(mu: Any) -> Any:
    """``mu``, which must not be many windows."""
    first = mu[0] if isinstance(mu, (list, tuple)) and mu else None
    if getattr(mu, "ndim", 0) == 3 or getattr(first, "ndim", 0) == 2 or isinstance(first, Measure):
        what = f"a list of {len(mu)}" if first is not None else f"shape {tuple(mu.shape)}"
        raise ValueError(
            f"mu must be one measure or array (n, d), received {what}; local_lipschitz_batch takes many windows."
        )
    return mu


def _top_singular(
    attention: AttentionMap, mu: Measure, tol: float, rng: np.random.Generator, device: Any
) -> tuple[float, Array, Array, float, int, SoftmaxLayer | None]:
    """Top singular triple of ``W^{1/2} J W^{-1/2}``: sigma, u, v, relative residual, products, and the layer that was fused."""
    n, d = mu.n, mu.dim
    e = d if attention.out_dim is None else attention.out_dim
    if n * d * n * e <= DENSE_ENTRIES:
        dense = attention.jacobian(mu).reweighted(mu.weights).to_dense()
        U, s, Vt = np.linalg.svd(dense, full_matrices=False)
        return float(s[0]), U[:, 0].reshape(n, e), Vt[0].reshape(n, d), 0.0, 0, None
    J = measure_jacobian(attention, mu)
    top = top_singular(J, precision="precise", tol=tol, rng=rng, device=device)
    return (
        top.value,
        top.left.reshape(n, e),
        top.right.reshape(n, d),
        top.residual,
        top.iterations,
        J.layer if isinstance(J, FusedJacobian) else None,
    )
