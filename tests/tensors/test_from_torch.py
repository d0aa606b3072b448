"""Modules of torch, transformers and timm as attention maps: the same values, the same derivatives, and what is refused."""

import numpy as np
import pytest

import otattn as oa

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn
torch.set_num_threads(1)


def randomised(module, seed=0, scale=1.0):
    """Every parameter random, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5 + (p.ndim == 1))
    return module.eval()


def agree(module, call, *, causal=False, tol=1e-12, n=9, dim=8):
    """Values at other tokens than those of the check, and a product with the adjoint of the Jacobian by torch."""
    attention = oa.from_torch(module, causal=causal)
    X = np.random.default_rng(7).standard_normal((n, dim))
    module = module.double()
    expected = call(module, torch.tensor(X)).detach().numpy()
    np.testing.assert_allclose(attention.on_tokens(X), expected, rtol=tol, atol=tol * np.abs(expected).max())
    g = np.random.default_rng(8).standard_normal(expected.shape)
    pulled = torch.autograd.functional.vjp(lambda x: call(module, x), torch.tensor(X), torch.tensor(g))[1].numpy()
    close = max(1e3 * tol, 1e-10) * np.abs(pulled).max()
    np.testing.assert_allclose(attention.jacobian(X).vjp(g), pulled, rtol=0, atol=close)
    return attention


def hidden(X):
    return torch.ones(len(X), len(X), dtype=torch.bool).triu(1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(bias, batch_first):
    module = randomised(nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first, dropout=0.3).train())
    module.train()
    attention = agree(module.eval(), lambda m, X: m(X, X, X, need_weights=False)[0])
    assert isinstance(attention, oa.MultiHeadAttention)
    assert module.training is False
    assert oa.at_measure_bound(attention, np.eye(8)[:3]).value > 0.0
    masked = agree(module, lambda m, X: m(X, X, X, need_weights=False, attn_mask=hidden(X))[0], causal=True)
    assert isinstance(masked, oa.MaskedAttention)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU("tanh"), nn.SiLU()])
def test_encoder_layers(norm_first, activation):
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation=activation, norm_first=norm_first, batch_first=True)
    block = agree(randomised(layer), lambda m, X: m(X))
    assert isinstance(block, oa.TransformerBlock)
    assert oa.local_lipschitz(block, np.eye(8)).value > 0.0


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_layers_one_after_another():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    encoder = randomised(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False))
    assert len(agree(encoder, lambda m, X: m(X[None])[0]).maps) == 3
    agree(randomised(nn.Sequential(layer, nn.RMSNorm(8, eps=1e-6))), lambda m, X: m(X), causal=False)
    masked = oa.from_torch(randomised(nn.Sequential(layer, layer)), causal=True)
    assert masked.causal


def test_what_is_not_known_is_refused():
    with pytest.raises(
        TypeError, match=r"module must be one of .*MultiheadAttention.*received .*Linear; use its layers"
    ):
        oa.from_torch(nn.Linear(3, 3))
    for wrong in (lambda X: X, np.eye(2), nn.Linear):
        with pytest.raises(TypeError, match=r"torch.nn.Module, received"):
            oa.from_torch(wrong)
    with pytest.raises(ValueError, match="add_bias_kv"):
        oa.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match="add_zero_attn"):
        oa.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True))
    with pytest.raises(ValueError, match="kdim = vdim = 8, received 4"):
        oa.from_torch(nn.MultiheadAttention(8, 2, kdim=4))
    with pytest.raises(ValueError, match="empty Sequential"):
        oa.from_torch(nn.Sequential())
    module = nn.MultiheadAttention(8, 2)
    module.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="received extra, whose use is not known"):
        oa.from_torch(module)
    with pytest.raises(ValueError, match="must be one of"):
        oa.from_torch(nn.TransformerEncoderLayer(8, 2, activation=torch.cos))
    broken = nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        broken.in_proj_weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="in_proj_weight must be finite"):
        oa.from_torch(broken)


def test_another_forward_pass_is_noticed():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args, **options):
            out, weights = super().forward(*args, **options)
            return 1.0001 * out, weights

    with pytest.raises(
        ValueError, match=r"must agree with Doubled at random tokens within 1e-05, received a difference of"
    ):
        oa.from_torch(randomised(Doubled(8, 2)))


def test_half_precision_and_no_tie_to_the_module():
    module = randomised(nn.MultiheadAttention(8, 2)).bfloat16()
    attention, X = oa.from_torch(module), np.eye(8)
    before = attention.on_tokens(X)
    with torch.no_grad():
        module.in_proj_weight.zero_()
    np.testing.assert_array_equal(attention.on_tokens(X), before)
    assert module.in_proj_weight.dtype == torch.bfloat16


# transformers


def modelling(family):
    return pytest.importorskip(f"transformers.models.{family}", reason="transformers is not installed")


def first(out):
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_bert(act):
    bert = modelling("bert")
    config = bert.BertConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=12, hidden_act=act, num_hidden_layers=1
    )
    config._attn_implementation = "eager"
    layer = randomised(bert.modeling_bert.BertLayer(config))
    for module in (layer, layer.attention, layer.attention.self):
        agree(module, lambda m, X: first(m(X[None])))
    with pytest.raises(ValueError, match="causal must be left out"):
        oa.from_torch(layer, causal=True)


@pytest.mark.parametrize("options", [{}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gpt2(options, implementation):
    gpt2 = modelling("gpt2")
    config = gpt2.GPT2Config(n_embd=8, n_head=2, n_layer=2, **options)
    config._attn_implementation = implementation
    block = randomised(gpt2.modeling_gpt2.GPT2Block(config, layer_idx=1))

    def call(m, X):
        mask = torch.zeros(len(X), len(X), dtype=X.dtype).masked_fill(hidden(X), -torch.inf)
        return first(m(X[None], attention_mask=mask[None, None]))

    for module in (block, block.attn):
        assert agree(module, call).causal


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_llama(rope):
    llama = modelling("llama")
    config = llama.LlamaConfig(
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=12,
        num_hidden_layers=1,
        head_dim=4,
    )
    config._attn_implementation = "sdpa"
    config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    layer = randomised(llama.modeling_llama.LlamaDecoderLayer(config, 0))
    rotary = llama.modeling_llama.LlamaRotaryEmbedding(config)

    def call(m, X):
        mask = torch.zeros(len(X), len(X), dtype=X.dtype).masked_fill(hidden(X), -torch.inf)
        positions = rotary(X[None], torch.arange(len(X))[None])
        return first(m(X[None], attention_mask=mask[None, None], position_embeddings=positions))

    for module in (layer, layer.self_attn):
        assert agree(module, call, tol=2e-6).causal  # norms and angles of that module are in float32
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(ValueError, match=r"do not depend on the length, .*received .*yarn"):
        oa.from_torch(layer)


@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_vit(qkv_bias, kind):
    package = modelling(kind.lower())
    config = getattr(package, f"{kind}Config")(
        hidden_size=8, num_attention_heads=2, intermediate_size=12, qkv_bias=qkv_bias
    )
    config._attn_implementation = "sdpa"
    layer = randomised(getattr(getattr(package, f"modeling_{kind.lower()}"), f"{kind}Layer")(config))
    for module in (layer, layer.attention):
        agree(module, lambda m, X: first(m(X[None])))
    with pytest.raises(ValueError, match="causal must be left out"):
        oa.from_torch(layer, causal=True)


# timm


@pytest.mark.parametrize("init_values", [None, 0.3])
def test_timm(init_values):
    transformer = pytest.importorskip("timm.models.vision_transformer", reason="timm is not installed")
    block = randomised(transformer.Block(8, 2, qkv_bias=True, init_values=init_values, drop_path=0.2))
    for module in (block, block.attn):
        agree(module, lambda m, X: m(X[None])[0])
        agree(module, lambda m, X: m(X[None], is_causal=True)[0], causal=True)
    with pytest.raises(ValueError, match=r"attn\.norm\.weight, .*whose use is not known"):
        oa.from_torch(transformer.Block(8, 2, scale_attn_norm=True))
    bare = randomised(transformer.Block(8, 2, scale_attn_norm=True, norm_layer=bare_norm))
    with pytest.raises(ValueError, match="must agree with Block"):
        oa.from_torch(bare)


def bare_norm(d, **_):
    return nn.LayerNorm(d, elementwise_affine=False)


@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda d, **_: nn.RMSNorm(d, eps=1e-3), bare_norm])
def test_timm_with_normalised_queries_and_keys(norm):
    transformer = pytest.importorskip("timm.models.vision_transformer", reason="timm is not installed")
    block = randomised(transformer.Block(8, 2, qkv_bias=True, qk_norm=True, norm_layer=norm))
    for module in (block, block.attn):
        agree(module, lambda m, X: m(X[None])[0])
        masked = agree(module, lambda m, X: m(X[None], is_causal=True)[0], causal=True)
        assert masked.causal
    attention = oa.from_torch(block.attn)
    assert all(isinstance(head, oa.ScoreAttention) for head in attention.heads)
    assert oa.local_lipschitz(attention, np.eye(8)[:4]).value > 0.0


def test_timm_deit():
    """The blocks of a whole distilled model, one after another."""
    deit = pytest.importorskip("timm.models.deit", reason="timm is not installed")
    model = randomised(
        deit.VisionTransformerDistilled(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=0),
        scale=0.5,
    )
    agree(model.blocks, lambda m, X: m(X[None])[0])
