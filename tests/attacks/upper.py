"""Attacks on the bounds of Lipschitz constants: configurations of the domain that stretch more than they allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from ascent import steepest
from definitions import SCORES, Head, distance, field_jacobian, image, local_constant
from exact import distance as exact_distance
from exact import exact, field_stretch, masses, stretch
from exact import image as exact_image
from outcomes import Outcome, Refused, asked, attempt, settled
from problems import ALL, NEGATIVE, ORDERS, POSITIVE, SOFTMAX, SYMMETRIC, Problem, measure, problem
from regions import around

import otattn as oa

PAIRS = 6
"""Pairs of configurations whose finite ratio is compared with each bound for n tokens."""
SEVERAL = {"heads": True, "kinds": ALL}


def attack(name: str, call: Callable[[Problem], Any], **draw: Any) -> Callable[[np.random.Generator], Outcome]:
    """The attack on one function: ``call`` gives its Bound (or several) for a problem drawn with ``draw``."""

    def run(rng: np.random.Generator) -> Outcome:
        q = problem(rng, **draw)

        def body() -> Outcome:
            bounds = asked(lambda: call(q))
            bounds = [bounds] if isinstance(bounds, oa.Bound) else list(bounds)
            uppers = [float(b) for b in bounds if b.kind == "upper"]
            if not uppers:
                raise Refused("no upper bound")
            return below(name, q, min(uppers), rng)

        return attempt(name, body, q.kind, q)

    return run


def below(name: str, q: Problem, bound: float, rng: np.random.Generator) -> Outcome:
    """Whether configurations of the problem stay below ``bound``, infinitesimally and at finite distance."""
    found = steepest(q, rng)

    def sure():
        return stretch(q.map, q.region.exact(found.z), masses(found.w), found.eps, q.p)

    outcome = settled(name, q.kind, bound, found.value, found.tried, sure, (q, found))
    if outcome.state == "held" and q.n is not None and q.n <= 4:
        return _finite(outcome, q, bound, rng)
    return outcome


def _finite(outcome: Outcome, q: Problem, bound: float, rng) -> Outcome:
    """The same for ``W_p(f(X), f(Y)) / W_p(X, Y)``, close pairs and far ones."""
    for _ in range(PAIRS):
        z = np.array([1.0, rng.choice([1.0, 3.0])])[:, None, None] * rng.standard_normal((2, q.n, q.region.size))
        if rng.random() < 0.5:
            z[1] = z[0] + 10 ** rng.uniform(-6, 0) * z[1]
        X = q.region.points(z)
        apart = distance(X[0], X[1], q.p, q.map.ordered)
        if not apart > 1e-7 * np.abs(X).max():
            continue
        with np.errstate(all="ignore"):
            Y = image(q.map, X, np.full((2, q.n), 1.0 / q.n))
            ratio = distance(Y[0], Y[1], q.p, q.map.ordered) / apart
        if not np.isfinite(ratio):
            continue

        def sure(z=z):
            w = masses(np.ones(q.n))
            X = [q.region.exact(one) for one in z]
            Y = [exact_image(q.map, one, w) for one in X]
            return exact_distance(*Y, q.p, q.map.ordered) / exact_distance(*X, q.p, q.map.ordered)

        new = settled(outcome.function, q.kind, bound, float(ratio), 1, sure, (q, z.tolist()))
        share = max(outcome.share, new.share)
        outcome = Outcome(new.function, new.kind, new.state, outcome.tried + 1, new.report, share)
        if new.state == "violated":
            return outcome
    return outcome


def on_domain(function: Callable[..., Any], *, n: bool = True, p: bool = True) -> Callable[[Problem], Any]:
    """A call with ``domain=``, and with n and p where the function takes them."""
    return lambda q: function(q.ours, domain=q.region.domain, **({"n": q.n} if n else {}), **({"p": q.p} if p else {}))


def on_ball(function: Callable[..., Any], *, n: bool = True) -> Callable[[Problem], Any]:
    """A call with ``radius=``, for the published theorems."""
    return lambda q: function(q.ours, radius=q.region.par["radius"], **({"n": q.n} if n else {}))


def near_tokens(rng: np.random.Generator) -> Outcome:
    """Configurations near given tokens, with and without a bound of the whole ball that holds them."""
    name = "relaxations.near_tokens"
    q = problem(rng, kinds=SOFTMAX, heads=rng.random() < 0.5, masked=None, any_measure=False)
    X = q.region.points(rng.standard_normal((q.n, q.region.size)))
    rho = float(np.abs(X).max() * 10 ** rng.uniform(-4, 0) + 1e-3)
    near = Problem(q.map, q.ours, around(X, rho), q.n, q.n, 2.0)

    def body() -> Outcome:
        whole = None
        if rng.random() < 0.3 and len(q.map.heads) == 1:
            reach = float(np.linalg.norm(X, axis=1).max() + rho) * (1 + 1e-12)
            whole = asked(lambda: oa.lipschitz_upper_bound(q.ours, radius=reach, n=q.n, theorem="row_bound"))
        bound = asked(lambda: oa.relaxations.near_tokens(q.ours, X, rho, global_bound=whole)).value
        return below(name, near, bound, rng)

    return attempt(name, body, q.kind, near)


def at_one_measure(rng: np.random.Generator) -> Outcome:
    """The bound at one measure against the Jacobian there and the field at its atoms."""
    name = "at_measure_bound"
    q = problem(rng, kinds=ALL, heads=rng.random() < 0.4, masked=None)
    n = q.atoms
    z = rng.standard_normal((n, q.region.size)) * 10 ** rng.uniform(-1, 0.7)
    w = np.full(n, 1.0 / n) if q.n else rng.dirichlet(np.full(n, 0.7)) + 1e-6
    X, w = q.region.points(z), w / w.sum()
    about = (q, X.tolist(), w.tolist())

    def body() -> Outcome:
        bound = asked(lambda: oa.at_measure_bound(q.ours, measure(q, X, w))).value
        with np.errstate(all="ignore"):
            value, eps = local_constant(q.map, X[None], w[None], 2)
            fields = field_jacobian(q.map, X[None], np.arange(n), X[None], w[None])[0]
        _, sizes, right = np.linalg.svd(fields)
        i = int(sizes[:, 0].argmax())
        points, mass = exact(X), masses(w)

        def moved():
            return stretch(q.map, points, mass, eps[0], 2)

        def split():
            return field_stretch(q.map, i, points, mass, right[i, 0])

        first = settled(name, q.kind, bound, float(value[0]), 1, moved, about)
        return first if first.state == "violated" else settled(name, q.kind, bound, float(sizes[i, 0]), 2, split, about)

    return attempt(name, body, q.kind, about)


def identity_head(head: Head, d: int, causal: bool) -> Any:
    """The head of the library with the identity for values."""
    p, eye = head.par, np.eye(d)
    if head.kind == "softmax":
        one = oa.SoftmaxAttention(p["A"], eye, bias=p["c"])
    else:
        one = oa.SoftmaxAttention.from_qkv(p["Q"], p["K"], eye, scale=p["scale"], query_bias=p["bq"])
    return oa.MaskedAttention(one) if causal else one


def multihead(rng: np.random.Generator) -> Outcome:
    """Heads combined from bounds of theirs with the identity for values."""
    name = "bounds.multi_head, given bounds"
    q = problem(rng, kinds=SOFTMAX, heads=True, masked=None, any_measure=None)

    def body() -> Outcome:
        ones = [identity_head(h, q.map.dim, q.map.causal) for h in q.map.heads]
        tables = [asked(lambda one=one: oa.bounds.table(one, domain=q.region.domain, n=q.n)) for one in ones]
        bounds = [min((b for b in t if b.kind == "upper" and b.n == q.n), key=float) for t in tables]
        bound = asked(lambda: oa.bounds.multi_head(q.ours, head_bounds=bounds)).value
        return below(name, q, bound, rng)

    return attempt(name, body, q.kind, q)


def rigorous(q: Problem) -> Any:
    """The least closed form with the value that exact arithmetic proves for it."""
    bound = min((b for b in oa.bounds.table(q.ours, domain=q.region.domain, n=q.n) if b.kind == "upper"), key=float)
    if not hasattr(bound, "rigorous_value"):
        raise Refused("no exact arithmetic here")
    return replace(bound, value=bound.rigorous_value())


B, R = oa.bounds, oa.relaxations
ONE = {"kinds": SOFTMAX, "any_measure": False}
MASKED = {"kinds": SOFTMAX, "masked": True}
FINITE = (2.0, 2.0, 1.5, 3.0)
BALL = {"regions": ("ball",)}
SMALL = {"sizes": (1, 2, 3, 4), "dims": (1, 2)}

UPPER: dict[str, Callable[[np.random.Generator], Outcome]] = {
    name: attack(name, call, **draw)
    for name, call, draw in [
        ("bounds.castin2024_discrete", on_ball(B.castin2024_discrete), {**ONE, **BALL}),
        ("bounds.castin2024_masked", on_ball(B.castin2024_masked), {**MASKED, **BALL, "any_measure": False}),
        (
            "bounds.geshkovski2024_mean_field",
            on_ball(B.geshkovski2024_mean_field, n=False),
            {"kinds": SOFTMAX, **BALL, "any_measure": None},
        ),
        (
            "bounds.kim2021_l2",
            lambda q: B.kim2021_l2(q.ours, n=q.n, p=q.p),
            {"kinds": ("l2",), "masked": None, "any_measure": False, "orders": (2.0, np.inf)},
        ),
        (
            "bounds.l2_tied_bound",
            lambda q: B.l2_tied_bound(q.ours, n=q.n, p=q.p),
            {"kinds": ("l2",), "masked": None, "any_measure": False, "orders": (2.0, 3.0, np.inf)},
        ),
        (
            "bounds.castin2024_multi_head",
            on_ball(B.castin2024_multi_head),
            {"kinds": SOFTMAX, "heads": True, "masked": None, "any_measure": None, **BALL},
        ),
        ("bounds.column_bound", on_domain(B.column_bound), {"kinds": SOFTMAX, "masked": None, "orders": ORDERS}),
        ("bounds.density_bound", on_domain(B.density_bound), {"kinds": SOFTMAX, "orders": (2.0, 3.0, np.inf)}),
        ("bounds.row_bound", on_domain(B.row_bound), {**ONE, "masked": None}),
        ("bounds.l2_row_bound", on_domain(B.l2_row_bound), {"kinds": ("l2",), "masked": None, "any_measure": False}),
        ("bounds.l2_column_bound", on_domain(B.l2_column_bound), {"kinds": ("l2",), "masked": None, "orders": ORDERS}),
        ("bounds.masked_average_bound", on_domain(B.masked_average_bound), {**MASKED, "orders": FINITE}),
        (
            "bounds.masked_column_bound",
            on_domain(B.masked_column_bound),
            {**MASKED, "any_measure": False, "orders": ORDERS},
        ),
        ("bounds.masked_row_bound", on_domain(B.masked_row_bound), {**MASKED, "any_measure": False}),
        ("bounds.multi_head", on_domain(B.multi_head), {**SEVERAL, "masked": None, "orders": ORDERS}),
        ("bounds.pointwise_bound", on_domain(B.pointwise_bound), {"kinds": ALL[-4:], "masked": None, "orders": ORDERS}),
        ("bounds.rotary_row_bound", on_domain(B.rotary_row_bound), {"kinds": ("rotary",), "any_measure": False}),
        ("bounds.rotary_gram_bound", on_domain(B.rotary_gram_bound), {"kinds": ("rotary",), "any_measure": False}),
        ("bounds.sinkhorn_bound", on_domain(B.sinkhorn_bound), {"kinds": ("sinkhorn",), "orders": ORDERS}),
        ("bounds.score_row_bound", on_domain(B.score_row_bound), {"kinds": SCORES, "any_measure": False}),
        ("bounds.score_column_bound", on_domain(B.score_column_bound), {"kinds": SCORES, "orders": ORDERS}),
        ("bounds.score_average_bound", on_domain(B.score_average_bound), {"kinds": ("score",), "orders": FINITE}),
        (
            "bounds.gated_bound",
            on_domain(B.gated_bound),
            {"kinds": ("softmax", "rotary", *SCORES), "gated": True, "any_measure": False},
        ),
        (
            "bounds.heads_bound",
            on_domain(B.heads_bound),
            {"heads": True, "kinds": ("rotary", "score"), "any_measure": False},
        ),
        ("bounds.table", on_domain(B.table), {"kinds": (*ALL, "rotary"), "masked": None, "orders": ORDERS}),
        (
            "relaxations.rows_and_columns",
            lambda q: R.rows_and_columns(q.ours, domain=q.region.domain, n=q.n),
            {**ONE, "masked": None, **SMALL},
        ),
        (
            "relaxations.mean_field",
            lambda q: R.mean_field(q.ours, domain=q.region.domain, p=q.p),
            {"kinds": SOFTMAX, "any_measure": None, "orders": ORDERS, **SMALL},
        ),
        (
            "relaxations.two_tokens",
            lambda q: R.two_tokens(q.ours, domain=q.region.domain),
            {**ONE, "sizes": (2,), "dims": (1, 2, 3)},
        ),
        (
            "relaxations.psd",
            lambda q: R.psd(q.ours, domain=q.region.domain, n=q.n, effort="fast"),
            {"kinds": ("softmax",), "forms": POSITIVE, "plain": True, "any_measure": False, **BALL, "sizes": (2, 3, 4)},
        ),
        (
            "relaxations.psd_mean_field",
            lambda q: R.psd_mean_field(q.ours, domain=q.region.domain),
            {"kinds": ("softmax",), "forms": POSITIVE, "plain": True, "any_measure": None, **BALL},
        ),
        (
            "relaxations.logit_gap",
            lambda q: R.logit_gap(q.ours, domain=q.region.domain),
            {"kinds": SOFTMAX, "any_measure": None, **SMALL},
        ),
        (
            "relaxations.negative_identity",
            lambda q: R.negative_identity(q.ours, domain=q.region.domain, n=q.n),
            {"kinds": ("softmax",), "forms": NEGATIVE, "plain": True, "any_measure": False, **BALL, "sizes": (3, 4, 6)},
        ),
        (
            "relaxations.sinkhorn_symmetric",
            on_domain(R.sinkhorn_symmetric),
            {"kinds": ("sinkhorn",), "forms": SYMMETRIC, "plain": True},
        ),
        (
            "relaxations.frontier_rows",
            lambda q: R.frontier_rows(q.ours, domain=q.region.domain, n=q.n),
            {
                "kinds": ("softmax",),
                "plain": True,
                "any_measure": False,
                **BALL,
                "sizes": (3, 4, 6),
                "dims": (1, 2, 3, 4),
            },
        ),
        (
            "lipschitz_upper_bound",
            on_domain(oa.lipschitz_upper_bound),
            {"kinds": (*ALL, "rotary", "sinkhorn"), "masked": None, "orders": ORDERS, **SMALL},
        ),
    ]
}
UPPER |= {
    "Bound.rigorous_value": attack("Bound.rigorous_value", rigorous, **ONE, **SMALL),
    "relaxations.near_tokens": near_tokens,
    "at_measure_bound": at_one_measure,
    "bounds.at_measure_bound": at_one_measure,
}


def several_heads(rng: np.random.Generator) -> Outcome:
    """``lipschitz_upper_bound`` of sums of heads, softmax alone half of the time."""
    kinds, orders = (SOFTMAX, (2.0,)) if rng.random() < 0.5 else (ALL, ORDERS)
    draw = {"kinds": kinds, "heads": True, "masked": None, "orders": orders, **SMALL}
    return attack("lipschitz_upper_bound", on_domain(oa.lipschitz_upper_bound), **draw)(rng)
