"""Every family: states of an independent implementation, its layers as maps, padding, ways to give it, what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import synthetic as syn

import otattn as oa
from otattn.models import Transformer, load_model, random
from otattn.models.load import FAMILIES

REFERENCES = sorted((Path(__file__).parent / "references").glob("*.npz"))
"""Written by benchmarks/families.py, whose numbers are of the package transformers."""
KINDS = sorted({name for family in FAMILIES for name in family.model_types})
TEXTS = [kind for kind in KINDS if kind not in ("vit", "deit")]
LONG, SHORT = [3, 5, 2, 9, 4, 7, 7, 11, 8], [6, 11, 9, 8]


def opened(path: Path) -> tuple[Transformer, np.ndarray, np.ndarray]:
    """The model of a reference, its inputs and its states."""
    with np.load(path) as file:
        about, flat, inputs, states = (
            json.loads(file["about"].tobytes()),
            *(file[k] for k in ("weights", "inputs", "states")),
        )
    weights, at = {}, 0
    for name, shape in about["shapes"].items():
        size = int(np.prod(shape))
        weights[name] = flat[at : at + size].reshape(shape)
        at += size
    assert at == len(flat)
    return load_model(weights, config=about["config"]), inputs, states


def inputs_of(model: Transformer) -> Any:
    images = not model.layout.family.embeddings
    return np.random.default_rng(0).standard_normal((3, 36, 36)) if images else np.array(LONG)


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_states_are_those_of_transformers(path: Path) -> None:
    model, inputs, states = opened(path)
    mine = model.hidden_states(inputs)
    assert mine.shape == states.shape
    # the references are float32, and their frequencies and buckets were computed in it
    for layer, (a, b) in enumerate(zip(mine, states, strict=True)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=f"layer {layer}")
    assert np.abs(states[-1] - states[0]).max() > 1.0
    np.testing.assert_allclose(model.hidden_states(inputs[1]), mine[:, 1], atol=1e-13)


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_maps_are_the_forward_pass(path: Path) -> None:
    """The whole model as a map, one layer's Jacobian, its heads, a local constant and a neighbourhood."""
    model, inputs, _ = opened(path)
    X = model.hidden_states(inputs[0])
    np.testing.assert_allclose(model.map().on_tokens(X[0]), X[-1], atol=1e-11)
    layer = model.layers[1]
    seen = model.attention_inputs(inputs[0])[1]
    by_heads = sum(h.on_tokens(seen) @ W.T for h, W in zip(layer.heads, layer.outputs, strict=True))
    bias = layer.projections.output_bias
    np.testing.assert_allclose(layer.projections(seen[None])[0], by_heads + (0.0 if bias is None else bias), atol=1e-12)
    # a Richardson step on central differences: the error is h^4 times fifth derivatives
    J, v = layer.block.jacobian(X[1]), np.random.default_rng(0).standard_normal(X[1].shape)
    slopes = [
        (layer.block.on_tokens(X[1] + h * v) - layer.block.on_tokens(X[1] - h * v)) / (2 * h) for h in (2e-4, 1e-4)
    ]
    slope = (4 * slopes[1] - slopes[0]) / 3
    np.testing.assert_allclose(J.jvp(v), slope, atol=1e-6 * np.abs(slope).max())
    local = oa.local_lipschitz(layer.block, X[1])
    assert local.particle == pytest.approx(np.linalg.svd(J.to_dense(), compute_uv=False)[0], rel=1e-6)
    bound = oa.certify(layer.block, X[1], radius=1e-6)
    assert local.particle * (1 - 1e-6) <= bound.value <= 1.1 * local.particle


