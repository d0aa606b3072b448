"""The bound of rotary attention: never below a local constant, exact for one token, of the right growth."""

import numpy as np
import pytest

from otattn.attention import SoftmaxAttention
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz.upper.scores import rotary_row_bound
from otattn.measures import Ball, Ellipsoid


def local(a: RotaryAttention, X: np.ndarray) -> float:
    return float(np.linalg.svd(a.jacobian(X).to_dense(), compute_uv=False)[0])


@pytest.mark.parametrize("seed", range(12))
def test_never_violated(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d, k, e, n = 3, int(rng.choice([2, 4])), int(rng.integers(1, 4)), int(rng.integers(1, 7))
    bias = seed % 2 == 0
    a = RotaryAttention(
        *(rng.normal(size=(rows, d)) * 10 ** rng.uniform(-1, 1) for rows in (k, k, e)),
        base=float(rng.uniform(2.0, 100.0)),
        query_bias=rng.normal(size=k) if bias else None,
        key_bias=rng.normal(size=k) if bias else None,
        masked=seed % 3 > 0,
    )
    R = 10 ** rng.uniform(-1, 0.7)
    bound = rotary_row_bound(a, radius=R, n=n).value
    best, X = 0.0, np.zeros((n, d))
    for _ in range(30):
        Y = rng.normal(size=(n, d))
        Y *= R / np.linalg.norm(Y, axis=1, keepdims=True) * rng.choice([1.0, 0.5], size=(n, 1))
        Y[rng.random(n) < 0.3] = Y[0]
        if (value := local(a, Y)) > best:
            best, X = value, Y
    # hill climbing from the best of them
    for _ in range(200):
        Y = X + 0.3 * R * rng.normal(size=X.shape)
        Y *= np.minimum(1.0, R / np.maximum(np.linalg.norm(Y, axis=1, keepdims=True), 1e-300))
        value = local(a, Y)
        if value > best:
            X, best = Y, value
    assert best <= bound


def test_one_token_is_exact() -> None:
    rng = np.random.default_rng(0)
    a = RotaryAttention(rng.normal(size=(2, 3)), rng.normal(size=(2, 3)), rng.normal(size=(2, 3)))
    assert rotary_row_bound(a, radius=2.0, n=1).value == pytest.approx(np.linalg.norm(a.V, 2), rel=1e-10)


def test_growth_and_domains() -> None:
    a = RotaryAttention(np.eye(2), np.eye(2), np.eye(2), scale=1.0)
    values = [rotary_row_bound(a, radius=3.0, n=n).value for n in (10**4, 4 * 10**4)]
    # sqrt(n) to leading order, the constant is (1 + R^2) / sqrt 2
    assert values[1] / values[0] == pytest.approx(2.0, rel=0.02)
    assert values[1] == pytest.approx(200.0 * 10.0 / np.sqrt(2.0), rel=0.02)
    one = rotary_row_bound(a, radius=3.0, n=5).value
    assert rotary_row_bound(a, domain=Ball(3.0, 2), n=5).value == one
    assert rotary_row_bound(a, domain=Ellipsoid(np.diag([3.0, 1.0])), n=5).value == pytest.approx(one, rel=1e-9)


def test_bad_input() -> None:
    a = RotaryAttention(np.eye(2), np.eye(2), np.eye(2))
    with pytest.raises(ValueError, match="attention must be RotaryAttention"):
        rotary_row_bound(SoftmaxAttention(np.eye(2), np.eye(2)), radius=1.0, n=2)
    with pytest.raises(ValueError, match="p must be 2"):
        rotary_row_bound(a, radius=1.0, n=2, p=1)
    with pytest.raises(ValueError, match="exactly one of radius and domain"):
        rotary_row_bound(a, n=2)
    with pytest.raises(ValueError, match="n must be at least 1"):
        rotary_row_bound(a, radius=1.0, n=0)
