"""What the examples share: the command line, and where their pictures go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

THUMBNAIL_WIDTH = 300


class Gallery:
    """Writes the pictures of one example; the first one also becomes its thumbnail where that is asked for."""

    def __init__(self, name: str, out: Path, thumbnails: Path | None) -> None:
        self.name, self.out, self.thumbnails = name, out, thumbnails

    def save(self, picture: Any, name: str) -> None:
        """Write ``picture`` (a figure, or one of its axes) to ``OUT/name.png``."""
        figure = getattr(picture, "figure", None) or picture
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{name}.png"
        figure.savefig(path, dpi=130)
        print(f"wrote {path}")
        if self.thumbnails is not None:
            self.thumbnails.mkdir(parents=True, exist_ok=True)
            _thumbnail(figure, self.thumbnails / f"{self.name}.png")
            self.thumbnails = None


def gallery(name: str, doc: str | None, argv: Sequence[str] | None = None) -> Gallery:
    """Read ``--out`` and ``--thumbnails`` from the command line of an example."""
    parser = argparse.ArgumentParser(
        description=doc, prog=f"plot_{name}.py", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gallery_output"), help="folder of the pictures")
    parser.add_argument("--thumbnails", type=Path, help="also write the small picture of the gallery to this folder")
    options = parser.parse_args(argv)
    return Gallery(name, options.out, options.thumbnails)


def panels(
    columns: int, *, rows: int = 1, size: tuple[float, float] = (4.6, 4.0), layout: str = "constrained", **keywords: Any
) -> tuple[Any, list[Any]]:
    """A figure of panels of the given size, made without pyplot, so nothing has to be closed or shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=layout)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **keywords).ravel())
    for ax in axes:
        if ax.name == "rectilinear":
            ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _thumbnail(figure: Any, path: Path) -> None:
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=2 * THUMBNAIL_WIDTH / figure.get_figwidth())
    buffer.seek(0)
    with Image.open(buffer) as image:
        height = round(image.height * THUMBNAIL_WIDTH / image.width)
        small = image.convert("RGB").resize((THUMBNAIL_WIDTH, height), Image.Resampling.LANCZOS)
        small.quantize(colors=64).save(path, optimize=True)