def test_every_family_has_a_reference() -> None:
    found = {opened(path)[0].config.family for path in REFERENCES}
    assert found == set(KINDS) - {"deit"}  # ViT with one more first token


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_models(kind: str) -> None:
    model = random(kind, layers=3, dim=32, heads=2, spread=0.2, rng=3)
    c = model.config
    assert (c.num_layers, c.dim, c.num_heads, c.family) == (3, 32, 2, kind)
    states = model.hidden_states(inputs_of(model))
    assert np.array_equal(
        states, random(kind, layers=3, dim=32, heads=2, spread=0.2, rng=3).hidden_states(inputs_of(model))
    )
    assert not np.array_equal(
        states, random(kind, layers=3, dim=32, heads=2, spread=0.2, rng=4).hidden_states(inputs_of(model))
    )
    for index, layer in enumerate(model.layers):
        # eps makes tokens shorter: inside of the ellipsoid whose boundary a LayerNorm without eps fills
        hull = oa.Ellipsoid(layer.domain.shape, layer.domain.center)
        assert hull.contains(model.attention_inputs(inputs_of(model))[index], tol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_heads_of_a_model_know_where_their_tokens_are(kind: str) -> None:
    """Without a domain, constants of a head are those on the ellipsoid of the normalisation in front of it."""
    layer = random(kind, layers=2, dim=16, heads=2, spread=0.2, rng=3).layers[1]
    for part in (*layer.heads, layer.attention):
        assert part.domain is layer.domain
    head = layer.heads[0]
    bound = oa.lipschitz_upper_bound(head, n=3, theorem="rotary_gram_bound" if kind == "llama" else "row_bound")
    assert bound.domain is layer.domain
    assert bound.value == oa.lipschitz_upper_bound(head, domain=layer.domain, n=3, theorem=bound.theorem).value
    assert oa.bounds.table(head, n=3)[0].domain is layer.domain
    lower = oa.lipschitz_lower_bound(head, n=2)
    assert lower.domain is layer.domain
    assert layer.domain.contains(lower.witness.points, tol=1e-9)
    assert oa.bounds.table(head, radius=1.0, n=3)[0].domain.radius == 1.0


def test_untrained_models_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"family must be one of bert, .*, received 'lstm'"):
        random("lstm", rng=0)
    with pytest.raises(ValueError, match="heads must divide dim"):
        random("bert", dim=32, heads=3, rng=0)
    with pytest.raises(ValueError, match="even width"):
        random("llama", dim=6, heads=2, rng=0)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_does_not_depend_on_its_padding(kind: str) -> None:
    model = random(kind, layers=2, dim=16, heads=2, spread=0.3, rng=0)
    alone = [model.hidden_states(text) for text in (LONG, SHORT)]
    n, m = len(LONG), len(SHORT)
    pad = 0 if model.config.pad is None else model.config.pad
    ragged = model.hidden_states([LONG, SHORT])
    right = model.hidden_states([LONG, SHORT + [pad] * (n - m)], mask=[[1] * n, [1] * m + [0] * (n - m)])
    left = model.hidden_states([LONG, [pad] * (n - m) + SHORT], mask=[[1] * n, [0] * (n - m) + [1] * m])
    for states, at in ((ragged, slice(m)), (right, slice(m)), (left, slice(n - m, n))):
        assert states.shape == (3, 2, n, 16)
        np.testing.assert_allclose(states[:, 0], alone[0], atol=1e-13)
        np.testing.assert_allclose(states[:, 1, at], alone[1], atol=1e-13)
        rest = np.delete(states[:, 1], np.arange(n)[at], axis=1)
        assert np.isnan(rest).all()
        assert rest.shape[1] == n - m
    seen = model.attention_inputs([LONG, SHORT])
    np.testing.assert_allclose(seen[:, 1, :m], model.attention_inputs(SHORT), atol=1e-13)
    assert np.isnan(seen[:, 1, m:]).all()
    with pytest.raises(ValueError, match="windows of one length"):
        model.ids([LONG, SHORT])
    np.testing.assert_array_equal(model.hidden_states([LONG], mask=[[1] * n]), alone[0][:, None])


