"""How sphinx-gallery runs the examples: where their pictures go, in which order they stand, what a notebook needs first."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
STORIES = re.findall(r"\]\((plot_\w+\.py)\): ", (EXAMPLES / "README.md").read_text(encoding="utf-8"))


class Arguments:
    """The command line of an example: its pictures go to a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:  # part of the configuration that Sphinx compares: the same in each build
        return "Arguments"

    def __call__(self, conf: dict[str, Any], script: dict[str, Any]) -> list[str]:
        return ["--out", str(self.folder / Path(script["src_file"]).stem)]


class Pictures(Arguments):
    """Takes up what an example wrote."""

    def __repr__(self) -> str:
        return "Pictures"

    def __call__(self, block: Any, variables: dict[str, Any], conf: dict[str, Any]) -> str:  # type: ignore[override]
        from sphinx_gallery.scrapers import figure_rst

        taken = []
        for picture in sorted((self.folder / Path(variables["src_file"]).stem).glob("*.png")):
            taken.append(next(variables["image_path_iterator"]))
            shutil.move(picture, taken[-1])
        return figure_rst(taken, conf["src_dir"])


class Order:
    """The order of the examples is that of their README."""

    def __init__(self, folder: str) -> None:
        pass

    def __repr__(self) -> str:
        return "Order"

    def __call__(self, name: str) -> int:
        return STORIES.index(name) if name in STORIES else len(STORIES)


def first_cell() -> str:
    """What the examples share, as the first cell of each notebook, so that a downloaded one runs alone."""
    source = (EXAMPLES / "_gallery.py").read_text(encoding="utf-8")
    return (
        "# What the examples share, so that this notebook runs alone\n"
        "import sys\nimport types\n\n"
        f"module = types.ModuleType('_gallery')\nexec({source!r}, module.__dict__)\n"
        "sys.modules['_gallery'], sys.argv = module, ['notebook']"
    )
