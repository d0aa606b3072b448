"""The command line: exit codes, one clear line on bad input, the main job's files."""

import json
import pathlib

import numpy as np
import pytest

from otattn.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def small_layer(tmp_path: pathlib.Path) -> list[str]:
    rng = np.random.default_rng(0)
    d, k, heads = 6, 3, 2
    weights = {f"{name}_weight": rng.normal(size=(k * heads, d)) / 3 for name in ("query", "key", "value")}
    np.savez(tmp_path / "layer.npz", num_heads=heads, **weights)
    np.save(tmp_path / "tokens.npy", rng.normal(size=(2, 16, d)))
    return ["--tokens", str(tmp_path / "tokens.npy"), "--weights", str(tmp_path / "layer.npz"), "--quiet"]


@pytest.mark.slow
def test_report_writes_its_files(small_layer: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    assert main(["report", *small_layer, "--out", str(out), "--pairs", "4"]) == 0
    assert "report.html" in capsys.readouterr().out
    pictures = sorted(out.glob("*.png"))
    assert len(pictures) >= 3
    assert all(p.read_bytes().startswith(PNG) and p.stat().st_size > 5000 for p in pictures)
    text = (out / "report.md").read_text(encoding="utf-8")
    assert all(f"]({p.name})" in text for p in pictures)
    assert text.index("## Summary") < text.index("## Enclosure")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == len(pictures)
    assert 'src="http' not in page
    assert 'href="http' not in page
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert len(data["sections"]["Summary"]["sentences"]) == 5
    heads = data["sections"]["Stability constants"]["heads"]
    assert len(heads) == 2
    for head in heads:
        for metric in ("W_1", "W_2", "conditional W_2, masked"):
            assert 0 < head[metric]["median"] <= head[metric]["largest"]
            assert head[metric]["certified_lower"] <= head[metric]["largest"] * (1 + 1e-12)
    local = data["sections"]["Local constants"]
    assert np.all(np.asarray(local["particle"]) <= np.asarray(local["published_discrete"])[:, None, :])


@pytest.mark.slow
def test_report_is_reproducible(small_layer: list[str], tmp_path: pathlib.Path) -> None:
    contents = []
    for k in range(2):
        assert main(["report", *small_layer, "--out", str(tmp_path / str(k)), "--pairs", "3", "--seed", "7"]) == 0
        data = json.loads((tmp_path / str(k) / "report.json").read_text(encoding="utf-8"))
        data.pop("seconds")
        contents.append(data)
    assert contents[0] == contents[1]


def test_stability_and_local_print_json(small_layer: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["stability", *small_layer, "--pairs", "3", "--n", "5", "--p", "inf", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["p"] == "inf"
    assert len(data["heads"]) == 2
    assert main(["stability", *small_layer, "--pairs", "3", "--n", "5", "--masked"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["local", *small_layer, "--n", "4", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == [4, 8]
    assert main(["local", *small_layer]) == 0
    assert "exponent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["local", "--tokens", "{tokens}"], "--weights"),
        (["local", "--weights", "{weights}"], "--tokens"),
        (["local", "--weights", "{nowhere}", "--tokens", "{tokens}"], "nowhere"),
        (["local", "--weights", "{text}", "--tokens", "{tokens}"], "text.npz"),
        (["local", "--weights", "{weights}", "--tokens", "{wrong}"], "(n, 6)"),
        (["local", "--weights", "{weights}", "--tokens", "{nan}"], "finite"),
        (["local", "--weights", "{weights}", "--tokens", "{tokens}", "--n", "1000"], "window length"),
        (["stability", "--weights", "{weights}", "--tokens", "{tokens}", "--p", "0.5"], "p must lie in"),
    ],
)
def test_bad_input_gives_one_line(
    arguments: list[str],
    expected: str,
    small_layer: list[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "text.npz").write_text("not an archive", encoding="utf-8")
    np.save(tmp_path / "wrong.npy", np.zeros((4, 5)))
    np.save(tmp_path / "nan.npy", np.full((4, 6), np.nan))
    names = {
        "tokens": small_layer[1],
        "weights": small_layer[3],
        "nowhere": str(tmp_path / "nowhere.npz"),
        "text": str(tmp_path / "text.npz"),
        "wrong": str(tmp_path / "wrong.npy"),
        "nan": str(tmp_path / "nan.npy"),
    }
    assert main([*(a.format(**names) for a in arguments), "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("otattn: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert expected in captured.err


def test_usage_errors_exit_with_two() -> None:
    for arguments in ([], ["nothing"], ["report"], ["local", "--seed", "-1"], ["stability", "--pairs", "0"]):
        with pytest.raises(SystemExit) as info:
            main(arguments)
        assert info.value.code == 2


@pytest.mark.slow
def test_gradient_flow_table(small_layer: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["gradient-flow", "--quiet", "--out", str(tmp_path / "g")]) == 0
    text = capsys.readouterr().out
    assert "Wasserstein gradient flow" in text
    rows = json.loads((tmp_path / "g" / "gradient-flow.json").read_text(encoding="utf-8"))["rows"]
    found = {(r["variant"], r["values"]): r["verdict"] for r in rows}
    assert found["Sinkhorn", "V = A"] == "Wasserstein gradient flow"
    assert found["softmax", "V = A"] == "gradient flow with mobility 1/Z"
    assert (tmp_path / "g" / "gradient-flow.png").read_bytes().startswith(PNG)
    assert main(["gradient-flow", *small_layer, "--n", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer"]["verdict"]
    assert main(["gradient-flow", "--dim", "1"]) == 2
    assert "dim must" in capsys.readouterr().err


@pytest.mark.slow
def test_flow(small_layer: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["flow", "--quiet", "--n", "6", "--t-end", "0.5", "--out", str(tmp_path / "f")]) == 0
    assert "blow-up time" in capsys.readouterr().out
    data = json.loads((tmp_path / "f" / "flow.json").read_text(encoding="utf-8"))
    assert data["status"] == "success"
    first, last = data["rows"][0], data["rows"][-1]
    assert first["ratio"] == 1.0
    assert last["t"] == 0.5
    for row in data["rows"]:
        assert np.log10(row["ratio"]) <= float(row["log10 of the Gronwall bound"]) + 1e-9
    assert (tmp_path / "f" / "flow.png").read_bytes().startswith(PNG)
    assert main(["flow", "--t-end", "-1"]) == 2
    assert "--t-end" in capsys.readouterr().err
