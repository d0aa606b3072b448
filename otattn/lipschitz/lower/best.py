"""Lower bounds of Lipschitz constants, each with the measure that witnesses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.attention import AttentionMap, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.attention.head import check_sizes
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import Candidates, evaluate, round_multiplicities
from otattn.lipschitz.lower.charts import Chart, chart_of
from otattn.lipschitz.lower.explicit import Layout, hint_forms, output_pair, search_explicit
from otattn.lipschitz.lower.forms import Form, forms_of
from otattn.lipschitz.lower.search import Effort, search_measures, search_tokens
from otattn.lipschitz.lower.sequences import search_chains, search_sequences
from otattn.measures import Ball, Domain, SpaceTimeMeasure

__all__ = ["adversarial_tokens", "lipschitz_lower_bound"]

Array = NDArray[np.float64]
Method = Literal["castin-antipodal", "castin-half", "two-anchor", "ascent", "best"]
METHODS = ("castin-antipodal", "castin-half", "two-anchor", "ascent", "best")

SEQUENCE_CORE = 256
"""Causal sequences are searched up to this length; longer ones are made from those (see ``_best_sequence``)."""
EXPLICIT_CORE = 16
"""The same for causal maps without an analytic gradient."""
STRETCH_LIMIT = 2048
"""Up to this length the blocks of a core are also stretched to n tokens."""
SEQUENCE_BYTES = 2**29
"""A witness of a causal map holds every one of its n tokens; larger ones are refused."""
SOURCE = "otattn, local constant at a witness measure"


@dataclass(frozen=True, eq=False)
class _Task:
    """A map, its domain, and what the analytic search can use of them."""

    attention: AttentionMap
    domain: Domain
    chart: Chart
    forms: tuple[Form, ...] | None
    """In reduced coordinates; None when the map is not a sum of softmax and L2 heads."""
    hints: tuple[Form, ...]


def _unmasked(attention: AttentionMap) -> AttentionMap:
    """The map that a causal attention is on a single time slice."""
    if isinstance(attention, MaskedAttention):
        return attention.attention
    if isinstance(attention, MultiHeadAttention) and attention.causal:
        heads = [_unmasked(h) for h in attention.heads]
        return MultiHeadAttention(heads, attention.outputs, output_bias=attention.output_bias)
    return attention


def _task(attention: Any, radius: float | None, domain: Domain | None) -> _Task:
    if not isinstance(attention, AttentionMap):
        raise TypeError(f"attention must be an attention map, received {type(attention).__name__}; build one first.")
    if (radius is None) == (domain is None):
        given = "neither" if radius is None else "both"
        raise ValueError(
            f"exactly one of radius and domain must be given, received {given}; radius means Ball(radius)."
        )
    region = Ball(check.positive(radius, "radius")) if domain is None else domain
    dim = attention.in_dim if attention.in_dim is not None else region.dim
    if dim is None:
        raise ValueError(
            "the dimension of the tokens must be known, received a map and a domain that fit any; give Ball(radius, dim)."
        )
    check_sizes(attention)
    forms = forms_of(_unmasked(attention))
    chart = chart_of(region, dim, forms)
    hints = hint_forms(attention) if forms is None else forms
    usable = tuple(f for f in hints if f.A.shape == (dim, dim))
    return _Task(attention, region, chart, None if forms is None else chart.restrict(forms), chart.restrict(usable))


def adversarial_tokens(
    attention: AttentionMap,
    n: int,
    radius: float | None = None,
    *,
    method: Method = "best",
    rng: np.random.Generator | int | None = None,
    domain: Domain | None = None,
) -> Any:
    """Tokens at which the map ``f`` on n tokens is steep.

    Parameters
    ----------
    attention : AttentionMap
    n : int
        Number of tokens; equal tokens are one atom, so n may be 10**6.
    radius : float, optional
        Tokens lie in the ball of this radius; or give ``domain``.
    method : {"castin-antipodal", "castin-half", "two-anchor", "ascent", "best"}
        The published witnesses ``(Ru, -Ru, ..., -Ru)`` and ``(Ru, Ru/2, ..., Ru/2)``, with u the eigenvector of the least
        and of the largest real eigenvalue of A (single-head softmax only); a cluster with two anchors across its
        gradient; an ascent from structured and random starts; the best of all.
    rng : Generator or int, optional
        Starting points; the same ones at every call by default.
    domain : Ball, Ellipsoid, LayerNormDomain or Box, optional

    Returns
    -------
    DiscreteMeasure
        Weights are multiples of ``1/n``; ``.tokens(n)`` expands it. For a causal map a SpaceTimeMeasure: the sequence.

    Raises
    ------
    ValueError
        An unknown method, or one that needs matrices which the map does not have, or fewer tokens than it needs.

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024 (published witnesses); the others are ours, see
    :mod:`otattn.lipschitz.lower.witnesses`.

    Examples
    --------
    >>> mu = adversarial_tokens(SoftmaxAttention([[-1.0]], [[1.0]]), 4, 2.0, method="castin-antipodal")
    >>> np.abs(mu.points).ravel(), mu.weights
    (array([2., 2.]), array([0.25, 0.75]))
    """
    n = check.count(n, "n")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, received {method!r}.")
    task = _task(attention, radius, domain)
    generator = check.rng_from(0 if rng is None else rng)
    if method in ("ascent", "best"):
        return _best_tokens(task, n, 2.0, generator, "fast")[0]
    if attention.causal:
        _check_length(task, n)
    candidates = _structured(task, n, method, generator)
    can_split = candidates.log_weights > np.log(1.5)
    assert task.forms is not None
    symmetric, fields = evaluate(task.forms, task.chart, candidates, can_split=can_split)
    top = int(np.maximum(symmetric, fields.max(axis=1)).argmax())
    layout = Layout(attention, task.chart, "sequence" if attention.causal else "measure", n, 2.0)
    latents, logs = candidates.latents[top], candidates.log_weights[top]
    if attention.causal:
        order = np.argsort(logs, kind="stable")
        latents, logs = latents[order], logs[order]
    measure = layout.measure(latents, logs)
    return measure if attention.causal else measure.merge_duplicates()


def _check_length(task: _Task, n: int) -> None:
    """Refuse a sequence that does not fit: equal tokens of a causal map cost memory, since each has its own time."""
    each = 8 * (len(task.chart.shape) + 2)
    if n * each > SEQUENCE_BYTES:
        raise ValueError(
            f"n must be at most {SEQUENCE_BYTES // each} for a causal map, whose witness lists every token, received {n} "
            f"(about {n * each:.3g} bytes); give fewer tokens, or n=None for any measure."
        )


def _structured(task: _Task, n: int, method: str, rng: np.random.Generator) -> Candidates:
    """The candidates of one structured method."""
    forms = task.forms
    if forms is None:
        raise ValueError(
            f"method {method!r} needs softmax, L2 or multi-head attention of these, received "
            f"{type(task.attention).__name__}; use method='ascent'."
        )
    if method == "two-anchor":
        found = [witnesses.two_anchor(f, task.chart, n, rng) for f in forms]
        batches = [b for b in found if b is not None]
        if not batches:
            raise ValueError(
                "method 'two-anchor' needs n >= 3, tokens of dimension 2 at least, A and V with V u != 0 for some u orthogonal "
                "to A z, and logits of the domain that exceed a token's own by log(n / 2), or two anchors are not seen among "
                f"the others; received n = {n} and dimension {task.chart.latent_dim}; use method='best'."
            )
        out = batches[0]
        for other in batches[1:]:
            out = out.joined(other)
        return out
    if not isinstance(_unmasked(task.attention), SoftmaxAttention) or n < 2:
        raise ValueError(
            f"method {method!r} needs single-head softmax attention and n >= 2, received "
            f"{type(task.attention).__name__} and n = {n}; use method='ascent'."
        )
    build = witnesses.castin_antipodal if method == "castin-antipodal" else witnesses.castin_half
    return build(forms[0], task.chart, n)


def _best_tokens(
    task: _Task, n: int, p: float, rng: np.random.Generator, effort: Effort
) -> tuple[Any, float, dict[str, Any]]:
    """The witness of n tokens, its value by the map's own Jacobian, and details."""
    causal = task.attention.causal
    if not causal:
        layout = Layout(task.attention, task.chart, "measure", n, p)
        if task.forms is not None:
            found = search_tokens(task.forms, task.chart, n, rng, effort)
            pair = (found.latents, found.log_weights)
            if p != 2.0:
                pair = search_explicit(layout, task.hints, rng, seeds=[pair], **_explicit(effort))
        else:
            pair = search_explicit(layout, task.hints, rng, **_explicit(effort))
        return *output_pair(layout, *pair), {"atoms": len(pair[0])}
    return _best_sequence(task, n, p, rng, effort)


