"""Arrays as callers have them: masked, with missing values, of every precision; and tolerances that follow the type."""

import warnings

import mpmath as mp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import otattn as oa
from otattn import _validate as check

MASKED = np.ma.array([[0.0], [1.0], [9.0]], mask=[[0], [0], [1]])
EYE = np.eye(2)
HEAD = oa.SoftmaxAttention(EYE, EYE)
X = [[0.0, 1.0], [1.0, 0.5]]

# every way in for an array (n, 2) of points
ENTRIES = {
    "measure": lambda x: oa.DiscreteMeasure(x),
    "normalized": lambda x: oa.DiscreteMeasure.normalized(x, [1.0, 1.0]),
    "space-time": lambda x: oa.SpaceTimeMeasure.from_sequence(x),
    "point set": lambda x: oa.PointSet(x),
    "gaussian": lambda x: oa.GaussianMeasure([0.0, 0.0], x),
    "ellipsoid": lambda x: oa.Ellipsoid(x),
    "wasserstein": lambda x: oa.wasserstein(x, X),
    "transport": lambda x: oa.transport(X, x),
    "batch": lambda x: oa.wasserstein_batch([X], [x]),
    "conditional": lambda x: oa.conditional_wasserstein(x, X),
    "costs": lambda x: oa.transport_from_cost([0.5, 0.5], [0.5, 0.5], x),
    "bures": lambda x: oa.covariance_distance(x, EYE),
    "softmax": lambda x: oa.SoftmaxAttention(x, EYE),
    "values": lambda x: oa.SoftmaxAttention(EYE, x),
    "qkv": lambda x: oa.SoftmaxAttention.from_qkv(x, EYE, EYE),
    "l2": lambda x: oa.L2Attention(EYE, x, EYE),
    "sinkhorn": lambda x: oa.SinkhornAttention(x, EYE),
    "mlp": lambda x: oa.MLP(x, [0.0, 0.0], EYE),
    "outputs": lambda x: oa.MultiHeadAttention([HEAD], [x]),
    "tokens": lambda x: HEAD.on_tokens(x),
    "at": lambda x: HEAD(x, X),
    "field": lambda x: HEAD.field_jacobian(x, X),
    "direction": lambda x: HEAD.jacobian(X).jvp(x),
    "ratio": lambda x: oa.stability_ratio(HEAD, x, np.array(X) + 1.0),
    "local": lambda x: oa.local_lipschitz(HEAD, x),
    "flow": lambda x: oa.flow(HEAD, x, t_span=(0.0, 0.1)),
    "gaussian batch": lambda x: oa.gaussian_flow_batch(HEAD, [x], t_span=(0.0, 0.1)),
}
# every way in for a vector
VECTORS = {
    "weights": lambda w: oa.DiscreteMeasure(X, w),
    "normalized": lambda w: oa.DiscreteMeasure.normalized(X, w),
    "times": lambda w: oa.SpaceTimeMeasure(w, X),
    "mean": lambda w: oa.GaussianMeasure(w, EYE),
    "center": lambda w: oa.DiscreteMeasure(X).radius(w),
    "box": lambda w: oa.Box([-1.0, -1.0], w),
    "gain": lambda w: oa.LayerNorm(w),
    "query bias": lambda w: oa.SoftmaxAttention.from_qkv(EYE, EYE, EYE, query_bias=w),
    "plan": lambda w: oa.transport_from_cost(w, [0.5, 0.5], EYE),
}
GOOD = np.array([[1.0, 0.5], [0.5, 2.0]])


def numbers(result):
    """A few numbers that show what was read."""
    for name in ("value", "points", "weights", "shape", "A", "W", "covs", "cov", "gain"):
        if hasattr(result, name):
            return np.asarray(getattr(result, name), dtype=float)
    return np.asarray(result, dtype=float) if np.isscalar(result) or isinstance(result, np.ndarray) else None


def with_a_gap(x):
    frame = pd.DataFrame(x) if np.ndim(x) == 2 else pd.Series(x)
    frame = frame.astype("Float64")
    frame.iloc[1] = pd.NA
    return frame


