"""A single altered field of a bound: the check says no, or what is left is true, by recomputation and by attained values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from attained_values import attained
from proven_bounds import closed_forms, evaluated_once, float_only, relaxed, searched

from otattn import bounds
from otattn.attention import (
    Compose,
    L2Attention,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    SoftmaxAttention,
)
from otattn.errors import CertificateError
from otattn.lipschitz import certificate, certify, relaxations
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Certificate
from otattn.lipschitz.constants.simplex import IntervalSimplex
from otattn.lipschitz.containment import NearMeasure, NearTokens
from otattn.lipschitz.theorem import THEOREMS, Quantity
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, PointSet

try:
    import flint  # noqa: F401

    MODES: tuple[bool, ...] = (False, True)
except ImportError:  # then the float64 checks are what can be tried
    MODES = (False,)

PROVED = {t.key for t in THEOREMS.values() if t.closed and t.kind == "upper"}
FORMS, RELAXED, SEARCHED, FLOATS = closed_forms(), relaxed(), searched(), float_only()
FIRST = {name.split("-")[0]: name for name in reversed(FORMS) if "-1" not in name}
CLOSED = sorted(
    {
        *FIRST.values(),
        "column_bound-biased-box-5-3.0",
        "column_bound-plain-ellipsoid-None-inf",
        "row_bound-biased-points-7",
        "multi_head-two-box-4-3.0",
        "masked_row_bound-plain-ellipsoid-3",
        "pointwise_bound-sigmoid-box",
    }
)
CHEAP = [
    "field_certificate-biased-ball",
    "field_certificate-plane",
    "field_certificate-sdp",
    "field_certificate-plain-points",
    "kappa-biased-ellipsoid",
    "kappa-plain-box",
    "self_entropy-biased-ball-5",
    "self_entropy-plain-box-5",
    "row_constant-plain-ball-5",
    "interval_simplex",
    "multihead-identity",
    "multihead-own",
]
DEAR = [
    "rows_and_columns-biased-Ellipsoid",
    "two_tokens-plain-Ball",
    "mean_field-plain-Ball-2.0",
    "psd_mean_field",
    "logit_gap",
    "sinkhorn_symmetric",
    "psd",
    "negative_identity",
    "frontier_rows",
]
NEAR = ["second_order", "second_order/pairs"]
QUANTITIES = get_args(Quantity)
EVERY = {**FORMS, **RELAXED, **SEARCHED, **FLOATS}
_made: dict[str, Bound] = {}


@pytest.fixture(autouse=True)
def _evaluated_once() -> Iterator[None]:
    with evaluated_once():
        yield


def made(name: str) -> Bound:
    if name not in _made:
        _made[name] = EVERY[name]()
    return _made[name]


def modes(bound: Bound) -> tuple[bool, ...]:
    return MODES if bound._has_exact else (False,)


def holds(bound: Bound, *, rigorous: bool = True) -> bool:
    """Whether any of the checks says yes: that in float64, and the rigorous one where there is one."""
    answers = [bound.verify(rigorous=mode) for mode in modes(bound) if rigorous or not mode]
    assert all(isinstance(answer, bool) for answer in answers)
    return any(answers)


def fresh(bound: Bound) -> float:
    """The bound of the same statement from the public function."""
    name = bound.theorem
    if name == "interval_simplex":
        return float(relaxations.interval_simplex(bound.domain.points, bound.domain.lower, bound.domain.upper))
    if name == "multi_head_certificate":
        return float(bounds.multi_head(bound.attention, head_bounds=bound.options["heads"]))
    if name == "near_tokens":
        return float(
            relaxations.near_tokens(
                bound.attention, bound.domain.points, bound.domain.radius, global_bound=bound.options.get("global")
            )
        )
    if name == "second_order":
        kind = "pairs" if bound.quantity == "pairs" else "constant"
        return float(certify(bound.attention, bound.domain.points, radius=bound.domain.radius, kind=kind))
    if name == "at_measure_bound":
        return float(bounds.at_measure_bound(bound.attention, bound.domain))
    function = getattr(bounds, name, None) or getattr(relaxations, name)
    n = (
        None if name in ("mean_field", "psd_mean_field", "logit_gap") else bound.n
    )  # a bound for any measure is one for n tokens
    return float(function(bound.attention, domain=bound.domain, n=n, p=bound.p))


def true(bound: Bound) -> None:
    """The statement that is left is true: nothing attained exceeds it, and the public function finds no more."""
    assert attained(bound, trials=20) <= bound.value * (1 + 1e-12)
    room = {
        "rows_and_columns": 2e-2,
        "two_tokens": 6e-2,
        "psd": 5e-2,
        "negative_identity": 5e-3,
        "frontier_rows": 2e-2,
        "mean_field": 2e-2,
        "psd_mean_field": 5e-3,
        "logit_gap": 2e-2,
        "sinkhorn_symmetric": 2e-2,
        "field_certificate": 2e-3,
    }.get(bound.theorem, 1e-9)
    assert fresh(bound) <= bound.value * (1 + room), "a recheck proves less than the public function needs"


def maps(bound: Bound) -> Iterator[Any]:
    """Other maps."""
    yield None
    base = bound.attention
    if base is None:
        return
    d = base.in_dim
    yield SoftmaxAttention(3.0 * np.eye(d), 5.0 * np.eye(d))
    yield SoftmaxAttention(np.eye(d + 1), np.eye(d + 1))
    yield L2Attention(2.0 * np.eye(d), np.eye(d), 4.0 * np.eye(d))
    second = SoftmaxAttention(np.eye(d), np.ones((base.out_dim, d)))
    yield MultiHeadAttention([base, MaskedAttention(second) if base.causal else second])
    if isinstance(base, Compose | Residual | LayerNorm):
        yield Compose(base, base)
        yield Residual(base)
    elif base.maskable and not base.causal:
        yield MaskedAttention(base)
    if isinstance(base, MaskedAttention):
        yield base.attention
    if isinstance(base, SoftmaxAttention):
        yield SoftmaxAttention(1.01 * base.A, base.V, bias=base.bias)
        yield SoftmaxAttention(base.A, base.V * 1.01, bias=base.bias)
        yield SoftmaxAttention(base.A, base.V, bias=np.full(d, 0.7))
        yield SoftmaxAttention(0.5 * base.A, 0.5 * base.V)


def domains(bound: Bound) -> Iterator[Any]:
    """Other places for the tokens."""
    old, d = bound.domain, 2 if bound.attention is None else bound.attention.in_dim
    yield from (None, Ball(1e6), Ball(1e-3), "ball", DiscreteMeasure(np.eye(d)), NearTokens(np.eye(d), 0.1))
    yield Box([-9.0] * (d + 1), [9.0] * (d + 1))
    yield Box([-9.0] * d, [9.0] * d)
    yield PointSet(8.0 * np.eye(d))
    yield Ellipsoid(7.0 * np.eye(d), np.ones(d))
    if isinstance(old, Ball):
        yield from (Ball(old.radius * 1.01), Ball(old.radius * 0.9))
    if isinstance(old, Ellipsoid):
        yield from (Ellipsoid(1.01 * old.shape, old.center), Ellipsoid(old.shape, old.center + 0.1))
    if isinstance(old, Box):
        yield from (Box(old.lower - 0.1, old.upper), Box(old.lower, old.upper - 0.01))
    if isinstance(old, PointSet):
        yield from (PointSet(1.01 * old.points), PointSet(old.points[:2]))
    if isinstance(old, NearTokens):
        yield from (NearTokens(old.points, 1.2 * old.radius), NearTokens(old.points * 1.5, old.radius))
    if isinstance(old, NearMeasure):
        yield from (NearMeasure(old.points, 1.2 * old.radius), NearMeasure(old.points * 1.5, old.radius))
        yield from (NearMeasure(old.points, 0.5 * old.radius), NearMeasure(old.points[:2], old.radius))
    if isinstance(old, IntervalSimplex):
        yield from (
            IntervalSimplex(2.0 * old.points, old.lower, old.upper),
            IntervalSimplex(old.points, 0.0 * old.lower, old.upper),
            IntervalSimplex(old.points, old.lower, np.ones_like(old.upper)),
            IntervalSimplex(old.points, old.lower + 1.0, old.upper + 1.0),
            IntervalSimplex(old.points, old.lower, 0.1 * old.upper),
            IntervalSimplex(old.points[:2], old.lower, old.upper),
        )


def refused_values(bound: Bound) -> None:
    for value in (bound.value * (1 - 1e-6), 0.5 * bound.value, 0.0, -1.0, math.nan, -math.inf):
        assert not holds(replace(bound, value=value)), value


def refused_labels(bound: Bound) -> None:
    for quantity in QUANTITIES:
        if quantity != bound.quantity:
            assert not holds(replace(bound, quantity=quantity)), quantity
    for kind in ("lower", "local", "estimate"):
        assert not holds(replace(bound, kind=kind)), kind


def altered_statements(bound: Bound, *, rigorous: bool = False) -> None:
    counts: tuple[Any, ...] = (None, 1, 2, 20)
    orders = (1.0, 1.5, 2.0, 3.0, math.inf)
    altered = [replace(bound, n=n) for n in counts if n != bound.n] + [
        replace(bound, p=p) for p in orders if p != bound.p
    ]
    altered += [replace(bound, domain=domain) for domain in domains(bound)]
    altered += [replace(bound, attention=attention) for attention in maps(bound)]
    for other in altered:
        if holds(other, rigorous=rigorous):
            true(other)
    for n in (0, -3, 2.5, True, "7", math.nan):
        assert not holds(replace(bound, n=n)), n
    for p in (0.5, 0.0, -2.0, math.nan):
        assert not holds(replace(bound, p=p)), p


@pytest.mark.parametrize(
    ("name", "rigorous"),
    [
        # the checks in float64 are among those of the slow test, too
        *((name, False) for name in [*CLOSED, "kim2021_l2", "at_measure_bound"] if name != "multi_head-two-box-4-3.0"),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in [*CLOSED, "kim2021_l2", "at_measure_bound"]),
    ],
)
def test_closed_forms(name: str, rigorous: bool) -> None:
    bound = made(name)
    assert bound.verify()
    refused_values(bound)
    refused_labels(bound)
    altered_statements(bound, rigorous=rigorous)
    with pytest.raises(ValueError, match="verify needs an upper bound with a theorem"):
        replace(bound, theorem="another").verify()
    least = attained(bound)
    assert least <= bound.value
    for theorem in PROVED:
        other = replace(bound, theorem=theorem)
        assert isinstance(other.verify(), bool)  # another theorem may prove the same statement
        if least > 0.0:
            assert not holds(replace(other, value=least * (1 - 1e-9)), rigorous=rigorous), theorem


def test_every_closed_form_is_tampered_with() -> None:
    assert {made(name).theorem for name in [*CLOSED, "kim2021_l2", "at_measure_bound"]} == PROVED


def test_every_relaxation_is_tampered_with() -> None:
    quick = {made(name).relaxation for name in [*CHEAP, "near_tokens", *NEAR]}
    assert quick | {name.split("-")[0] for name in DEAR} == set(certificate._DUAL_FUNCTIONS)


# --- certificates


def altered_multipliers(bound: Certificate) -> Iterator[tuple[str, dict[str, Any]]]:
    """One multiplier at a time."""
    changes: dict[str, Callable[[np.ndarray], Any]] = {
        "halved": lambda x: 0.5 * x,
        "huge": lambda x: 1e6 * x,
        "negated": lambda x: -x,
        "zeros": np.zeros_like,
        "nan": lambda x: x * math.nan,
        "inf": lambda x: x + math.inf,
        "flat": lambda x: x.ravel()[:-1],
        "longer": lambda x: np.concatenate([x, x]),
        "number": lambda x: np.float64(1.0),
        "none": lambda x: None,
        "text": lambda x: "multiplier",
    }
    for key, value in bound.multipliers.items():
        yield f"{key} missing", {k: v for k, v in bound.multipliers.items() if k != key}
        for change, function in changes.items():
            yield f"{key} {change}", {**bound.multipliers, key: function(value)}


def altered_options(bound: Certificate) -> Iterator[tuple[str, dict[str, Any]]]:
    """One option at a time."""
    for key, value in bound.options.items():
        yield f"{key} missing", {k: v for k, v in bound.options.items() if k != key}
        others: list[Any] = [
            None,
            math.nan,
            math.inf,
            -math.inf,
            "entropy",
            "covariance",
            "plain",
            0,
            1,
            2.5,
            1e9,
            -5.0,
        ]
        if isinstance(value, (int, float)):
            others += [value - 0.5, 0.9 * value, 2 * value, -value]
        if isinstance(value, tuple):
            first, second = value
            others += [
                (second, first),
                (first,),
                (first, 0.5),
                (replace(first, value=0.5 * first.value), second),
                (replace(first, n=64), second),
                (replace(first, domain=Ball(0.1)), second),
                (first, replace(second, kind="lower")),
                (first, replace(second, quantity="field")),
                (first, replace(second, attention=first.attention)),
            ]
        if isinstance(value, Bound):
            others += [replace(value, value=0.1 * value.value), replace(value, domain=Ball(0.1)), replace(value, n=64)]
        for other in others:
            yield f"{key} = {other!r}", {**bound.options, key: other}


def tamper(name: str, *, rigorous: bool = False) -> None:
    bound = made(name)
    assert isinstance(bound, Certificate)
    assert bound.verify()
    refused_values(bound)
    refused_labels(bound)
    altered_statements(bound, rigorous=rigorous)
    least = attained(bound)
    assert 0.0 < least <= bound.value
    # none of the choices matters: a value below an attained one is never proved, and a check answers yes or no
    for relaxation in [*certificate._DUAL_FUNCTIONS, "another", ""]:
        other = replace(bound, relaxation=relaxation)
        assert isinstance(other.verify(), bool), relaxation
        assert not replace(other, value=least * (1 - 1e-9)).verify(), relaxation
    assert not replace(bound, relaxation="another").verify()
    for what, multipliers in altered_multipliers(bound):
        other = replace(bound, multipliers=multipliers, value=least * (1 - 1e-9))
        assert not holds(other, rigorous=rigorous), what
        assert isinstance(replace(other, value=bound.value).verify(), bool), what
    for what, options in altered_options(bound):
        assert not holds(replace(bound, options=options, value=least * (1 - 1e-9)), rigorous=rigorous), what


@pytest.mark.parametrize("rigorous", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*CHEAP, "near_tokens", "near_tokens-global", *NEAR])
def test_certificates(name: str, rigorous: bool) -> None:
    tamper(name, rigorous=rigorous)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEAR)
def test_certificates_of_searches(name: str) -> None:
    """Each check takes seconds, and those of useless multipliers a minute: one alteration of each kind."""
    bound = made(name)
    assert isinstance(bound, Certificate)
    assert holds(bound)
    least = attained(bound)
    assert 0.0 < least <= bound.value
    for value in (bound.value * (1 - 1e-6), 0.0, math.nan, -math.inf):
        assert not replace(bound, value=value).verify(), value
    assert MODES == (False,) or not replace(bound, value=bound.value * (1 - 1e-6)).verify(rigorous=True)
    refused_labels(bound)
    domain, head = bound.domain, bound.attention
    larger = Ball(1.1 * domain.radius) if isinstance(domain, Ball) else Ellipsoid(1.1 * domain.shape, domain.center)
    altered = [replace(bound, n=n) for n in (None, 1, 5, 0, 2.5)] + [replace(bound, p=p) for p in (3.0, 0.5, math.nan)]
    altered += [
        replace(bound, domain=other) for other in (larger, None, Box([-1.0], [1.0]), DiscreteMeasure(np.eye(3)))
    ]
    given = {"bias": head.bias} if isinstance(head, SoftmaxAttention) else {}
    others = [type(head)(a * head.A, v * head.V, **given) for a, v in ((1.0, 1.1), (1.1, 1.0))]
    others += [None, MaskedAttention(head) if head.maskable else SoftmaxAttention(head.A, head.V)]
    altered += [replace(bound, attention=other) for other in others]
    for other in altered:
        if other.verify():
            true(other)
    for key, value in bound.multipliers.items():
        for broken in (value * math.nan, value.ravel()[:-1] if value.size > 1 else value + math.inf, "text", None):
            other = replace(bound, multipliers={**bound.multipliers, key: broken})
            assert not other.verify(), key
            assert not replace(other, value=least * (1 - 1e-9)).verify(), key
    for key in bound.options:
        assert not replace(bound, options={k: v for k, v in bound.options.items() if k != key}).verify(), key
        for other in (math.nan, math.inf, None):
            changed = replace(bound, options={**bound.options, key: other})
            # another branch of the same theorem may prove the value too
            assert key == "branch" or not changed.verify(), (key, other)
            assert not replace(changed, value=least * (1 - 1e-9)).verify(), (key, other)


def test_multipliers_that_are_none_are_refused() -> None:
    for name in CHEAP:
        bound = made(name)
        for key, value in bound.multipliers.items():
            for broken in (value * math.nan, value.ravel()[:-1], "text", None):
                other = replace(bound, multipliers={**bound.multipliers, key: broken})
                assert not holds(other), (name, key)
                with pytest.raises(CertificateError):
                    other.proved_value()


def test_a_bound_of_another_quantity_is_no_bound_of_a_head() -> None:
    """``kappa`` is far below the constant; called one, it must prove nothing about several heads."""
    heads = [SoftmaxAttention(0.1 * np.eye(2), np.eye(2)) for _ in range(2)]
    posing = [replace(relaxations.column_exponent(head, domain=Ball(1.0)), quantity="lipschitz") for head in heads]
    assert not posing[0].verify()
    small = bounds.multi_head(MultiHeadAttention(heads), head_bounds=posing)
    assert small.value < 1.0
    assert not holds(small)


def test_the_callers_statement_is_what_is_answered() -> None:
    bound = made("row_bound-biased-points-7")
    for other in domains(bound):
        if other is not None:
            assert not bound.verify(domain=other)
    for other in maps(bound):
        if other is not None:
            assert not bound.verify(other)
    assert not bound.verify(n=None)
    assert not bound.verify(n=8)
    assert not bound.verify(p=3.0)
    assert bound.verify(bound.attention, domain=PointSet(bound.domain.points), n=7, p=2)
