"""Hidden states against forward passes written from the definitions; layers, heads, blocks and domains of the models."""

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic as syn

from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz.local.value import local_lipschitz
from otattn.measures import Ellipsoid, LayerNormDomain
from otattn.models import Transformer, load_model

HEADS, EPS = 3, 1e-3  # a large eps: a model that ignores it is caught
IDS = np.array([[1, 5, 2, 16, 0, 7, 7], [3, 3, 9, 1, 0, 2, 4]])
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": EPS, "rope_theta": 30.0}


def weights_of(kind: str) -> syn.Weights:
    rng = np.random.default_rng(7)
    return {"bert": syn.bert_weights, "gpt2": syn.gpt2_weights, "llama": syn.llama_weights}[kind](rng)


def model_of(kind: str) -> tuple[Transformer, list[list[np.ndarray]]]:
    """The model, and its independent hidden states for each row of IDS."""
    w = weights_of(kind)
    if kind == "bert":
        return syn.bert(w, num_heads=HEADS, eps=EPS), [syn.bert_forward(w, i, heads=HEADS, eps=EPS) for i in IDS]
    if kind == "gpt2":
        return syn.gpt2(w, num_heads=HEADS, eps=EPS), [syn.gpt2_forward(w, i, heads=HEADS, eps=EPS) for i in IDS]
    states = [syn.llama_forward(w, i, heads=4, kv=2, eps=EPS, base=30.0) for i in IDS]
    return load_model(w, config=LLAMA), states