def _best_sequence(
    task: _Task, n: int, p: float, rng: np.random.Generator, effort: Effort
) -> tuple[Any, float, dict[str, Any]]:
    """The same for a causal map: searched on a sequence of at most a core's length, then lengthened to n."""
    _check_length(task, n)
    analytic = task.forms is not None and p == 2.0
    core = min(n, SEQUENCE_CORE if analytic else EXPLICIT_CORE)
    layout = Layout(task.attention, task.chart, "sequence", core, p)
    if analytic:
        assert task.forms is not None
        pair = search_sequences(task.forms, task.chart, core, rng, effort)
    else:
        pair = search_explicit(layout, task.hints, rng, **_explicit(effort))
    measure, value = output_pair(layout, *pair)
    if core == n:
        return measure, value, {"core": core}
    best: tuple[Any, float] | None = None
    if task.forms is not None:
        # normalised kernels: earlier tokens do not see those appended at the end, so the leading block of the Jacobian,
        # hence the value, stays (all tokens weigh the same in conditional W_p)
        points = np.concatenate([measure.points, np.repeat(measure.points[-1:], n - core, axis=0)])
        best = SpaceTimeMeasure.from_sequence(points), value
    if best is None or n <= (STRETCH_LIMIT if p == 2.0 else SEQUENCE_CORE):
        if p != 2.0 and n > SEQUENCE_CORE:
            raise ValueError(
                f"n must be at most {SEQUENCE_CORE} for a causal map that is not normalised and p = {p:g}, received {n}; "
                "use p = 2."
            )
        # the same blocks, longer; evaluated at all n tokens
        stretched = Layout(task.attention, task.chart, "sequence", n, p)
        long = output_pair(stretched, pair[0], round_multiplicities(pair[1][None], n)[0])
        best = long if best is None or long[1] > best[1] else best
    return *best, {"core": core}


