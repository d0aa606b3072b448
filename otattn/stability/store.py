"""Where a study keeps the pairs it has finished, so that it can go on after a kill."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from otattn.errors import StoreError, StoreWarning
from otattn.stability.folder import (
    append,
    folder_path,
    is_file,
    lock,
    make_folder,
    one_error,
    read_only,
    read_whole,
    write_whole,
)

__all__ = ["DirectoryStore", "MemoryStore", "Store"]

FORMAT = 3
LARGEST_HEADER = 1 << 16
"""Bytes; a header takes about 100."""
Terms = tuple[float, float]


class Store(Protocol):
    """Keeps the two distances ``(W_p(F(mu), F(nu)), W_p(mu, nu))`` of each finished pair, by its index."""

    def open(self, fingerprint: str) -> None:
        """Called once before a study: refuse what another study has left."""

    def get(self, index: int) -> Terms | None:
        """The distances of a pair, None when it is not finished."""

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        """Keep a finished chunk of pairs: all of it or nothing."""

    def close(self) -> None:
        """Called once after a study, finished or not."""


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

    def close(self) -> None:
        pass


class DirectoryStore:
    """A folder with ``study.json`` (which study it is) and ``chunks.jsonl`` (one line a finished chunk).

    Every line carries a checksum over its content and the study's fingerprint. A line is appended by a single write and
    flushed to the disk, so a kill leaves whole lines and at most one torn last line; a line that is torn, damaged or
    foreign is named in a :class:`StoreWarning`, set aside and its pairs are computed again. The header appears by an
    atomic rename. While a study runs, the file ``lock`` is locked and ``owner`` names its process: a second process gets
    a :class:`StoreError`; the system releases the lock of a killed process. Symbolic links in place of these files are
    refused. Floats are written with all their digits. A folder that cannot be written is read: a study that finds all
    its pairs there needs no more.

    Parameters
    ----------
    path : path
        Created when it does not exist; ``~`` is expanded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = folder_path(path)
        self._terms: dict[int, Terms] = {}
        self._fingerprint = ""
        self._lock: Any = None

    def open(self, fingerprint: str) -> None:
        make_folder(self.path)
        with one_error(f"{self.path} must be a folder with the files of a store", "take a new folder"):
            try:
                self._lock = lock(self.path)
            except OSError as exc:
                if not read_only(exc):
                    raise
            try:
                self._claim({"format": FORMAT, "fingerprint": fingerprint})
                self._fingerprint = fingerprint
                self._terms = self._read()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _claim(self, header: dict[str, Any]) -> None:
        file = self.path / "study.json"
        if not is_file(file):
            self._writable()
            write_whole(file, json.dumps(header).encode())
        try:
            found = json.loads(read_whole(file, LARGEST_HEADER))
        except (ValueError, RecursionError) as exc:
            raise StoreError(
                f"{file} must be the header of a study, but is damaged ({exc}); take a new folder."
            ) from exc
        if found != header:
            raise StoreError(
                f"{self.path} must belong to this study (same attention, sampler, p and seed, or the same key), received "
                f"the store of another one, or of another version: {str(found)[:200]}, wanted {header}; take a new folder."
            )

    def _writable(self) -> None:
        if self._lock is None:
            raise StoreError(
                f"store must be a folder that can be written as long as pairs are missing, received {self.path}, which can "
                "only be read; copy it to another place."
            )

    def _read(self) -> dict[int, Terms]:
        file = self.path / "chunks.jsonl"
        terms: dict[int, Terms] = {}
        good, bad = [], []
        for number, line, chunk in self._lines(file):
            if chunk is None:
                bad.append(number)
            else:
                good.append(line)
                terms.update(chunk)
        if bad:
            warnings.warn(
                f"{file}: line {', '.join(map(str, bad))} torn, damaged or of another study; set aside, these pairs are "
                "computed again.",
                StoreWarning,
                stacklevel=2,
            )
            if self._lock is not None:
                write_whole(file, b"".join(line + b"\n" for line in good))
        return terms

    def _lines(self, file: Path) -> Iterator[tuple[int, bytes, dict[int, Terms] | None]]:
        """Each line with its number and its pairs, None for those of a line that is no record of this study."""
        *lines, last = read_whole(file).split(b"\n")
        for number, line in enumerate(lines, 1):
            if line:
                yield number, line, self._parse(line)
        if last:  # no end of line: torn
            yield len(lines) + 1, last, None

    def _parse(self, line: bytes) -> dict[int, Terms] | None:
        try:
            record = json.loads(line)
            body = [record["indices"], record["numerators"], record["denominators"]]
            if record["checksum"] != self._checksum(body):
                return None
            terms = {int(i): (float(a), float(b)) for i, a, b in zip(*body, strict=True)}
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None
        sound = all(i >= 0 and 0.0 <= a < math.inf and 0.0 <= b < math.inf for i, (a, b) in terms.items())
        return terms if sound else None

    def _checksum(self, body: list[Any]) -> str:
        return hashlib.sha256((self._fingerprint + json.dumps(body)).encode()).hexdigest()[:32]

    def get(self, index: int) -> Terms | None:
        return self._terms.get(index)

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        self._writable()
        body: list[Any] = [[int(i) for i in indices], [float(t[0]) for t in terms], [float(t[1]) for t in terms]]
        names = ("indices", "numerators", "denominators")
        record = {**dict(zip(names, body, strict=True)), "checksum": self._checksum(body)}
        file = self.path / "chunks.jsonl"
        with one_error(
            f"{file} must have room for another chunk",
            "the finished pairs before it are kept, free some space and run the study again",
        ):
            append(file, (json.dumps(record) + "\n").encode())
        self._terms.update(zip(indices, terms, strict=True))

    def where(self, index: int) -> str:
        """The record of a pair in words: its file and line."""
        file = self.path / "chunks.jsonl"
        lines = [str(number) for number, _, chunk in self._lines(file) if chunk and index in chunk]
        return f"line {', '.join(lines) or 'unknown'} of {file}"

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.path)!r})"