def test_masks_with_holes_keep_the_places_of_the_others() -> None:
    """A token that is masked out of the middle is as one that no other attends to."""
    w = syn.bert_weights(np.random.default_rng(7))
    model = load_model(w, num_heads=3, config={"layer_norm_eps": 1e-3})
    ids, mask = np.array([1, 5, 2, 16, 0]), np.array([1, 1, 0, 1, 1])
    other = ids.copy()
    other[2] = 9
    states = model.hidden_states(ids, mask=mask)
    np.testing.assert_array_equal(states[:, mask == 1], model.hidden_states(other, mask=mask)[:, mask == 1])
    # without the token the others are at other positions
    assert np.abs(states[-1, mask == 1] - model.hidden_states(ids[mask == 1])[-1]).max() > 0.01
    for wrong in ([1, 1, 1], [0] * 5, [1, 2, 1, 1, 1]):
        with pytest.raises(ValueError, match="mask must have an entry 0 or 1"):
            model.hidden_states(ids, mask=wrong)
    with pytest.raises(ValueError, match="mask must leave a token in each window"):
        model.hidden_states([ids, ids], mask=[mask, 0 * mask])


class Tensor:
    """What this library asks of a tensor of torch; the numbers are only there after ``detach`` and ``cpu``."""

    def __init__(self, values: np.ndarray, dtype: str = "torch.float32", steps: int = 2) -> None:
        self.values, self.dtype, self.steps = values, dtype, steps

    def detach(self) -> "Tensor":
        return Tensor(self.values, self.dtype, self.steps - 1)

    cpu = detach

    def double(self) -> "Tensor":
        return self

    def float(self) -> "Tensor":
        return Tensor(self.values, "torch.float32", self.steps)

    def numpy(self) -> np.ndarray:
        assert self.steps == 0
        assert "bfloat16" not in self.dtype
        return self.values


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_model_objects_and_state_dicts(dtype: str) -> None:
    plain = random("gpt2", dim=16, heads=2, rng=0)
    tensors = {f"transformer.{name}": Tensor(plain.checkpoint.tensor(name), dtype) for name in plain.checkpoint.shapes}
    config = SimpleNamespace(to_dict=lambda: {"model_type": "gpt2", "n_head": 2, "n_layer": 2})
    given = SimpleNamespace(state_dict=lambda: tensors, config=config)
    for source, options in ((given, {}), (tensors, {"config": config}), (tensors, {"config": config.to_dict()})):
        np.testing.assert_array_equal(load_model(source, **options).hidden_states(LONG), plain.hidden_states(LONG))
    with pytest.raises(ValueError, match=r"the given SimpleNamespace must hold the tensor 'transformer\.ln_f\.bias'"):
        load_model(
            SimpleNamespace(
                state_dict=lambda: {k: v for k, v in tensors.items() if "ln_f.bias" not in k}, config=config
            )
        )


def test_the_prefix_tells_a_family_without_its_name() -> None:
    w = syn.bert_weights(np.random.default_rng(7))
    assert load_model(syn.prefixed(w, "roberta."), num_heads=3).config.family == "roberta"
    assert load_model(w, num_heads=3).config.family == "bert"
    with pytest.raises(ValueError, match="received none of them"):
        load_model({"w": np.ones((2, 2))})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("electra", {"embedding_size": 8}),
    ("roberta", {"position_embedding_type": "relative_key"}),
    ("distilbert", {"n_layers": 3}),
    ("modernbert", {"norm_bias": True}),
    ("modernbert", {"layer_types": ["full_attention", "chunked_attention"]}),
    ("modernbert", {"local_attention": 0}),
    ("modernbert", {"sliding_window": False}),
    ("modernbert", {"rope_parameters": {"global": {"rope_type": "default"}}}),
    ("vit", {"image_size": 40}),
    ("vit", {"qkv_bias": True}),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
    ("t5", {"is_decoder": True}),
    ("t5", {"dense_act_fn": "gelu", "feed_forward_proj": "relu"}),
    ("t5", {"is_gated_act": True}),
    ("t5", {"relative_attention_num_buckets": 16}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"is_causal": False}),
    ("gpt_neox", {"is_causal": None}),
    ("opt", {"word_embed_proj_dim": 8}),
    ("opt", {"enable_bias": True}),
    ("gpt_neox", {"use_parallel_residual": None}),
    ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}),
    ("mistral", {"layer_types": ["full_attention"] * 2}),
    ("mistral", {"sliding_window": -1}),
    ("mistral", {"attention_bias": True}),
    ("qwen2", {"use_sliding_window": "yes"}),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}),
    ("qwen3", {"head_dim": 4}),
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gemma2", {"attn_logit_softcapping": 0.0}),
    ("gemma2", {"query_pre_attn_scalar": None}),
    ("gpt_oss", {"num_experts_per_tok": 5}),
    ("gpt_oss", {"hidden_act": "gelu"}),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}),
]