SPOILT = {
    "masked": (lambda x: np.ma.array(x, mask=np.arange(np.size(x)).reshape(np.shape(x)) == 1), "masked entries"),
    "masked rows in a list": (lambda x: [np.ma.array(row, mask=np.arange(np.size(row)) == 0) for row in x], "masked"),
    "missing": (lambda x: with_a_gap(x), "missing"),
    "complex": (lambda x: np.asarray(x) + 0j, "real numbers"),
    "text": (lambda x: np.asarray(x).astype(str), "real numbers"),
    "objects": (lambda x: np.asarray(x).astype(object), "real numbers"),
    "bfloat16 as numpy reads it": (lambda x: np.asarray(x).astype(np.float16).view("V2"), "bfloat16"),
    "records": (lambda x: np.rec.fromarrays([np.asarray(x)], names="x"), "real numbers"),
    "dates": (lambda x: np.asarray(x).astype("M8[s]"), "real numbers"),
    "beyond float64": (lambda x: np.asarray(x, np.longdouble) * np.longdouble("1e4000"), "must"),
    "sparse": (lambda x: sparse.csr_array(np.atleast_2d(x)), "toarray"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", SPOILT)
def test_no_array_that_cannot_be_read_comes_in(entry, kind):
    spoil, message = SPOILT[kind]
    with pytest.raises(ValueError, match=message):
        ENTRIES[entry](spoil(GOOD))


@pytest.mark.parametrize("entry", VECTORS)
@pytest.mark.parametrize("kind", [k for k in SPOILT if k != "masked rows in a list"])
def test_no_vector_that_cannot_be_read_comes_in(entry, kind):
    spoil, message = SPOILT[kind]
    with pytest.raises(ValueError, match=message):
        VECTORS[entry](spoil(np.array([0.5, 0.5])))


HARMLESS = {
    "unmasked": lambda x: np.ma.array(x, mask=False),
    "nullable": lambda x: pd.DataFrame(x).astype("Float64"),
    "float32": lambda x: np.asarray(x, np.float32),
    "half": lambda x: np.asarray(x, np.float16),
    "longdouble": lambda x: np.asarray(x, np.longdouble),
    "matrix": lambda x: np.matrix(x),
    "rows": lambda x: [np.ma.array(row) for row in x],
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_what_float64_can_say_is_read_right(entry, kind):
    expected, found = (numbers(ENTRIES[entry](x)) for x in (GOOD, HARMLESS[kind](GOOD)))
    assert (expected is None) == (found is None)
    if expected is not None:
        np.testing.assert_array_equal(found, expected)


def test_a_masked_point_is_not_a_point():
    with pytest.raises(ValueError, match="mu must have no masked entries, received 1"):
        oa.wasserstein(MASKED, [[0.0], [1.0]], p=1)
    assert oa.wasserstein(MASKED[:2], [[0.0], [1.0]], p=1) == 0.0
    assert oa.wasserstein(MASKED.compressed()[:, None], [[0.0], [1.0]], p=1) == 0.0


@pytest.mark.parametrize(
    ("frame", "eps"),
    [
        (pd.DataFrame({"a": pd.array([1.0, 2.0], dtype="Float64"), "b": pd.array([3, 4], dtype="Int64")}), 2.0**-52),
        (pd.DataFrame({"a": pd.array([1.0, 2.0], dtype="Float32"), "b": pd.array([3, 4], dtype="Float32")}), 2.0**-23),
        (pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]}), 2.0**-52),
        (pd.DataFrame({"a": pd.array([1, 2], dtype="UInt8"), "b": pd.array([3, 4], dtype="Int32")}), 2.0**-52),
        (pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}, dtype=np.float16), 2.0**-10),
    ],
)
def test_frames(frame, eps):
    assert check.points(frame).tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert check.resolution(frame) == eps
    assert check.vector(frame["a"], "a").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": ["x", "y"], "b": [1.0, 2.0]}),
        pd.DataFrame({"a": pd.to_datetime(["2020-01-01", "2021-01-01"])}),
        pd.DataFrame({"a": [1j, 2.0]}),
        pd.DataFrame({"a": pd.array([1, None], dtype="Int64")}),
        pd.DataFrame({"a": [1.0, np.nan]}),
    ],
)
def test_frames_of_something_else(frame):
    with pytest.raises(ValueError, match="points must"):
        check.points(frame)


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes brings bfloat16 to numpy")
    x = np.array([[1.5, 0.5], [0.25, 2.0]], dtype=ml_dtypes.bfloat16)
    assert check.points(x).tolist() == [[1.5, 0.5], [0.25, 2.0]]
    assert check.resolution(x) == 2.0**-7
    with pytest.raises(ValueError, match="bfloat16"):
        check.points(x.view("V2"))


