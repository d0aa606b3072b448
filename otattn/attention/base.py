"""The protocol of attention maps: Gamma_mu, the push-forward, the Jacobian, the field Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import Array
from otattn.attention import memory
from otattn.attention.jacobian import JacobianOperator, finite
from otattn.attention.kernels import Values
from otattn.errors import NoJacobianError, NotGaussianPreservingError
from otattn.measures import (
    AnyMeasure,
    DiscreteMeasure,
    GaussianMeasure,
    MeasureLike,
    SpaceTimeMeasure,
    as_discrete,
    as_spacetime,
)

if TYPE_CHECKING:
    from otattn.attention.head import Arithmetic, Head

__all__ = ["AttentionMap", "Drift", "Measure", "as_attention"]

Measure = DiscreteMeasure | SpaceTimeMeasure
Method = Callable[[Array, Measure, "Array | None", "int | None"], Array]


class Drift(NamedTuple):
    """What moves the tokens of a flow: ``scale * map(x) - skip * x``."""

    map: AttentionMap
    scale: float = 1.0
    skip: float = 0.0


class AttentionMap(Saved, ABC):
    """A map that moves each token by a function of the whole measure, ``x -> Gamma_mu(x)``.

    Subclasses are immutable. A measure is a :class:`DiscreteMeasure`, an ``(n, d)`` array (uniform weights)
    or, for causal maps, a :class:`SpaceTimeMeasure` (an array is then the sequence of its rows).

    A new map is one class. It must have ``_apply``; with ``_jacobian`` and ``_field`` it has local constants, lower bounds
    and gradient-flow checks. (:class:`FunctionAttention` finds these two by itself for a map that is given as a function.) What else
    is known of it are methods too (:meth:`values`, :meth:`in_coordinates`, :meth:`logits`, :meth:`gaussian_affine`), which
    say by default that nothing is; and what is known of it on higher floors is registered there, with
    ``gradient_flow.known.known_structure``, ``known_gaussian_structure``, ``gradient_flow.twisted.log_kernel``,
    ``dynamics.gaussian_fields.field_of`` and ``lipschitz.catalogue.theorem``. What is not there raises an error that names it.

    Arguments of the three methods are checked before they are called: ``x (m, d)`` in float64, ``mu`` with ``points (n, d)``,
    ``weights (n,)``, and for causal maps the ``times (m,)`` of the rows (else None); ``block_size`` is a wish that a map may ignore.
    A map that is kept in files, or printed with its numbers, is a frozen dataclass.

    Examples
    --------
    Tokens are pulled to the mean of all, ``Gamma_mu(x) = tanh(m - x)`` with ``m = sum_j w_j y_j``. A displacement ``v`` of the
    atoms moves the values by ``s_i (sum_j w_j v_j - v_i)`` with the slopes ``s = 1 - tanh^2``; the adjoint of that is
    ``g -> w_j sum_i s_i g_i - s_j g_j``. With the measure kept, ``D_x Gamma = -diag(s)``.

    >>> from otattn.attention import JacobianOperator
    >>> class Pull(AttentionMap):
    ...     def _apply(self, x, mu, times, block_size):
    ...         return np.tanh(mu.mean() - x)
    ...
    ...     def _field(self, x, mu, times, block_size):
    ...         return -(1 - np.tanh(mu.mean() - x) ** 2)[:, :, None] * np.eye(mu.dim)
    ...
    ...     def _jacobian(self, mu, times, block_size):
    ...         s, w = 1 - np.tanh(mu.mean() - mu.points) ** 2, mu.weights
    ...         return JacobianOperator(
    ...             mu.n, mu.dim, mu.dim,
    ...             jvp=lambda v: s * (w @ v - v),
    ...             vjp=lambda g: w[:, None] * np.sum(s * g, axis=0) - s * g,
    ...         )
    >>> Pull().on_tokens([[0.0], [2.0]]).ravel().round(4)
    array([ 0.7616, -0.7616])
    >>> from otattn.lipschitz import lipschitz_lower_bound, local_lipschitz
    >>> from otattn.measures import Ball
    >>> local_lipschitz(Pull(), [[0.0], [2.0]])
    LocalLipschitz(0.419974, p=2, particle=0.419974, splitting=0.419974, n=2)
    >>> round(lipschitz_lower_bound(Pull(), domain=Ball(1.0, 1), n=2).value, 6)   # that of equal tokens
    1.0
    """

    domain: Any = None
    """The domain of the tokens of a checkpoint's head, behind its normalisation: that of its constants when none is given."""
    maskable: bool = False
    """True when the map has a causal form: ``_apply``, ``_field`` and ``_jacobian`` obey ``times``."""

    @property
    def in_dim(self) -> int | None:
        """Dimension d of the tokens (None when any will do)."""
        return None

    @property
    def out_dim(self) -> int | None:
        """Dimension e of the values (None when it equals that of the tokens)."""
        return None

    @property
    def kind(self) -> str:
        """The name of the map, for messages."""
        return type(self).__name__

    @property
    def causal(self) -> bool:
        """True when the map needs the times of a space-time measure."""
        return False

    @property
    def splits(self) -> bool:
        """True when atoms can split into parts that move apart (False: the map is known on sequences of tokens only)."""
        return True

    @property
    def everywhere(self) -> bool:
        """True when ``Gamma_mu(x)`` is known at every x, not only at the atoms."""
        return True

    # What subclasses implement. ``times`` (m,) are the times of the rows of ``x``: a row sees only atoms that
    # are not later; None means that every row sees every atom.
    @abstractmethod
    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array: ...

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        raise self._no_jacobian("field_jacobian", "_field")

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        raise self._no_jacobian("jacobian", "_jacobian")

    def _no_jacobian(self, what: str, method: str) -> NoJacobianError:
        return NoJacobianError(
            f"{what} needs a map with an analytic Jacobian, received {type(self).__name__}, of which only values are known; "
            f"use stability_ratio or stability_study, write the map as a class with {method} (the help of AttentionMap shows "
            "one), or wrap its values as FunctionAttention((x, mu) -> values), which finds their derivative."
        )

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        """The heads whose sum the map is (:func:`otattn.attention.head.heads_of`); none when it is no such sum."""
        return ()

    @property
    def _kernels(self) -> int:
        """How many n x n arrays a Jacobian of this map would like to keep."""
        return 1

    @property
    def _tol(self) -> float:
        """Relative error of the values beyond rounding (of an iteration that ends)."""
        return 0.0

    @property
    def unmasked(self) -> AttentionMap:
        """The map under a mask (what a causal map is on a single time slice); the map itself without one."""
        return self

    @property
    def drift(self) -> Drift:
        """What moves the tokens of a flow: the map; the increment of a layer that holds its skip connection."""
        return Drift(self)

    def values(self) -> tuple[Values, ...] | None:
        """The terms of the map, a sum of weighted averages of affine values; None when it is not known to be one."""
        return None

    def in_coordinates(self, E: Array, left: Array) -> AttentionMap:
        """The map of the same kind on tokens z with ``x = E z`` and values ``left v``: ``z -> left Gamma(E z)``.

        Raises
        ------
        ValueError
            The map has no such form.
        """
        raise ValueError(f"attention must be built of attention heads to change coordinates, received {self.kind}.")

    def logits(self, x: Array, head: int = 0) -> Array:
        """Logits ``(n, n)`` of the tokens ``x (n, d)`` among themselves, up to a term constant in each row.

        Raises
        ------
        ValueError
            The map has no normalised logits, or no such head.
        """
        raise ValueError(f"logits are those of softmax or L2 attention (or heads of it), received {self.kind}.")

    @property
    def _width(self) -> int:
        """How many numbers a token a Jacobian of this map would like to keep beside them."""
        return 0

    def as_measure(self, mu: AnyMeasure) -> Measure:
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
        self, x: ArrayLike, mu: MeasureLike, *, times: ArrayLike | None = None, block_size: int | None = None
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
        return self._at(self._apply, x, mu, times, block_size)

    def _at(
        self, method: Method, x: ArrayLike, mu: MeasureLike, times: ArrayLike | None, block_size: int | None
    ) -> Array:
        measure = self.as_measure(mu)
        rows = check.points(x, "x", dim=measure.dim)
        clock, rows_at_once = self._times(rows, measure, times), _block(block_size)
        with np.errstate(over="ignore", invalid="ignore"):
            return finite(method(rows, measure, clock, rows_at_once))

    def _at_atoms(self, measure: Measure) -> Array:
        """The values at the atoms themselves (the array is passed on uncopied: compositions recognise it)."""
        clock = self._times(measure.points, measure, None)
        with np.errstate(over="ignore", invalid="ignore"):
            return finite(self._apply(measure.points, measure, clock, None))

    @overload
    def pushforward(self, mu: GaussianMeasure) -> GaussianMeasure: ...

    @overload
    def pushforward(self, mu: MeasureLike) -> Measure: ...

    def pushforward(self, mu: AnyMeasure) -> Measure | GaussianMeasure:
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
        """
        batch = check.as_float_array(X, "X", ndim=3)
        if 0 in batch.shape:
            raise ValueError(f"X must hold at least one problem, token and coordinate, received shape {batch.shape}.")
        check.points(batch[0], "X", dim=self.in_dim)
        with np.errstate(over="ignore", invalid="ignore"):
            return finite(self._batch(batch))

    def _batch(self, X: Array) -> Array:
        return np.stack([self.on_tokens(x) for x in X])

    def jacobian(self, mu: MeasureLike, *, block_size: int | None = None) -> JacobianOperator:
        """``D_X f`` at the atoms of ``mu`` (weights kept fixed), a linear operator ``(n d,) -> (n e,)``.

        The kernels of all heads and the slopes of all layers are kept between products when together they fit half the
        memory budget and no ``block_size`` is given; otherwise each product computes them again, in blocks of rows.
        """
        measure = self.as_measure(mu)
        rows, n = _block(block_size), measure.n
        if rows is None and 8 * n * (n * self._kernels + self._width) > memory.MEMORY_BUDGET // 2:
            rows = memory.block_rows(n, n)
        return self._jacobian(measure, self._times(measure.points, measure, None), rows)

    def field_jacobian(
        self, x: ArrayLike, mu: MeasureLike, *, times: ArrayLike | None = None, block_size: int | None = None
    ) -> Array:
        """``D_x Gamma_mu(x)`` at the rows of ``x (m, d)``, the measure kept fixed; returns ``(m, e, d)``."""
        return self._at(self._field, x, mu, times, block_size)

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """Matrix ``G (e, d)`` and offset ``b (e,)`` with ``Gamma_mu(x) = G x + b`` for a Gaussian ``mu``."""
        raise NotGaussianPreservingError(
            f"{type(self).__name__} does not map Gaussian measures to Gaussian measures; "
            "softmax, L2, Sinkhorn and linear attention do. Sample the Gaussian instead."
        )


def as_attention(value: Any, name: str = "attention") -> AttentionMap:
    """The map itself; a TypeError that says how to make one of anything else."""
    if isinstance(value, AttentionMap):
        return value
    if hasattr(value, "named_parameters"):
        fix = "otattn.from_torch(module) makes one of a torch module, FunctionAttention(lambda X: ..., dim) of any call"
    elif callable(value) and not isinstance(value, type):
        fix = "wrap it as FunctionAttention(function)"
    else:
        fix = "build one first, such as SoftmaxAttention"
    raise TypeError(f"{name} must be an attention map, received {type(value).__name__}; {fix}.")


def _block(block_size: int | None) -> int | None:
    return None if block_size is None else check.count(block_size, "block_size")
