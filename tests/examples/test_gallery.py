"""Every example runs, writes its pictures, and finds its headline number (each asserts its own)."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("plot_*.py"))
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # a child process, as a user would start it: warnings are errors, no display, one thread of BLAS
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "error", str(script), "--out", "pictures", "--thumbnails", "small"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped: this example needs torch"):
        pytest.skip("torch is not installed")
    assert "headline: " in done.stdout
    pictures = sorted((tmp_path / "pictures").glob("*.png"))
    assert 1 <= len(pictures) <= 3
    thumbnail = tmp_path / "small" / f"{script.stem.removeprefix('plot_')}.png"
    for path in (*pictures, thumbnail):
        assert path.read_bytes().startswith(PNG), path
    assert thumbnail.stat().st_size < 40_000


def test_gallery_is_complete() -> None:
    assert len(SCRIPTS) >= 12
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert f"({script.name})" in index, f"examples/README.md does not link {script.name}"
        thumbnail = EXAMPLES / "thumbnails" / f"{script.stem.removeprefix('plot_')}.png"
        assert f"(thumbnails/{thumbnail.name})" in index
        assert thumbnail.is_file(), f"no thumbnail for {script.name}"
        assert thumbnail.stat().st_size < 40_000


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_states_what_it_reproduces(script: pathlib.Path) -> None:
    text = script.read_text(encoding="utf-8")
    doc = text.split('"""')[1]
    assert "Reproduces: " in doc
    assert "How the numbers compare: " in doc
    assert "assert " in text.split("def main", 1)[1], "an example asserts its headline number"
