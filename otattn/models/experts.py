"""A feed-forward part of several experts, of which each token takes the few that a router prefers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from otattn import _validate as check
from otattn.attention.tokenwise import TokenwiseMap

__all__ = ["Experts"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, init=False)
class Experts(TokenwiseMap):
    r"""``sum_e p_e(x) (W_e h_e(x) + c_e)`` over the ``top`` experts with the largest router logits, p the softmax over those.

    Hidden values are :math:`h = (u + 1)\, g\, \sigma(\alpha g)`, with g and u the even and the odd entries of
    :math:`G_e^T x + b_e`, g at most ``limit`` and u between ``-limit`` and ``limit``.

    The map jumps where the order of two router logits changes; derivatives are those of the experts chosen at the token.

    Parameters
    ----------
    router : array_like (E, d)
    router_bias : array_like (E,)
    gate_up : array_like (E, d, 2 h)
    gate_up_bias : array_like (E, 2 h)
    down : array_like (E, h, d)
    down_bias : array_like (E, d)
    top : int
    alpha, limit : float

    References
    ----------
    OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025.
    """

    router: Array
    router_bias: Array
    gate_up: Array
    gate_up_bias: Array
    down: Array
    down_bias: Array
    top: int
    alpha: float
    limit: float

    def __init__(
        self,
        router: ArrayLike,
        router_bias: ArrayLike,
        gate_up: ArrayLike,
        gate_up_bias: ArrayLike,
        down: ArrayLike,
        down_bias: ArrayLike,
        *,
        top: int,
        alpha: float,
        limit: float,
    ) -> None:
        R = check.matrix(router, "router")
        arrays = {
            "router": R,
            "router_bias": check.vector(router_bias, "router_bias", size=len(R)),
            "gate_up": check.as_float_array(gate_up, "gate_up", ndim=3),
            "gate_up_bias": check.matrix(gate_up_bias, "gate_up_bias", shape=(len(R), None)),
            "down": check.as_float_array(down, "down", ndim=3),
            "down_bias": check.matrix(down_bias, "down_bias", shape=(len(R), None)),
        }
        wide, h = arrays["gate_up"].shape, arrays["down"].shape[1]
        if wide != (len(R), R.shape[1], 2 * h) or len(arrays["down"]) != len(R):
            raise ValueError(
                f"gate_up and down must have shapes (E, d, 2 h) and (E, h, d) for {len(R)} experts and d = {R.shape[1]}, received "
                f"{wide} and {arrays['down'].shape}."
            )
        for name, value in arrays.items():
            object.__setattr__(self, name, check.frozen(value))
        if not 1 <= check.count(top, "top") <= len(R):
            raise ValueError(f"top must be at most the number of experts {len(R)}, received {top}.")
        object.__setattr__(self, "top", int(top))
        object.__setattr__(self, "alpha", check.positive(alpha, "alpha"))
        object.__setattr__(self, "limit", check.positive(limit, "limit"))

    @property
    def in_dim(self) -> int:
        return int(self.router.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.down.shape[2])

    def as_experts(self) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array, int, float, float]:
        """Router, gates, ups and outputs with their biases, one row a value: what the expansions near given tokens need."""
        gate, up = (np.swapaxes(self.gate_up[:, :, k::2], 1, 2) for k in (0, 1))
        biases = self.gate_up_bias[:, ::2], self.gate_up_bias[:, 1::2]
        down = np.swapaxes(self.down, 1, 2), self.down_bias
        return self.router, self.router_bias, gate, biases[0], up, biases[1], *down, self.top, self.alpha, self.limit

    def _chosen(self, x: Array) -> tuple[NDArray[np.intp], Array]:
        """The experts of each token ``(n, top)`` and their weights."""
        logits = x @ self.router.T + self.router_bias
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, : self.top]
        values = np.take_along_axis(logits, chosen, axis=1)
        p = np.exp(values - values[:, :1])
        return chosen, p / p.sum(axis=1, keepdims=True)

    def _hidden(self, x: Array, e: int) -> tuple[Array, Array, Array]:
        """Hidden values of expert e, and their derivatives in g and u."""
        z = x @ self.gate_up[e] + self.gate_up_bias[e]
        g, u = np.minimum(z[:, ::2], self.limit), np.clip(z[:, 1::2], -self.limit, self.limit)
        s = expit(self.alpha * g)
        in_g = (z[:, ::2] < self.limit) * (u + 1.0) * (s + self.alpha * g * s * (1.0 - s))
        in_u = (np.abs(z[:, 1::2]) < self.limit) * g * s
        return (u + 1.0) * g * s, in_g, in_u

    def _each(self, x: Array) -> list[tuple[NDArray[np.intp], int, Array]]:
        """For each expert that is taken: the tokens that take it, its number, and their weights ``(m, 1)``."""
        chosen, p = self._chosen(x)
        out = []
        for e in np.unique(chosen):
            token, place = np.nonzero(chosen == e)
            out.append((token, int(e), p[token, place][:, None]))
        return out

    def _map(self, x: Array) -> Array:
        out = np.zeros((len(x), self.out_dim))
        for token, e, p in self._each(x):
            out[token] += p * (self._hidden(x[token], e)[0] @ self.down[e] + self.down_bias[e])
        return out

    def _means(self, x: Array) -> Array:
        """``sum_e p_e r_e`` of the router's rows, ``(n, d)``: ``dp_e = p_e <r_e - mean, dx>``."""
        chosen, p = self._chosen(x)
        return np.asarray(np.einsum("nt,ntd->nd", p, self.router[chosen]))

    def _jvp(self, x: Array, v: Array) -> Array:
        out, mean = np.zeros((len(x), self.out_dim)), self._means(x)
        for token, e, p in self._each(x):
            h, in_g, in_u = self._hidden(x[token], e)
            z = v[token] @ self.gate_up[e]
            slope = np.sum((self.router[e] - mean[token]) * v[token], axis=1, keepdims=True)
            value = h @ self.down[e] + self.down_bias[e]
            out[token] += p * ((in_g * z[:, ::2] + in_u * z[:, 1::2]) @ self.down[e] + slope * value)
        return out

    def _vjp(self, x: Array, g: Array) -> Array:
        out, mean = np.zeros_like(x), self._means(x)
        for token, e, p in self._each(x):
            h, in_g, in_u = self._hidden(x[token], e)
            back = g[token] @ self.down[e].T
            z = np.empty((len(token), self.gate_up.shape[2]))
            z[:, ::2], z[:, 1::2] = in_g * back, in_u * back
            value = np.sum((h @ self.down[e] + self.down_bias[e]) * g[token], axis=1, keepdims=True)
            out[token] += p * (z @ self.gate_up[e].T + value * (self.router[e] - mean[token]))
        return out
