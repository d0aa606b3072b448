r"""The velocity of the tokens: what a flow integrates.

- plain: ``x_i' = Gamma_mu(x_i)``;
- sphere: ``x_i' = P_i Gamma_mu(x_i)``, ``P_i = I - x_i x_i^T / |x_i|^2``: each token keeps its norm (LayerNorm in
  continuous depth);
- rescaled: ``z_i' = e^{-tV} (Gamma_mu(x_i) - V x_i)`` for ``z = e^{-tV} x``.

A layer that already holds its skip connection (:class:`Residual`, :class:`TransformerBlock`) moves tokens by its
increment ``F(x) - x``.

Rescaled tokens are moved without ever forming x. With ``E = e^{tV}`` the logits of ``x = E z`` are those of z under ``A_t =
E^T A E``, and the values of a head become ``E^{-1} V_h E`` acting on averages of z. So ``z' = Gamma_t(z) - V z`` for an
attention map ``Gamma_t`` of the same kind: no difference of large numbers is taken, however much x grows. Where parameters
depend on time, E solves ``E' = V(t) E``, ``E = I`` at the start, and ``z' = Gamma_t(z) - E^{-1} V(t) E z``.
"""

from __future__ import annotations

import bisect
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from otattn._files.saved import Saved
from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.attention.base import Measure, as_attention

__all__ = ["Field", "Normalization", "Velocity", "check_values", "layer_at", "linear_growth"]

Field = AttentionMap | Callable[[float], AttentionMap]
Normalization = Literal["sphere", "rescaled"] | None
PRECISION = 1e-12
"""Tolerance of the propagator of rescaled tokens, below that of any flow."""


def layer_at(attention: Field, t: float) -> AttentionMap:
    """The attention map at time t: the map itself, or what a callable ``t -> attention`` gives."""
    if isinstance(attention, AttentionMap):
        return attention
    if not callable(attention):
        raise TypeError(
            f"attention must be an attention map or a callable t -> attention map, received {type(attention).__name__}."
        )
    if hasattr(attention, "named_parameters") or _takes_more_than_time(attention):
        as_attention(attention)
    layer = attention(float(t))
    if not isinstance(layer, AttentionMap):
        raise TypeError(f"attention(t) must be an attention map, received {type(layer).__name__} at t = {t:g}.")
    return layer


def _takes_more_than_time(function: Callable[..., object]) -> bool:
    """True for a function that cannot be called with a time alone, as one of tokens and a measure."""
    try:
        inspect.signature(function).bind(0.0)
    except TypeError:
        return True
    except ValueError:  # a function without a signature is called
        return False
    return False


def check_values(attention: AttentionMap, dim: int) -> None:
    """Refuse a map whose values lie in another space than the tokens: there is no flow."""
    if attention.out_dim not in (None, dim):
        raise ValueError(
            f"attention must have values in the space of the tokens, received {dim} -> {attention.out_dim}; "
            "add an output matrix with MultiHeadAttention([head], [W])."
        )


def linear_growth(attention: Field) -> bool:
    """True when ``|Gamma_mu(x)| <= c (1 + sup |y|)``: the flow then exists for all times."""
    terms = attention.drift.map.values() if isinstance(attention, AttentionMap) else None
    return terms is not None and all(term.mass != "any" for term in terms)


def value_matrix(attention: AttentionMap) -> Array:
    """The linear map V of one token alone: that of a head, ``sum_h W_h V_h`` of several.

    Raises
    ------
    ValueError
        The map has no value matrix (an MLP, a normalisation, a composition), or it is not square.
    """
    drift = attention.drift
    terms = drift.map.values()
    if terms is None or drift.skip:
        raise ValueError(
            f'normalization="rescaled" must have an attention map with a value matrix, received '
            f'{attention.kind}; use None or "sphere".'
        )
    V = np.asarray(drift.scale * np.sum([term.V for term in terms], axis=0))
    if V.shape[0] != V.shape[1]:
        raise ValueError(f"V must be square for a flow, received shape {V.shape}; add an output matrix.")
    return V


