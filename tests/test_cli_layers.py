"""``--model``, ``--layer``, ``--head`` and ``--text`` in every command: layers of models of several families, and what is refused."""

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

import otattn as oa
from otattn.cli import main
from otattn.models import load_model, model_path, random

sys.path.append(str(Path(__file__).parent / "models"))
import synthetic as syn

HEADS = {"gpt2": "n_head", "t5": "num_heads"}
KINDS = ("bert", "gpt2", "llama", "gemma2", "t5", "vit")
"""Softmax heads, masked, rotary, of composed logits with a mask, with a bias, and of images."""
WORDS = "[PAD] [UNK] [CLS] [SEP] the cat sat on a mat and then it saw dog who ran to me ."


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def saved(folder: Path, kind: str) -> list[str]:
    """A model of two layers and two heads with a file of its inputs; the options that name them."""
    pytest.importorskip("safetensors", reason="the extra `models` (safetensors) is not installed")
    vocab = len(WORDS.split())
    model = random(kind, layers=2, dim=8, heads=2, vocab=vocab, length=32, spread=0.4, rng=0)
    syn.write_safetensors(
        folder / "model.safetensors", {name: model.checkpoint.tensor(name) for name in model.checkpoint.shapes}
    )
    config = {"model_type": kind, HEADS.get(kind, "num_attention_heads"): 2}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(WORDS.split()), encoding="utf-8")
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(2, 3, 36, 36)) if kind == "vit" else draw.integers(4, vocab, (2, 12))
    np.save(folder / "inputs.npy", inputs)
    return ["--model", str(folder), "--tokens", str(folder / "inputs.npy")]