def test_long_doubles_leave_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check.vector(np.array([1, "1e-400"], dtype=np.longdouble), "x").tolist() == [1.0, 0.0]
        third = check.vector(np.longdouble(1) / np.array([3.0], dtype=np.longdouble), "x")
        assert third.tolist() == [1 / 3]
        if np.finfo(np.longdouble).max > np.finfo(np.float64).max:
            with pytest.raises(ValueError, match=r"at most 1\.8e\+308, received 1"):
                check.vector(np.array(["1e400", "1"], dtype=np.longdouble), "x")
        with pytest.raises(ValueError, match="1 NaN or infinite"):
            check.vector(np.array([np.inf, 1.0], dtype=np.longdouble), "x")


@pytest.mark.parametrize(
    "value", [np.ma.masked, "2", b"2", np.array([2.0]), 2 + 0j, np.complex128(2), pd.NA, None, 10**400]
)
def test_scalars_of_another_kind(value):
    with pytest.raises(ValueError, match=r"must be a number in \[1, inf\]"):
        check.check_order(value)
    with pytest.raises(ValueError, match="x must be a number"):
        check.positive(value, "x")


def test_large_weights_are_divided_without_overflow():
    for top in (1e200, 1.7e308):
        mu = oa.DiscreteMeasure.normalized(X, [top, top])
        assert mu.weights.tolist() == [0.5, 0.5]
        with pytest.raises(ValueError, match="sum to 1"):
            oa.DiscreteMeasure(X, [top, top])
    mu = oa.DiscreteMeasure([[3e200, 4e200]])
    assert mu.radius() == pytest.approx(5e200, rel=1e-15)
    assert oa.DiscreteMeasure([[3e-200, 4e-200]]).radius() == pytest.approx(5e-200, rel=1e-15)
    with pytest.raises(OverflowError, match="radius"):
        oa.DiscreteMeasure([[1.7e308, 1.7e308]]).radius()


def test_lists_of_any_depth():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    round_and_round: list = []
    round_and_round.append(round_and_round)
    for value in (deep, round_and_round):
        with pytest.raises(ValueError, match="nested at most 32 deep"):
            check.points(value)
    assert check.points([(1, 2.5), np.array([3, 4], dtype=np.int8), pd.Series([5, 6])]).tolist() == [
        [1, 2.5],
        [3, 4],
        [5, 6],
    ]


# ----------------------------------------------------------------------------------- tolerances


def float32_covariances(d):
    """``R S R^T`` and a sample covariance of 40 draws, both formed in float32 in a fixed order of summation."""
    rng = np.random.default_rng(d)
    R = np.linalg.qr(rng.normal(size=(d, d)))[0].astype(np.float32)
    S = rng.uniform(0.5, 1.5, size=d).astype(np.float32)
    RS, C = R * S, np.zeros((d, d), dtype=np.float32)
    for k in range(d):
        C += np.outer(RS[:, k], R[:, k])  # entries (i, j) and (j, i) are rounded differently
    Y = rng.normal(size=(40, d)).astype(np.float32)
    Y -= Y.mean(axis=0)
    G = np.zeros((d, d), dtype=np.float32)
    for row in Y:
        G += np.outer(row, row)
    return C, G / np.float32(39)


@pytest.mark.parametrize("d", [3, 16, 128])
def test_covariances_of_float32_are_known_to_its_rounding(d):
    rotated, sample = float32_covariances(d)
    assert d < 16 or np.abs(rotated - rotated.T).max() > 1e-10 * np.abs(rotated).max()
    assert d < 128 or np.linalg.eigvalsh(sample.astype(float))[0] < -1e-8
    first, second = (oa.GaussianMeasure(np.zeros(d, dtype=np.float32), S) for S in (rotated, sample))
    for g, S in ((first, rotated), (second, sample)):
        assert (g.cov == g.cov.T).all()
        assert np.abs(g.cov - S).max() <= 4 * d * 2.0**-23 * np.abs(S).max()
        assert np.linalg.eigvalsh(g.cov)[0] >= -1e-13 * np.abs(S).max()
        assert oa.bures_wasserstein(g, g) == 0.0
    assert oa.bures_wasserstein(first, second) == pytest.approx(
        float(oa.covariance_distance(rotated, sample)), rel=1e-12
    )
    batch = oa.gaussian_flow_batch(oa.SoftmaxAttention(np.zeros((d, d)), np.eye(d)), [rotated], t_span=(0.0, 0.1))
    np.testing.assert_allclose(batch[0].covs[0], first.cov, atol=1e-13)


