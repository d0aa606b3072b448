"""Shards and split files load as one model; a part alone is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import BASE, EPS, HEADS, KV, gguf, write

from otattn.models import ShardedCheckpoint, load_model, open_checkpoint

IDS = np.array([3, 1, 16, 0, 7, 7, 2])
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": EPS,
    "rope_theta": BASE,
}


def shards(folder: Path, w: syn.Weights, count: int = 3) -> Path:
    names, where = sorted(w), {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: w[name] for name in names[i::count]}
        syn.write_safetensors(folder / file, part, dtype="F64")
        where |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards(tmp_path, syn.llama_weights(np.random.default_rng(7)))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_shards_load_as_one_model(folder: Path) -> None:
    w = syn.llama_weights(np.random.default_rng(7))
    expected = syn.llama_forward(w, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    index = folder / "model.safetensors.index.json"
    for source in (folder, index, str(index), open_checkpoint(index)):
        np.testing.assert_allclose(load_model(source).hidden_states(IDS), expected, atol=1e-12)
    one = open_checkpoint(index)
    assert isinstance(one, ShardedCheckpoint)
    assert one.fingerprint == ShardedCheckpoint(index).fingerprint
    syn.write_safetensors(folder / "model-00002-of-00003.safetensors", w)
    with pytest.raises(ValueError, match="must tell the same tensors"):
        ShardedCheckpoint(index)


def test_one_shard_alone_is_refused(folder: Path) -> None:
    for i in (1, 2, 3):
        with pytest.raises(ValueError, match=f"is shard {i} of 3; give the folder or the index"):
            load_model(folder / f"model-0000{i}-of-00003.safetensors")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "must hold weight_map"),
        ({"weight_map": {}}, "must hold weight_map"),
        ({"weight_map": {"a": 1}}, "must hold weight_map"),
        ({"weight_map": {"a": "../x.safetensors"}}, "must name files beside it"),
        ({"weight_map": {"a": "/etc/hostname"}}, "must name files beside it"),
        ({"weight_map": {"a": ""}}, "must name files beside it"),
        ({"weight_map": {"a": "model-00001-of-00003.safetensors"}}, "must tell the same tensors"),
    ],
)
def test_damaged_indices(index: dict[str, Any], message: str, folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert file.name in str(caught.value)


def split(folder: Path, w: syn.Weights, count: int = 2, **change: int) -> Path:
    """A file of the gguf package, its tensors shared among several files."""
    write(folder / "whole.gguf", w)
    reader = gguf.GGUFReader(folder / "whole.gguf")
    for i in range(count):
        file = folder / f"m-{i + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_uint16("split.no", change.get("no", i))
        writer.add_uint16("split.count", change.get("told", count))
        writer.add_int32("split.tensors.count", change.get("tensors", len(reader.tensors)))
        if i == 0:
            writer.add_head_count(HEADS)
            writer.add_head_count_kv(KV)
            writer.add_layer_norm_rms_eps(EPS)
            writer.add_rope_freq_base(BASE)
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (folder / "whole.gguf").unlink()
    return folder / f"m-00001-of-{count:05}.gguf"


@pytest.mark.parametrize("count", [2, 3])
def test_split_gguf_files_load_as_one_model(count: int, tmp_path: Path) -> None:
    w = syn.llama_weights(np.random.default_rng(7))
    first = split(tmp_path, w, count)
    expected = syn.llama_forward(w, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    for source in (first, tmp_path):
        # weights are rounded to float32
        np.testing.assert_allclose(load_model(source).hidden_states(IDS), expected, atol=1e-5)
    with pytest.raises(ValueError, match=rf"is part 1 \(from 0\) of {count}; open the first part"):
        load_model(tmp_path / f"m-00002-of-0000{count}.gguf")
    (tmp_path / f"m-00002-of-0000{count}.gguf").unlink()
    with pytest.raises(ValueError, match=rf"is one of {count} parts, but m-00002-of-0000{count}\.gguf"):
        load_model(first)


@pytest.mark.parametrize("change", [{"no": 0}, {"told": 3}, {"tensors": 7}, {"told": 60_000}])
def test_parts_that_do_not_fit(change: dict[str, int], tmp_path: Path) -> None:
    first = split(tmp_path, syn.llama_weights(np.random.default_rng(7)), **change)
    with pytest.raises(ValueError, match=r"m-0000[12]-of-00002\.gguf"):
        load_model(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match=r"renamed\.gguf"):
        load_model(tmp_path / "renamed.gguf")
