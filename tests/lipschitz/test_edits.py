"""Robustness in words: distances before and after, the pooled output, what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

import otattn as oa

sys.path.append(str(Path(__file__).parents[1] / "models"))
import synthetic as syn

IDS = np.array([3, 1, 4, 1, 5, 9])


def encoder():
    return syn.bert(syn.bert_weights(np.random.default_rng(0), layers=3), num_heads=3)


def test_numbers_are_those_of_the_definitions():
    model = encoder()
    edits = {"one word": [3, 1, 4, 2, 5, 9], "permutation": IDS[::-1], "truncation": IDS[:4]}
    found = oa.edit_stability(model, IDS, edits)
    F, X = model.map(), model.embed(model.ids(IDS))[0]
    assert abs(found.local - oa.local_lipschitz(F, X).particle) <= found.error_bar
    for i, ids in enumerate(edits.values()):
        Y = model.embed(model.ids(np.asarray(ids)))[0]
        assert found.before[i] == pytest.approx(oa.wasserstein(X, Y), rel=1e-12)
        FX, FY = model.hidden_states(IDS)[-1], model.hidden_states(np.asarray(ids))[-1]
        assert found.after[i] == pytest.approx(oa.wasserstein(FX, FY), rel=1e-9)
        assert found.pooled[i] == pytest.approx(np.linalg.norm(FX.mean(0) - FY.mean(0)), rel=1e-9)
    assert (found.pooled <= found.after * (1 + 1e-12)).all()
    assert [r["measured"] for r in found.rows()] == found.ratios.tolist()
    assert found.to_dict()["edits"][2]["edit"] == "truncation"


def test_tiny_edits_stay_below_the_local_constant():
    model = encoder()
    X = model.embed(model.ids(IDS))[0]
    profile = oa.depth_profile(model, IDS, tol=1e-6)
    steep = np.linalg.svd(profile.network.jacobian(X).to_dense())[2][0].reshape(X.shape)
    rng = np.random.default_rng(0)
    found = oa.edit_stability(
        model, X, {"steepest": X + 1e-5 * steep, **{str(i): X + 1e-5 * rng.standard_normal(X.shape) for i in range(5)}}
    )
    assert found.ratios[0] == pytest.approx(found.local, rel=1e-3)
    assert (found.ratios[1:] < found.local).all()


def test_order_does_not_matter_without_positions():
    head = oa.SoftmaxAttention(np.eye(3), np.eye(3))
    X = np.random.default_rng(0).standard_normal((5, 3))
    found = oa.edit_stability([head], X, {"permutation": X[::-1]})
    assert found.before[0] == 0.0
    assert found.pooled[0] <= 1e-15
    assert np.isnan(found.ratios[0])


def test_what_cannot_be_compared_is_refused():
    model = syn.gpt2(syn.gpt2_weights(np.random.default_rng(0)), num_heads=3)
    assert oa.edit_stability(model, IDS, {"word": [3, 1, 4, 1, 5, 8]}).after[0] > 0.0
    with pytest.raises(ValueError, match="as many tokens as the text, 6, received 4 for 'cut'"):
        oa.edit_stability(model, IDS, {"cut": IDS[:4]})
    with pytest.raises(ValueError, match="at least one text"):
        oa.edit_stability(model, IDS, {})
