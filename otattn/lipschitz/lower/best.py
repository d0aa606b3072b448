"""Lower bounds of Lipschitz constants, each with the measure that witnesses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from otattn import _validate as check
from otattn.attention import AttentionMap, RotaryAttention, SoftmaxAttention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import Candidates, evaluate, round_multiplicities
from otattn.lipschitz.lower.explicit import Layout, search_explicit
from otattn.lipschitz.lower.problem import Effort, Problem, problem_of
from otattn.lipschitz.lower.rotary import continued, nested, reduced, search_rotary
from otattn.lipschitz.lower.search import search_measures, search_tokens
from otattn.lipschitz.lower.sequences import search_chains, search_sequences
from otattn.lipschitz.theorem import check_count, check_effort
from otattn.measures import DiscreteMeasure, Domain, SpaceTimeMeasure

Method = Literal["castin-antipodal", "castin-half", "two-anchor", "ascent", "best"]
METHODS = get_args(Method)

SEQUENCE_CORE = 256
"""Causal sequences are searched up to this length; longer ones are made from those (see ``_best_sequence``)."""
EXPLICIT_CORE = 16
"""The same for causal maps without an analytic gradient."""
STRETCH_LIMIT = 2048
"""Up to this length the blocks of a core are also stretched to n tokens."""
SEQUENCE_BYTES = 2**29
"""A witness of a causal map holds every one of its n tokens; larger ones are refused."""
SOURCE = "otattn, local constant at a witness measure"
_Found = tuple[Any, float, dict[str, Any]]
"""The witness, its value by the map's own Jacobian, and details."""


def adversarial_tokens(
    attention: AttentionMap,
    *,
    n: int,
    radius: float | None = None,
    domain: Domain | None = None,
    method: Method = "best",
    rng: np.random.Generator | int | None = None,
) -> DiscreteMeasure | SpaceTimeMeasure:
    """Tokens at which the map ``f`` on n tokens is steep.

    Parameters
    ----------
    attention : AttentionMap
    n : int
        Number of tokens; equal tokens are one atom, so n may be 10**6.
    radius : float, optional
        Tokens lie in the ball of this radius; or give ``domain``.
    domain : Ball, Ellipsoid, LayerNormDomain or Box, optional
    method : {"castin-antipodal", "castin-half", "two-anchor", "ascent", "best"}
        The published witnesses ``(Ru, -Ru, ..., -Ru)`` and ``(Ru, Ru/2, ..., Ru/2)``, with u the eigenvector of the least
        and of the largest real eigenvalue of A (single-head softmax only); a cluster with two anchors across its
        gradient; an ascent from structured and random starts; the best of all.
    rng : Generator or int, optional
        Starting points; the same ones at every call by default.

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
    >>> mu = adversarial_tokens(SoftmaxAttention([[-1.0]], [[1.0]]), n=4, radius=2.0, method="castin-antipodal")
    >>> np.abs(mu.points).ravel(), mu.weights
    (array([2., 2.]), array([0.25, 0.75]))
    """
    count = check.count(n, "n")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, received {method!r}.")
    problem = problem_of(attention, radius=radius, domain=domain, n=count)
    generator = check.rng_from(0 if rng is None else rng)
    if method in ("ascent", "best"):
        return _best_tokens(problem, generator)[0]
    if attention.causal:
        _check_length(problem)
    return _steepest(problem, _structured(problem, method, generator))


def two_anchor_tokens(
    attention: AttentionMap, *, n: int, radius: float, rng: np.random.Generator | np.random.SeedSequence | int
) -> Any:
    """The tokens of the method "two-anchor" of :func:`adversarial_tokens`, None where the map has no two anchors."""
    problem = problem_of(attention, radius=radius, n=check.count(n, "n"))
    candidates = _anchored(problem, check.rng_from(rng))
    return None if candidates is None else _steepest(problem, candidates)


def _steepest(problem: Problem, candidates: Candidates) -> Any:
    """The best candidate as a measure, for a causal map as a sequence."""
    causal = problem.attention.causal
    top = candidates.best(evaluate(problem.unmasked, candidates), 1)
    order = np.argsort(top.log_weights[0], kind="stable") if causal else slice(None)
    measure = Layout(problem, _kind(problem)).measure(top.latents[0][order], top.log_weights[0][order])
    return measure if causal else measure.merge_duplicates()


def _kind(problem: Problem) -> Literal["measure", "slice", "sequence"]:
    """How atoms become a measure: causal maps see tokens in order, and any measure on one time slice."""
    return "measure" if not problem.causal else "slice" if problem.n is None else "sequence"


def _check_length(problem: Problem) -> None:
    """Refuse a sequence that does not fit: equal tokens of a causal map cost memory, since each has its own time."""
    each = 8 * (len(problem.chart.shape) + 2)
    if problem.tokens * each > SEQUENCE_BYTES:
        raise ValueError(
            f"n must be at most {SEQUENCE_BYTES // each} for a causal map, whose witness lists every token, received "
            f"{problem.n} (about {problem.tokens * each:.3g} bytes); give fewer tokens, or n=None for any measure."
        )


def _anchored(problem: Problem, rng: np.random.Generator) -> Candidates | None:
    """Clusters with two anchors, None where no head has any."""
    found = [witnesses.two_anchor(problem, f, rng) for f in problem.forms]
    batches = [b for b in found if b is not None]
    return Candidates.join(batches) if batches else None


