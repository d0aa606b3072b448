"""The folder of a store: where it is, who holds it, and files in it that appear whole and are never links."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from otattn.errors import StoreError

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # it warns where the system has no locks; a lock file that names its owner serves there
    import filelock

__all__ = [
    "append",
    "folder_path",
    "is_file",
    "lock",
    "make_folder",
    "one_error",
    "read_only",
    "read_whole",
    "write_whole",
]

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


@contextmanager
def one_error(required: str, advice: str) -> Iterator[None]:
    """What the system refuses as a StoreError; StoreErrors pass as they are."""
    try:
        yield
    except StoreError:
        raise
    except OSError as exc:
        raise StoreError(f"{required}, but the system refuses it ({exc}); {advice}.") from exc


def make_folder(folder: Path, name: str = "store") -> None:
    """Create the folder if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(
            f"{name} must be a folder that can be written, received {folder} ({exc}); take another one."
        ) from exc


def read_only(exc: OSError) -> bool:
    """Whether the system refused to write, and nothing else is wrong."""
    return exc.errno in _READ_ONLY


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


def lock(folder: Path) -> Any:
    """The lock of a folder for this process, to be released by ``.release()``; the system releases that of a killed one.

    Raises
    ------
    StoreError
        Another study holds it, or the file system has no locks.
    OSError
        The folder cannot be written.
    """
    is_file(folder / "lock")
    owner = folder / "owner"
    held = filelock.FileLock(folder / "lock", timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        held.acquire()
    except filelock.Timeout as exc:
        name = read_whole(owner, 64).decode(errors="replace").strip()
        if name == str(os.getpid()):
            whose = "another study of this process"
        else:
            whose = f"another process (number {name or 'unknown'})"
        raise StoreError(f"{folder} is in use by {whose}; wait for it or take a new folder.") from exc
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise
        raise StoreError(
            f"store must lie where files can be locked, but locks are not available on the file system of {folder} ({exc}); "
            "take a folder on a local disk and copy it afterwards."
        ) from exc
    try:
        write_whole(owner, str(os.getpid()).encode())
    except BaseException:
        held.release()
        raise
    return held
