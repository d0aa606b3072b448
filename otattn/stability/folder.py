"""The folder of a store: where it is, who holds it, and files in it that appear whole and are never links."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from otattn.errors import StoreError, StoreWarning

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # it warns where the system has no locks; a lock file that names its owner serves there
    import filelock

__all__ = ["StoreFolder", "folder_path", "is_file", "write_whole"]

HEADER, FORMAT = "study.json", 3
LARGEST_HEADER = 1 << 16
"""Bytes; a header takes about 100."""

LARGEST_FILE = 1 << 32
"""A record file beyond this is not read: no study of this package writes one."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # two letters at least: C:/ is a drive
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def folder_path(path: str | os.PathLike[str], name: str = "store") -> Path:
    """The folder that an argument names, ``~`` expanded.

    Raises
    ------
    ValueError
        It is empty, or an address such as ``s3://bucket/x``.
    TypeError
        It is no path.

    Examples
    --------
    >>> folder_path("runs/first").name
    'first'
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{name} must be the path of a folder, received {type(path).__name__}.") from None
    if not text.strip() or "\0" in text:
        raise ValueError(
            f"{name} must be the path of a folder, received {text!r}; name one, '.' for the current folder."
        )
    if _ADDRESS.match(text):
        raise ValueError(
            f"{name} must be a folder of a mounted file system, received the address {text!r}; take a local folder and copy "
            "it there afterwards."
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise ValueError(f"{name} must be the path of a folder, received {text!r} ({exc}); write it in full.") from exc


def is_file(file: Path) -> bool:
    """Whether the file exists; what is no plain file is refused, a link first of all."""
    try:
        mode = os.lstat(file).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        found = "a symbolic link" if stat.S_ISLNK(mode) else "a folder or a device"
        raise StoreError(f"{file} must be a plain file, received {found}; a store follows no links, take a new folder.")
    return True


def read_whole(file: Path, largest: int = LARGEST_FILE) -> bytes:
    """The content of a plain file, empty if there is none."""
    if not is_file(file):
        return b""
    with os.fdopen(os.open(file, os.O_RDONLY | _FLAGS), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise StoreError(f"{file} must be at most {largest} bytes, received {size}; take a new folder.")
        return stream.read()


def write_whole(file: Path, content: bytes) -> None:
    """The file with a new content: it appears at once or not at all."""
    is_file(file)
    draft = file.with_name(f"{file.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def append(file: Path, line: bytes) -> None:
    """One more line, by a single write that is flushed to the disk; after an error the file is as long as before."""
    is_file(file)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o666)
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


class StoreFolder:
    """A folder of finished records, the one store behind all that is kept: whose it is, who holds it, what is in it.

    Files appear whole, or grow by whole lines that are flushed to the disk; none is ever a link. Records carry a checksum
    over their content and the fingerprint of what they belong to: one that is damaged or foreign is named in a
    :class:`StoreWarning`, set aside and computed again. While the folder is open it is locked, and the file ``owner`` names the
    process; the system releases the lock of a killed one. A folder that cannot be written is read. What the system refuses is
    a :class:`StoreError`.

    Parameters
    ----------
    path : path
        ``~`` is expanded.
    fingerprint : str
        Of what the records belong to; for folders that are locked :meth:`open` takes it.
    name : str
        The argument that named the folder, for messages.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str = "", *, name: str = "store") -> None:
        self.path, self.fingerprint, self.name = folder_path(path, name), fingerprint, name
        self._lock: Any = None

    def make(self) -> None:
        """Create the folder if there is none, before work is spent that it could not keep."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StoreError(
                f"{self.name} must be a folder that can be written, received {self.path} ({exc}); take another one."
            ) from exc

    def open(self, fingerprint: str) -> None:
        """Lock the folder for this process, and refuse what another study has left in it.

        Raises
        ------
        StoreError
            Another study holds it or has left it, the file system has no locks, or refuses.
        """
        self.make()
        with self._refusals(self.path, "be a folder with the files of a store"):
            self._acquire()
        self.fingerprint, header = fingerprint, {"format": FORMAT, "fingerprint": fingerprint}
        file = self.path / HEADER
        try:
            if not is_file(file):
                self.write(HEADER, json.dumps(header).encode())
            try:
                found = json.loads(self.read(HEADER, LARGEST_HEADER))
            except (ValueError, RecursionError) as exc:
                raise StoreError(
                    f"{file} must be the header of a study, but is damaged ({exc}); take a new folder."
                ) from exc
            if found != header:
                raise StoreError(
                    f"{self.path} must belong to this study (same attention, sampler, p and seed, or the same key), received "
                    f"the store of another one, or of another version: {str(found)[:200]}, wanted {header}; take a new folder."
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _acquire(self) -> None:
        is_file(self.path / "lock")
        held = filelock.FileLock(self.path / "lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            held.acquire()
            write_whole(self.path / "owner", str(os.getpid()).encode())
        except filelock.Timeout as exc:
            name = read_whole(self.path / "owner", 64).decode(errors="replace").strip()
            whose = (
                "another study of this process"
                if name == str(os.getpid())
                else f"another process (number {name or 'unknown'})"
            )
            raise StoreError(f"{self.path} is in use by {whose}; wait for it or take a new folder.") from exc
        except BaseException as exc:
            held.release()
            if isinstance(exc, OSError) and exc.errno in _NO_LOCKS:
                raise StoreError(
                    "store must lie where files can be locked, but locks are not available on the file system of "
                    f"{self.path} ({exc}); take a folder on a local disk and copy it afterwards."
                ) from exc
            if isinstance(exc, OSError) and exc.errno in _READ_ONLY:
                return
            raise
        self._lock = held

    @property
    def writable(self) -> bool:
        """True while the folder is open and locked."""
        return self._lock is not None

    def checksum(self, content: bytes) -> str:
        """Ties a record to its content and to what it belongs to."""
        return hashlib.sha256(self.fingerprint.encode() + content).hexdigest()[:32]

    def read(self, name: str, largest: int = LARGEST_FILE) -> bytes:
        """The content of a file, empty if there is none."""
        with self._refusals(self.path / name, "be a file that can be read"):
            return read_whole(self.path / name, largest)

    def write(self, name: str, content: bytes, *, grow: bool = False, shared: bool = False) -> None:
        """A file with a new content, or with one more line (``grow``); ``shared`` files need no lock."""
        if not (shared or self.writable):
            raise StoreError(
                f"store must be a folder that can be written as long as pairs are missing, received {self.path}, which can "
                "only be read; copy it to another place."
            )
        with self._refusals(self.path / name, "have room for another record"):
            (append if grow else write_whole)(self.path / name, content)

    def set_aside(self, where: str, again: str) -> None:
        """Say which records are not what was written."""
        warnings.warn(f"{self.path / where}; set aside, {again} again.", StoreWarning, stacklevel=4)

    @contextmanager
    def _refusals(self, what: Path, required: str) -> Iterator[None]:
        """What the system refuses as a StoreError; StoreErrors pass as they are."""
        try:
            yield
        except StoreError:
            raise
        except OSError as exc:
            raise StoreError(
                f"{what} must {required}, but the system refuses it ({exc}); what was kept before is kept: free some space and "
                "run it again, or take a new folder."
            ) from exc

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"