def _structured(problem: Problem, method: str, rng: np.random.Generator) -> Candidates:
    """The candidates of one structured method."""
    n, name = problem.tokens, type(problem.attention).__name__
    if not problem.analytic:
        raise ValueError(
            f"method {method!r} needs softmax, L2 or multi-head attention of these, received {name}; use method='ascent'."
        )
    if method == "two-anchor":
        anchored = _anchored(problem, rng)
        if anchored is None:
            raise ValueError(
                "method 'two-anchor' needs n >= 3, tokens of dimension 2 at least, A and V with V u != 0 for some u orthogonal "
                "to A z, and logits of the domain that exceed a token's own by log(n / 2), or two anchors are not seen among "
                f"the others; received n = {n} and dimension {problem.chart.latent_dim}; use method='best'."
            )
        return anchored
    if not isinstance(problem.attention.unmasked, SoftmaxAttention) or n < 2:
        raise ValueError(
            f"method {method!r} needs single-head softmax attention and n >= 2, received {name} and n = {n}; "
            "use method='ascent'."
        )
    build = witnesses.castin_antipodal if method == "castin-antipodal" else witnesses.castin_half
    return build(problem, problem.forms[0])


def _best_tokens(problem: Problem, rng: np.random.Generator) -> _Found:
    """The witness of n tokens."""
    if problem.causal:
        return _best_sequence(problem, rng)
    layout, seeds = Layout(problem, "measure"), []
    if problem.analytic:
        found = search_tokens(problem, rng)
        seeds = [(found.latents, found.log_weights)]
    pair = seeds[0] if seeds and problem.p == 2.0 else search_explicit(layout, rng, seeds=seeds)
    return *layout.witness(*pair), {"atoms": len(pair[0])}


def _best_sequence(problem: Problem, rng: np.random.Generator) -> _Found:
    """The same for a causal map: searched on a sequence of at most a core's length, then lengthened to n."""
    _check_length(problem)
    n, p = problem.tokens, problem.p
    head = problem.attention
    if p == 2.0 and isinstance(head, RotaryAttention) and (n <= STRETCH_LIMIT or nested(head)):
        return _best_rotary(problem, rng)
    by_gradient = problem.analytic and p == 2.0
    core = replace(problem, n=min(n, SEQUENCE_CORE if by_gradient else EXPLICIT_CORE))
    layout = Layout(core, "sequence")
    pair = search_sequences(core, rng) if by_gradient else search_explicit(layout, rng)
    measure, value = layout.witness(*pair)
    details = {"core": core.n}
    if core.n == n:
        return measure, value, details
    best: tuple[Any, float] | None = None
    if problem.analytic:
        # normalised kernels: earlier tokens do not see those appended at the end, so the leading block of the Jacobian,
        # hence the value, stays (all tokens weigh the same in conditional W_p)
        points = np.concatenate([measure.points, np.repeat(measure.points[-1:], n - core.tokens, axis=0)])
        best = SpaceTimeMeasure.from_sequence(points), value
    if best is None or n <= (STRETCH_LIMIT if p == 2.0 else SEQUENCE_CORE):
        if p != 2.0 and n > SEQUENCE_CORE:
            raise ValueError(
                f"n must be at most {SEQUENCE_CORE} for a causal map that is not normalised and p = {p:g}, received {n}; "
                "use p = 2."
            )
        # the same blocks, longer; evaluated at all n tokens
        long = Layout(problem, "sequence").witness(pair[0], round_multiplicities(pair[1][None], n)[0])
        best = long if best is None or long[1] > best[1] else best
    return *best, details


def _best_rotary(problem: Problem, rng: np.random.Generator) -> _Found:
    """The same for a rotary head: each sequence found, with n tokens, by the map's own Jacobian."""
    n = problem.tokens
    seen = reduced(replace(problem, n=min(n, STRETCH_LIMIT)))
    layout = Layout(seen, "sequence")
    found = [layout.witness(continued(z, seen.tokens), np.zeros(seen.tokens)) for z in search_rotary(seen, rng)]
    measure, value = max(found, key=lambda one: one[1])
    if n > seen.tokens:  # the leading block of the Jacobian stays
        measure = SpaceTimeMeasure.from_sequence(continued(measure.points, n))
    return measure, value, {}


def _best_measure(problem: Problem, rng: np.random.Generator) -> _Found:
    """The witness of the mean-field constant; for causal maps on a single time slice or one atom at a time."""
    layout, seeds = Layout(problem, _kind(problem)), []
    if problem.analytic:
        found = search_measures(problem.unmasked, rng)
        seeds = [(found.latents, found.log_weights)]
    pair = seeds[0] if seeds and problem.p == 2.0 else search_explicit(layout, rng, seeds=seeds)
    best = layout.witness(*pair)
    if problem.causal and problem.analytic:
        other = Layout(problem, "chain").witness(*search_chains(problem, rng))
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
    check_effort(effort)
    count = check_count(n)
    problem = problem_of(attention, radius=radius, domain=domain, n=count, p=order, effort=effort)
    search = _best_measure if n is None else _best_tokens
    witness, value, details = search(problem, check.rng_from(rng))
    return Bound(value, "lower", SOURCE, order, problem.domain, count, witness, details, attention)
