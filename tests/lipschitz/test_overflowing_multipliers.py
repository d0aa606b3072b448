"""Multipliers so large that the matrices overflow prove nothing: never a smaller bound."""

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
    "frontier_rows": lambda: oa.relaxations.frontier_rows(ATTENTION, radius=1.0, n=3),
    "mean field": lambda: oa.relaxations.mean_field(ATTENTION, radius=1.0),
    "two_tokens": lambda: oa.relaxations.two_tokens(ATTENTION, radius=1.0),
    "local ball": lambda: oa.relaxations.near_tokens(ATTENTION, POINTS / 3, 0.05),
}


@cache
def built(name):
    return CERTIFICATES[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", CERTIFICATES)
@pytest.mark.parametrize("size", [1e60, 1e160, 1e300, 1.7e308])
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
