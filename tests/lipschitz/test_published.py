"""The published bounds: their formulas, their witnesses, their hypotheses."""

import math

import numpy as np
import pytest

from otattn.attention import (
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    SigmoidAttention,
    SoftmaxAttention,
)
from otattn.lipschitz import bounds as pub


def _local(attention, mu):
    """Particle part of the local constant, for uniform tokens or a weighted measure."""
    weights = getattr(mu, "weights", np.full(len(mu), 1.0 / len(mu)) if isinstance(mu, np.ndarray) else None)
    return float(np.linalg.norm(attention.jacobian(mu).reweighted(weights).to_dense(), 2))


def _tokens(witness, n):
    return np.repeat(witness.points, np.rint(witness.weights * n).astype(int), axis=0)


def _cases(seed, count=60):
    rng = np.random.default_rng(seed)
    for k in range(count):
        d = int(rng.integers(1, 5))
        A = rng.standard_normal((d, d)) * rng.uniform(0.1, 1.5)
        if k % 3 == 0:
            A = A + A.T
        V = rng.standard_normal((int(rng.integers(1, 5)), d))
        yield SoftmaxAttention(A, V), d, int(rng.integers(1, 8)), float(rng.uniform(0.3, 2.5)), rng


def test_discrete_formula():
    A, V = np.diag([2.0, -1.0]), np.diag([3.0, 1.0])
    expected = math.sqrt(3.0) * 3.0 * math.sqrt(4.0 * 1.5**4 * 21.0 + 5.0)
    plain = pub.castin2024_discrete(SoftmaxAttention(A, V), radius=1.5, n=5)
    masked = pub.castin2024_masked(MaskedAttention(SoftmaxAttention(A, V)), radius=1.5, n=5)
    assert plain.value == pytest.approx(expected, rel=1e-10)
    assert masked.value == plain.value
    assert plain.value >= expected
    assert plain.kind == masked.kind == "upper"


def test_mean_field_formula():
    b = pub.geshkovski2024_mean_field(SoftmaxAttention(np.diag([2.0, -1.0]), np.eye(2)), radius=1.0)
    assert b.value == pytest.approx(7.0 * math.exp(4.0), rel=1e-10)
    assert b.n is None


def test_overflow_is_carried_by_the_logarithm():
    b = pub.geshkovski2024_mean_field(SoftmaxAttention([[400.0]], [[1.0]]), radius=1.0)
    assert b.value == math.inf
    assert b.log_value == pytest.approx(800.0 + math.log(1201.0), abs=1e-10)
    # 2a = 700 is still a float
    b = pub.geshkovski2024_mean_field(SoftmaxAttention([[350.0]], [[1e-3]]), radius=1.0)
    assert b.value == pytest.approx(math.exp(b.log_value), rel=1e-10)
    low = pub.castin2024_mean_field_lower(SoftmaxAttention([[-900.0]], [[1.0]]), radius=1.0)
    assert low.value == math.inf
    assert low.log_value == pytest.approx(900.0 + math.log(450.0), rel=1e-14)
    assert low.witness is None


def test_upper_bounds_hold_on_random_and_published_configurations():
    for attention, d, n, R, rng in _cases(0):
        upper = pub.castin2024_discrete(attention, radius=R, n=n).value
        masked = MaskedAttention(attention)
        upper_masked = pub.castin2024_masked(masked, radius=R, n=n).value
        for _ in range(3):
            X = rng.standard_normal((n, d))
            X *= R / np.linalg.norm(X, axis=1, keepdims=True)
            assert _local(attention, X) <= upper
            assert _local(masked, X) <= upper_masked


