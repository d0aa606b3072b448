"""A report while it is made: each section is written when it is finished, and a report that was stopped goes on."""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from otattn._progress import LOG
from otattn.report.output import draw, to_json, write_text
from otattn.report.page import html_page
from otattn.report.section import Section

__all__ = ["Draft"]

TITLE = "Attention stability report"
KEPT = "unfinished"
"""The folder, beside the report, of the sections of a report that is not finished."""
_NOT_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class Draft:
    """The files of a report, and its sections so far.

    Parameters
    ----------
    folder : Path
    head : dict
        What the report is of, for the top of it.
    order : sequence of str
        Names of the sections, as they follow one another.
    key : str
        Of everything that the sections depend on: kept sections of another key are not taken.
    resume : bool
        Take the sections that an earlier, unfinished report left in the folder.
    """

    def __init__(
        self, folder: pathlib.Path, head: dict[str, Any], order: Sequence[str], *, key: str = "", resume: bool = False
    ) -> None:
        self.folder, self.head, self.order, self.key = folder, head, order, key
        self.sections: dict[str, Section] = {}
        self.drawn: dict[str, bytes | str] = {}
        self.start = time.perf_counter()
        kept = folder / KEPT
        if resume:
            for name in order:
                self._take(name, kept / f"{name}.json")
        else:
            shutil.rmtree(kept, ignore_errors=True)

    def add(self, name: str, section: Section) -> None:
        """A finished section: its numbers are written, then its pictures, and then it is kept."""
        self.sections[name] = section
        self.write(self._so_far())
        for file, picture in section.pictures.items():
            reason = draw(self._keeping(picture, file), self.folder / file)
            if reason is not None:
                self.drawn[file] = reason
        pictures = {file: self._text(file) for file in section.pictures}
        record = {"key": self.key, "lines": section.lines, "title": section.title, "data": section.data}
        (self.folder / KEPT).mkdir(exist_ok=True)
        path = self.folder / KEPT / f"{name}.json"
        # whole or not at all
        write_text(path.parent, f"{name}.part", to_json({**record, "pictures": pictures}))
        os.replace(path.parent / f"{name}.part", path)
        self.write(self._so_far())

    def finish(self, sections: Sequence[Section]) -> dict[str, Any]:
        """Write the report with these sections in place of those that were added; the content of ``report.json``."""
        data = self.write(sections)
        shutil.rmtree(self.folder / KEPT, ignore_errors=True)
        return data

    def write(self, sections: Sequence[Section]) -> dict[str, Any]:
        """Write all kinds of files, with the pictures that are drawn; returns the JSON content."""
        head, seconds = self.head, time.perf_counter() - self.start
        about = (
            f"{head['layer']}: {head['heads']} heads, {head['windows']} windows of {head['tokens_per_window']} tokens in "
            f"dimension {head['dimension']}; seed {head['seed']}; {seconds:.0f} s."
        )
        lines = [f"# {TITLE}", "", about, ""]
        data: dict[str, Any] = {**head, "seconds": round(seconds, 1), "sections": {}}
        for section in sections:
            lines += [f"## {section.title}", "", *section.lines]
            for name in section.pictures:
                reason = self.drawn.get(name, b"")
                link = f"![{section.title}]({name})"
                lines += [f"({name} was not drawn: {reason})" if isinstance(reason, str) else link, ""]
            data["sections"][section.title] = section.data
        write_text(self.folder, "report.json", to_json(data))
        write_text(self.folder, "report.md", "\n".join(lines))
        write_text(self.folder, "report.html", html_page(TITLE, about, sections, self.drawn))
        return data

    def _so_far(self) -> list[Section]:
        missing = [name for name in self.order if name not in self.sections]
        done = [self.sections[name] for name in self.order if name in self.sections]
        if not missing:
            return done
        note = f"Not finished: {', '.join(missing)} to come. If it was stopped, resume goes on from here."
        return [Section("Unfinished", [note, ""], {"missing": missing}), *done]

    def _keeping(self, picture: Callable[[], Any], name: str) -> Callable[[], Any]:
        """The picture, which leaves its SVG in ``drawn``."""

        def draw_both() -> Any:
            axes = picture()
            buffer = io.BytesIO()
            axes.figure.savefig(buffer, format="svg")
            self.drawn[name] = buffer.getvalue()
            return axes

        return draw_both

    def _text(self, file: str) -> dict[str, str]:
        found = self.drawn[file]
        return {"reason": found} if isinstance(found, str) else {"svg": found.decode("utf-8")}

    def _take(self, name: str, path: pathlib.Path) -> None:
        """A kept section, where there is one of the same key."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["key"] != self.key:
                LOG.warning("%s is a section of another report: it is made again.", path)
                return
            pictures = {file: text.get("reason") or text["svg"].encode() for file, text in record["pictures"].items()}
            section = Section(
                record["title"], record["lines"], _numbers(record["data"]), dict.fromkeys(pictures, _drawn)
            )
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            LOG.warning("%s cannot be read (%s): the section is made again.", path, exc)
            return
        if all((self.folder / file).exists() for file, found in pictures.items() if isinstance(found, bytes)):
            self.sections[name], self.drawn = section, {**self.drawn, **pictures}


def _drawn() -> Any:
    raise AssertionError("a picture that is kept is not drawn again")


def _numbers(value: Any) -> Any:
    """Numbers that JSON lacks, back from the words that stand for them."""
    if isinstance(value, dict):
        return {name: _numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
