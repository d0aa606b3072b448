"""A page as a headless browser leaves it, after its scripts have run."""

import pathlib
import shutil
import subprocess

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--allow-file-access-from-files",
    "--virtual-time-budget=10000",
    "--dump-dom",
]


def rendered(address: str, folder: pathlib.Path, width: int = 1280) -> str:
    """The document at ``address`` in a window of that width; ``folder`` is for what the browser keeps."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium on this machine")
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'user'}", f"--window-size={width},900", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