def test_lower_bounds_are_reached_by_their_witnesses():
    checked = 0
    for attention, _, n, R, _ in _cases(1, 90):
        try:
            low = pub.castin2024_discrete_lower(attention, radius=R, n=n)
        except ValueError as error:
            assert "real eigenvalue" in str(error)  # noqa: PT017 (the only refusal that random cases meet)
            continue
        checked += 1
        X = _tokens(low.witness, n)
        assert len(X) == n
        assert np.linalg.norm(X, axis=1).max() <= R * (1 + 1e-14)
        assert low.value <= _local(attention, X) <= pub.castin2024_discrete(attention, radius=R, n=n).value
        mean = pub.castin2024_mean_field_lower(attention, radius=R)
        if mean.witness is not None:
            local = _local(attention, mean.witness)
            assert mean.value <= mean.details["witness_value"] <= local * (1 + 1e-9)
            assert local <= pub.geshkovski2024_mean_field(attention, radius=R).value
    assert checked > 50


@pytest.mark.parametrize("s", [1e-12, 1e-4, 1.0, 100.0, 350.0, 354.0])
def test_mean_field_witnesses_reach_their_value_or_are_not_given(s):
    attention = SoftmaxAttention([[-s]], [[1.0]])
    mean = pub.castin2024_mean_field_lower(attention, radius=1.0)
    assert mean.witness.n == 2
    assert mean.value <= mean.details["witness_value"] <= _local(attention, mean.witness) * (1 + 1e-9)
    # the light atom's weight e^{-2 s} is no float, or one of few digits
    for more in (355.0, 372.0, 500.0):
        beyond = pub.castin2024_mean_field_lower(SoftmaxAttention([[-more]], [[1.0]]), radius=1.0)
        assert beyond.witness is None
        assert beyond.log_value == pytest.approx(more + math.log(more / 2.0), rel=1e-14)


def test_lower_bound_formulas_for_identity_values():
    n, R = 7, 1.3
    for A, gamma in ((np.diag([-2.0, 1.0]), 2.0), (np.diag([0.4, 8.0]), 1.0), (np.zeros((2, 2)), 0.0)):
        low = pub.castin2024_discrete_lower(SoftmaxAttention(A, np.eye(2)), radius=R, n=n)
        expected = math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * R * R * gamma))
        assert low.value == pytest.approx(expected, rel=1e-11)
        if gamma > 0:
            s = gamma * R * R
            mean = pub.castin2024_mean_field_lower(SoftmaxAttention(A, np.eye(2)), radius=R)
            assert mean.details["gamma"] == pytest.approx(gamma)
            assert mean.value >= s / 2 * math.exp(s) * (1 - 1e-11)


def test_lower_bound_of_one_token_is_zero():
    low = pub.castin2024_discrete_lower(SoftmaxAttention([[-1.0]], [[1.0]]), radius=1.0, n=1)
    assert low.value == 0.0
    assert low.witness.n == 1


def test_masked_lower_bounds_are_reached_by_their_witnesses():
    """A sequence with the anchor first: its Jacobian has at least the closed form, whatever A, V, R and n."""
    checked = 0
    for attention, _, n, R, _ in _cases(2, 120):
        masked = MaskedAttention(attention)
        try:
            low = pub.castin2024_discrete_lower(masked, radius=R, n=n)
        except ValueError as error:
            assert "real eigenvalue" in str(error)  # noqa: PT017 (the only refusal that random cases meet)
            continue
        checked += 1
        X = low.witness.points
        assert X.shape == (n, attention.in_dim)
        assert np.linalg.norm(X, axis=1).max() <= R * (1 + 1e-14)
        assert low.value <= _local(masked, X) <= pub.castin2024_masked(masked, radius=R, n=n).value
        assert (
            low.value >= pub.castin2024_discrete_lower(attention, radius=R, n=n).value
        )  # the sum has larger terms, and one more
    assert checked > 70