def _explicit(effort: Effort) -> dict[str, Any]:
    return {"starts": 8, "ascents": 5, "steps": 25} if effort == "fast" else {"starts": 40, "ascents": 12, "steps": 80}


def _best_measure(task: _Task, p: float, rng: np.random.Generator, effort: Effort) -> tuple[Any, float, dict[str, Any]]:
    """The witness of the mean-field constant; for causal maps on a single time slice or one atom at a time."""
    causal = task.attention.causal
    layout = Layout(task.attention, task.chart, "slice" if causal else "measure", None, p)
    seeds = None
    if task.forms is not None:
        found = search_measures(task.forms, task.chart, rng, effort)
        seeds = [(found.latents, found.log_weights)]
    if seeds is not None and p == 2.0:
        pair = seeds[0]
    else:
        pair = search_explicit(layout, task.hints, rng, seeds=seeds, **_explicit(effort))
    best = output_pair(layout, *pair)
    if causal and task.forms is not None:
        chain = search_chains(task.forms, task.chart, rng, effort)
        other = output_pair(Layout(task.attention, task.chart, "chain", None, p), *chain)
        best = other if other[1] > best[1] else best
    return *best, {"atoms": best[0].n}


def lipschitz_lower_bound(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    rng: np.random.Generator | int = 0,
    effort: Effort = "fast",
) -> Bound:
    r"""A lower bound of the W_p Lipschitz constant of ``F(mu) = (Gamma_mu)_# mu``, with the measure that witnesses it.

    The value is the local constant at the witness, evaluated through ``attention.jacobian`` and
    ``attention.field_jacobian``; it is attained in the limit of small displacements of its tokens inside the domain.

    Parameters
    ----------
    attention : AttentionMap
        Softmax, L2 and multi-head maps of these (masked too) use analytic gradients on clusters of tokens; any other map
        a slower ascent on measures with few atoms, whose value is as true but less sharp.
    radius : float, optional
        Tokens lie in the ball of this radius; or give ``domain``.
    domain : Ball, Ellipsoid, LayerNormDomain or Box, optional
        Tokens stay in it; on a LayerNorm sphere only tangent displacements count.
    n : int, optional
        Number of tokens; None for any measure (mean-field). A causal map of n > 256 tokens (16 without analytic
        gradient) is searched on sequences of that length, which are then made longer.
    p : {1, 2, inf}
        Order of the Wasserstein distance (the conditional one for causal maps).
    rng : Generator or int
        Starting points.
    effort : {"fast", "deep"}
        Seconds, or up to some minutes.

    Returns
    -------
    Bound
        Of kind "lower"; ``witness`` is a DiscreteMeasure, for causal maps a SpaceTimeMeasure.

    Raises
    ------
    ValueError
        Another p, a domain without displacements, radius and domain both given or both missing, a causal map and so many
        tokens that their list takes more than half a gigabyte.

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024 (published witnesses); the others are ours, derived in
    :mod:`otattn.lipschitz.lower.witnesses` and :mod:`otattn.lipschitz.lower.mean_field_witnesses`.

    Examples
    --------
    >>> attention = SoftmaxAttention([[-1.0, 0.0], [0.0, -1.0]], [[1.0, 0.0], [0.0, 1.0]])
    >>> lipschitz_lower_bound(attention, radius=2.0, n=3, rng=0).value > 4.0
    True
    """
    order = check.check_order(p)
    if order not in (1.0, 2.0, np.inf):
        raise ValueError(f"p must be 1, 2 or inf for a witnessed lower bound, received {p!r}; use one of these.")
    if effort not in ("fast", "deep"):
        raise ValueError(f"effort must be 'fast' or 'deep', received {effort!r}.")
    task = _task(attention, radius, domain)
    generator = check.rng_from(rng)
    if n is None:
        witness, value, details = _best_measure(task, order, generator, effort)
    else:
        witness, value, details = _best_tokens(task, check.count(n, "n"), order, generator, effort)
    return Bound(value, "lower", SOURCE, order, task.domain, n, witness, details, attention)
