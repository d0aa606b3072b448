"""Checkpoints of every kind give the same tensors; damaged and hostile files are refused with a name."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic as syn

from otattn.models import ArrayCheckpoint, SafetensorsCheckpoint, open_checkpoint
from otattn.models import checkpoint as module

pytest.importorskip("safetensors", reason="the extra `models` (safetensors) is not installed")


def small() -> syn.Weights:
    rng = np.random.default_rng(0)
    return {"a.weight": rng.normal(size=(3, 4)), "b.bias": rng.normal(size=5)}


@pytest.mark.parametrize(("dtype", "eps"), [("F64", 0.0), ("F32", 2.0**-24), ("F16", 2.0**-11), ("BF16", 2.0**-7)])
def test_types_of_safetensors(dtype: str, eps: float, tmp_path: Path) -> None:
    w = small()
    file = open_checkpoint(syn.write_safetensors(tmp_path / "x.safetensors", w, dtype=dtype))
    assert isinstance(file, SafetensorsCheckpoint)
    assert dict(file.shapes) == {"a.weight": (3, 4), "b.bias": (5,)}
    for name, value in w.items():
        out = file.tensor(name)
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, value, rtol=eps)
    rows = np.array([2, 0])
    np.testing.assert_array_equal(file.tensor("a.weight", None, 4, rows=rows), file.tensor("a.weight")[rows])


def test_npz_and_arrays(tmp_path: Path) -> None:
    w = small()
    np.savez(tmp_path / "x.npz", **w)
    for source in (tmp_path / "x.npz", w, ArrayCheckpoint(w)):
        checkpoint = open_checkpoint(source)
        for name, value in w.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), value)
        assert "a.weight" in checkpoint
        assert "c" not in checkpoint


def test_fingerprints_are_of_the_content(tmp_path: Path) -> None:
    w = small()
    same = [open_checkpoint(syn.write_safetensors(tmp_path / name, w)).fingerprint for name in ("x", "y")]
    assert same[0] == same[1]
    changed = w | {"b.bias": w["b.bias"] + 1.0}
    assert open_checkpoint(syn.write_safetensors(tmp_path / "z", changed)).fingerprint != same[0]
    arrays = [ArrayCheckpoint(v).fingerprint for v in (w, dict(reversed(w.items())), changed)]
    assert arrays[0] == arrays[1] != arrays[2]


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "short": b"abc",
    "text": b"this is no checkpoint at all",
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "header beyond the file": struct.pack("<Q", 100) + b"{}",
    "no json": header(b"{" * 50),
    "deep json": header(b"[" * 100_000),
    "cut off": header(json.dumps({"a": F32}).encode(), b"\0" * 4),
    "beyond the end": header(
        json.dumps({"a": {**F32, "data_offsets": [0, 2**40], "shape": [2**38]}}).encode(), b"\0" * 8
    ),
    "shape and size differ": header(json.dumps({"a": {**F32, "shape": [3]}}).encode(), b"\0" * 8),
    "overlap": header(json.dumps({"a": F32, "b": F32}).encode(), b"\0" * 8),
    "negative shape": header(json.dumps({"a": {**F32, "shape": [-2]}}).encode(), b"\0" * 8),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(DAMAGED[case])
    with pytest.raises(ValueError, match=r"x\.safetensors must be a \.safetensors file"):
        open_checkpoint(file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="existing file"):
        open_checkpoint(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="must be a file"):
        open_checkpoint(tmp_path)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="never loaded"):
        open_checkpoint(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="array of real numbers"):
        ArrayCheckpoint({"a": np.array(["x"])})


def test_sizes_are_checked_before_reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = open_checkpoint(syn.write_safetensors(tmp_path / "x.safetensors", small()))
    monkeypatch.setattr(module, "MAX_BYTES", 90)
    monkeypatch.setattr(file, "_read", lambda *_: pytest.fail("read in spite of its size"))
    with pytest.raises(ValueError, match="at most 90 bytes"):
        file.tensor("a.weight")


def test_types_that_are_no_numbers(tmp_path: Path) -> None:
    entry = {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}
    file = tmp_path / "x.safetensors"
    file.write_bytes(header(json.dumps({"a": entry}).encode(), b"\0\0"))
    with pytest.raises(ValueError, match="plain numbers, received dtype F8_E5M2"):
        open_checkpoint(file).tensor("a")


def test_configuration_files(tmp_path: Path) -> None:
    w = syn.bert_weights(np.random.default_rng(0), layers=1)
    file = syn.write_safetensors(tmp_path / "x.safetensors", w)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="JSON object"):
        syn.bert(file)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON file"):
        syn.bert(file)
    (tmp_path / "other.json").write_text('{"num_attention_heads": 2}')
    assert syn.bert(file, config=tmp_path / "other.json").config.num_heads == 2
    assert syn.bert(file, config=tmp_path / "other.json", num_heads=4).config.num_heads == 4


def test_the_extra_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = syn.write_safetensors(tmp_path / "x.safetensors", small())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"otattn\[models\]"):
        open_checkpoint(file)
