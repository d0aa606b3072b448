"""The command ``models``: what a checkpoint holds, what is missing, and why it does not open."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from otattn.cli import main
from otattn.models import random

sys.path.append(str(Path(__file__).parent / "models"))
import synthetic as syn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors", reason="the extra `models` (safetensors) is not installed")
    model = random("qwen3", dim=16, heads=2, rng=0)
    weights = {f"model.{name}": model.checkpoint.tensor(name) for name in model.checkpoint.shapes}
    syn.write_safetensors(tmp_path / "model.safetensors", weights | {"lm_head.weight": np.ones((3, 16))})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 2}))
    return tmp_path


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["models", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_whole_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = listed(folder, capsys)
    assert (data["family"], data["missing"], data["strange"], data["problem"]) == ("qwen3", [], [], None)
    assert data["unused"] == ["lm_head.weight"]
    assert data["model"]["heads"] == 2
    assert data["model"]["attention"] == "MultiHeadAttention(ScoreAttention)"
    assert main(["models", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "family: qwen3" in out
    assert "opens: yes" in out


def test_what_is_missing_and_what_has_no_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = random("qwen3", dim=16, heads=2, rng=0)
    weights = {name: plain.checkpoint.tensor(name) for name in plain.checkpoint.shapes}
    gone = weights.pop("layers.1.mlp.up_proj.weight")
    syn.write_safetensors(folder / "model.safetensors", weights | {"layers.0.mlp.experts.weight": gone})
    data = listed(folder, capsys)
    assert data["missing"] == ["layers.1.mlp.up_proj.weight"]
    assert data["strange"] == ["layers.0.mlp.experts.weight"]
    assert "layers.0.mlp.experts.weight" in data["problem"]
    assert data["model"] is None


def test_another_architecture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    data = listed(folder, capsys)
    assert data["family"] is None
    assert "model_type" in data["problem"]
    assert main(["models", str(folder / "none")]) == 2
    assert "none" in capsys.readouterr().err