@pytest.mark.parametrize(("A", "gamma"), [(np.diag([-2.0, 1.0]), 2.0), (np.diag([0.4, 8.0]), 1.0)])
def test_masked_lower_bound_grows_like_the_root_of_n_and_then_stands(A, gamma):
    """The growth of the theorem while ``n q`` is small; beyond it the value stays, where the form without a mask falls."""
    masked = MaskedAttention(SoftmaxAttention(A, 3.0 * np.eye(2)))
    q = math.exp(-2.0 * gamma * 1.5**2)
    for n in (1, 2, 9, 10**4):
        low = pub.castin2024_discrete_lower(masked, radius=1.5, n=n)
        assert low.value == pytest.approx(3.0 * math.sqrt(n / (1.0 + n * q)), rel=1e-11)
        assert low.details["gamma"] == pytest.approx(gamma)
        assert (low.witness is None) == (n > 4096)
    for n in (2, 9):
        # the exact sum of squares of the anchor's weights, which the integral of its terms is below by q n at most
        exact = 3.0 * math.sqrt(sum((1.0 + k * q) ** -2 for k in range(n)))
        low = pub.castin2024_discrete_lower(masked, radius=1.5, n=n)
        assert exact * (1.0 - n * q) <= low.value <= exact
    assert pub.castin2024_discrete_lower(masked, radius=1.5, n=10**12).value == pytest.approx(
        3.0 / math.sqrt(q), rel=1e-6
    )


def test_large_radius_limit():
    rng = np.random.default_rng(3)
    for masked in (False, True):
        for _ in range(10):
            n, d = int(rng.integers(1, 7)), 3
            attention = SoftmaxAttention(rng.standard_normal((d, d)), rng.standard_normal((2, d)))
            attention = MaskedAttention(attention) if masked else attention
            X = rng.standard_normal((n, d))
            limit = pub.castin2024_large_radius(attention, X)
            if limit.details["margin"] > 1e-2:
                # the margin of the logits is at least 1e4 at this radius: rows are one-hot to the bit
                assert _local(attention, 1e3 * X) == pytest.approx(limit.value, rel=1e-10)
    with pytest.raises(ValueError, match="one largest logit"):
        pub.castin2024_large_radius(SoftmaxAttention(np.eye(2), np.eye(2)), [[1.0, 0.0], [1.0, 0.0]])


def _ascent(attention, X, steps=60):
    """Projected-free ascent of the local constant by coordinate probes: a crude but honest attack."""
    rng = np.random.default_rng(0)
    best, size = _local(attention, X), 0.5
    for _ in range(steps):
        Y = X + size * rng.standard_normal(X.shape)
        value = _local(attention, Y)
        if value > best:
            best, X = value, Y
        else:
            size *= 0.93
    return best


def test_tied_l2_bound_holds_everywhere():
    rng = np.random.default_rng(4)
    for k in range(25):
        d, n = int(rng.integers(1, 4)), int(rng.integers(1, 9))
        Q = rng.standard_normal((d + k % 2, d)) * rng.uniform(0.2, 2.0)
        attention = L2Attention(Q, Q, rng.standard_normal((int(rng.integers(1, 4)), d)))
        upper = pub.kim2021_l2(attention, n=n).value
        assert pub.kim2021_l2(MaskedAttention(attention), n=n).value == upper
        X = rng.standard_normal((n, d)) * rng.uniform(0.1, 5.0)
        assert _ascent(attention, X) <= upper
        assert _local(MaskedAttention(attention), X) <= upper


def test_tied_l2_bound_of_one_token_is_the_linear_map():
    Q = np.diag([2.0, 2.0])
    attention = L2Attention(Q, Q, np.diag([3.0, 1.0]))
    assert pub.kim2021_l2(attention, n=1).value == pytest.approx(3.0, rel=1e-10)
    # the map is homogeneous of degree 2 in W_Q: with ||W_Q||^2 in place of ||W_Q||^4 under the root it
    # would be violated
    W = 5.0
    tied = L2Attention([[W]], [[W]], [[W * W]])
    assert _local(tied, np.zeros((1, 1))) == pytest.approx(W * W)
    assert pub.kim2021_l2(tied, n=1).value >= W * W


