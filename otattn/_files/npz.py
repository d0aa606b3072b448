"""Reading numpy files that come from elsewhere: no pickles, sizes checked before anything is allocated."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from otattn._files.npy_header import Header, Refused, read_header

__all__ = ["MAX_BYTES", "existing", "names_npz", "outline_npy", "outline_npz", "read_npy", "read_npz"]

MAX_BYTES = 4 * 2**30
"""Most bytes that the arrays read from one file may become together, as float64."""
EXPANSION = 64
"""Arrays may become this many times the file (8 bytes for each byte of an array of int8, compressed eight times) ..."""
ALWAYS = 64 * 2**20
"""... or so many bytes. An archive that claims more than both claims what no layer needs."""
_CHUNK = 2**20

_ARCHIVE = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError)
_CONTENT = (OSError, ValueError, LookupError, OverflowError, TypeError, MemoryError)
_DAMAGE = (*_ARCHIVE, *_CONTENT, RuntimeError)  # an encrypted member, or compressed as zipfile cannot

_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x93NUMPY", "one array (.npy)", "save named arrays with numpy.savez"),
    (b"PK", "an archive (.npz or another zip)", "save the one array with numpy.save"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "run git lfs pull"),
    (b"\x89HDF\r\n", "an HDF5 file", "save the arrays with numpy"),
    (b"GGUF", "a GGUF checkpoint", "use otattn.models"),
    (b"\x1f\x8b", "a gzip archive", "unpack it"),
    (b"{", "JSON text", "save the arrays with numpy"),
    (b"[", "JSON text", "save the arrays with numpy"),
    (b"\x80", "a pickle, which is never loaded", "save the arrays with numpy"),
)


def read_npz(
    path: str | PathLike[str], keys: Collection[str] | None = None, *, max_bytes: int = MAX_BYTES
) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file by name.

    Parameters
    ----------
    path : path
    keys : collection of str, optional
        Names to read, where the file has them; all by default. Other members are not even opened.
    max_bytes : int
        Refuse a file whose arrays (those that are read) become more bytes than this as float64, or more than 64 MiB
        and 64 times the file. All headers are looked at before any array is read.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is no npz file, is damaged, holds pickled objects, or is too large.
    """
    with _archive(path) as (file, archive):
        headers = _headers(file, archive, keys, _allowance(file, max_bytes))
        out = {}
        for name, (member, _) in headers.items():
            with archive.open(member) as stream:
                label = f"{name!r} in {file}"
                out[name] = _data(stream, read_header(stream, label), label)
    return out


def outline_npz(
    path: str | PathLike[str], keys: Collection[str] | None = None, *, max_bytes: int = MAX_BYTES
) -> dict[str, NDArray[Any]]:
    """Arrays with the names, shapes and types of those in an ``.npz`` file, all zero: no data are read, no memory is taken."""
    with _archive(path) as (file, archive):
        headers = _headers(file, archive, keys, _allowance(file, max_bytes))
        return {name: header.outline() for name, (_, header) in headers.items()}


def names_npz(path: str | PathLike[str]) -> list[str]:
    """Names of the arrays in an ``.npz`` file; nothing of them is read."""
    with _archive(path) as (_, archive):
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def read_npy(path: str | PathLike[str], *, max_bytes: int = MAX_BYTES) -> NDArray[Any]:
    """The array of an ``.npy`` file; limits and errors as in :func:`read_npz`."""
    with _single(path, max_bytes) as (file, stream, header):
        return _data(stream, header, str(file))


def outline_npy(path: str | PathLike[str], *, max_bytes: int = MAX_BYTES) -> NDArray[Any]:
    """An array of the shape and type of that in an ``.npy`` file, as in :func:`outline_npz`."""
    with _single(path, max_bytes) as (_, _, header):
        return header.outline()


@contextmanager
def _archive(path: str | PathLike[str]) -> Iterator[tuple[Path, zipfile.ZipFile]]:
    file = existing(path)
    with _one_error(file, "an .npz file of plain arrays"):
        with open(file, "rb") as stream:
            start = stream.read(2)
        # an archive behind other bytes is one to zipfile, but not to numpy
        if start != b"PK" or not zipfile.is_zipfile(file):
            raise Refused(f"{file} must be an .npz file, received {_kind(file)}.")
        with zipfile.ZipFile(file) as archive:
            yield file, archive


