"""Where a study keeps the pairs it has finished, so that it can go on after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from otattn.errors import StoreError, StoreWarning

__all__ = ["DirectoryStore", "MemoryStore", "Store"]

FORMAT = 2
LARGEST_FILE = 1 << 32
"""A record file beyond this is not read: no study of this package writes one."""
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
    atomic rename. While a study runs, the file ``lock`` is locked: a second process gets a :class:`StoreError`; the
    system releases the lock of a killed process. Floats are written with all their digits.

    Parameters
    ----------
    path : path
        Created when it does not exist.
    """

    _held: set[Path] = set()  # noqa: RUF012 - one table for the whole process

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._terms: dict[int, Terms] = {}
        self._fingerprint = ""
        self._lock: int | None = None

    def open(self, fingerprint: str) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            try:
                self._claim({"format": FORMAT, "fingerprint": fingerprint})
                self._fingerprint = fingerprint
                self._terms = self._read()
            except BaseException:
                self.close()
                raise
        except OSError as exc:
            raise StoreError(f"store must be a folder that can be written, received {self.path} ({exc}).") from exc

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            os.close(self._lock)  # releases a record lock as well
            self._lock = None
            self._held.discard(self.path.resolve())

    def _acquire(self) -> None:
        key = self.path.resolve()
        if key in self._held:
            raise StoreError(
                f"{self.path} is in use by another study of this process; wait for it or take a new folder."
            )
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError as exc:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise StoreError(
                f"{self.path} is in use by another process (number {owner}); wait for it or take a new folder."
            ) from exc
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._lock = handle
        self._held.add(key)

    def _claim(self, header: dict[str, Any]) -> None:
        file = self.path / "study.json"
        if not file.exists():
            draft = self.path / f"study.json.{os.getpid()}"
            with draft.open("w", encoding="utf-8") as out:
                out.write(json.dumps(header))
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, file)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise StoreError(
                f"{file} must be the header of a study, but is damaged ({exc}); take a new folder."
            ) from exc
        if found != header:
            raise StoreError(
                f"{self.path} must belong to this study (same attention, sampler, p and seed), received the store of "
                f"another one: {found}, wanted {header}; take a new folder."
            )

    def _read(self) -> dict[int, Terms]:
        file = self.path / "chunks.jsonl"
        if not file.exists():
            return {}
        size = file.stat().st_size
        if size > LARGEST_FILE:
            raise StoreError(f"{file} must be at most {LARGEST_FILE} bytes, received {size}; take a new folder.")
        data = file.read_bytes()
        lines, torn = data.split(b"\n"), not data.endswith(b"\n")
        terms: dict[int, Terms] = {}
        good, bad = [], []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            chunk = None if torn and number == len(lines) else self._parse(line)
            if chunk is None:
                bad.append(number)
            else:
                good.append(line)
                terms.update(chunk)
        if bad:
            names = ", ".join(map(str, bad))
            warnings.warn(
                f"{file}: line {names} torn, damaged or of another study; set aside, these pairs are computed again.",
                StoreWarning,
                stacklevel=2,
            )
            self._rewrite(file, good)
        return terms

    def _rewrite(self, file: Path, lines: list[bytes]) -> None:
        """The file without the lines set aside, by an atomic rename."""
        draft = self.path / f"chunks.jsonl.{os.getpid()}"
        with draft.open("wb") as out:
            out.write(b"".join(line + b"\n" for line in lines))
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, file)

    def _parse(self, line: bytes) -> dict[int, Terms] | None:
        """The pairs of a line; None when it is not a record of this study."""
        try:
            record = json.loads(line)
            body = [record["indices"], record["numerators"], record["denominators"]]
            if record["checksum"] != self._checksum(body):
                return None
            return {int(i): (float(a), float(b)) for i, a, b in zip(*body, strict=True)}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def _checksum(self, body: list[Any]) -> str:
        return hashlib.sha256((self._fingerprint + json.dumps(body)).encode()).hexdigest()[:32]

    def get(self, index: int) -> Terms | None:
        return self._terms.get(index)

    def put(self, indices: Sequence[int], terms: Sequence[Terms]) -> None:
        body: list[Any] = [[int(i) for i in indices], [float(t[0]) for t in terms], [float(t[1]) for t in terms]]
        names = ("indices", "numerators", "denominators")
        record = {**dict(zip(names, body, strict=True)), "checksum": self._checksum(body)}
        line = (json.dumps(record) + "\n").encode()
        file = self.path / "chunks.jsonl"
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                before = os.fstat(handle).st_size
                try:
                    written = os.write(handle, line)
                    if written != len(line):
                        raise OSError(f"only {written} of {len(line)} bytes were written")
                    os.fsync(handle)
                except OSError:
                    os.ftruncate(handle, before)  # what was kept before stays whole
                    raise
            finally:
                os.close(handle)
        except OSError as exc:
            raise StoreError(
                f"{file} must have room for another chunk, but it could not be written ({exc}); the finished pairs before "
                "it are kept, free some space and run the study again."
            ) from exc
        self._terms.update(zip(indices, terms, strict=True))


def _lock(handle: int) -> None:
    """An exclusive lock that ends with the process; OSError when another one holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        return
    # record locks belong to the process: workers that were forked from it do not keep them alive
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