def test_tied_l2_heads():
    rng = np.random.default_rng(5)
    heads, outputs = [], []
    for _ in range(3):
        # small multiples of 1/8: the product of the values is exact, as the hypothesis asks
        Q, M = (np.round(8.0 * rng.standard_normal(shape)) / 8.0 for shape in ((2, 4), (2, 2)))
        heads.append(L2Attention(Q, Q, M @ Q))
        outputs.append(rng.standard_normal((4, 2)))
    for W in (outputs, None):
        attention = MultiHeadAttention(heads, W)
        upper = pub.kim2021_l2(attention, n=5).value
        for _ in range(5):
            assert _local(attention, rng.standard_normal((5, 4))) <= upper


@pytest.mark.parametrize("part", [0.5, 1e-13, 5e-324])
def test_values_outside_the_queries_are_not_lipschitz_on_the_whole_space(part):
    """However small the part of V outside the row space of Q, tokens far along it exceed every constant."""
    Q = np.array([[1.0, 0.0]])
    attention = L2Attention(Q, Q, np.array([[1.0, part]]))
    with pytest.raises(ValueError, match="factor through the queries exactly"):
        pub.kim2021_l2(attention, n=2)
    if part > 1e-20:
        far = 1e3 / part
        bound = pub.kim2021_l2(L2Attention(Q, Q, [[1.0, 0.0]]), n=2).value
        assert _local(attention, np.array([[0.3, far], [-0.3, -far]])) > 10.0 * bound


def test_dot_product_is_not_lipschitz_on_the_whole_space():
    rng = np.random.default_rng(6)
    for attention, _, n, _, _ in _cases(7, 30):
        count = max(n, 2)
        assert pub.kim2021_dot_product(attention, n=count).value == math.inf
        values = []
        for R in (10.0, 20.0):
            low = pub.kim2021_dot_product(attention, n=count, radius=R)
            tokens = _tokens(low.witness, count)
            assert len(tokens) == count
            assert low.value <= _local(attention, tokens) * (1 + 1e-12)
            values.append(low.value)
        # quadratic growth, up to the term V/n
        assert values[1] > 2.0 * values[0]
    for A, V in ((np.zeros((2, 2)), np.eye(2)), (np.eye(2), np.zeros((2, 2)))):
        linear = pub.kim2021_dot_product(SoftmaxAttention(A, V), n=4)
        assert linear.value == pytest.approx(np.linalg.norm(V, 2))
        assert _local(SoftmaxAttention(A, V), rng.standard_normal((4, 2))) == pytest.approx(linear.value)


def test_absorbed_bias_is_safe():
    rng = np.random.default_rng(8)
    for k in range(40):
        d, n, R = int(rng.integers(1, 4)), int(rng.integers(1, 6)), float(rng.uniform(0.2, 2.0))
        A = np.zeros((d, d)) if k % 5 == 0 else rng.standard_normal((d, d))
        attention = SoftmaxAttention(A, rng.standard_normal((d, d)), bias=3 * rng.standard_normal(d))
        upper = pub.castin2024_discrete(attention, radius=R, n=n)
        mean = pub.geshkovski2024_mean_field(attention, radius=R)
        assert upper.details["bias_absorbed"]
        for _ in range(4):
            X = rng.standard_normal((n, d))
            X *= R / np.linalg.norm(X, axis=1, keepdims=True)
            assert _local(attention, X) <= min(upper.value, mean.value)
    plain = pub.castin2024_discrete(SoftmaxAttention(np.eye(2), np.eye(2)), radius=1.0, n=3).value
    faint = SoftmaxAttention(np.eye(2), np.eye(2), bias=[1e-12, 0.0])
    assert pub.castin2024_discrete(faint, radius=1.0, n=3).value == pytest.approx(plain, rel=1e-5)  # r^2 = sqrt(b)


def test_reduction_to_the_span_changes_nothing():
    rng = np.random.default_rng(9)
    d, k = 24, 3
    Q, K, V = (rng.standard_normal((k, d)) for _ in range(3))
    small = SoftmaxAttention.from_qkv(Q, K, V)
    full = SoftmaxAttention(small.A, small.V)
    for f in (pub.castin2024_discrete, pub.castin2024_discrete_lower):
        assert f(small, radius=0.5, n=6).value == pytest.approx(f(full, radius=0.5, n=6).value, rel=1e-9)
    low = pub.castin2024_discrete_lower(small, radius=0.5, n=6)
    assert low.value <= _local(small, _tokens(low.witness, 6)) * (1 + 1e-12)
    X = rng.standard_normal((5, d))
    assert pub.castin2024_large_radius(small, X).value == pytest.approx(pub.castin2024_large_radius(full, X).value)


