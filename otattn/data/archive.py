"""Reading numpy files that come from elsewhere: no pickles, sizes checked before anything is allocated."""

from __future__ import annotations

import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

__all__ = ["MAX_BYTES", "read_npy", "read_npz"]

MAX_BYTES = 4 * 2**30
"""Most bytes that the arrays read from one file may take together, uncompressed."""

_DAMAGE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    SyntaxError,
    TypeError,
    UnicodeError,
    NotImplementedError,  # a compression method that zipfile lacks
    RuntimeError,  # an encrypted member
)


class _Refused(ValueError):
    """A refusal that already says everything; passed on as it is."""


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
        Refuse a file whose arrays (those that are read) exceed this many bytes.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is no npz file, is damaged, holds pickled objects, or is too large.
    """
    file = _existing(path)
    with _one_error(file, "an .npz file of plain arrays"):
        if not zipfile.is_zipfile(file):
            raise _Refused(f"{file} must be an .npz file, received something else; write it with numpy.savez.")
        out: dict[str, NDArray[Any]] = {}
        left = max_bytes
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename or (keys is not None and name not in keys):
                    continue
                if name in out:
                    raise _Refused(f"{file} must name each array once, received {name!r} twice; write it again.")
                with archive.open(member) as stream:
                    out[name] = _read_array(stream, f"{name!r} in {file}", member.file_size, left, max_bytes)
                left -= out[name].nbytes
    return out


def read_npy(path: str | PathLike[str], *, max_bytes: int = MAX_BYTES) -> NDArray[Any]:
    """The array of an ``.npy`` file; errors as in :func:`read_npz`."""
    file = _existing(path)
    with _one_error(file, "an .npy file of one plain array"):
        size = file.stat().st_size
        with open(file, "rb") as stream:
            return _read_array(stream, str(file), size, max_bytes, max_bytes)


def _existing(path: str | PathLike[str]) -> Path:
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} must be an existing file, received a path where there is none; check it.")
    if not file.is_file():
        raise ValueError(f"{file} must be a file, received a directory or a device; name the file in it.")
    return file


@contextmanager
def _one_error(file: Path, what: str) -> Iterator[None]:
    """Turn every way in which a damaged file can fail into one ValueError."""
    try:
        yield
    except _Refused as exc:
        raise ValueError(str(exc)) from None
    except _DAMAGE as exc:
        raise ValueError(
            f"{file} must be {what}, but reading it failed ({type(exc).__name__}: {exc}); it is "
            "damaged or incomplete, "
            "copy or write it again."
        ) from exc


_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


def _read_array(stream: IO[bytes], name: str, size: int, left: int, limit: int) -> NDArray[Any]:
    """One array; its header is compared with the bytes there are before any memory is taken."""
    if size > left + 2**16:  # the header comes on top
        raise _Refused(f"the arrays must take at most {limit} bytes together, received {size} for {name}; read less.")
    version = npy.read_magic(stream)
    if version not in _HEADERS:
        raise _Refused(f"{name} must be in npy format 1.0 or 2.0, received {version}; save it with a current numpy.")
    shape, fortran_order, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise _Refused(f"{name} must be an array of numbers, received pickled objects, which are never loaded.")
    if dtype.itemsize == 0 or min(shape, default=1) < 0:
        raise _Refused(f"{name} must be an array of numbers, received dtype {dtype} and shape {shape}.")
    need = math.prod(shape) * dtype.itemsize
    if need > size:
        raise _Refused(f"{name} must hold {need} bytes for shape {shape}, received {size}; the file is damaged.")
    data = stream.read(need)
    if len(data) != need:
        raise _Refused(f"{name} must hold {need} bytes for shape {shape}, received {len(data)}; the file is cut off.")
    stream.read(io.DEFAULT_BUFFER_SIZE)  # reaching the end makes zipfile compare the checksum
    flat = np.frombuffer(data, dtype=dtype)
    return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)
