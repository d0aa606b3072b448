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


@pytest.mark.parametrize("causal", [False, True])
def test_the_certified_constant_holds_for_the_edit_itself(causal):
    head = oa.SoftmaxAttention(0.3 * np.eye(3), np.eye(3))
    network = [oa.Residual(oa.MaskedAttention(head) if causal else head, scale=0.5)] * 2
    X = np.random.default_rng(0).standard_normal((5, 3))
    Y = X + 1e-4 * np.random.default_rng(1).standard_normal(X.shape)
    edits = {"none": X, "small": Y, "huge": 1e3 * X, **({} if causal else {"cut": X[:4]})}
    found = oa.edit_stability(network, X, edits, certified=True)
    assert found.ratios[1] <= found.certified[1] <= 1.05 * found.local
    bound = oa.certify(oa.Compose(*network), X, radius=found.before[1])
    assert found.certified[1] == pytest.approx(bound.value, rel=1e-6)
    assert np.isinf(found.certified[2])
    assert causal or np.isnan(found.certified[3])
    assert [r["certified"] for r in found.rows()][:3] == found.certified[:3].tolist()
    assert np.isnan(oa.edit_stability(network, X, edits).certified).all()
    with pytest.raises(ValueError, match="equal weights"):
        oa.edit_stability([head], oa.DiscreteMeasure(X[:2], [0.3, 0.7]), {"same": X[:2]}, certified=True)


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
