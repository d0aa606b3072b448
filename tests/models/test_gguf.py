"""GGUF files written by the gguf package: hidden states of the dequantised weights, tokenizer, damaged files."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import BASE, EPS, HEADS, KV, write

from otattn.attention.rotary import RotaryAttention
from otattn.models import GGUFCheckpoint, load_model, load_tokenizer, open_checkpoint

gguf = pytest.importorskip("gguf", reason="the extra `models` (gguf) is not installed")

IDS = np.array([3, 1, 16, 0, 7, 7, 2])


@pytest.fixture
def weights() -> syn.Weights:
    return syn.llama_weights(np.random.default_rng(5), heads=HEADS, kv=KV)


def test_hidden_states_from_adjacent_pairs(weights: syn.Weights, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", weights)
    model = load_model(tmp_path / "x.gguf")
    assert model.config.rotary.layout == "adjacent"
    np.testing.assert_allclose(model.config.rotary.frequencies, BASE ** (-np.arange(4) / 4), rtol=1e-14)
    assert model.config.max_length == 50
    expected = syn.llama_forward(weights, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    # weights are rounded to float32
    np.testing.assert_allclose(model.hidden_states(IDS), expected, atol=1e-5)
    head = model.layers[1].heads[3]
    assert isinstance(head, RotaryAttention)
    assert head.layout == "adjacent"


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantised_tensors(kind: str, weights: syn.Weights, tmp_path: Path) -> None:
    stored = write(tmp_path / "x.gguf", weights, kind)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.quantisation("blk.0.attn_q.weight") == kind
    assert set(checkpoint.shapes) == set(stored)
    for name, value in stored.items():
        assert checkpoint.shapes[name] == value.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), value)
    rows = np.array([5, 0, 5])
    part = checkpoint.tensor("token_embd.weight", None, 32, rows=rows)
    np.testing.assert_array_equal(part, stored["token_embd.weight"][rows])
    assert checkpoint.metadata["general.flag"] is True
    assert checkpoint.items("general.list") == [1.5, 2.5]
    with pytest.raises(ValueError, match="must hold the list"):
        checkpoint.items("general.none")


def test_byte_level_tokenizer(weights: syn.Weights, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra `models` (tokenizers) is not installed")
    tokens = ["<|endoftext|>", "a", "b", "c", "Ġ", "ab", "Ġab", "1", "2", "12"]

    def vocabulary(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_merges(["a b", "Ġ ab", "1 2"])

    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][: len(tokens)]
    write(tmp_path / "x.gguf", weights, change=vocabulary)
    tokenizer = load_tokenizer(load_model(tmp_path / "x.gguf"))
    # digits are split before merging, so "12" stays two tokens
    assert tokenizer.encode("ab abc12").tokens == ["ab", "Ġab", "c", "1", "2"]
    assert load_tokenizer(tmp_path / "x.gguf").encode("ab").ids == [5]
    write(tmp_path / "y.gguf", weights)
    with pytest.raises(ValueError, match="byte-level BPE"):
        load_tokenizer(tmp_path / "y.gguf")


def test_other_architectures_are_refused(weights: syn.Weights, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", weights, arch="falcon")
    with pytest.raises(ValueError, match=r"general\.architecture .* received 'falcon'"):
        load_model(tmp_path / "x.gguf")
    write(tmp_path / "y.gguf", weights, change=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR))
    with pytest.raises(ValueError, match=r"rope\.scaling\.type .* received 'linear'"):
        load_model(tmp_path / "y.gguf")


def test_every_truncation_is_refused(weights: syn.Weights, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", weights)
    whole = (tmp_path / "x.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for size in [4, 8, 23, *np.linspace(30, len(whole) - 1, 25).astype(int)]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut"):
            load_model(file).hidden_states(np.arange(17))


def header(tensors: int, keys: int, rest: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


HOSTILE = {
    "version": (header(0, 0, version=1), "version 2 or 3"),
    "tensors": (header(2**60, 0), "at most"),
    "keys": (header(0, 2**60), "at most"),
    "string": (header(0, 1, struct.pack("<Q", 2**60) + b"\0" * 8), "at most"),
    "list": (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 6, 2**60)), "at most"),
    "list beyond the end": (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 6, 2**20)), "cut off"),
    "strings beyond the end": (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**20)), "cut off"),
    "lists of lists": (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "scalars or strings"),
    "type": (header(0, 1, text(b"k") + struct.pack("<I", 77)), "code 77"),
    "key twice": (header(0, 2, 2 * (text(b"k") + struct.pack("<IB", 0, 1))), "once"),
    "dimensions": (header(1, 0, text(b"t") + struct.pack("<I", 2**31) + b"\0" * 24), "dimensions"),
    "size": (header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2, 0, 0)), "at most"),
    "alignment": (header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
}


def test_no_gguf_file_at_all(tmp_path: Path) -> None:
    for data in (b"", b"GGML" + b"\0" * 40):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(ValueError, match=r"must be a \.gguf file"):
            GGUFCheckpoint(tmp_path / "x")


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("dims", "code", "message"),
    [((2**39, 1), 0, "cut off"), ((8, 8), 0, "cut off"), ((8, 1), 99, "code 99"), ((5, 2), 3, "multiples of 32")],
)
def test_hostile_tensors(dims: tuple[int, int], code: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, *dims, code, 0)) + b"\0" * 96)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(file)
