"""Mutated files: each gives an error that names its file, or what an independent reading of the same bytes gives.

A :class:`Format` writes good files, reads a folder with the library, and tells what is right; :func:`one_file` mutates one of
the files. A module adds its formats to ``FORMATS`` and is named in ``MODULES`` of ``benchmarks/fuzz_files.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FORMATS", "Fault", "Format", "mutated_bytes", "mutated_json", "one_file", "quiet"]

NAMED = (ValueError, FileNotFoundError)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes
    ----------
    files : tuple of str
        Names of the files that are mutated, one at a time.
    make : function of a folder and a random.Random
        Writes good files.
    read : function of a folder
        The library's reading; the named errors are right, all others are faults.
    judge : function of a folder and what was read
        Raises AssertionError when it is not what the bytes say.
    """

    files: tuple[str, ...]
    make: Callable[[Path, random.Random], None]
    read: Callable[[Path], Any]
    judge: Callable[[Path, Any], None]


FORMATS: dict[str, Format] = {}
"""Filled by the modules of the formats when they are imported."""


class Fault(AssertionError):
    """What a mutated file must not cause."""


EXTREMES = [0, 1, 0xFF, 0x7F, 0x80, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
WORDS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    0.5,
    1e308,
    1e-320,
    2**70,
    -(2**63),
    "",
    "x",
    "linear",
    [],
    {},
    [1],
    {"a": 1},
]


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four small changes, more often near the start, where headers are."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = int(rng.random() ** rng.choice((1, 2, 4)) * max(len(out), 1))
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            out[at : at + size] = (rng.choice(EXTREMES) % 256**size).to_bytes(size, "little")
        elif kind == 3:
            del out[at : at + rng.choice((1, 2, 8, 64, 4096))]
        elif kind == 4:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 5:
            other = rng.randrange(max(len(out), 1))
            out[at : at + 16] = out[other : other + 16]
        elif kind == 6 and rng.random() < 0.3:
            del out[at:]
        else:
            out[at : at + 4] = rng.randbytes(4)
    return bytes(out)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """A value, a key or an entry of the object changed."""
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node, key = rng.choice(list(places(value)))
        kind = rng.randrange(6)
        if kind == 0 and isinstance(node, dict):
            node[rng.choice((key + "x", key.upper(), "", "a" * 2000))] = node.pop(key)
        elif kind == 1:
            del node[key]
        elif kind == 2 and isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
            node[key] = rng.choice((node[key] + 1, node[key] * 2, -node[key], node[key] / 2, float(node[key])))
        elif kind == 3 and isinstance(node[key], str):
            node[key] = node[key] + rng.choice(("x", "\u0000", "\ud7ff", " "))
        else:
            node[key] = rng.choice(WORDS)
        if not list(places(value)):
            break
    return json.dumps(value).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key or index in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def one_file(name: str, seed: int) -> str:
    """A mutated file of a format: "value" or the class of the named error; anything else is a Fault."""
    rng = random.Random(f"{name} {seed}")
    form = FORMATS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        form.make(folder, rng)
        file = folder / rng.choice(form.files)
        change = mutated_json if file.suffix == ".json" and rng.random() < 0.7 else mutated_bytes
        file.write_bytes(change(file.read_bytes(), rng))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value = form.read(folder)
        except NAMED as exc:
            if place not in str(exc) and file.name not in str(exc):
                raise Fault(f"{name} {seed}: {type(exc).__name__} does not name {file.name}: {exc}") from exc
            return type(exc).__name__
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            raise Fault(f"{name} {seed}: {type(exc).__name__} in {file.name}: {exc}") from exc
        try:
            with np.errstate(all="ignore"):
                form.judge(folder, value)
        except Exception as exc:
            raise Fault(
                f"{name} {seed}: another value than {file.name} says: {type(exc).__name__}: {str(exc)[:300]!r}"
            ) from exc
        return "value"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Panics of the tokenizers package print to the error stream before they are caught."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