@pytest.mark.parametrize(("kind", "config"), REFUSED, ids=str)
def test_options_of_a_family_that_are_refused(kind: str, config: dict[str, Any]) -> None:
    plain = random(kind, dim=16, heads=2, rng=0)
    weights = {name: plain.checkpoint.tensor(name) for name in plain.checkpoint.shapes}
    assert load_model(weights, config={"model_type": kind}, num_heads=2).num_layers == 2
    with pytest.raises(ValueError) as caught:
        load_model(weights, config={"model_type": kind, **config}, num_heads=2)
    assert next(iter(config)) in str(caught.value)


STRANGE = {
    "distilbert": "transformer.layer.0.attention.q_norm.weight",
    "modernbert": "layers.0.attn_norm.weight",
    "vit": "encoder.layer.0.layernorm_before.scale",
    "t5": "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
    "opt": "project_in.weight",
    "qwen2": "layers.0.self_attn.o_proj.bias",
    "mistral": "layers.1.self_attn.q_proj.bias",
    "gemma2": "layers.0.self_attn.q_norm.weight",
    "gpt_oss": "layers.0.mlp.experts.gate_up_proj_blocks",
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_have_no_place_are_named(kind: str) -> None:
    plain = random(kind, dim=16, heads=2, rng=0)
    weights = {name: plain.checkpoint.tensor(name) for name in plain.checkpoint.shapes} | {STRANGE[kind]: np.ones(16)}
    with pytest.raises(ValueError) as caught:
        load_model(weights, config={"model_type": kind}, num_heads=2)
    assert repr(STRANGE[kind]) in str(caught.value)


def test_two_tables_of_words_must_be_one() -> None:
    plain = random("t5", dim=16, heads=2, rng=0)
    weights = {name: plain.checkpoint.tensor(name) for name in plain.checkpoint.shapes}
    name = "encoder.embed_tokens.weight"
    same = load_model(weights | {name: weights["shared.weight"]}, config={"model_type": "t5"}, num_heads=2)
    np.testing.assert_array_equal(same.hidden_states(LONG), plain.hidden_states(LONG))
    with pytest.raises(ValueError, match=f"{name} in the given arrays must equal shared.weight"):
        load_model(weights | {name: 2 * weights["shared.weight"]}, config={"model_type": "t5"}, num_heads=2)


def test_images_are_checked() -> None:
    model = random("vit", dim=16, heads=2, rng=0)
    X = np.random.default_rng(0).standard_normal((2, 3, 36, 36))
    states = model.hidden_states(X)
    assert states.shape == (3, 2, 82, 16)
    np.testing.assert_allclose(model.hidden_states(X[1]), states[:, 1], atol=1e-14)
    for wrong in (X[:, :2], X[:, :, :32], X[0, 0], np.full((3, 36, 36), np.nan)):
        with pytest.raises(ValueError, match="images must"):
            model.hidden_states(wrong)
    with pytest.raises(ValueError, match="mask must have an entry"):
        model.hidden_states(X, mask=np.ones((2, 82)))


def test_three_lines() -> None:
    """From a model to its states, a local constant and a neighbourhood."""
    model = random("gpt2", layers=1, dim=8, heads=2, spread=0.2, rng=0)
    states = model.hidden_states(SHORT)
    local, near = oa.local_lipschitz(model.map(), states[0]), oa.certify(model.map(), states[0], radius=1e-4)
    assert local.particle <= near.value