def printed(run: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert main([*run, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar: the error stream is no terminal
    return json.loads(captured.out)


def refused(run: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(run) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("otattn: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_local_and_stability_of_a_layer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = saved(tmp_path, kind)
    model = load_model(tmp_path)
    seen = model.attention_inputs(np.load(tmp_path / "inputs.npy"))[1]
    data = printed(["local", *given, "--layer", "1", "--n", "4", "8"], capsys)
    for h, head in enumerate(model.layers[1].heads):
        expected = [[oa.local_lipschitz(head, X[:n]).value for n in (4, 8)] for X in seen]
        found = np.maximum(data["particle"][h], data["splitting"][h])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    one = printed(["local", *given, "--layer", "-1", "--head", "1", "--n", "4", "8"], capsys)
    assert one["head_numbers"] == [1]
    np.testing.assert_allclose(one["particle"][0], data["particle"][1], rtol=1e-6)
    ratios = printed(["stability", *given, "--layer", "1", "--head", "1", "--pairs", "3", "--n", "4"], capsys)["heads"]
    assert [row["head"] for row in ratios] == [1]
    assert 0 < ratios[0]["certified_lower"] <= ratios[0]["largest"] * (1 + 1e-9)


@pytest.mark.slow
def test_bounds_of_a_head(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = saved(tmp_path, kind)
    data = printed(["bounds", *given, "--layer", "1", "--head", "1", "--n", "3", "--out", str(tmp_path / "b")], capsys)
    assert (tmp_path / "b" / "bounds.png").stat().st_size > 5000
    assert data["head"] == 1
    assert [row["n"] for row in data["rows"]] == ([3, None] if kind != "llama" else [3])
    assert ("log10_crossover_n" in data) == (kind in ("bert", "vit"))
    assert all(0 < row["lower"] <= row["upper"] for row in data["rows"])
    seen = load_model(tmp_path).attention_inputs(np.load(tmp_path / "inputs.npy"))[1]
    assert data["radius"] == pytest.approx(np.linalg.norm(seen, axis=-1).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "vit"], indirect=True)
def test_flows_of_a_layer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*saved(tmp_path, kind), "--layer", "1", "--n", "3"]
    data = printed(["flow", *given, "--head", "0", "--t-end", "0.1"], capsys)
    assert data["status"] == "success"
    assert data["rows"][0]["ratio"] == 1.0
    assert printed(["gradient-flow", *given], capsys)["layer"]["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "vit"], indirect=True)
def test_report_of_one_head(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = saved(tmp_path, kind)
    out = tmp_path / "out"
    assert main(["report", *given, "--layer", "1", "--head", "1", "--pairs", "2", "--out", str(out)]) == 0
    assert "report.md" in capsys.readouterr().out
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["layer"] == f"layer 1 of {tmp_path / 'model.safetensors'}"
    sections = data["sections"]
    names = ("Stability constants", "Enclosure of the Lipschitz constant", "Mean-field and discrete bounds")
    assert [[row["head"] for row in sections[name]["heads"]] for name in names] == [[1]] * 3
    assert "| 1 |" in (out / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "t5"], indirect=True)
def test_what_a_report_cannot_do_is_said_before_the_work(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = saved(tmp_path, kind)
    text = refused(["report", *given, "--out", str(tmp_path / "out")], capsys)
    assert "a report must be asked of heads of plain softmax attention, received" in text
    text = refused(["local", *given, "--n", "4", "8", "--adversarial"], capsys)
    assert "--adversarial must be asked of heads of plain softmax attention" in text


def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers", reason="the extra `models` (tokenizers) is not installed")
    given = saved(tmp_path, "bert")[:2]
    (tmp_path / "short.txt").write_text("The cat sat on a mat.", encoding="utf-8")
    (tmp_path / "long.txt").write_text("the dog ran to me . " * 60, encoding="utf-8")
    model = load_model(tmp_path)
    # a short text is one window (with its two marks there is no room for the last tokens), a long one several of the model's length
    for name, ids in (("short", [[2, 4, 5, 6, 7, 8, 3]]), ("long", None)):
        data = printed(["local", *given, "--text", str(tmp_path / f"{name}.txt"), "--n", "4", "5"], capsys)
        assert np.shape(data["particle"]) == (2, 1 if ids else 4, 2)
        if ids:
            X = model.attention_inputs(ids)[0, 0]
            assert data["particle"][0][0][1] == pytest.approx(
                oa.local_lipschitz(model.layers[0].heads[0], X[:5]).particle
            )
    assert printed(["depth", *given, "--text", str(tmp_path / "long.txt"), "--n", "6"], capsys)


def test_options_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = saved(tmp_path, "bert")
    for run, message in (
        (["local", "--layer", "1"], "--layer needs --model"),
        (["gradient-flow", "--text", "x"], "--text needs --model"),
        (["report", "--heads", "2", "--out", str(tmp_path / "o")], "--heads needs --model"),
        (["local", *given, "--layer", "2"], "--layer must lie in [-2, 2), received 2"),
        (["local", *given, "--head", "2"], "head must be from 0 to 1, received 2"),
        (["stability", "--head", "12"], "head must be from 0 to 11, received 12"),
        (["local", *given, "--weights", "x.npz"], "--weights must be left out when --model is given"),
        (["local", *given, "--text", "x.txt"], "--text and --tokens are one too many"),
        (["depth", *given, "--layer", "1"], "--layer must be left out: depth goes through whole layers"),
        (
            ["models", "--model", str(tmp_path), "--head", "1"],
            "--head must be left out: models lists a whole checkpoint",
        ),
        (["models"], "models needs one PATH"),
        (["local", "--model", "no-such-package"], "neither; check the name, or install the package"),
    ):
        assert message in refused(run, capsys)
    given = saved(tmp_path, "vit")
    assert "reads images, no text" in refused(["local", *given[:2]], capsys)
    assert "reads images: depth takes texts" in refused(["depth", *given], capsys)


def test_names_of_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    saved(package, "bert")
    about = tmp_path / "site" / "tiny_model-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n", encoding="utf-8")
    files = [*package.iterdir(), about / "METADATA", about / "RECORD"]
    record = "\n".join(f"{file.relative_to(tmp_path / 'site')},," for file in files)
    (about / "RECORD").write_text(record, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert model_path("tiny-model") == package / "model.safetensors"
    data = printed(["models", "--model", "tiny-model"], capsys)
    assert (data["family"], data["problem"]) == ("bert", None)
    run = ["local", "--model", "tiny-model", "--tokens", str(package / "inputs.npy"), "--n", "4", "--head", "0"]
    assert printed(run, capsys)["head_numbers"] == [0]
    (about / "RECORD").write_text(f"{record}\nother/model.safetensors,,\n", encoding="utf-8")
    assert "must hold the weights of one model" in refused(["models", "tiny-model"], capsys)
    assert "received none" in refused(["models", "pytest"], capsys)


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are there on a terminal, unless they are not wanted."""
    run = ["stability", *saved(tmp_path, "bert"), "--pairs", "2", "--n", "3"]
    shown = []
    for terminal, more in ((False, []), (True, ["--quiet"]), (True, [])):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=terminal: answer, raising=False)
        assert main([*run, *more]) == 0
        shown.append("heads" in capsys.readouterr().err)
    assert shown == [False, False, True]


def test_bars_and_logs_of_the_library(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    head = oa.SoftmaxAttention([[0.0]], [[2.0]])
    work = {
        "bounds": lambda progress: oa.bounds.table(head, radius=1.0, n=1, progress=progress),
        "enclosure": lambda progress: oa.enclose_lipschitz(head, radius=1.0, n=1, progress=progress),
        "enclosures": lambda progress: oa.enclosure_table(head, radius=1.0, n_values=[1], progress=progress),
        "flow": lambda progress: oa.flow(head, [[1.0], [0.5]], t_span=(0.0, 1.0), progress=progress),
    }
    for name, call in work.items():
        for progress in (True, False):
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="otattn"):
                call(progress)
            assert (f"{name}:" in capsys.readouterr().err) == progress
            assert any(record.getMessage().startswith(f"{name}:") for record in caplog.records)
    with caplog.at_level(logging.WARNING, logger="otattn"):
        caplog.clear()
        work["enclosure"](False)
    assert caplog.records == []
