"""Files that are no checkpoint are told apart by what they are; damaged ones are named."""

import gzip
import json
import pickle
import resource
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import gguf, write

from otattn.models import NpzCheckpoint, load_model, load_tokenizer, open_checkpoint
from otattn.models.files import read_json

IDS = np.array([3, 1, 16, 0, 7, 7, 2])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"


def zipped(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")


FOREIGN = {
    "pointer.safetensors": (POINTER, "pointer of Git LFS"),
    "pointer.gguf": (POINTER, "git lfs pull"),
    "old.bin": (pickle.dumps({"a": 1}, protocol=2), "pickle"),
    "newer.pt": (pickle.dumps({"a": 1}, protocol=4), "safetensors.torch.save_file"),
    "model.onnx": (b"\x08\x07\x12\x07pytorch\x1a\x051.0.0", "ONNX"),
    "model": (b"\x08\x09\x12\x07pytorch\x1a\x051.0.0" + b"\0" * 90, "ONNX"),
    "raw.onnx": (b"\x3a\xff" * 40, "ONNX"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 90, "HDF5"),
    "model.tflite": (b"\x1c\0\0\0TFL3" + b"\0" * 90, "TFLite"),
    "model.msgpack": (b"\x81\xa1x" * 30, "Flax"),
    "one.npy": (b"\x93NUMPY\x01\0" + b"\0" * 90, "one array"),
    "model.tar.gz": (gzip.compress(b"x" * 99), "gzip archive"),
    "ggml.bin": (b"lmgg" + b"\0" * 90, "before GGUF"),
    "page.safetensors": (b"<!DOCTYPE html><html></html>", "web page"),
    "config.json": (b'{"hidden_size": 32, "vocab_size": 17}', "JSON text"),
    "empty.safetensors": (b"", "empty"),
    "weights.ckpt": (b"\x01\x02" * 60, "training checkpoint"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_a_file_is(name: str, tmp_path: Path) -> None:
    data, what = FOREIGN[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError) as caught:
        open_checkpoint(tmp_path / name)
    assert what in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("members", "what"),
    [
        (("archive/data.pkl", "archive/data/0"), "torch.save"),
        (("readme.txt", "weights.bin"), "zip archive without arrays"),
        ((), "zip archive without arrays"),
    ],
)
def test_what_an_archive_is(members: tuple[str, ...], what: str, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    zipped(file, *members)
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin .*{what}"):
        open_checkpoint(file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*damaged"):
        open_checkpoint(file)


def test_a_header_that_looks_like_a_pickle_is_read(tmp_path: Path) -> None:
    """Its length, 0x280, starts with the two bytes of a pickle of protocol 2."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode().ljust(0x280)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1.0, 2.0))
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "x.safetensors").tensor("a"), [1.0, 2.0])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], r"received pytorch_model\.bin; save the model with safetensors"),
        (["a.ckpt", "b.h5"], r"received b\.h5, a\.ckpt|received a\.ckpt, b\.h5"),
        (["a.onnx", "b.onnx"], r"received a\.onnx, b\.onnx; name the file"),
        (["a.gguf", "b.gguf"], r"received a\.gguf, b\.gguf; name the file"),
        ([], "received none of them"),
    ],
)
def test_folders_without_a_model(files: list[str], message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["", "https://host/model.safetensors", "hf://org/model", "file:/tmp/x"])
def test_addresses_and_empty_names_are_no_files(name: str) -> None:
    for read in (open_checkpoint, load_tokenizer, load_model):
        with pytest.raises(ValueError, match="must be given by its path, received"):
            read(name)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    np.testing.assert_array_equal(open_checkpoint("~/x.npz").tensor("a"), np.ones(3))
    with pytest.raises(FileNotFoundError):
        open_checkpoint("~no-such-user-here/x.npz")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)):
        open_checkpoint(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (POINTER.decode(), "pointer of Git LFS"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("[" * 10_000, "JSON file"),
        ("[1]", "JSON object"),
        ("\ufeff{}", "JSON file"),
    ],
)
def test_configurations_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(caught.value)


def test_npz_files_are_read_array_by_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = syn.bert_weights(np.random.default_rng(0))
    np.savez(tmp_path / "x.npz", **w)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "num_attention_heads": 3, "layer_norm_eps": 0.001}')
    asked: list[str] = []
    import otattn.models.checkpoint as module

    plain = module.read_npz
    monkeypatch.setattr(module, "read_npz", lambda file, keys: asked.extend(keys) or plain(file, keys))
    model = syn.bert(tmp_path / "x.npz")
    assert isinstance(model.checkpoint, NpzCheckpoint)
    assert model.config.eps == 0.001
    assert asked == []
    expected = syn.bert_forward(w, IDS, heads=3, eps=0.001)
    np.testing.assert_allclose(model.hidden_states(IDS), expected, atol=1e-12)
    assert not any("pooler" in name for name in asked)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux")
def test_archives_that_claim_gigabytes_are_refused_without_taking_them(tmp_path: Path) -> None:
    w = syn.bert_weights(np.random.default_rng(0))
    w["embeddings.word_embeddings.weight"] = np.zeros((16384, 16384), np.uint8)
    np.savez_compressed(tmp_path / "x.npz", **w)
    assert (tmp_path / "x.npz").stat().st_size < 2**21
    del w
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"x\.npz"):
        syn.bert(tmp_path / "x.npz", num_heads=3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_headers_of_npy_that_nest_deeply(tmp_path: Path) -> None:
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"-" * 9000 + b"1,), }\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head)
    with pytest.raises(ValueError, match=r"x\.npz"):
        open_checkpoint(tmp_path / "x.npz")


def place(dims: tuple[int, ...], offset: int, *, code: int = 0) -> bytes:
    return struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def named(name: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name


LAID_OUT = {
    "unaligned": (named(b"a") + place((8,), 4), 1, "start at a multiple of 32"),
    "overlap": (named(b"a") + place((16,), 0) + named(b"b") + place((8,), 32), 2, "a and b .* must not overlap"),
    "the same place": (named(b"a") + place((8,), 0) + named(b"b") + place((8,), 0), 2, "must not overlap"),
    "beyond the end": (named(b"a") + place((8,), 1 << 40), 1, "beyond its end"),
    "too long": (named(b"a") + place((1 << 39,), 0), 1, "beyond its end"),
    "twice": (2 * (named(b"a") + place((8,), 0)), 2, "once"),
    "name": (named(b"\xff\xfe") + place((8,), 0), 1, "UTF-8"),
}


@pytest.mark.parametrize("case", LAID_OUT)
def test_where_the_tensors_of_gguf_lie(case: str, tmp_path: Path) -> None:
    infos, count, message = LAID_OUT[case]
    data = b"GGUF" + struct.pack("<IQQ", 3, count, 0) + infos
    (tmp_path / "x.gguf").write_bytes(data + b"\0" * (-len(data) % 32) + b"\0" * 128)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "keys"), [(1 << 19, 0), (0, 1 << 19), (1 << 62, 0), (0, 1 << 62)], ids=["t", "k", "T", "K"]
)
def test_counts_beyond_the_file(tensors: int, keys: int, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"\0" * 4096)
    with pytest.raises(ValueError, match=r"x\.gguf must hold"):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("kind", [4, 9])
def test_an_alignment_that_is_no_number(kind: int, tmp_path: Path) -> None:
    value = struct.pack("<I", 3 << 20) if kind == 4 else struct.pack("<IQI", 4, 1, 32)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + named(b"general.alignment") + struct.pack("<I", kind) + value
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"general\.alignment in .*x\.gguf"):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [2 << 24, 3 << 24])
def test_big_endian_files_are_told(version: int, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ValueError, match=r"x\.gguf .*big-endian"):
        open_checkpoint(tmp_path / "x.gguf")


def test_a_vocabulary_that_does_not_fit_the_embedding(tmp_path: Path) -> None:
    write(
        tmp_path / "x.gguf",
        syn.llama_weights(np.random.default_rng(7)),
        change=lambda writer: writer.add_token_list([f"t{i}" for i in range(16)]),
    )
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens in .*x\.gguf must have as many entries"):
        load_model(tmp_path / "x.gguf")


def test_integers_of_gguf_are_no_weights(tmp_path: Path) -> None:
    """Frequencies as integers pass as a buffer; a weight of integers does not."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("a", np.arange(6, dtype=np.int32).reshape(2, 3))
    writer.add_tensor("b", np.arange(4, dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    for name in "ab":
        with pytest.raises(ValueError, match=rf"{name} in .*x\.gguf must hold floating-point"):
            checkpoint.tensor(name)
    np.testing.assert_array_equal(checkpoint.buffer("a"), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(checkpoint.buffer("b"), [0, 1, 2, 3])


def test_a_tokenizer_is_no_pointer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra `models` (tokenizers) is not installed")
    for name in ("vocab.txt", "tokenizer.json"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(ValueError, match=rf"{name} is a pointer of Git LFS"):
            load_tokenizer(tmp_path)