def conjugate(attention: AttentionMap, V: Array, t: float) -> AttentionMap:
    """The attention that acts on ``z = e^{-tV} x`` as ``attention`` acts on x: ``e^{-tV} Gamma(e^{tV} z)``.

    Raises
    ------
    OverflowError
        The rescaled parameters are not representable.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return attention.in_coordinates(expm(t * V), expm(-t * V))


class Propagator:
    """``E(t)`` with ``E' = V(t) E`` and ``E = I`` at the start, integrated to ``stop`` at once, and beyond as far as asked."""

    def __init__(self, rate: Callable[[float], Array], start: float, stop: float) -> None:
        self.stop = stop
        self.rate, self.ends, self.pieces = rate, [start], [lambda t: np.eye(len(rate(start))).ravel()]

    def __call__(self, t: float) -> Array:
        """E at a time from the start on, ``(d, d)``."""
        if t > self.ends[-1]:
            end = max(t, self.stop)
            first = self.pieces[-1](self.ends[-1])
            d = int(np.sqrt(len(first)))
            piece = solve_ivp(
                lambda s, E: (self.rate(s) @ E.reshape(d, d)).ravel(),
                (self.ends[-1], end),
                first,
                method="DOP853",
                rtol=PRECISION,
                atol=PRECISION * float(np.abs(first).max()),
                dense_output=True,
            )
            self.ends.append(end)
            self.pieces.append(piece.sol)
        flat = np.asarray(self.pieces[bisect.bisect_left(self.ends, t)](t))
        return flat.reshape(int(np.sqrt(len(flat))), -1)


class Velocity(Saved):
    """The right-hand side of a flow on ``(n, d)`` tokens.

    Parameters
    ----------
    attention : AttentionMap or callable t -> AttentionMap
    measure : measure
        Initial tokens, weights and (for causal maps) times.
    normalization : None, "sphere" or "rescaled"
    start : float
    stop : float
        How far the flow may go.
    """

    def __init__(
        self,
        attention: Field,
        measure: Measure,
        normalization: Normalization,
        start: float,
        stop: float = -math.inf,
    ) -> None:
        if normalization not in (None, "sphere", "rescaled"):
            raise ValueError(f'normalization must be None, "sphere" or "rescaled", received {normalization!r}.')
        layer = layer_at(attention, start)
        check_values(layer, measure.dim)
        self.attention, self.measure, self.normalization, self.start = attention, measure, normalization, start
        self.V: Array | None = None
        self.norms: Array | None = None
        self.propagator: Propagator | None = None
        if normalization == "rescaled":
            self.V = value_matrix(layer)
            if not isinstance(attention, AttentionMap):
                self.propagator = Propagator(lambda t: value_matrix(layer_at(attention, t)), start, stop)
        elif normalization == "sphere":
            self.norms = np.linalg.norm(measure.points, axis=1, keepdims=True)
            if not (self.norms > 0).all():
                raise ValueError(
                    f"tokens must not be zero on the sphere, received token {int(self.norms.argmin())} = 0; move it."
                )

    def _to_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("attention", "measure", "normalization", "start")}

    @classmethod
    def _from_fields(cls, state: dict[str, Any]) -> Velocity:
        return cls(**state)

    def attention_at(self, t: float) -> AttentionMap:
        """The map that acts on the state at time t (on rescaled tokens: with rescaled parameters)."""
        layer = layer_at(self.attention, t)
        if self.propagator is not None:
            E = self.propagator(t)
            return layer.in_coordinates(E, np.asarray(np.linalg.inv(E)))
        return layer if self.V is None else conjugate(layer, self.V, t - self.start)

    def retract(self, x: Array) -> Array:
        """Tokens on their spheres (the tokens themselves without that normalisation)."""
        if self.norms is None:
            return x
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        return np.asarray(x * (self.norms / np.where(norms > 0, norms, 1.0)))

    def __call__(self, t: float, x: Array) -> Array:
        """Velocities ``(n, d)`` at time t."""
        x = self.retract(x)
        layer = self.attention_at(t)
        measure = self.measure._with_points(x)
        drift = layer.drift  # the increment of a residual layer itself, without the difference
        v = drift.map._at_atoms(measure)
        if drift.scale != 1.0:
            v = drift.scale * v
        if drift.skip:
            v = v - drift.skip * x
        if self.propagator is not None:
            E = self.propagator(t)
            v = v - x @ np.linalg.solve(E, value_matrix(layer_at(self.attention, t)) @ E).T
        elif self.V is not None:
            v = v - x @ self.V.T
        elif self.norms is not None:
            unit = x / self.norms
            v = v - (v * unit).sum(axis=1, keepdims=True) * unit
        return np.asarray(v)
