"""Where results go: a folder that is checked before the work, numbers first, pictures last."""

from __future__ import annotations

import io
import json
import logging
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from otattn._tabular import plain

__all__ = ["draw", "prepare_folder", "say", "short_warnings", "to_json", "write_text"]

Picture = Callable[[], Any]
"""Draws when it is called, and returns the axes."""
_PLAIN = {"±": "+-", "≤": "<=", "≥": ">=", "²": "^2", "→": "->", "≈": "~", "×": "x"}


def prepare_folder(out: str | PathLike[str], files: Collection[str] = (), *, name: str = "out") -> pathlib.Path:
    """The folder ``out``, made if needed, in which ``files`` can be written; called before hours of work.

    Raises
    ------
    ValueError
        ``out`` is empty, a file, or cannot be made or written; or a folder has the name of one of the files.
    """
    if not str(out):
        raise ValueError(f"{name} must be the name of a folder, received an empty one; give one.")
    folder = pathlib.Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise ValueError(
            f"{name} must be a folder that can be written, received {str(out)!r} ({reason}); name another one."
        ) from exc
    for file in files:
        target = folder / file
        if target.exists():
            try:
                with open(target, "ab"):
                    pass
            except OSError as exc:
                raise ValueError(f"{name} must be a folder where {file} can be written, received {exc}.") from exc
    return folder


def to_json(data: Any) -> str:
    """``data`` as JSON text; ``inf`` and ``nan``, which JSON lacks, are written as strings."""
    return json.dumps(plain(data), indent=1, allow_nan=False)


def write_text(folder: pathlib.Path, file: str, text: str) -> None:
    """Write a text in UTF-8; what no encoding knows (names of files in other alphabets) is written in escapes."""
    (folder / file).write_text(text, encoding="utf-8", errors="backslashreplace")


def draw(picture: Picture, path: pathlib.Path, *, dpi: int = 160) -> str | None:
    """Draw a picture into ``path``; when that fails, one warning, and the reason is returned.

    Pictures come after the numbers and are no reason to lose them: matplotlib fails in many ways (no LaTeX for
    ``text.usetex``, no font, a style of another version), all of them are met here.
    """
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    try:
        fonts.setLevel(logging.ERROR)  # one line a character for a font that is missing
        buffer = io.BytesIO()
        picture().figure.savefig(buffer, format="png", dpi=dpi)
        path.write_bytes(buffer.getvalue())
    except Exception as exc:
        reason = f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
        warnings.warn(f"{path.name} was not drawn ({reason}); all numbers are written.", UserWarning, stacklevel=2)
        return reason
    finally:
        fonts.setLevel(level)
    return None


@contextmanager
def short_warnings() -> Iterator[None]:
    """Warnings as one line each, without the place in our source."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"otattn: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def say(text: str) -> None:
    """Print, also where the terminal knows no more than ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        text.encode(encoding)
    except UnicodeError:
        for sign, ascii_sign in _PLAIN.items():
            text = text.replace(sign, ascii_sign)
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    print(text)
