"""Every certificate: rechecks itself, rejects what was altered, and survives a solver that stopped early."""

from dataclasses import replace

import numpy as np
import pytest

from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.errors import CertificateError
from otattn.lipschitz import certificate
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.bounds import multi_head, row_bound
from otattn.lipschitz.certificate import Statement, certify, dual_function
from otattn.lipschitz.relaxations import (
    Certificate,
    column_exponent,
    field_certificate,
    interval_simplex,
    near_tokens,
    row_certificate,
    self_entropy,
)
from otattn.lipschitz.upper.multi_head import head_with_values
from otattn.measures import Ball, Box, Ellipsoid, PointSet

RNG = np.random.default_rng(0)
A, V, C = RNG.standard_normal((3, 3)), RNG.standard_normal((2, 3)), RNG.standard_normal(3)
HEAD = SoftmaxAttention(A, V, bias=C)
KEEN = SoftmaxAttention(np.diag([9.0, 7.0, 8.0]), V, bias=C)  # tokens that attend to themselves
BOX = Box([-1.0, -2.0, 0.5], [1.0, 0.0, 2.0])
POINTS = RNG.standard_normal((8, 3))
WEIGHTS = RNG.dirichlet(np.ones(8))
HEADS = MultiHeadAttention([HEAD, SoftmaxAttention(A.T, V)], [np.eye(2), np.diag([1.0, 3.0])])

SINGLES = [row_bound(head_with_values(HEADS, h, None), radius=1.0, n=4) for h in (0, 1)]

# relaxation name -> builder(solver, max_iter)
SOLVED = {
    "field ball": lambda **o: field_certificate(HEAD, domain=Ball(1.0), **o),
    "field ellipsoid": lambda **o: field_certificate(HEAD, domain=Ellipsoid(POINTS[:3], C), **o),
    "field box": lambda **o: field_certificate(HEAD, domain=BOX, **o),
    "kappa ball": lambda **o: column_exponent(HEAD, domain=Ball(1.0), **o),
    "kappa box": lambda **o: column_exponent(HEAD, domain=BOX, **o),
    "self entropy ball": lambda **o: self_entropy(KEEN, domain=Ball(2.0), n=5, **o),
    "self entropy box": lambda **o: self_entropy(KEEN, domain=BOX, n=5, **o),
    "row constant": lambda **o: row_certificate(KEEN, domain=Ball(2.0), n=5, **o),
    "interval simplex": lambda **o: interval_simplex(POINTS, 0.7 * WEIGHTS, np.minimum(1, 1.4 * WEIGHTS), **o),
}
CHEAP = {
    "several heads": lambda: multi_head(HEADS, head_bounds=SINGLES),
    "field points": lambda: field_certificate(HEAD, domain=PointSet(POINTS)),
    "kappa points": lambda: column_exponent(HEAD, domain=PointSet(POINTS)),
    "local ball": lambda: near_tokens(HEAD, POINTS, 0.3),
}
ALL = {**SOLVED, **CHEAP}


@pytest.fixture(scope="module")
def built():
    options = {"solver": "CLARABEL"}
    return {name: build(**options) if name in SOLVED else build() for name, build in ALL.items()}


@pytest.mark.parametrize("name", ALL)
def test_verifies_and_rejects_a_smaller_value(built, name):
    bound = built[name]
    assert isinstance(bound, Bound)
    assert bound.verify()
    assert bound.proved_value() <= bound.value
    for factor in (1 - 1e-9, 0.5, 0.0, -1.0):
        assert not replace(bound, value=bound.value * factor).verify()
    for wrong in (float("nan"), float("inf")):
        assert not replace(bound, value=wrong).verify()
    assert not replace(bound, kind="lower").verify()
    assert not replace(bound, relaxation="another").verify()
    # a larger value is still proved
    assert replace(bound, value=bound.value * 2).verify()


