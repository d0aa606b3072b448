"""A model as one attention map: its values, slices, memory."""

import numpy as np
import pytest
import synthetic as syn

import otattn as oa
from otattn.attention import memory
from otattn.models import FeedForward, load_model

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
MODELS = {
    "bert": lambda: syn.bert(syn.bert_weights(np.random.default_rng(0), layers=3), num_heads=3),
    "gpt2": lambda: syn.gpt2(syn.gpt2_weights(np.random.default_rng(0), layers=3), num_heads=3),
    "llama": lambda: load_model(syn.llama_weights(np.random.default_rng(0), layers=3), config=CONFIG),
}
IDS = np.array([3, 1, 4, 1, 5, 9])


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    return MODELS[request.param]()


def test_every_slice_takes_one_state_to_another(model):
    states = model.hidden_states(IDS)
    for a in range(3):
        for b in range(a + 1, 4):
            F = model.map(a, b)
            assert np.allclose(F.on_tokens(states[a]), states[b], rtol=0, atol=1e-12)
            assert F.causal == model.config.causal
    assert np.array_equal(model.map(-2).on_tokens(states[1]), model.map(1, 3).on_tokens(states[1]))
    assert len(model.map(final_norm=False).maps) == 3


def test_slices_that_are_empty_or_outside_are_refused(model):
    for first, last in ((2, 2), (2, 1), (1, -2)):
        with pytest.raises(ValueError, match="last must come after first"):
            model.map(first, last)
    with pytest.raises(IndexError, match="layer must lie in"):
        model.map(0, 4)
    with pytest.raises(TypeError, match="integer"):
        model.map(0.5)


def test_studies_and_sampled_pairs(model):
    F = model.map()
    X = model.embed(model.ids(IDS))[0]
    Y = X + 0.01 * np.random.default_rng(0).standard_normal(X.shape)
    mu, nu = F.as_measure(X), F.as_measure(Y)
    before = oa.conditional_wasserstein if F.causal else oa.wasserstein
    expected = before(F.pushforward(mu), F.pushforward(nu)) / before(mu, nu)
    ratio = oa.stability_ratio(F, mu, nu)
    assert np.isclose(ratio.value, expected, rtol=1e-9)
    # the images of whole models are enclosed, feed-forward parts included
    assert 0.99 * expected < ratio.certified_lower <= expected
    sampler = oa.samplers.perturbation_pairs(mu, 0.1)
    study = oa.stability_study(F, sampler, n_pairs=4, rng=0, progress=False)
    assert study.ratios.shape == (4,)
    assert (study.ratios > 0).all()


def test_memory_is_bounded(model, monkeypatch):
    """With a budget of nothing every product computes what it needs again, to the same values."""
    F, X = model.map(), model.embed(model.ids(IDS))[0]
    v = np.random.default_rng(0).standard_normal(X.shape)
    kept, field = F.jacobian(X).jvp(v), F.field_jacobian(X, X)
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 600)
    assert np.allclose(F.jacobian(X).jvp(v), kept, rtol=1e-12, atol=1e-12)
    assert np.allclose(F.field_jacobian(X, X), field, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
def test_the_field_of_a_feed_forward_part_comes_in_runs(gated, monkeypatch):
    rng = np.random.default_rng(0)
    part = FeedForward(
        rng.standard_normal((7, 3)),
        rng.standard_normal((2, 7)),
        activation="gelu_tanh",
        gate=rng.standard_normal((7, 3)) if gated else None,
        gate_bias=rng.standard_normal(7) if gated else None,
    )
    X = rng.standard_normal((9, 3))
    whole = part.field_jacobian(X, X)
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 32 * 7 * 3 * 2)
    assert np.array_equal(part.field_jacobian(X, X), whole)
    direction = rng.standard_normal((9, 3))
    assert np.allclose(
        part.jacobian(X).jvp(direction), np.einsum("ned,nd->ne", whole, direction), rtol=1e-12, atol=1e-13
    )