def test_scaling_and_zero_matrices():
    rng = np.random.default_rng(10)
    A, V = rng.standard_normal((3, 3)), rng.standard_normal((3, 3))
    base = pub.castin2024_discrete(SoftmaxAttention(A, V), radius=1.0, n=4).value
    for t in (1e-6, 1e6):
        same = pub.castin2024_discrete(SoftmaxAttention(A * t, V), radius=t**-0.5, n=4).value
        assert same == pytest.approx(base, rel=1e-12)
        assert pub.castin2024_discrete(SoftmaxAttention(A, V * t), radius=1.0, n=4).value == pytest.approx(base * t)
    zero = SoftmaxAttention(A, np.zeros((2, 3)))
    for b in (
        pub.castin2024_discrete(zero, radius=1.0, n=4),
        pub.geshkovski2024_mean_field(zero, radius=1.0),
        pub.castin2024_mean_field_lower(SoftmaxAttention(A + A.T, np.zeros((2, 3))), radius=1.0),
        pub.castin2024_discrete_lower(SoftmaxAttention(A + A.T, np.zeros((2, 3))), radius=1.0, n=4),
        pub.kim2021_dot_product(zero, n=4, radius=1.0),
        pub.kim2021_l2(L2Attention(A, A, np.zeros((2, 3))), n=4),
        pub.kim2021_l2(L2Attention(0 * A, 0 * A, np.zeros((2, 3))), n=4),
    ):
        assert b.value == 0.0


def test_hypotheses_are_checked():
    softmax = SoftmaxAttention(np.eye(2), np.eye(2))
    biased = SoftmaxAttention(np.eye(2), np.eye(2), bias=[1.0, 0.0])
    cases = [
        (lambda: pub.castin2024_discrete(SigmoidAttention(np.eye(2), np.eye(2)), radius=1.0, n=2), "Sigmoid"),
        (lambda: pub.castin2024_discrete(MaskedAttention(softmax), radius=1.0, n=2), "without a mask"),
        (lambda: pub.castin2024_masked(softmax, radius=1.0, n=2), "MaskedAttention"),
        (lambda: pub.castin2024_discrete(softmax, radius=0.0, n=2), "radius"),
        (lambda: pub.castin2024_discrete(softmax, radius=1.0, n=0), "n must be at least 1"),
        (lambda: pub.castin2024_discrete(softmax, radius=1.0, n=2, p=1), "p must be 2"),
        (lambda: pub.geshkovski2024_mean_field(softmax, radius=math.nan), "radius"),
        (lambda: pub.castin2024_discrete_lower(biased, radius=1.0, n=2), "assumes no query bias"),
        (lambda: pub.castin2024_mean_field_lower(biased, radius=1.0), "assumes no query bias"),
        (lambda: pub.castin2024_large_radius(biased, np.eye(2)), "assumes no query bias"),
        (lambda: pub.kim2021_dot_product(softmax, n=1), "n must be at least 2"),
        (lambda: pub.kim2021_l2(softmax, n=2), "L2Attention"),
        (lambda: pub.kim2021_l2(L2Attention(np.eye(2), 2 * np.eye(2), np.eye(2)), n=2), "tied"),
        (lambda: pub.kim2021_l2(L2Attention([[1.0, 0.0]], [[1.0, 0.0]], np.eye(2)), n=2), "factor through"),
        (
            lambda: pub.castin2024_discrete_lower(
                SoftmaxAttention([[0.0, 1.0], [-1.0, 0.0]], np.eye(2)), radius=1.0, n=2
            ),
            "real eigenvalue",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
