r"""Certificates of second order for softmax and rotary heads, proved from the floats of the map and of the tokens as exact numbers.

The float64 evaluation (:mod:`~otattn.lipschitz.near.build`) says ``N`` for the norm of the Jacobian at the tokens, ``C`` for the
second derivative, and ``D_k`` for the third at the nodes of its integrals. Here each of these numbers is proved:

- ``N``: no eigenvalue of the Gram matrix of the Jacobian, in intervals, is above ``N^2``
  (:mod:`~otattn.lipschitz.arithmetic.eigenvalues`);
- ``C``: with the terms of the row's own token at most ``o`` (:mod:`~otattn.lipschitz.rigorous.own_token`), no eigenvalue of the
  Gram matrix of the others is above ``(C - o)^2``;
- ``D_k``: the bound of the third derivative, evaluated on intervals, is at most ``D_k``.

What they say about the map is then put together in intervals. A number that is not confirmed is an error, so that no more is
proved than what was claimed, and nothing of the float64 evaluation is trusted.

Rotary heads are softmax heads at the tokens ``y_i = T_i (L x_i + b)`` (:mod:`~otattn.lipschitz.near.rotary`), exact in balls, angles
included. Their Jacobian is that of the heads times ``diag T_i L``, and a ball of radius r becomes one of radius ``l r``, where
``l >= ||L||`` is proved in the same way, T being orthogonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from otattn._linalg import EPS
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.eigenvalues import Symmetric
from otattn.lipschitz.arithmetic.intervals import Interval, lift, lower, upper
from otattn.lipschitz.near.expansion import CELLS, COARSE, Taylor
from otattn.lipschitz.near.gram_jacobian import LARGEST_GRAM
from otattn.lipschitz.near.heads import softmax_heads
from otattn.lipschitz.near.rotary import lifted, rotary_heads
from otattn.lipschitz.near.stack import DENSE, Chain
from otattn.lipschitz.near.third_order import ThirdOrder
from otattn.lipschitz.rigorous.grams import hessian_gram, jacobian, jacobian_gram
from otattn.lipschitz.rigorous.heads import EnclosedHead, enclosed_heads, matmul
from otattn.lipschitz.rigorous.own_token import own_token_bound
from otattn.lipschitz.rigorous.turned import TurnedTokens, turned_tokens

__all__ = ["Claims", "ProvedChain", "claims_of", "proved_chain", "why_not_proved"]


def why_not_proved(map: Any, points: Any) -> str | None:
    """Why a map at these tokens has no rigorous evaluation; None when it has one."""
    heads, n = softmax_heads(map), len(points)
    if not heads and not rotary_heads(map):
        kind = getattr(map, "kind", type(map).__name__)
        return f"it covers softmax and rotary heads, one or several, not stacks and token-wise maps, received {kind!r}"
    size = n * max(map.in_dim, map.out_dim or map.in_dim)
    if not heads:
        size = max(size, n * len(lifted(map, n)[0].L))
    if size > DENSE and not (heads and n * (map.out_dim or map.in_dim) <= LARGEST_GRAM):
        return f"it covers norms that are proved, not those with a stated probability (n d = {size})"
    return None


@dataclass(frozen=True)
class Claims:
    """What the float64 evaluation says at the tokens: ``norm`` of the whole Jacobian, ``first`` of the lift (1 where there is
    none), ``second`` and ``third(r)`` of the heads.
    """

    norm: float
    first: float
    second: float
    third: Callable[[float], float]


def claims_of(chain: Chain) -> Claims:
    """The numbers of a chain of heads, or of a lift and heads."""
    last, off = chain.stages[-1].expansion, chain.offs[-1]
    if not isinstance(last, Taylor) or len(chain.stages) > 2:
        raise ValueError("a chain of one attention map is required; stacks have no rigorous evaluation.")

    def third(r: float) -> float:
        return last.third(off + r)

    second = last.second + (off * last.third(off) * (1.0 + 4.0 * EPS) if off > 0.0 else 0.0)
    first = float(chain.norms[0, 1]) if len(chain.stages) == 2 else 1.0
    return Claims(chain.norm, first, second, third)


def proved_chain(map: Any, points: Any, chain: Chain) -> ProvedChain:
    """The chain of the same map and tokens, whose numbers are proved.

    Raises
    ------
    CertificateError
        A number is not confirmed.
    """
    heads = softmax_heads(map)
    claims = claims_of(chain)
    if heads:
        return ProvedChain(claims, enclosed_heads(map, points))
    place, rest = lifted(map, len(points))
    turned = turned_tokens(place, points)
    return ProvedChain(claims, enclosed_heads(rest, turned.tokens), turned)


@dataclass(frozen=True, eq=False)
class ProvedChain:
    """Heads at exact tokens, with claims that are proved when a value is asked for."""

    claims: Claims
    heads: list[EnclosedHead]
    turned: TurnedTokens | None = None

    def stretch(self, r: float) -> float:
        """Upper bound of ``|F(X + D) - F(X)| / |D|`` for ``0 < |D| <= r``."""
        first = lift(self.first)
        rest = self._sum(r, 0.5, lambda t: (1.0 - t) ** 3 / 6.0)
        return float(upper(lift(self.norm) + lift(r) * first**2 * rest))

    def constant(self, r: float) -> float:
        """Upper bound of the Lipschitz constant of F on the ball."""
        first = lift(self.first)
        rest = self._sum(r, 1.0, lambda t: (1.0 - t) ** 2 / 2.0)
        return float(upper(lift(self.norm) + lift(r) * first**2 * rest))

    def _sum(self, r: float, share: float, weight: Callable[[Any], Any]) -> Any:
        """``share C + r sum over cells (weight(left) - weight(right)) D3(right r)``, r after the lift."""
        if r == 0.0:
            return lift(0.0)
        radius = lift(r) * lift(self.first)
        second = lift(share) * lift(self.second)
        ends = [lift(k) / float(CELLS) for k in range(CELLS + 1)]
        whole = radius * weight(lift(0.0)) * self.third(radius)
        if float(upper(whole)) > COARSE * float(upper(second)):
            parts = [(weight(s) - weight(t)) * self.third(t * radius) for s, t in pairwise(ends)]
            whole = radius * sum(parts[1:], parts[0])
        return second + whole

    @cached_property
    def first(self) -> float:
        """The norm of the lift."""
        if self.turned is not None:
            L = self.turned.L
            _confirm("the norm of the lift", _gram(matmul(L.T, L)), lift(self.claims.first))
        return self.claims.first

    @cached_property
    def norm(self) -> float:
        """That of the whole Jacobian at the tokens."""
        if self.turned is None:
            gram = jacobian_gram(self.heads)
        else:
            J = jacobian(self.heads)
            blocks = [matmul(J[:, j], self.turned.matrix(j)) for j in range(J.shape[1])]
            whole = np.concatenate(blocks, axis=1)
            gram = _gram(matmul(whole, whole.T) if whole.shape[0] <= whole.shape[1] else matmul(whole.T, whole))
        _confirm("the norm of the Jacobian", gram, lift(self.claims.norm))
        return self.claims.norm

    @cached_property
    def second(self) -> float:
        """Of the second derivative at the tokens."""
        rest = lift(self.claims.second) - lift(own_token_bound(self.heads))
        _confirm("the norm of the second derivative", hessian_gram(self.heads), rest)
        return self.claims.second

    def third(self, radius: Interval) -> Any:
        """Of the third derivative within a radius, its upper end."""
        r = float(upper(radius))
        claimed = self.claims.third(r)
        total = lift(0.0)
        for h, D3 in zip(self.heads, self._thirds, strict=True):
            if h.v > 0.0 and (h.a > 0.0 or upper(h.G).any()):  # without values, or with equal weights, it is exactly 0
                total = total + lift(h.norm_W) * lift(D3(r))
        if not float(upper(total)) <= claimed:
            raise CertificateError(f"the bound {claimed:.17g} of the third derivative within {r:g} is not confirmed.")
        return lift(claimed)

    @cached_property
    def _thirds(self) -> list[ThirdOrder]:
        return [ThirdOrder(h.P, h.P, h.G, h.Y, h.K, *h.spreads(), h.a, h.v) for h in self.heads]


def _confirm(name: str, gram: Symmetric, claimed: Any) -> None:
    """That no singular value is above the lower end of what is claimed."""
    low = float(lower(claimed))
    if not (low >= 0.0 and gram.largest_at_most(float(lower(lift(low) ** 2)))):
        raise CertificateError(f"the bound {low:.17g} of {name} is not confirmed.")


def _gram(M: Any) -> Symmetric:
    G = Symmetric(len(M))
    G.put(slice(None), slice(None), M)
    return G