@pytest.mark.parametrize("name", [name for name in ALL if name != "local ball"])
def test_rejects_altered_multipliers(built, name):
    bound = built[name]
    for key, value in bound.multipliers.items():
        for factor in (0.5, 2.0):
            wrong = replace(bound, multipliers={**bound.multipliers, key: value * factor})
            assert not wrong.verify(), (key, factor)
            if name != "several heads":  # whose multipliers must lie on the simplex
                assert wrong.proved_value() > bound.value
    if name == "several heads":
        s = bound.multipliers["s"] * [1.5, 1.0]
        wrong = replace(bound, multipliers={"s": s / s.sum()})
        assert not wrong.verify()
        assert wrong.proved_value() > bound.value


@pytest.mark.parametrize("name", ALL)
def test_rejects_inadmissible_multipliers(built, name):
    bound = built[name]
    for key, value in bound.multipliers.items():
        for wrong in (value * np.nan, -np.abs(value) - 1.0, value.ravel()[:0]):
            changed = {**bound.multipliers, key: np.asarray(wrong)}
            assert not replace(bound, multipliers=changed).verify(), key
        missing = {k: v for k, v in bound.multipliers.items() if k != key}
        assert not replace(bound, multipliers=missing).verify()
        with pytest.raises(CertificateError):
            replace(bound, multipliers=missing).proved_value()


def test_local_ball_thresholds_matter_where_they_decide():
    # one far token that the interval lets move: the direct branch wins, through its thresholds
    X = np.array([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.1], [2.0, 2.0]])
    bound = near_tokens(SoftmaxAttention(np.eye(2), np.eye(2)), X, 0.2)
    assert bound.details["branch"] == "direct"
    assert bound.verify()
    moved = {key: value * 100 for key, value in bound.multipliers.items()}
    assert replace(bound, multipliers=moved).proved_value() >= bound.value * (1 - 1e-11)


@pytest.mark.parametrize("name", SOLVED)
@pytest.mark.parametrize("solver", ["CLARABEL", "SCS"])
@pytest.mark.parametrize("max_iter", [1, 3, 20])
def test_a_solver_stopped_early_is_never_believed(built, name, solver, max_iter):
    full = built[name]
    try:
        early = SOLVED[name](solver=solver, max_iter=max_iter)
    except CertificateError:
        return
    assert early.verify()
    # the optimum itself is only known to the accuracy of the full solve
    assert early.value >= full.value * (1 - 1e-6)
    assert early.value >= early.details.get("attained", 0.0)


@pytest.mark.parametrize("name", ["field ball", "kappa ball", "self entropy ball", "field box"])
def test_a_search_stopped_early_is_repaired(built, name):
    early = SOLVED[name](max_iter=3)
    assert early.verify()
    assert early.value >= SOLVED[name]().value * (1 - 1e-12)


def test_the_solver_status_is_recorded_and_not_used(built):
    early = SOLVED["field box"](solver="CLARABEL", max_iter=2)
    assert early.solver == "CLARABEL"
    assert early.solver_status == "user_limit"
    assert early.solver_value < early.value
    assert early.residuals["gap"] == early.value - early.solver_value
    assert early.value > built["field box"].value


def test_certificates_are_immutable_records(built):
    bound = built["field ball"]
    with pytest.raises(AttributeError):
        bound.value = 0.0
    with pytest.raises(ValueError, match="read-only"):
        bound.multipliers["s"][0] = 1.0
    data = bound.to_dict()
    assert data["relaxation"] == "field_certificate/round"
    assert data["value"] == bound.value == float(bound)
    assert repr(bound).startswith("Certificate(upper")


def test_dual_functions_have_one_name_each_and_must_prove_something_finite(monkeypatch):
    for registry in ("_DUAL_FUNCTIONS", "_QUANTITIES"):  # what is registered here is gone for other tests
        monkeypatch.setattr(certificate, registry, dict(getattr(certificate, registry)))
    with pytest.raises(ValueError, match="registered already"):
        dual_function("multi_head_certificate")(lambda problem, multipliers: 0.0)
    name = "test/always infinite"
    dual_function(name)(lambda problem, multipliers: float("inf"))
    nothing, told = (
        Statement(None, None, None, 2.0),
        {"solver": "", "solver_status": "", "solver_value": 0.0},
    )
    with pytest.raises(CertificateError, match="no finite bound"):
        certify(name, statement=nothing, problem={}, multipliers={}, **told)
    with pytest.raises(CertificateError, match="no dual function"):
        Certificate(value=1.0, kind="upper").proved_value()
