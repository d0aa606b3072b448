"""The benchmark of user calls fails where a ratio has become worse than that of the stored table."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def work(times):
    return lambda: [sum(range(1000)) for _ in range(times)]


GROUP = {"part": (work(100), None), "whole": (work(300), "part")}
"""A whole of about three times its part."""


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """``calls(*flags)``: the exit code of the command on one small group, in a folder with a table of its own."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import calls as module

    monkeypatch.setattr(module, "groups", lambda *_: {"small": lambda: GROUP})
    monkeypatch.setattr(module, "peak_of", lambda *_: "-")

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["calls", "--quick", "--out", str(tmp_path), *flags])
        return module.main()

    return run


def tampered(path, ratio):
    """The stored table with another ratio of the whole to its part."""
    lines = path.read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("| whole |")]
    cells = lines[at].split(" | ")
    cells[4] = ratio
    lines[at] = " | ".join(cells)
    path.write_text("\n".join(lines) + "\n")
    return path.read_text()


def test_a_ratio_beyond_its_margin_fails_the_command_and_keeps_the_table(calls, tmp_path, capsys):
    table = tmp_path / "calls.md"
    assert calls() == 0
    assert "| whole |" in table.read_text()
    before = tampered(table, "0.10")
    assert calls() == 1
    assert table.read_text() == before
    assert "slower: whole: " in capsys.readouterr().err
    assert calls("--accept") == 0
    assert table.read_text() != before


@pytest.mark.parametrize("ratio", ["1000.00", "-"])
def test_a_better_ratio_or_one_that_was_not_known_passes(calls, tmp_path, ratio):
    calls()
    before = tampered(tmp_path / "calls.md", ratio)
    assert calls() == 0
    assert (tmp_path / "calls.md").read_text() != before
