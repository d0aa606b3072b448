"""Attacks on values from below: each is computed again at its witness, which must lie where it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from definitions import field_jacobian, jacobian, logits, operator_norm
from outcomes import Outcome, Refused, asked, attempt
from problems import ALL, SOFTMAX, Problem, measure, problem
from upper import SEVERAL, SMALL, below

import otattn as oa

B = oa.bounds
ROUNDING = 1e-9
"""Local constants of the library and ours are both float64."""
SEARCH = 1e-6
"""For p = 1 and inf ours is the end of a search in few dimensions."""
SHARE = 1e-8
"""Share of an atom that splits off (p = 1: the smaller, the worse)."""
EXPAND = 64
BEYOND = 1e130
"""The light atom of a mean-field witness has a mass of the inverse square."""


def at_witness(q: Problem, witness: Any, n: int | None, p: float) -> float:
    """The constant at a witness measure, atoms that may split included."""
    w, X = np.asarray(witness.weights), np.asarray(witness.points)
    keep = w > 0
    w, X = w[keep], X[keep]
    times = np.asarray(witness.times)[keep] if hasattr(witness, "times") else None
    if n is None:
        share = 0.5 if p == 2 else SHARE
        X, w = np.repeat(X, 2, axis=0), np.stack([w * (1 - share), w * share], axis=1).ravel()
        times = None if times is None else np.repeat(times, 2)
    elif n <= EXPAND and times is None:
        counts = np.rint(w * n).astype(int)
        X, w = np.repeat(X, counts, axis=0), np.full(counts.sum(), 1.0 / counts.sum())
    map = replace(q.map, times=None if times is None else tuple(times))
    value, _ = operator_norm(jacobian(map, X[None], w[None]), w[None], p, rounds=400, starts=99)
    if n is not None and n > EXPAND and times is None:
        fields = field_jacobian(map, X[None], np.arange(len(X)), X[None], w[None])
        many = w * n > 1.5
        value = np.maximum(value, np.linalg.norm(fields[0], 2, axis=(1, 2))[many].max(initial=0.0))
    return float(value[0])


def recomputed(name: str, q: Problem, bound: Any, n: int | None, p: float) -> Outcome:
    """Held when the constant at the witness is the value, the witness lies in the domain and has n tokens."""
    witness, faults = bound.witness, []
    if witness is None:
        faults.append("no witness")
    else:
        own = at_witness(q, witness, n, p)
        if not bound.value <= own * (1 + (ROUNDING if p == 2 else SEARCH)) + 1e-300:
            faults.append(f"the witness has {own!r}")
        if not q.region.holds(np.asarray(witness.points)[np.asarray(witness.weights) > 0]):
            faults.append("the witness leaves the domain")
        if (
            n is not None
            and np.abs(np.asarray(witness.weights) * n - np.rint(np.asarray(witness.weights) * n)).max() > 1e-6
        ):
            faults.append(f"the weights are no multiples of 1/{n}")
        if not faults:
            return Outcome(name, q.kind, "held", 1, share=1.0)
    return Outcome(name, q.kind, "violated", 1, f"{name}: {bound!r}, but {', '.join(faults)}\n  {q!r}\n  {witness!r}")


def attack(name: str, call: Callable[[Problem], Any], **draw: Any) -> Callable[[np.random.Generator], Outcome]:
    def run(rng: np.random.Generator) -> Outcome:
        q = problem(rng, **draw)

        def body() -> Outcome:
            bound = asked(lambda: call(q))
            if (bound.witness is None and bound.value in (0.0, np.inf)) or bound.value > BEYOND:
                raise Refused("no witness in float64")
            if bound.witness is None:  # a linear map: any tokens do
                X = q.region.points(np.ones((q.atoms, q.region.size)))
                bound = replace(bound, witness=measure(q, X, np.full(q.atoms, 1.0 / q.atoms)))
            return recomputed(name, q, bound, q.n, q.p)

        return attempt(name, body, q.kind, q)

    return run


def searched(rng: np.random.Generator) -> Outcome:
    """``lipschitz_lower_bound`` of every map."""
    name, n = "lipschitz_lower_bound", rng.choice([0, 1, 2, 3, 6, 12])
    q = problem(
        rng,
        **(
            {**SEVERAL, "masked": None}
            if rng.random() < 0.3
            else {"kinds": (*ALL, "rotary", "sinkhorn"), "masked": None}
        ),
        orders=(2.0, 2.0, 1.0, np.inf),
        any_measure=False,
    )
    q = replace(q, n=int(n) or None)

    def body() -> Outcome:
        bound = asked(
            lambda: oa.lipschitz_lower_bound(q.ours, domain=q.region.domain, n=q.n, p=q.p, rng=int(rng.integers(99)))
        )
        return recomputed(name, q, bound, q.n, q.p)

    return attempt(name, body, q.kind, q)


def tokens(rng: np.random.Generator) -> Outcome:
    """``adversarial_tokens`` lie in the ball, n of them, and are no less steep than the published ones."""
    name = "adversarial_tokens"
    q = problem(rng, kinds=(*SOFTMAX, "l2"), regions=("ball",), masked=None, any_measure=False)
    method = str(rng.choice(["castin-antipodal", "castin-half", "two-anchor", "ascent", "best"]))

    def body() -> Outcome:
        mu = asked(lambda: oa.adversarial_tokens(q.ours, n=q.n, radius=q.region.par["radius"], method=method, rng=0))
        local = asked(lambda: oa.local_lipschitz(q.ours, mu))
        claimed = type("Claim", (), {"value": local.particle, "witness": mu})
        return recomputed(name, q, claimed, None if q.map.causal else q.n, 2.0)

    return attempt(name, body, q.kind, q)


def enclosure(rng: np.random.Generator) -> Outcome:
    """Both ends of ``enclose_lipschitz``: the witness again, and configurations against the upper one."""
    name = "enclose_lipschitz"
    draw = {**SEVERAL} if rng.random() < 0.2 else {"kinds": (*SOFTMAX, "l2", "linear", "sigmoid", "rotary")}
    q = problem(rng, masked=None, orders=(2.0, 2.0, 1.0, np.inf), **{**draw, **SMALL})

    def body() -> Outcome:
        found = asked(lambda: oa.enclose_lipschitz(q.ours, domain=q.region.domain, n=q.n, p=q.p, rng=0))
        return both_ends(name, q, found, rng)

    return attempt(name, body, q.kind, q)


def both_ends(name: str, q: Problem, found: Any, rng: np.random.Generator) -> Outcome:
    if not found.lower.value <= found.upper.value:
        return Outcome(name, q.kind, "violated", 1, f"{name}: {found!r}\n  {q!r}")
    first = recomputed(name, q, found.lower, q.n, q.p)
    return first if first.state == "violated" else below(name, q, found.upper.value, rng)


def table_of_enclosures(rng: np.random.Generator) -> Outcome:
    """Each row of ``enclosure_table``."""
    name = "enclosure_table"
    q = problem(rng, kinds=SOFTMAX, regions=("ball",), any_measure=False, sizes=(2, 3), dims=(1, 2))

    def body() -> Outcome:
        found = asked(lambda: oa.enclosure_table(q.ours, radius=q.region.par["radius"], n_values=(q.n, None), rng=0))
        for n, one in zip(found.values, found.enclosures, strict=True):
            outcome = both_ends(name, replace(q, n=n), one, rng)
            if outcome.state == "violated":
                break
        return outcome

    return attempt(name, body, q.kind, q)


def local(rng: np.random.Generator) -> Outcome:
    """``local_lipschitz``: ``lower <= constant <= upper`` at one measure, every map."""
    name = "local_lipschitz"
    draw = {**SEVERAL} if rng.random() < 0.3 else {"kinds": (*ALL, "rotary", "sinkhorn")}
    q = problem(rng, masked=None, orders=(2.0, 2.0, 1.0, np.inf), **draw)
    X = q.region.points(rng.standard_normal((q.atoms, q.region.size)) * 10 ** rng.uniform(-1, 0.5))
    w = np.full(q.atoms, 1.0 / q.atoms) if q.n else rng.dirichlet(np.ones(q.atoms)) + 1e-3
    mu = measure(q, X, w / w.sum())

    def body() -> Outcome:
        if any(h.kind == "relu" and _kinked(h, X) for h in q.map.heads):
            raise Refused("no derivative at a kink")
        found = asked(lambda: oa.local_lipschitz(q.ours, mu, p=q.p))
        own = at_witness(q, mu, None, q.p)
        tol = 1e-6 if any(h.kind == "sinkhorn" for h in q.map.heads) or q.p != 2 else 1e-8
        # the complex steps of the reference leave their own square where the derivative is zero
        if found.lower <= own * (1 + tol) + 1e-300 and own <= found.upper * (1 + tol) + 1e-50:
            return Outcome(name, q.kind, "held", 1, share=1.0)
        return Outcome(
            name,
            q.kind,
            "violated",
            1,
            f"{name}: [{found.lower!r}, {found.upper!r}] without {own!r}\n  {q!r}\n  {mu!r}",
        )

    return attempt(name, body, q.kind, q)


def _kinked(head: Any, X: Any) -> bool:
    s = np.abs(logits(head, X[None], np.arange(len(X)), X[None]))
    return bool(s.min() <= 1e-12 * s.max())


def large_radius(rng: np.random.Generator) -> Outcome:
    """The limit of tokens that grow: logits far apart, Jacobian ``V eps_{argmax}``."""
    name = "bounds.castin2024_large_radius"
    q = problem(rng, kinds=("softmax",), plain=True, masked=None, any_measure=False, regions=("ball",))
    X = q.region.points(rng.standard_normal((q.n, q.region.size)))

    def body() -> Outcome:
        limit = asked(lambda: B.castin2024_large_radius(q.ours, X))
        if limit.details["margin"] <= 0 or q.n == 1:
            raise Refused("no gap")
        Y = X * np.sqrt(200.0 / limit.details["margin"])
        own = at_witness(q, measure(q, Y, np.full(q.n, 1.0 / q.n)), q.n, 2.0)
        # the field part is left over: e^{-200} times squares of the tokens
        if abs(own - limit.value) <= 1e-8 * own + 1e-300:
            return Outcome(name, q.kind, "held", 1, share=1.0)
        return Outcome(name, q.kind, "violated", 1, f"{name}: {limit!r}, far out {own!r}\n  {q!r}\n  {X.tolist()}")

    return attempt(name, body, q.kind, q)


def crossing(rng: np.random.Generator) -> Outcome:
    """``crossover``: at the number that it gives the bound for n tokens has reached that for any measure, not before."""
    name = "bounds.crossover"
    q = problem(rng, kinds=SOFTMAX, regions=("ball",), any_measure=True)
    R = q.region.par["radius"]

    def body() -> Outcome:
        found = asked(lambda: B.crossover(q.ours, R))
        n = found.published
        if not 2 <= n <= 2**50:
            raise Refused("out of reach")
        mean = B.geshkovski2024_mean_field(q.ours, radius=R).log_value
        ends = [
            B.castin2024_discrete(q.ours, radius=R, n=round(m)).log_value for m in (n * (1 - 1e-9) - 1, n * (1 + 1e-9))
        ]
        if ends[0] <= mean * (1 + 1e-12) and mean <= ends[1] + 1e-12 * abs(mean):
            return Outcome(name, q.kind, "held", 2)
        return Outcome(name, q.kind, "violated", 2, f"{name}: {found!r}, {ends} against {mean}\n  {q!r}")

    return attempt(name, body, q.kind, q)


PUBLISHED = {"kinds": SOFTMAX, "plain": True, "regions": ("ball",)}
LOWER: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "lipschitz_lower_bound": searched,
    "adversarial_tokens": tokens,
    "enclose_lipschitz": enclosure,
    "enclosure_table": table_of_enclosures,
    "local_lipschitz": local,
    "bounds.castin2024_large_radius": large_radius,
    "bounds.crossover": crossing,
    "bounds.castin2024_discrete_lower": attack(
        "bounds.castin2024_discrete_lower",
        lambda q: B.castin2024_discrete_lower(q.ours, radius=q.region.par["radius"], n=q.n),
        any_measure=False,
        masked=None,
        **PUBLISHED,
    ),
    "bounds.castin2024_mean_field_lower": attack(
        "bounds.castin2024_mean_field_lower",
        lambda q: B.castin2024_mean_field_lower(q.ours, radius=q.region.par["radius"]),
        any_measure=True,
        **PUBLISHED,
    ),
    "bounds.kim2021_dot_product": attack(
        "bounds.kim2021_dot_product",
        lambda q: B.kim2021_dot_product(q.ours, n=q.n, radius=q.region.par["radius"]),
        any_measure=False,
        **PUBLISHED,
    ),
}
