"""Where a study keeps the pairs it has finished, so that it can go on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from otattn.errors import StoreError

__all__ = ["DirectoryStore", "MemoryStore", "Store"]

FORMAT = 1
Terms = tuple[float, float]


class Store(Protocol):
    """Keeps the two distances ``(W_p(F(mu), F(nu)), W_p(mu, nu))`` of each finished pair, by its index."""

    def open(self, fingerprint: str) -> None:
        """Called once before a study: refuse what another study has left."""

    def get(self, index: int) -> Terms | None:
        """The distances of a pair, None when it is not finished."""

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        """Keep a finished chunk of pairs: all of it or nothing."""


class MemoryStore:
    """Keeps the pairs of one study in memory: nothing survives the process."""

    def __init__(self) -> None:
        self._terms: dict[int, Terms] = {}
        self._fingerprint: str | None = None

    def open(self, fingerprint: str) -> None:
        if self._fingerprint not in (None, fingerprint):
            raise StoreError(
                f"the store must belong to this study, received one of {self._fingerprint}; take a new one."
            )
        self._fingerprint = fingerprint

    def get(self, index: int) -> Terms | None:
        return self._terms.get(index)

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        self._terms.update(zip(indices, terms, strict=True))


class DirectoryStore:
    """A folder with ``study.json`` (which study it is) and ``chunks.jsonl`` (one line a finished chunk).

    A line is appended by a single write and flushed to the disk, so a kill leaves whole lines and at most
    one torn last line, which the next run drops. Floats are written with all their digits.

    Parameters
    ----------
    path : path
        Created when it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._terms: dict[int, Terms] = {}

    def open(self, fingerprint: str) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim({"format": FORMAT, "fingerprint": fingerprint})
            self._terms = self._read()
        except StoreError:
            raise
        except OSError as exc:
            raise StoreError(f"store must be a folder that can be written, received {self.path} ({exc}).") from exc

    def _claim(self, header: dict[str, Any]) -> None:
        file = self.path / "study.json"
        if not file.exists():
            draft = self.path / f"study.json.{os.getpid()}"
            draft.write_text(json.dumps(header), encoding="utf-8")
            os.replace(draft, file)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise StoreError(
                f"{file} must be the header of a study, but is damaged ({exc}); take a new folder."
            ) from exc
        if found != header:
            raise StoreError(
                f"{self.path} must belong to this study (same attention, sampler, p and seed), "
                "received the store of "
                f"another one: {found}, wanted {header}; take a new folder."
            )

    def _read(self) -> dict[int, Terms]:
        file = self.path / "chunks.jsonl"
        data = file.read_bytes() if file.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(file, whole)
        terms: dict[int, Terms] = {}
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                chunk = json.loads(line)
                terms.update({int(i): (float(a), float(b)) for i, a, b in zip(*chunk, strict=True)})
            except (ValueError, TypeError) as exc:
                raise StoreError(
                    f"{file} is damaged in line {number} ({exc}); delete that line to recompute it."
                ) from exc
        return terms

    def get(self, index: int) -> Terms | None:
        return self._terms.get(index)

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        line = json.dumps([list(indices), [t[0] for t in terms], [t[1] for t in terms]]) + "\n"
        handle = os.open(self.path / "chunks.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(handle, line.encode()) != len(line):
                raise StoreError(f"{self.path} must have room for another chunk, but the write was cut short.")
            os.fsync(handle)
        finally:
            os.close(handle)
        self._terms.update(zip(indices, terms, strict=True))
