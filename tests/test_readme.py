"""The README does what it says: its script runs, its commands are those of the project, its picture exists."""

import importlib.metadata
import json
import pathlib
import re

import numpy as np
import pytest

import otattn

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_script_runs_and_encloses(capsys: pytest.CaptureFixture) -> None:
    script = SCRIPTS[0]
    assert 10 <= len(script.strip().splitlines()) <= 18
    scope: dict = {}
    exec(script, scope)
    out = capsys.readouterr().out
    assert "Enclosure([" in out
    assert scope["ratio"].certified_lower <= scope["ratio"].value <= scope["local"].value * 1.05


def of_one_s_own(index: int, **given: object) -> None:
    """Run one of the README's examples of one's own model, module and function."""
    assert len(SCRIPTS) == 2
    parts = SCRIPTS[1].strip().split("\n\n")
    assert len(parts) == 3
    exec(parts[index], {"oa": otattn, "np": np, "rng": np.random.default_rng(0), **given})


def test_own_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    write = pytest.importorskip("safetensors.numpy").save_file
    with np.load(ROOT / "tests" / "models" / "references" / "bert.npz") as file:
        about, flat = json.loads(file["about"].tobytes()), file["weights"]
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in about["shapes"].values())])
    parts = {k: flat[i:j].reshape(v) for (k, v), i, j in zip(about["shapes"].items(), ends, ends[1:], strict=False)}
    write(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    of_one_s_own(0, folder=tmp_path, ids=[1, 2, 3, 4])
    assert "upper" in capsys.readouterr().out


def test_own_module(capsys: pytest.CaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    of_one_s_own(1, torch=torch)
    assert "upper" in capsys.readouterr().out


def test_own_function(capsys: pytest.CaptureFixture) -> None:
    of_one_s_own(2)
    assert "lower" in capsys.readouterr().out


def test_two_commands() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)
    assert len(commands) == 2
    assert commands[0].endswith("otattn report --out report")
    assert commands[1].endswith("python -m pytest")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert '".[test]"' in commands[1]
    assert '".[test]"' in ci
    assert "python -m pytest" in ci


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"`(otattn/data/\w+\.md)`", README):
        assert (ROOT / target).is_file(), target


def test_version_is_the_same_everywhere() -> None:
    version = otattn.__version__
    assert importlib.metadata.version("otattn") == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"Version {version}" in README
