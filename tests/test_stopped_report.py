"""A report that is stopped leaves what it had, and goes on from there to the same end."""

import json
import logging
import math

import numpy as np
import pytest

import otattn as oa
from otattn.plotting.style import axes
from otattn.report import build
from otattn.report.section import Section

COUNTS = {"n_pairs": 2, "n_tokens": 4, "progress": False}


@pytest.fixture(scope="module")
def model():
    return oa.models.random("bert", layers=2, dim=8, heads=2, rng=0)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(5, 20, size=(2, 8))


@pytest.fixture(scope="module")
def layer(model, ids):
    return model.sample(1, ids)


@pytest.fixture(scope="module")
def whole(layer, model, ids, tmp_path_factory):
    """The report that nothing stopped."""
    out = tmp_path_factory.mktemp("whole")
    oa.build_report(layer, out, network=(model, ids[0]), **COUNTS)
    return out


def content(folder):
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    del data["seconds"]
    return data


def stopped(monkeypatch, name, *arguments, **options):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, name, stop)
        with pytest.raises(KeyboardInterrupt):
            oa.build_report(*arguments, **options, **COUNTS)


@pytest.mark.slow
def test_the_network_comes_first(whole, model, ids):
    data = content(whole)["sections"]
    profile = oa.depth_profile(model, ids[0], partial=False)
    np.testing.assert_allclose(data["The network"]["composed"], profile.composed, rtol=2e-3)
    np.testing.assert_allclose(data["The network"]["product"], profile.product, rtol=4e-3)
    text = (whole / "report.md").read_text(encoding="utf-8")
    assert text.index("## Summary") < text.index("network.png") < text.index("## The network")
    assert data["Summary"]["sentences"][0].startswith("At 8 tokens the network of 2 layers")
    assert sorted(p.name for p in whole.iterdir() if p.suffix != ".png") == ["report.html", "report.json", "report.md"]


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(whole, layer, model, ids, tmp_path, monkeypatch):
    """Numbers and pictures are those of the report that was not stopped; finished sections are not made again."""
    network = (model, ids[0])
    stopped(monkeypatch, "enclosure_section", layer, tmp_path, network=network)
    data = content(tmp_path)["sections"]
    assert data["Unfinished"] == {"missing": ["enclosure", "bounds"]}
    assert data["Local constants"] == content(whole)["sections"]["Local constants"]
    assert "stability.png" in {p.name for p in tmp_path.iterdir()}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Not finished: enclosure, bounds to come" in page
    with monkeypatch.context() as patch:
        patch.setattr(build, "stability_section", None)  # would not be callable
        oa.build_report(layer, tmp_path, network=network, resume=True, **COUNTS)
    assert content(tmp_path) == content(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in whole.iterdir())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == sum(p.suffix == ".png" for p in whole.iterdir())


def drawn():
    ax = axes()
    ax.plot([0.0, 1.0])
    return ax


@pytest.mark.parametrize("change", ["none", "seed", "torn", "edited", "picture", "without"])
def test_sections_of_another_report_are_made_again(layer, tmp_path, monkeypatch, caplog, change):
    """Another seed, a torn file, a file of something else, a picture that was deleted, or no wish to go on."""
    made = []

    def simple(layer, advance, **options):
        made.append(1)
        pictures = {"a.png": drawn} if len(made) == 2 else {}  # the local constants of the first run
        return Section("A", ["a"], {"value": math.inf, "n": [1]}, pictures)

    names = ("enclosure", "stability", "local", "bounds", "flow", "gradient_flow")
    for name in names:
        monkeypatch.setattr(build, f"{name}_section", simple)
    monkeypatch.setattr(build, "growth_of", lambda section: None)
    monkeypatch.setattr(build, "summarised", list)
    stopped(monkeypatch, "flow_section", layer, tmp_path)
    kept = tmp_path / "unfinished" / "local.json"
    record = kept.read_text(encoding="utf-8")
    assert len(made) == 2  # stability and local constants
    if change == "torn":
        kept.write_text(record[:-40], encoding="utf-8")
    if change == "edited":
        kept.write_text("[1, 2]", encoding="utf-8")
    if change == "picture":
        (tmp_path / "a.png").unlink()
    with caplog.at_level(logging.WARNING, logger="otattn"):
        oa.build_report(layer, tmp_path, seed=int(change == "seed"), resume=change != "without", **COUNTS)
    again = {"none": 0, "torn": 1, "edited": 1, "picture": 1, "seed": 2, "without": 2}[change]
    assert len(made) == 6 + again
    words = {"seed": "of another report", "torn": "cannot be read", "edited": "cannot be read"}
    assert words.get(change, "") in caplog.text
    assert (change in words) == bool(caplog.text)
    assert content(tmp_path)["sections"] == {"A": {"value": "inf", "n": [1]}}
    assert not (tmp_path / "unfinished").exists()
