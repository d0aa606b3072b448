"""Batches of equal shape: the values of the single problems."""

import numpy as np
import pytest
from attention_maps import MAPS, D

import otattn as oa
from otattn.attention import softmax


@pytest.mark.parametrize(
    "name", ["softmax", "softmax-bias", "softmax-qkv-k=2", "softmax-e=2", "l2", "masked-softmax", "linear"]
)
@pytest.mark.parametrize("n", [1, 6])
def test_values_of_the_single_problems(name, n, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    attention = MAPS[name](rng)
    X = rng.normal(size=(9, n, D))
    single = np.stack([attention.on_tokens(x) for x in X])
    assert attention.on_batch(X) == pytest.approx(single, rel=1e-12, abs=1e-13)
    monkeypatch.setattr(softmax, "BATCH_ENTRIES", 2 * n * max(n, D))  # two problems at once
    assert attention.on_batch(X) == pytest.approx(single, rel=1e-12, abs=1e-13)
    monkeypatch.setattr(softmax, "BATCH_TOKENS", 0)
    assert np.array_equal(attention.on_batch(X), single)


def test_huge_logits_far_offsets_and_bad_shapes() -> None:
    sharp = oa.SoftmaxAttention([[1e4]], [[1.0]])
    assert np.array_equal(sharp.on_batch([[[1.0], [-1.0]]]), [[[1.0], [-1.0]]])
    rng = np.random.default_rng(1)
    A, X = rng.normal(size=(3, 3)), 1e6 + rng.normal(size=(4, 5, 3))
    attention = oa.SoftmaxAttention(1e-6 * A, np.eye(3))
    assert attention.on_batch(X) == pytest.approx(np.stack([attention.on_tokens(x) for x in X]), rel=1e-14)
    for bad in (np.zeros((2, 3)), np.zeros((0, 2, 3)), np.zeros((2, 0, 3)), np.zeros((2, 2, 4)), [[["a"]]]):
        with pytest.raises(ValueError, match="X must"):
            attention.on_batch(bad)
    with pytest.raises(OverflowError):
        oa.LinearAttention([[1e30]], [[1e30]]).on_batch([[[1e300], [1.0]]])
