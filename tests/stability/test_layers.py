"""All heads of a model: the same numbers as one by one, kept on disk, resumed, keyed by their inputs."""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otattn.attention import MaskedAttention, SigmoidAttention, SoftmaxAttention
from otattn.attention.rotary import RotaryAttention
from otattn.data import load_sample
from otattn.errors import StoreError, StoreWarning
from otattn.lipschitz import bounds
from otattn.lipschitz.bounds import castin2024_discrete_lower
from otattn.lipschitz.local.value import local_lipschitz
from otattn.models import Transformer, load_model
from otattn.stability import heads as numbers
from otattn.stability import layers as module
from otattn.stability.heads import head_gamma, in_span
from otattn.stability.layers import measure_layers

sys.path.append(str(Path(__file__).parents[1] / "models"))
import synthetic as syn

IDS = np.random.default_rng(1).integers(0, 17, (3, 10))


def encoder(seed: int = 0) -> Transformer:
    return syn.bert(syn.bert_weights(np.random.default_rng(seed)), num_heads=3)


MODELS = {
    "bert": encoder,
    "gpt2": lambda: syn.gpt2(syn.gpt2_weights(np.random.default_rng(0)), num_heads=3),
    "llama": lambda: load_model(
        syn.llama_weights(np.random.default_rng(0)), config={"num_attention_heads": 4, "num_key_value_heads": 2}
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_are_those_of_each_head(kind: str) -> None:
    model = MODELS[kind]()
    m = measure_layers(model, IDS, n_values=(4, 8), n_pairs=5, progress=False)
    seen = model.attention_inputs(IDS)
    assert m.particle.shape == (2, model.config.num_heads, 3, 2)
    for i, h, w, k in ((0, 0, 0, 0), (1, 2, 2, 1)):
        head, X = model.layers[i].heads[h], seen[i, w, : (4, 8)[k]]
        local = local_lipschitz(head, X)
        assert m.particle[i, h, w, k] == pytest.approx(local.particle, rel=1e-6)
        assert m.splitting[i, h, w, k] == pytest.approx(local.splitting, rel=1e-9)
        assert m.radii[i, w, k] == pytest.approx(np.linalg.norm(X, axis=1).max(), rel=1e-14)
        inner = head.attention if isinstance(head, MaskedAttention) else head
        A = inner.A if isinstance(inner, SoftmaxAttention) else inner.form(0)
        assert m.norms[i, h, 0] == pytest.approx(np.linalg.norm(A, 2), rel=1e-9)
        R = m.radii[i, :, k].max()
        if kind == "llama":
            assert np.isnan(m.published[i, h, k])
        else:
            theorem = bounds.castin2024_discrete if kind == "bert" else bounds.castin2024_masked
            assert m.published[i, h, k] == pytest.approx(theorem(head, radius=R, n=(4, 8)[k]).value, rel=1e-9)
            assert m.own[i, h, k] < m.published[i, h, k]
    # what was measured lies below what was proved
    assert (m.values.max(axis=2) <= m.own).all()
    assert (m.radii <= m.domain_radius[:, None, None]).all()
    assert m.ratios.shape == (2, model.config.num_heads, 5)
    # pairs of equal runs have no ratio
    assert np.isfinite(m.ratios[:, :, 0]).all()
    assert np.array_equal(m.stability, np.nanmax(m.ratios, axis=2))
    json.dumps(m.to_dict(), allow_nan=False)


def test_windows_read_on_their_own() -> None:
    model = encoder()
    apart = {n: IDS[:, :n] for n in (8, 4)}
    m = measure_layers(model, apart, n_pairs=0, progress=False)
    assert m.n_values.tolist() == [4.0, 8.0]
    X = model.attention_inputs(IDS[:, :4])[1, 2]
    assert m.particle[1, 0, 2, 0] == pytest.approx(local_lipschitz(model.layers[1].heads[0], X).particle, rel=1e-6)
    whole = measure_layers(model, IDS, n_values=(4, 8), n_pairs=0, progress=False)
    # an encoder's tokens know the rest of the window from layer 1 on, a decoder's never do
    assert m.particle[0] == pytest.approx(whole.particle[0], rel=1e-9)
    assert np.abs(m.particle[1] / whole.particle[1] - 1.0).max() > 1e-3
    causal = MODELS["gpt2"]()
    pair = [
        measure_layers(causal, ids, n_pairs=0, progress=False, **o)
        for ids, o in ((apart, {}), (IDS, {"n_values": (4, 8)}))
    ]
    assert pair[0].particle == pytest.approx(pair[1].particle, rel=1e-6)
    with pytest.raises(ValueError, match="stability needs pairs"):
        _ = m.stability


def test_exponents() -> None:
    m = measure_layers(encoder(), IDS, n_values=(2, 4, 8), n_pairs=0, progress=False)
    x = np.log(m.n_values) - np.log(m.n_values).mean()
    slopes = np.log(m.particle) @ x / (x @ x)
    assert m.mean_exponent().exponent == pytest.approx(slopes.mean(), rel=1e-9)
    assert m.mean_exponent(1).exponent == pytest.approx(slopes[1].mean(), rel=1e-9)
    one = m.exponent(1, 2)
    assert one.exponent == pytest.approx(slopes[1, 2].mean(), rel=1e-9)
    assert one.standard_error == pytest.approx(slopes[1, 2].std(ddof=1) / np.sqrt(3), rel=1e-9)
    of_mean = np.log(m.particle[0].mean(axis=0)) @ x / (x @ x)
    assert m.exponent(0).exponent == pytest.approx(of_mean.mean(), rel=1e-9)
    with pytest.raises(ValueError, match="layer must be one of"):
        m.exponent(7)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict = {"n_values": (4, 8), "n_pairs": 3, "progress": False}
    expected = measure_layers(encoder(), IDS, **options)
    real, calls = module.measure_head, []

    def interrupted(layer: object, h: int, *rest: object) -> dict:
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(h)
        return real(layer, h, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "measure_head", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_layers(encoder(), IDS, cache=tmp_path, **options)
    assert len(list(tmp_path.glob("*/*.npz"))) == 4
    calls.clear()
    resumed = measure_layers(encoder(), IDS, cache=tmp_path, **options)
    assert calls == [1, 2]
    for name in ("particle", "splitting", "radii", "gamma", "published", "own", "ratios"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(expected, name))
    # all of it is there: the forward pass is not run again
    monkeypatch.setattr(Transformer, "walk", lambda *_, **__: pytest.fail("walked"))
    again = measure_layers(encoder(), IDS, cache=tmp_path, layers=[1], heads=[0, 2], **options)
    np.testing.assert_array_equal(again.particle, expected.particle[1:, [0, 2]])
    assert again.exponent(1, 2) == expected.exponent(1, 2)


def test_other_inputs_are_other_measurements(tmp_path: Path) -> None:
    options: dict = {
        "n_values": (4, 8),
        "n_pairs": 0,
        "layers": [0],
        "heads": [0],
        "cache": tmp_path,
        "progress": False,
    }
    measure_layers(encoder(), IDS, **options)
    measure_layers(encoder(1), IDS, **options)
    measure_layers(encoder(), IDS[:2], **options)
    measure_layers(encoder(), IDS, **(options | {"n_values": (4,)}))
    measure_layers(encoder(), IDS, **(options | {"n_pairs": 2}))
    assert len(list(tmp_path.iterdir())) == 5
    measure_layers(encoder(), IDS, **(options | {"heads": [1]}))
    assert len(list(tmp_path.iterdir())) == 5
    assert not list(tmp_path.glob("*/*.tmp"))


def rewritten(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    """An edit of the arrays in a file."""

    def edit(file: Path) -> None:
        with np.load(file) as stored:
            arrays = dict(stored)
        change(arrays)
        np.savez(file, **arrays)

    return edit


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "empty": lambda file: file.write_bytes(b""),
    "an object": rewritten(lambda a: a.update(particle=np.array([{}], dtype=object))),
    "one digit": rewritten(lambda a: a.update(particle=a["particle"] * (1 + 1e-15))),
    "not finite": rewritten(lambda a: a.update(particle=a["particle"] * np.nan)),
    "infinite": rewritten(lambda a: a.update(radii=a["radii"] * np.inf)),
    "another shape": rewritten(lambda a: a.update(splitting=a["splitting"][:1])),
    "another type": rewritten(lambda a: a.update(norms=a["norms"].astype(np.float32))),
    "swapped": rewritten(lambda a: a.update(particle=a["splitting"], splitting=a["particle"])),
    "a name missing": rewritten(lambda a: a.pop("gamma")),
    "no checksum": rewritten(lambda a: a.pop("checksum")),
    "another head": lambda file: file.write_bytes(file.with_name("layer000-head001.npz").read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_edited_record_is_named_and_measured_again(tmp_path: Path, damage: str) -> None:
    options: dict = {"n_values": (4,), "n_pairs": 2, "layers": [0], "cache": tmp_path, "progress": False}
    first = measure_layers(encoder(), IDS, heads=[0, 1], **options)
    (file,) = tmp_path.glob("*/layer000-head000.npz")
    DAMAGE[damage](file)
    with pytest.warns(StoreWarning, match=r"layer000-head000\.npz: damaged, edited or of another head") as said:
        again = measure_layers(encoder(), IDS, heads=[0], **options)
    assert len(said) == 1
    for name in numbers.FIELDS:
        expected = getattr(first, name)
        np.testing.assert_array_equal(
            getattr(again, name), expected if name in ("radii", "domain_radius") else expected[:, :1]
        )
    measure_layers(encoder(), IDS, heads=[0], **options)  # written again: nothing to say


def test_a_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    options: dict = {"n_values": (4,), "n_pairs": 0, "layers": [0], "heads": [0], "progress": False}
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="folder that can be written"):
        measure_layers(encoder(), IDS, cache=tmp_path / "file", **options)
    for address in ("", "s3://bucket/heads", "file:///tmp/heads"):
        with pytest.raises(ValueError, match="cache must be"):
            measure_layers(encoder(), IDS, cache=address, **options)
    measure_layers(encoder(), IDS, cache=tmp_path / "a", **options)
    (file,) = (tmp_path / "a").glob("*/*.npz")
    file.rename(tmp_path / "elsewhere.npz")
    file.symlink_to(tmp_path / "elsewhere.npz")
    with pytest.raises(StoreError, match="symbolic link"):
        measure_layers(encoder(), IDS, cache=tmp_path / "a", **options)


def test_a_key_stands_for_a_model_that_cannot_be_hashed(tmp_path: Path) -> None:
    plain = encoder()
    kind = type("Odd", (type(plain),), {"lock": threading.Lock()})  # a lock has no content
    odd = kind.__new__(kind)
    odd.__dict__.update(plain.__dict__)
    options: dict = {"n_values": (4,), "n_pairs": 0, "layers": [0], "heads": [0], "cache": tmp_path, "progress": False}
    with pytest.raises(ValueError, match="give key="):
        measure_layers(odd, IDS, **options)
    expected = measure_layers(odd, IDS, key="odd", **options)
    np.testing.assert_array_equal(measure_layers(plain, IDS, **options).particle, expected.particle)
    assert len(list(tmp_path.iterdir())) == 2
    measure_layers(odd, IDS, key="odd", **options)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="key must be a name"):
        measure_layers(odd, IDS, key=" ", **options)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS, {"n_values": (4, 11)}, "at most the window length 10"),
        (IDS, {"n_values": (8, 4)}, "must increase"),
        (IDS, {"n_values": ()}, "must increase"),
        (IDS, {"layers": [2]}, "layers must be indices from 0 to 1"),
        (IDS, {"heads": []}, "heads must be indices"),
        (IDS, {"n_pairs": -1}, "n_pairs"),
        ({4: IDS[:, :4], 8: IDS[:2, :8]}, {}, "equally many windows"),
        ({4: IDS[:, :5]}, {}, "must map each n"),
        ({4: IDS[:, :4]}, {"n_values": (4,)}, "must be left out"),
    ],
)
def test_bad_input(ids: object, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_layers(encoder(), ids, progress=False, **options)  # type: ignore[arg-type]


def test_bad_seed() -> None:
    with pytest.raises(TypeError, match="rng must be a non-negative integer"):
        measure_layers(encoder(), IDS, progress=False, rng=np.random.default_rng(0))  # type: ignore[arg-type]


def test_reduced_heads_have_the_same_jacobian_norms() -> None:
    rng = np.random.default_rng(2)
    Q, K, V = rng.normal(size=(2, 12)), rng.normal(size=(2, 12)), rng.normal(size=(3, 12))
    biases = {"query_bias": rng.normal(size=2), "key_bias": rng.normal(size=2), "value_bias": rng.normal(size=3)}
    X = rng.normal(size=(6, 12))
    softmax = SoftmaxAttention.from_qkv(Q, K, V, **biases)
    for head in (softmax, MaskedAttention(softmax), RotaryAttention(Q, K, V, **biases)):
        reduced, Z = in_span(head, X)
        assert type(reduced) is type(head)
        assert Z.shape == (6, 7)
        np.testing.assert_allclose(reduced.on_tokens(Z), head.on_tokens(X), atol=1e-12)
        s = [np.linalg.svd(h.jacobian(x).to_dense(), compute_uv=False)[:18] for h, x in ((head, X), (reduced, Z))]
        np.testing.assert_allclose(*s, atol=1e-12)
    # equal keys and queries span less
    assert in_span(SoftmaxAttention.from_qkv(Q, Q, V), X)[1].shape == (6, 5)
    plain = SoftmaxAttention(np.eye(12), V)
    assert in_span(plain, X)[0] is plain


def test_gamma_is_that_of_the_published_bound() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        head = SoftmaxAttention(rng.normal(size=(3, 3)), np.eye(3))
        bound = castin2024_discrete_lower(head, radius=1.0, n=4)
        assert head_gamma(head) == pytest.approx(bound.details["gamma"], abs=1e-10)
    head = load_sample().heads[0]
    values = np.linalg.eigvals(head.A)
    real = values.real[np.abs(values.imag) < 1e-9]
    assert head_gamma(head) == pytest.approx(max(-real.min(), real.max() / 8), rel=1e-8)
    assert head_gamma(SoftmaxAttention([[0.0, 1.0], [-1.0, 0.0]], np.eye(2))) == 0.0
    with pytest.raises(TypeError, match="softmax or rotary"):
        head_gamma(SigmoidAttention(np.eye(2), np.eye(2)))


@pytest.mark.slow
def test_the_bundled_layer_grows_like_a_fourth_root() -> None:
    """Layer 3 of MiniLM at the first n tokens of windows of 128: published growth is n^(1/4), the worst case n^(1/2)."""
    sample = load_sample()
    logs = np.zeros((4, 3))
    for head in sample.heads:
        reduced, Z = in_span(head, sample.hidden_states)
        logs += [[local_lipschitz(reduced, z[:n], tol=1e-4).particle for n in (16, 45, 128)] for z in Z]
    slopes = np.polyfit(np.log([16, 45, 128]), np.log(logs / 12).T, 1)[0]
    assert 0.15 < slopes.mean() < 0.30
    assert slopes.std(ddof=1) / 2 < 0.05
