"""The README does what it says: its script runs, its commands are those of the project, its picture exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_script_runs_and_encloses(capsys: pytest.CaptureFixture) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert 10 <= len(script.strip().splitlines()) <= 18
    scope: dict = {}
    exec(script, scope)
    out = capsys.readouterr().out
    assert "Enclosure([" in out
    assert scope["ratio"].certified_lower <= scope["ratio"].value <= scope["local"].value * 1.05


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
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"Version {version}" in README
