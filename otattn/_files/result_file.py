"""One file for one value: an ``.npz`` of plain arrays and a text ``meta`` in JSON; no pickles, no links.

The text is ``{"format", "root", "objects"}``. An object is ``{"class", "fields"}``, and comes after those that it is made of. A
value is a JSON scalar, a list, or an object with one key: ``float`` ("inf", "nan"), ``tuple``, ``dict`` (pairs), ``scalar`` (numpy
type and value), ``array`` (its name in the archive), ``csr`` (a sparse matrix), ``enum``, ``object`` (a number in ``objects``: what
occurs twice is kept once).
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
from contextlib import suppress
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from otattn._files.npz import read_npz
from otattn._files.saved import Saved, class_name, find_class

__all__ = ["can_keep", "read_file", "write_file"]

FORMAT = 1
LARGEST = 2**40
"""Bytes; :func:`read_npz` allows 64 times the file in any case."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,100}")
_SCALARS = "biufU"
"""Kinds of numpy scalars that JSON holds exactly."""


def write_file(value: Saved, path: str | PathLike[str]) -> None:
    """Write a value to a file, which appears whole or not at all.

    Raises
    ------
    TypeError
        Something in it that no file can hold; the message names it.
    ValueError
        ``path`` is a link, no file, or in no folder.
    """
    file = _plain_file(path)
    if not file.parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, received {str(file)!r}; create {file.parent} first.")
    writer = _Writer()
    root = writer.value(value, type(value).__name__)
    meta = {"format": FORMAT, "root": root, "objects": writer.objects}
    text = np.frombuffer(json.dumps(meta, allow_nan=False).encode(), dtype=np.uint8)
    draft = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(draft, "xb") as stream:
            np.savez(stream, allow_pickle=False, meta=text, **writer.arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def read_file(path: str | PathLike[str], kind: type) -> Any:
    """The value in a file, if it is a ``kind``.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It is a link, damaged, or not what :func:`write_file` wrote for a value of this kind.
    """
    file = _plain_file(path)
    arrays = read_npz(file, max_bytes=LARGEST)
    try:
        meta = json.loads(arrays.pop("meta").tobytes(), object_pairs_hook=_once)
        _keys(meta, "format", "root", "objects")
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']!r}, not {FORMAT}")
        reader = _Reader(arrays)
        for node in meta["objects"]:
            _keys(node, "class", "fields")
            state = {str(name): reader.value(entry) for name, entry in node["fields"].items()}
            cls = find_class(node["class"])
            if not issubclass(cls, Saved):
                raise ValueError(f"{node['class']!r} is no class of values")
            reader.objects.append(cls._from_fields(state))
        value = reader.value(meta["root"])
        if unused := sorted(set(arrays) - reader.used):
            raise ValueError(f"nothing uses its arrays {unused[:3]}")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, ImportError, RecursionError) as exc:
        reason = f"{exc.args[0]!r} is missing" if isinstance(exc, KeyError) else str(exc)
        raise ValueError(
            f"{file} must be a file written by {kind.__name__}.save, but it is not, or it is damaged ({reason})."
        ) from exc
    if not isinstance(value, kind):
        name = type(value).__name__
        raise ValueError(
            f"{file} must hold an object of {kind.__name__}, received one of {name}; read it with {name}.load."
        )
    return value


def can_keep(value: Any) -> bool:
    """Whether a file can hold a value."""
    try:
        _Writer().value(value, "")
    except TypeError:
        return False
    return True


def _plain_file(path: str | PathLike[str]) -> Path:
    try:
        file = Path(path).expanduser()
        mode = os.lstat(file).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return file
    except (TypeError, ValueError, OSError, RuntimeError) as exc:
        raise ValueError(f"path must be the name of a file, received {path!r} ({exc}); check it.") from exc
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a folder or a device"
        raise ValueError(f"path must be a plain file, received {what}, {str(path)!r}; name the file itself.")
    return file


class _Writer:
    """Turns values into JSON; arrays and objects are collected beside it, each once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.objects: list[Any] = []
        self.known: dict[int, Any] = {}
        self.alive: list[Any] = []  # an id stays that of one object

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is list or kind is tuple:
            items = [self.value(item, f"{where}.{k}") for k, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind is dict:
            return {"dict": [[self.value(k, f"{where} key"), self.value(v, f"{where}.{k}")] for k, v in value.items()]}
        if isinstance(value, Enum) and find_class(class_name(kind)) is kind:
            return {"enum": [class_name(kind), value.name]}
        if isinstance(value, np.generic) and value.dtype.kind in _SCALARS and value.dtype.itemsize <= 8:
            return {"scalar": [value.dtype.str, self.value(value.item(), where)]}
        if id(value) not in self.known:
            self.known[id(value)] = self._kept(value, where)
            self.alive.append(value)
        return self.known[id(value)]

    def _kept(self, value: Any, where: str) -> Any:
        if type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
            name = where.partition(".")[2]
            if not _PLAIN_NAME.fullmatch(name) or name in self.arrays or name in ("meta", "file", "allow_pickle"):
                name = f"array{len(self.arrays)}"
            self.arrays[name] = value
            return {"array": name}
        if type(value).__name__ == "csr_array":
            return {"csr": [self.value(getattr(value, part), f"{where}.{part}") for part in _CSR]}
        if not isinstance(value, Saved):
            raise TypeError(
                f"{where} must be made of numbers, arrays and values of otattn to be kept in a file, received "
                f"{getattr(value, '__qualname__', type(value).__name__)!r}; dataclasses.replace it by None or by a map of "
                "otattn, or keep to_dict()."
            )
        name = class_name(type(value))
        if find_class(name) is not type(value):
            raise TypeError(f"{where} is of class {name}, which cannot be found by its name; define it in a module.")
        state = {key: self.value(entry, f"{where}.{key}") for key, entry in value._to_fields().items()}
        self.objects.append({"class": name, "fields": state})
        return {"object": len(self.objects) - 1}


_CSR = ("data", "indices", "indptr", "shape")


class _Reader:
    """Turns JSON into values."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays, self.objects = arrays, list[Any]()
        self.used: set[str] = set()

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, body),) = node.items()
        if kind == "float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[body]
        if kind == "tuple":
            return tuple(map(self.value, body))
        if kind == "dict":
            return {self.value(key): self.value(entry) for key, entry in body}
        if kind == "scalar":
            dtype = np.dtype(body[0])
            if dtype.kind not in _SCALARS:
                raise ValueError(f"{body[0]!r} is no type of a number")
            return dtype.type(self.value(body[1]))
        if kind == "enum":
            return find_class(body[0])[body[1]]  # type: ignore[index]
        if kind == "array":
            self.used.add(body)
            self.arrays[body].flags.writeable = False
            return self.arrays[body]
        if kind == "csr":
            return _sparse(*map(self.value, body))
        if kind == "object" and isinstance(body, int) and 0 <= body < len(self.objects):
            return self.objects[body]
        raise ValueError(f"{kind!r} is no kind of value")


def _sparse(data: Any, indices: Any, indptr: Any, shape: Any) -> Any:
    from scipy.sparse import csr_array

    matrix = csr_array((data, indices, indptr), shape=shape)
    matrix.check_format(full_check=True)
    return matrix


def _keys(node: Any, *names: str) -> None:
    """Refuse a JSON object with other keys."""
    if not isinstance(node, dict) or set(node) != set(names):
        raise ValueError(f"{list(node) if isinstance(node, dict) else node!r} must have the keys {list(names)}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return out