@contextmanager
def _single(path: str | PathLike[str], max_bytes: int) -> Iterator[tuple[Path, IO[bytes], Header]]:
    file = existing(path)
    with _one_error(file, "an .npy file of one plain array"), open(file, "rb") as stream:
        if stream.read(6) != b"\x93NUMPY":
            raise Refused(f"{file} must be an .npy file of one array, received {_kind(file)}.")
        stream.seek(0)
        header = read_header(stream, str(file))
        _check_size(header, str(file), file.stat().st_size - stream.tell(), _allowance(file, max_bytes))
        yield file, stream, header


def _headers(
    file: Path, archive: zipfile.ZipFile, keys: Collection[str] | None, allowed: int
) -> dict[str, tuple[zipfile.ZipInfo, Header]]:
    """Members and headers of the arrays that are wanted, their sizes checked together."""
    out: dict[str, tuple[zipfile.ZipInfo, Header]] = {}
    left = allowed
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename or (keys is not None and name not in keys):
            continue
        label = f"{name!r} in {file}"
        if name in out:
            raise Refused(f"{file} must name each array once, received {name!r} twice; write it again.")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Refused(f"{label} must be stored or deflated, as numpy does it, received another compression.")
        with archive.open(member) as stream:
            header = read_header(stream, label)
            _check_size(header, label, member.file_size - stream.tell(), left, allowed)
        out[name] = member, header
        left -= header.working_bytes
    return out


def _allowance(file: Path, max_bytes: int) -> int:
    return min(max_bytes, max(ALWAYS, EXPANSION * file.stat().st_size))


def _check_size(header: Header, name: str, stored: int, left: int, allowed: int | None = None) -> None:
    """The bytes there are against those of the header, and what they become against what is allowed."""
    if header.nbytes > stored:
        raise Refused(
            f"{name} must hold {header.nbytes} bytes for shape {header.shape}, received {stored}; the file is damaged."
        )
    if header.nbytes < stored:
        raise Refused(
            f"{name} must hold one array, {header.nbytes} bytes for shape {header.shape}, received {stored}; "
            "write each array alone."
        )
    if header.working_bytes > left:
        raise Refused(
            f"the arrays must become at most {allowed if allowed is not None else left} bytes together (as float64, and "
            f"for a file of this size), received {header.working_bytes} for {name} of shape {header.shape}; read less, or "
            "save them uncompressed."
        )


def _data(stream: IO[bytes], header: Header, name: str) -> NDArray[Any]:
    """The array behind a header whose size has been checked."""
    buffer = np.empty(header.nbytes, dtype=np.uint8)
    for start in range(0, header.nbytes, _CHUNK):
        part = stream.read(min(_CHUNK, header.nbytes - start))
        if len(part) < min(_CHUNK, header.nbytes - start):
            raise Refused(f"{name} must hold {header.nbytes} bytes, received {start + len(part)}; the file is cut off.")
        buffer[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
    if stream.read(1):  # reaching the end makes zipfile compare the checksum
        raise Refused(f"{name} must hold {header.nbytes} bytes, received more; the file is damaged.")
    flat = buffer.view(header.dtype)
    return flat.reshape(header.shape[::-1]).T if header.fortran_order else flat.reshape(header.shape)


def _kind(file: Path) -> str:
    """What a file is instead, told by its first bytes, and what to do."""
    with open(file, "rb") as stream:
        start = stream.read(64).lstrip()
    if not start:
        return "an empty file; copy it again"
    for magic, what, fix in _KINDS:
        if start.startswith(magic):
            return f"{what}; {fix}"
    return "something else; write it with numpy.savez (named arrays) or numpy.save (one array)"


def existing(path: str | PathLike[str]) -> Path:
    """``path``, if it is a file."""
    file = Path(path)
    try:
        known = file.exists()
    except (OSError, ValueError) as exc:  # a name that is too long, or holds a null
        raise ValueError(f"{str(path)!r} must be the name of a file, but is not ({exc}); check it.") from exc
    if not known:
        raise FileNotFoundError(f"{file} must be an existing file, received a path where there is none; check it.")
    if not file.is_file():
        raise ValueError(f"{file} must be a file, received a directory or a device; name the file in it.")
    return file


@contextmanager
def _one_error(file: Path, what: str) -> Iterator[None]:
    """Turn every way in which a damaged file can fail into one ValueError."""
    try:
        yield
    except Refused as exc:
        raise ValueError(str(exc)) from None
    except PermissionError:
        raise
    except _DAMAGE as exc:
        raise ValueError(
            f"{file} must be {what}, but reading it failed ({type(exc).__name__}: {exc}); it is damaged or incomplete, "
            "copy or write it again."
        ) from exc
