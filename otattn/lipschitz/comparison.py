"""Real tokens against adversarial ones: the local constant where text puts the tokens, and where it is largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result, plain
from otattn.attention import SoftmaxAttention
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.local.growth import Exponent, LocalGrowth, fit_exponent, local_growth
from otattn.lipschitz.local.value import local_lipschitz
from otattn.lipschitz.lower.best import Method, adversarial_tokens, two_anchor_tokens
from otattn.measures import DiscreteMeasure


def adversarial_head_tokens(
    head: SoftmaxAttention,
    n: int,
    radius: float,
    *,
    method: Method | None = None,
    rng: np.random.Generator | np.random.SeedSequence | int = 0,
) -> DiscreteMeasure:
    """Adversarial tokens of a head of low rank, searched in the span of its factors and lifted back.

    A head built from factors reads its tokens through the projection on the span of the rows of Q, K and V, at most
    ``2 k + e`` dimensions; components orthogonal to it only use up norm. So the search loses nothing there.

    Parameters
    ----------
    head : SoftmaxAttention
    n : int
    radius : float
        Largest token norm.
    method : str, optional
        Of :func:`otattn.adversarial_tokens`; by default "two-anchor" where the head has two anchors, else "ascent".
    rng
        As there, or the seed of it.
    """
    reduced, basis = reduced_head(head)
    found = two_anchor_tokens(reduced, n=n, radius=radius, rng=rng) if method is None else None
    if found is None:
        found = adversarial_tokens(reduced, n=n, radius=radius, method=method or "ascent", rng=check.rng_from(rng))
    assert isinstance(found, DiscreteMeasure)  # the heads are not masked
    return found if basis is None else DiscreteMeasure(found.points @ basis.T, found.weights)


def reduced_head(head: SoftmaxAttention) -> tuple[SoftmaxAttention, Array | None]:
    """The head on the span of what it reads, with the orthonormal basis ``(d, r)`` of that span (None: no reduction).

    Values enter by ``|V x|`` only, so a tall V is replaced by its triangular factor: every Lipschitz constant is kept.
    """
    form = softmax_head(head, masked=False).on_span()
    return SoftmaxAttention(form.A, form.V, bias=form.c), form.basis


@dataclass(frozen=True, eq=False)
class RealAgainstAdversarial(Result):
    """Local constants of heads at real tokens and at adversarial tokens of no larger norm.

    Attributes
    ----------
    growth : LocalGrowth
        At the first n tokens of each window.
    adversarial : ndarray (heads, m)
        At adversarial tokens (each value recomputed from the map's Jacobian at the tokens found).
    radius : float
        Norm bound of the adversarial tokens: the largest norm of a real token.
    method : str
    """

    growth: LocalGrowth
    adversarial: Array
    radius: float
    method: str

    def real_exponent(self, head: int) -> Exponent:
        """Growth at the real tokens, standard error over windows."""
        return self.growth.exponent(head)

    def adversarial_exponent(self, head: int) -> Exponent:
        """Growth at the adversarial tokens, standard error of the regression."""
        return fit_exponent(self.growth.n_values, self.adversarial[head])

    def rows(self) -> list[dict[str, Any]]:
        """One record a head: both constants at the largest n, their ratio, both exponents with 95 percent intervals."""
        out = []
        for h in range(len(self.adversarial)):
            real, adverse = self.real_exponent(h), self.adversarial_exponent(h)
            value = float(self.growth.values[h, :, -1].mean())
            out.append(
                {
                    "head": h,
                    "real": value,
                    "adversarial": float(self.adversarial[h, -1]),
                    "ratio": float(self.adversarial[h, -1]) / value if value > 0 else float("inf"),
                    "real_exponent": real.exponent,
                    "real_interval": list(real.interval()),
                    "adversarial_exponent": adverse.exponent,
                    "adversarial_interval": list(adverse.interval()),
                }
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            **self.growth.to_dict(),
            "adversarial": self.adversarial.tolist(),
            "ball_radius": self.radius,
            "method": self.method,
            "heads": plain(self.rows()),
        }


def real_against_adversarial(
    heads: Sequence[SoftmaxAttention],
    windows: ArrayLike,
    *,
    n_values: Sequence[int] = (8, 16, 32, 64, 128),
    growth: LocalGrowth | None = None,
    method: Method | None = None,
    rng: np.random.Generator | int = 0,
    progress: bool = False,
) -> RealAgainstAdversarial:
    """Compare the local W_2 constants of heads at real tokens and at adversarial tokens of the same size.

    Parameters
    ----------
    heads : sequence of SoftmaxAttention
    windows : array_like (windows, length, d)
    n_values : sequence of int
    growth : LocalGrowth, optional
        The real side, when it has been computed already for these heads, windows and sizes.
    method : str, optional
        Of :func:`otattn.adversarial_tokens`; by default "two-anchor", and "ascent" for one and two tokens.
    rng : Generator or int
    progress : bool
    """
    X = check.as_float_array(windows, "windows", ndim=3)
    real = local_growth(heads, X, n_values=n_values, progress=progress) if growth is None else growth
    if real.particle.shape[0] != len(heads):
        raise ValueError(
            f"growth must belong to the {len(heads)} heads, received one of {real.particle.shape[0]} heads."
        )
    radius = float(np.linalg.norm(X, axis=2).max())
    generator = check.rng_from(rng)
    values = np.empty((len(heads), len(real.n_values)))
    for h in tqdm(range(len(heads)), desc="adversarial tokens", disable=not progress, leave=False):
        for k, n in enumerate(real.n_values):
            chosen: Method = method or ("two-anchor" if n >= 3 else "ascent")
            mu = adversarial_head_tokens(heads[h], int(n), radius, method=chosen, rng=generator)
            values[h, k] = local_lipschitz(heads[h], mu).value
    return RealAgainstAdversarial(real, values, radius, method or "two-anchor")
