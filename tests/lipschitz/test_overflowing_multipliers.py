"""Multipliers so large that the matrices overflow prove nothing: never a smaller bound."""

import contextlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import otattn as oa
from otattn._linalg import lambda_max_upper, spectral_norm_upper
from otattn.errors import CertificateError
from otattn.measures import Ball, Box, PointSet

ATTENTION = oa.SoftmaxAttention(4.0 * np.array([[0.5, 0.4], [-0.2, 1.0]]), np.array([[1.0, 0.2], [0.0, 0.7]]))
NEGATIVE = oa.SoftmaxAttention(-4.0 * np.eye(2), np.array([[1.0, 0.2], [0.0, 0.7]]))
POSITIVE = oa.SoftmaxAttention(4.0 * np.eye(2), np.array([[1.0, 0.2], [0.0, 0.7]]))
POINTS = np.random.default_rng(0).normal(size=(6, 2))
CERTIFICATES = {
    "field, ball": lambda: oa.relaxations.field_certificate(ATTENTION, domain=Ball(1.0, 2)),
    "field, rectangle": lambda: oa.relaxations.field_certificate(ATTENTION, domain=Box(-np.ones(2), np.ones(2))),
    "field, box": lambda: oa.relaxations.field_certificate(
        ATTENTION, domain=Box(-np.ones(2), np.ones(2)), solver="CLARABEL"
    ),
    "field, points": lambda: oa.relaxations.field_certificate(ATTENTION, domain=PointSet(POINTS)),
    "kappa": lambda: oa.relaxations.column_exponent(ATTENTION, domain=Ball(1.0, 2)),
    "self entropy": lambda: oa.relaxations.self_entropy(ATTENTION, domain=Ball(1.0, 2), n=4),
    "rows_and_columns": lambda: oa.relaxations.rows_and_columns(ATTENTION, radius=1.0, n=3),
    "negative_identity": lambda: oa.relaxations.negative_identity(NEGATIVE, radius=1.0, n=3),
    "psd_mean_field": lambda: oa.relaxations.psd_mean_field(POSITIVE, radius=1.0),
    "logit_gap": lambda: oa.relaxations.logit_gap(ATTENTION, radius=2.0),
    "sinkhorn_symmetric": lambda: oa.relaxations.sinkhorn_symmetric(
        oa.SinkhornAttention(4.0 * np.eye(2), np.eye(2)), radius=1.0
    ),
    "frontier_rows": lambda: oa.relaxations.frontier_rows(ATTENTION, radius=1.0, n=3),
    "mean field": lambda: oa.relaxations.mean_field(ATTENTION, radius=1.0),
    "two_tokens": lambda: oa.relaxations.two_tokens(ATTENTION, radius=1.0),
    "psd": lambda: oa.relaxations.psd(oa.SoftmaxAttention(8.0 * np.eye(2), np.eye(2)), radius=1.0, n=16),
    "local ball": lambda: oa.relaxations.near_tokens(ATTENTION, POINTS / 3, 0.05),
}


@cache
def built(name):
    return CERTIFICATES[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    # a check of frontier_rows takes a second
    [
        (x, s)
        for x in CERTIFICATES
        for s in (1e60, 1e160, 1e300, 1.7e308)
        if x != "frontier_rows" or s in (1e160, 1.7e308)
    ],
)
def test_huge_multipliers_never_prove_less(name, size) -> None:
    bound = built(name)
    assert bound.verify()
    for key, value in bound.multipliers.items():
        for wild in (np.full_like(value, size), np.where(value >= 0, size, -size)):
            other = replace(bound, multipliers={**bound.multipliers, key: wild})
            try:
                proved = other.proved_value()
            except CertificateError:
                continue
            # 5 percent: other cells and thresholds may be a little better than the ones that were found
            assert proved >= 0.95 * bound.value, (key, wild)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["nu", "s", "w"])
def test_multipliers_of_another_kind_are_refused(key) -> None:
    for name in CERTIFICATES:
        bound = built(name)
        if key in bound.multipliers:
            assert not replace(bound, multipliers={**bound.multipliers, key: bound.multipliers[key].tolist()}).verify()
            assert not replace(bound, multipliers={**bound.multipliers, key: None}).verify()


def test_upper_values_of_unknown_matrices_are_infinite() -> None:
    with np.errstate(all="ignore"):
        for M in (np.full((2, 2), 1e308), np.array([[1e308, -1e308], [-1e308, 1e308]])):
            for value in (lambda_max_upper(M), spectral_norm_upper(M)):
                assert value == np.inf or value >= 1e308


@pytest.mark.parametrize("name", ["frontier_rows", "rows_and_columns", "mean_field", "logit_gap"])
@pytest.mark.parametrize("nu", [1.7e308, -2e307, 1e20])
def test_multipliers_of_the_self_logit_whose_products_overflow(name, nu) -> None:
    """In one dimension ``nu A^2`` was infinite, its eigenvalue a nan, and cells that compare as nothing were left out."""
    head = oa.SoftmaxAttention([[4.0]], [[1.0]])
    count = {} if name in ("mean_field", "logit_gap") else {"n": 3}
    bound = getattr(oa.relaxations, name)(head, radius=1.0, **count)
    other = bound.multipliers | {"nu": np.array([nu]), "gap": np.zeros(1)}
    for target in (bound.options.get("target", 0.0), -5.0):
        with pytest.raises(CertificateError, match="at most"):
            replace(bound, multipliers=other, options={**bound.options, "target": target}).proved_value()


@pytest.mark.parametrize(("key", "value"), [("phi", 1e308), ("tau", 5e-324), ("omega", 5e-324), ("sigma", -1e300)])
def test_boxes_that_overflow_are_not_empty(key, value) -> None:
    """A nan compares as nothing: boxes of ``psd`` whose terms overflow counted as empty, and any target was proved."""
    bound = built("psd")
    assert bound.value > 7.5
    other = bound.multipliers | {key: np.full_like(bound.multipliers[key], value)}
    forged = replace(bound, multipliers=other, options={**bound.options, "target": 0.0}, value=1.01)
    assert not forged.verify()
    with contextlib.suppress(CertificateError, ValueError):
        assert forged.proved_value() > 7.5
