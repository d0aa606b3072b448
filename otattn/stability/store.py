"""Where a study keeps the pairs it has finished, so that it can go on after a kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from otattn.errors import StoreError
from otattn.stability.folder import StoreFolder

__all__ = ["DirectoryStore", "MemoryStore", "Store"]

CHUNKS, NAMES = "chunks.jsonl", ("indices", "numerators", "denominators")
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


class DirectoryStore(StoreFolder, MemoryStore):
    """A folder with ``study.json`` (which study it is) and ``chunks.jsonl`` (one line a finished chunk).

    A line is appended by a single write, so a kill leaves whole lines and at most one torn last line. A study that finds all
    its pairs in a folder that can only be read needs no more. Floats are written with all their digits.

    Parameters
    ----------
    path : path
        Created when it does not exist; ``~`` is expanded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._terms: dict[int, Terms] = {}

    def open(self, fingerprint: str) -> None:
        super().open(fingerprint)
        try:
            self._terms = self._restored()
        except BaseException:
            self.close()
            raise

    def _restored(self) -> dict[int, Terms]:
        terms: dict[int, Terms] = {}
        good, bad = [], []
        for number, line, chunk in self._lines():
            if chunk is None:
                bad.append(str(number))
            else:
                good.append(line)
                terms.update(chunk)
        if bad:
            where = f"{CHUNKS}: line {', '.join(bad)} torn, damaged or of another study"
            self.set_aside(where, "these pairs are computed")
            if self.writable:
                self.write(CHUNKS, b"".join(line + b"\n" for line in good))
        return terms

    def _lines(self) -> Iterator[tuple[int, bytes, dict[int, Terms] | None]]:
        """Each line with its number and its pairs, None for those of a line that is no record of this study."""
        *lines, last = self.read(CHUNKS).split(b"\n")
        for number, line in enumerate(lines, 1):
            if line:
                yield number, line, self._parse(line)
        if last:  # no end of line: torn
            yield len(lines) + 1, last, None

    def _parse(self, line: bytes) -> dict[int, Terms] | None:
        try:
            record = json.loads(line)
            body = [record[name] for name in NAMES]
            if record["checksum"] != self.checksum(json.dumps(body).encode()):
                return None
            terms = {int(i): (float(a), float(b)) for i, a, b in zip(*body, strict=True)}
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None
        sound = all(i >= 0 and 0.0 <= a < math.inf and 0.0 <= b < math.inf for i, (a, b) in terms.items())
        return terms if sound else None

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        body: list[Any] = [[int(i) for i in indices], [float(t[0]) for t in terms], [float(t[1]) for t in terms]]
        record = {**dict(zip(NAMES, body, strict=True)), "checksum": self.checksum(json.dumps(body).encode())}
        self.write(CHUNKS, (json.dumps(record) + "\n").encode(), grow=True)
        MemoryStore.put(self, indices, terms)

    def where(self, index: int) -> str:
        """The record of a pair in words: its file and line."""
        lines = [str(number) for number, _, chunk in self._lines() if chunk and index in chunk]
        return f"line {', '.join(lines) or 'unknown'} of {self.path / CHUNKS}"