def test_what_float32_rounding_does_not_explain_is_refused():
    skew, negative = np.eye(3, dtype=np.float32), np.diag([1.0, 1.0, -1e-4]).astype(np.float32)
    skew[0, 1] = 1e-4
    for wrong, message in ((skew, "not symmetric"), (negative, "not positive semi-definite")):
        for call in (lambda S: oa.GaussianMeasure(np.zeros(3), S), lambda S: oa.covariance_distance(S, S)):
            with pytest.raises(ValueError, match=message):
                call(wrong)
    # the same error in float64 is no rounding
    small = np.eye(3)
    small[0, 1] = 4.5e-8
    oa.GaussianMeasure(np.zeros(3), small.astype(np.float32))
    with pytest.raises(ValueError, match="not symmetric"):
        oa.GaussianMeasure(np.zeros(3), small)


def test_weights_are_known_to_the_rounding_of_their_type():
    seventh = np.full(7, 1 / 7)
    x = np.arange(7.0)[:, None]
    y = np.arange(7.0)[:, None] + 0.5
    expected = oa.wasserstein(oa.DiscreteMeasure(x, seventh), y)
    for dtype in (np.float32, np.float16):
        assert oa.wasserstein(oa.DiscreteMeasure(x, seventh.astype(dtype)), y) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="sum to 1"):  # off by 2.4e-4: rounding of half precision only
        oa.DiscreteMeasure(x, seventh.astype(np.float16).astype(np.float64))
    with pytest.raises(ValueError, match="sum to 1"):
        oa.DiscreteMeasure(x, seventh.astype(np.float16) * np.float16(1.01))


@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
def test_time_masses_of_float32(p):
    """Masses that a float32 softmax left 2e-7 apart are the same masses, on every path; 1e-5 is not."""
    rng = np.random.default_rng(0)
    w = np.exp(rng.normal(size=6))
    w /= w.sum()
    times = np.repeat([0.0, 0.5, 1.0], 2)
    x, y = rng.normal(size=(6, 2)), rng.normal(size=(6, 2))
    exact = oa.conditional_wasserstein(oa.SpaceTimeMeasure(times, x, w), oa.SpaceTimeMeasure(times, y, w), p=p)
    noisy = (w * (1 + 2e-7 * rng.uniform(-1, 1, size=6))).astype(np.float32)
    mu, nu = oa.SpaceTimeMeasure(times, x, w), oa.SpaceTimeMeasure(times, y, noisy)
    assert oa.conditional_wasserstein(mu, nu, p=p) == pytest.approx(exact, rel=1e-5)
    result = oa.conditional_transport(mu, nu, p=p)
    assert result.verify()
    assert result.value == pytest.approx(exact, rel=1e-5)
    masked = oa.MaskedAttention(HEAD)
    ratio = oa.stability_ratio(masked, mu, nu, p=p)
    assert 0.0 < ratio.certified_lower <= ratio.value
    single = [oa.SpaceTimeMeasure(np.arange(6) / 6, z, v) for z, v in ((x, w), (y, noisy))]
    assert oa.conditional_wasserstein(*single, p=p) > 0.0
    off = w * (1 + 1e-5 * np.repeat([1, -1, 1], 2))
    with pytest.raises(ValueError, match="same time marginal"):
        oa.conditional_wasserstein(mu, oa.SpaceTimeMeasure(times, y, off / off.sum()), p=p)


def test_distances_of_projected_covariances_are_those_of_their_positive_part():
    """A float32 matrix with a negative eigenvalue is its nearest positive semi-definite one."""
    S = np.array([[1.0, 0.0], [0.0, -2e-7]], dtype=np.float32)
    g = oa.GaussianMeasure([0.0, 0.0], S)
    np.testing.assert_allclose(g.cov, [[1.0, 0.0], [0.0, 0.0]], atol=1e-16)
    other = oa.GaussianMeasure([0.0, 0.0], [[4.0, 0.0], [0.0, 9.0]])
    assert oa.bures_wasserstein(g, other) == pytest.approx(float(mp.sqrt(mp.mpf(1) + mp.mpf(9))), rel=1e-12)
