"""The protocol of attention maps: Gamma_mu, the push-forward, the Jacobian, the field Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention.jacobian import JacobianOperator
from otattn.errors import NotGaussianPreservingError
from otattn.measures import DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure, as_discrete, as_spacetime

if TYPE_CHECKING:
    from otattn.attention.head import Arithmetic, Head

__all__ = ["MEMORY_BUDGET", "AttentionMap", "Measure", "block_rows"]

Array = NDArray[np.float64]
Measure = DiscreteMeasure | SpaceTimeMeasure

MEMORY_BUDGET = 256 * 2**20
"""Bytes that the row blocks of one evaluation may take together (n x n arrays are only built below it)."""


class AttentionMap(ABC):
    """A map that moves each token by a function of the whole measure, ``x -> Gamma_mu(x)``.

    Subclasses are immutable. A measure is a :class:`DiscreteMeasure`, an ``(n, d)`` array (uniform weights)
    or, for causal maps, a :class:`SpaceTimeMeasure` (an array is then the sequence of its rows).
    """

    @property
    @abstractmethod
    def in_dim(self) -> int | None:
        """Dimension d of the tokens (None when any will do)."""

    @property
    @abstractmethod
    def out_dim(self) -> int | None:
        """Dimension e of the values (None when it equals that of the tokens)."""

    @property
    def causal(self) -> bool:
        """True when the map needs the times of a space-time measure."""
        return False

    # What subclasses implement. ``times`` (m,) are the times of the rows of ``x``: a row sees only atoms that
    # are not later; None means that every row sees every atom.
    @abstractmethod
    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array: ...

    @abstractmethod
    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array: ...

    @abstractmethod
    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator: ...

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        """The heads whose sum the map is (:func:`otattn.attention.head.heads_of`); none when it is no such sum."""
        return ()

    @property
    def _kernels(self) -> int:
        """How many n x n arrays a Jacobian of this map would like to keep."""
        return 1

    @property
    def _width(self) -> int:
        """How many numbers a token a Jacobian of this map would like to keep beside them."""
        return 0

    def as_measure(self, mu: Any) -> Measure:
        """``mu`` as the kind of measure that the map acts on, with its dimension checked."""
        if isinstance(mu, GaussianMeasure):
            raise TypeError(
                "mu must be a discrete or space-time measure here, received a GaussianMeasure; "
                "use pushforward or gaussian_affine, or sample it."
            )
        out: Measure
        if self.causal:
            out = as_spacetime(mu)
        else:
            out = mu if isinstance(mu, SpaceTimeMeasure) else as_discrete(mu)
        self._check_dim(out.dim)
        return out

    def _check_dim(self, dim: int) -> None:
        if self.in_dim is not None and dim != self.in_dim:
            raise ValueError(f"mu must live in dimension {self.in_dim}, received {dim}; check A, V or the points.")

    def _times(self, x: Array, mu: Measure, times: ArrayLike | None) -> Array | None:
        if not self.causal:
            return None
        assert isinstance(mu, SpaceTimeMeasure)
        if times is not None:
            return check.vector(times, "times", size=len(x))
        if x.shape != mu.points.shape:
            raise ValueError(
                f"times must give the time of each row of x for a causal map, received None for {len(x)} "
                f"rows (the measure has {mu.n} atoms); pass times=."
            )
        return mu.times

    def __call__(
        self, x: ArrayLike, mu: Any, *, times: ArrayLike | None = None, block_size: int | None = None
    ) -> Array:
        """``Gamma_mu`` at the rows of ``x (m, d)``; returns ``(m, e)``.

        Parameters
        ----------
        x : array_like (m, d)
        mu : measure or array_like (n, d)
        times : array_like (m,), optional
            Times of the rows of ``x``, for causal maps (the atoms' own times when ``x`` has their shape);
            maps without a mask see every atom and ignore them.
        block_size : int, optional
            Rows handled at once; chosen from the memory budget by default.

        Raises
        ------
        ValueError
            Shapes that do not fit; a row of a causal map that comes before every atom.
        OverflowError
            A value is not representable in float64 (unnormalised kernels with huge logits).
        """
        measure = self.as_measure(mu)
        rows = check.points(x, "x", dim=measure.dim)
        clock, rows_at_once = self._times(rows, measure, times), _block(block_size)
        with np.errstate(over="ignore", invalid="ignore"):
            return _finite(self._apply(rows, measure, clock, rows_at_once))

    def _at_atoms(self, measure: Measure) -> Array:
        """The values at the atoms themselves (the array is passed on uncopied: compositions recognise it)."""
        clock = self._times(measure.points, measure, None)
        with np.errstate(over="ignore", invalid="ignore"):
            return _finite(self._apply(measure.points, measure, clock, None))

    @overload
    def pushforward(self, mu: GaussianMeasure) -> GaussianMeasure: ...

    @overload
    def pushforward(self, mu: Any) -> Any: ...

    def pushforward(self, mu: Any) -> Any:
        """``F(mu) = (Gamma_mu)_# mu``, of the same kind as ``mu`` (an array gives a measure).

        Raises
        ------
        NotGaussianPreservingError
            ``mu`` is Gaussian and the variant does not keep Gaussians Gaussian.
        """
        if isinstance(mu, GaussianMeasure):
            return mu.pushforward_affine(*self.gaussian_affine(mu))
        measure = self.as_measure(mu)
        return measure._with_points(self._at_atoms(measure))

    def on_tokens(self, X: ArrayLike) -> Array:
        """``f(X)``: the map at the tokens themselves, ``(n, d) -> (n, e)``."""
        measure = self.as_measure(check.points(X, "X", dim=self.in_dim))
        return self._at_atoms(measure)

    def on_batch(self, X: ArrayLike) -> Array:
        """``f`` at every row of a batch of equally many tokens, ``(B, n, d) -> (B, n, e)``.

        Softmax attention handles small problems together; other maps go one by one.

        Raises
        ------
        ValueError
            Another shape.
        OverflowError
            A value is not representable in float64.
        """
        batch = check.as_float_array(X, "X", ndim=3)
        if 0 in batch.shape:
            raise ValueError(f"X must hold at least one problem, token and coordinate, received shape {batch.shape}.")
        check.points(batch[0], "X", dim=self.in_dim)
        with np.errstate(over="ignore", invalid="ignore"):
            return _finite(self._batch(batch))

    def _batch(self, X: Array) -> Array:
        return np.stack([self.on_tokens(x) for x in X])

    def jacobian(self, mu: Any, *, block_size: int | None = None) -> JacobianOperator:
        """``D_X f`` at the atoms of ``mu`` (weights kept fixed), a linear operator ``(n d,) -> (n e,)``.

        The kernels of all heads and the slopes of all layers are kept between products when together they fit half the
        memory budget and no ``block_size`` is given; otherwise each product computes them again, in blocks of rows.
        """
        measure = self.as_measure(mu)
        rows, n = _block(block_size), measure.n
        if rows is None and 8 * n * (n * self._kernels + self._width) > MEMORY_BUDGET // 2:
            rows = block_rows(n, n)
        return self._jacobian(measure, self._times(measure.points, measure, None), rows)

    def field_jacobian(
        self, x: ArrayLike, mu: Any, *, times: ArrayLike | None = None, block_size: int | None = None
    ) -> Array:
        """``D_x Gamma_mu(x)`` at the rows of ``x (m, d)``, the measure kept fixed; returns ``(m, e, d)``."""
        measure = self.as_measure(mu)
        rows = check.points(x, "x", dim=measure.dim)
        clock, rows_at_once = self._times(rows, measure, times), _block(block_size)
        with np.errstate(over="ignore", invalid="ignore"):
            return _finite(self._field(rows, measure, clock, rows_at_once))

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """Matrix ``G (e, d)`` and offset ``b (e,)`` with ``Gamma_mu(x) = G x + b`` for a Gaussian ``mu``."""
        raise NotGaussianPreservingError(
            f"{type(self).__name__} does not map Gaussian measures to Gaussian measures; "
            "softmax, L2, Sinkhorn and linear attention do. Sample the Gaussian instead."
        )


def block_rows(m: int, n: int, width: int = 4) -> int:
    """How many of m rows of n entries to handle at once: ``width`` such blocks fit the memory budget.

    Blocks much above the cache gain nothing, below 256 rows the matrix products lose speed.
    """
    fit = MEMORY_BUDGET // (8 * width * max(n, 1))
    return max(1, min(m, fit, max(256, 2**21 // max(n, 1))))


def _finite(values: Array) -> Array:
    if not np.isfinite(values).all():
        raise OverflowError(
            "a value of the map is not representable in float64; scale the tokens, A or V down, or use a "
            "normalised kernel (softmax)."
        )
    return values


def _block(block_size: int | None) -> int | None:
    return None if block_size is None else check.count(block_size, "block_size")