KINDS = ["bert", "gpt2", "llama"]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_equal_an_independent_forward_pass(kind: str) -> None:
    model, expected = model_of(kind)
    states = model.hidden_states(IDS)
    assert states.shape == (3, 2, 7, model.config.dim)
    for w in range(2):
        np.testing.assert_allclose(states[:, w], np.stack(expected[w]), atol=1e-12)
    np.testing.assert_allclose(model.hidden_states(IDS[1]), states[:, 1], atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_as_a_token_map_is_its_forward_pass(kind: str) -> None:
    """Heads one by one, as maps on measures with Jacobians, against the batched pass."""
    model, _ = model_of(kind)
    states, seen = model.hidden_states(IDS), model.attention_inputs(IDS)
    layer = model.layers[0]
    np.testing.assert_allclose(layer.block.on_tokens(states[0, 1]), states[1, 1], atol=1e-12)
    by_heads = sum(h.on_tokens(seen[0, 0]) @ W.T for h, W in zip(layer.heads, layer.outputs, strict=True))
    bias = layer.projections.output_bias
    by_heads = by_heads if bias is None else by_heads + bias
    np.testing.assert_allclose(layer.projections(seen[0])[0], by_heads, atol=1e-12)
    np.testing.assert_allclose(layer.attention.on_tokens(seen[0, 0]), by_heads, atol=1e-12)
    # the Jacobian of the block is that of the forward pass
    rng = np.random.default_rng(0)
    X, v, h = states[0, 1], rng.normal(size=states[0, 1].shape), 1e-5
    slope = (layer.forward((X + h * v)[None]) - layer.forward((X - h * v)[None]))[0] / (2 * h)
    # truncation h^2 times third derivatives of size 100
    np.testing.assert_allclose(layer.block.jacobian(X).jvp(v), slope, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_domains_hold_the_tokens(kind: str) -> None:
    model, _ = model_of(kind)
    seen = model.attention_inputs(IDS)
    for layer in model.layers:
        assert isinstance(layer.domain, Ellipsoid if kind == "llama" else LayerNormDomain)
        tokens = seen[layer.index].reshape(-1, model.config.dim)
        # undo gain and bias: standardised tokens, shorter than sqrt(d) by eps
        norm = layer.attention_norm if layer.order == "pre" else None
        gain = norm.gain if norm is not None else layer.domain.gain
        z = (tokens - layer.domain.center) / gain
        lengths = np.linalg.norm(z, axis=1)
        d = model.config.dim
        assert (lengths <= np.sqrt(d) * (1 + 1e-12)).all()
        assert (lengths >= 0.98 * np.sqrt(d)).all()
        assert np.linalg.norm(tokens, axis=1).max() <= layer.domain.max_norm


@pytest.mark.parametrize("kind", KINDS)
def test_heads_have_local_constants(kind: str) -> None:
    model, _ = model_of(kind)
    seen = model.attention_inputs(IDS)[1, 0]
    head = model.layers[-1].heads[-1]
    assert isinstance(head, {"bert": SoftmaxAttention, "gpt2": MaskedAttention, "llama": RotaryAttention}[kind])
    local = local_lipschitz(head, seen)
    dense = np.linalg.svd(head.jacobian(seen).to_dense(), compute_uv=False)[0]
    assert local.particle == pytest.approx(dense, rel=1e-9)


def test_grouped_query_heads_share_keys_and_values() -> None:
    model, _ = model_of("llama")
    heads = model.layers[0].heads
    assert len(heads) == 4
    assert np.array_equal(heads[0].K, heads[1].K)
    assert np.array_equal(heads[2].V, heads[3].V)
    assert not np.array_equal(heads[1].K, heads[2].K)
    assert not np.array_equal(heads[0].Q, heads[1].Q)


@pytest.mark.parametrize(
    ("kind", "prefixes"), [("bert", ("bert.", "model.", "")), ("gpt2", ("transformer.", "model.", ""))]
)
@pytest.mark.parametrize("dtype", ["F64", "F32"])
def test_files_with_any_prefix(kind: str, prefixes: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra `models` is not installed")
    w = weights_of(kind)
    expected = model_of(kind)[0].hidden_states(IDS)
    # float32 weights are off by 1e-7 relative
    tol = 1e-12 if dtype == "F64" else 1e-4
    for prefix in prefixes:
        folder = tmp_path / (prefix or "none")
        folder.mkdir()
        file = syn.write_safetensors(folder / "model.safetensors", syn.prefixed(w, prefix), dtype=dtype)
        keys = {"bert": ("num_attention_heads", "layer_norm_eps"), "gpt2": ("n_head", "layer_norm_epsilon")}[kind]
        (folder / "config.json").write_text(
            json.dumps(dict(zip(keys, (HEADS, EPS), strict=True)) | {"model_type": kind})
        )
        for source in (file, folder):
            np.testing.assert_allclose(load_model(source).hidden_states(IDS), expected, atol=tol)


def test_old_names_of_layer_norm() -> None:
    w = weights_of("bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in w.items()
    }
    assert set(old) != set(w)
    states = [syn.bert(x, num_heads=HEADS, eps=EPS).hidden_states(IDS) for x in (old, w)]
    np.testing.assert_array_equal(*states)


def test_sample_is_what_the_library_takes() -> None:
    model, expected = model_of("bert")
    sample = model.sample(1, IDS)
    np.testing.assert_allclose(sample.hidden_states[1], expected[1][1], atol=1e-12)
    assert np.array_equal(sample.token_ids, IDS)
    assert len(sample.heads) == HEADS
    layer = model.layers[1]
    np.testing.assert_array_equal(
        sample.attention.on_tokens(sample.tokens(0)), layer.attention.on_tokens(sample.tokens(0))
    )
    with pytest.raises(
        ValueError, match=r"a report must be asked of heads of plain softmax attention, received Masked"
    ):
        model_of("gpt2")[0].sample(0, IDS).softmax_heads("a report")


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_one_head_of_a_layer(kind: str) -> None:
    model, _ = model_of(kind)
    sample = model.sample(1, IDS)
    X = sample.tokens(0)
    parts = [sample.of_head(h) for h in range(len(sample.heads))]
    assert [part.first_head for part in parts] == list(range(len(parts)))
    bias = model.layers[1].projections.output_bias
    whole = sum(part.attention.on_tokens(X) for part in parts) + (0.0 if bias is None else bias)
    np.testing.assert_allclose(whole, sample.attention.on_tokens(X), atol=1e-12)
    with pytest.raises(ValueError, match="head must be from 0 to"):
        sample.of_head(len(parts))


def test_layers_are_a_sequence() -> None:
    model, _ = model_of("bert")
    assert len(model.layers) == 2
    assert [layer.index for layer in model.layers] == [0, 1]
    assert model.layers[-1].index == 1
    assert [layer.index for layer in model.layers[:1]] == [0]
    with pytest.raises(IndexError, match="layer must lie in"):
        model.layers[2]
    with pytest.raises(TypeError, match="integer"):
        model.index(0.5)  # type: ignore[arg-type]
    walked = list(model.walk(IDS, stop=1))
    assert len(walked) == 1
    assert walked[0][1] is walked[0][2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.0, 2.0], "integers"),
        ([[[1]]], "shape"),
        ([], "integers"),
        ([17], r"lie in \[0, 17\)"),
        ([-1], "lie in"),
        ([0] * 11, "at most 10 tokens"),
    ],
)
def test_bad_ids(ids: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of("bert")[0].hidden_states(ids)


def without(w: syn.Weights, name: str) -> syn.Weights:
    return {key: value for key, value in w.items() if key != name}


def test_what_is_refused() -> None:
    w = weights_of("bert")
    with pytest.raises(ValueError, match="num_attention_heads must be in the configuration"):
        syn.bert(w)
    with pytest.raises(ValueError, match=r"position_embedding_type .* must be 'absolute'"):
        syn.bert(w, config={"position_embedding_type": "relative_key"}, num_heads=HEADS)
    with pytest.raises(ValueError, match=r"model_type .* must be one of bert, .* received 'albert'"):
        syn.bert(w, config={"model_type": "albert"}, num_heads=HEADS)
    with pytest.raises(ValueError, match=r"hidden_act .* must be one of"):
        syn.bert(w, num_heads=HEADS, config={"hidden_act": "softplus"})
    with pytest.raises(ValueError, match=r"num_attention_heads .* must be an integer"):
        syn.bert(w, config={"num_attention_heads": "3"})
    with pytest.raises(ValueError, match="must divide"):
        syn.bert(w, num_heads=5).hidden_states(IDS)
    with pytest.raises(ValueError, match="one tensor whose name ends with"):
        load_model(weights_of("gpt2"), num_heads=HEADS, config={"model_type": "bert"})
    broken = without(w, "encoder.layer.1.output.dense.bias")
    with pytest.raises(ValueError, match=r"must hold the tensor 'encoder\.layer\.1\.output\.dense\.bias'"):
        syn.bert(broken, num_heads=HEADS).hidden_states(IDS)
    wrong = w | {"encoder.layer.0.attention.self.key.weight": np.ones((12, 11))}
    with pytest.raises(ValueError, match="must have shape"):
        syn.bert(wrong, num_heads=HEADS).layers[0]
    nan = w | {"encoder.layer.0.attention.self.key.bias": np.full(12, np.nan)}
    with pytest.raises(ValueError, match="finite"):
        syn.bert(nan, num_heads=HEADS).layers[0]
    with pytest.raises(ValueError, match="at least one layer"):
        syn.bert({name: value for name, value in w.items() if "encoder" not in name}, num_heads=HEADS)
    g = weights_of("gpt2")
    with pytest.raises(ValueError, match="n_head must be in the configuration"):
        syn.gpt2(g)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx"):
        syn.gpt2(g, config={"scale_attn_by_inverse_layer_idx": True}, num_heads=HEADS)
    m = weights_of("llama")
    with pytest.raises(ValueError, match="num_attention_heads must be in the configuration"):
        load_model(m)
    with pytest.raises(ValueError, match=r"rope_scaling .* of one kind among"):
        load_model(m, config=LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(ValueError, match="must divide"):
        load_model(m, config=LLAMA | {"num_key_value_heads": 3}).layers[0]


@pytest.mark.parametrize("kind", KINDS)
def test_states_beyond_float64_are_an_error(kind: str) -> None:
    """Never infinite states, nor the zeros that a norm would make of them; the file is named."""
    load = {"bert": syn.bert, "gpt2": syn.gpt2, "llama": load_model}[kind]
    options: dict = {"config": LLAMA} if kind == "llama" else {"num_heads": HEADS, "eps": EPS}
    parts = {"bert": ("0.intermediate", "0.output.dense"), "gpt2": ("0.mlp",), "llama": ("0.mlp",)}[kind]
    w = {n: v * 1e200 if any(p in n for p in parts) else v for n, v in weights_of(kind).items()}
    with pytest.raises(ValueError, match="layer 0 of the given arrays"):
        load(w, **options).hidden_states(IDS)


def test_gpt2_heads_of_64_are_inferred() -> None:
    w = syn.gpt2_weights(np.random.default_rng(0), layers=1, d=128)
    assert syn.gpt2(w).config.num_heads == 2
    assert syn.gpt2(w).config.eps == 1e-5
    assert syn.gpt2(w).config.activation == "gelu_tanh"
