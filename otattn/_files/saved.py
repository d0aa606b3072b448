"""Values made of their fields: printed in one line, kept in one ``.npz`` file and read from it again, bit for bit.

A file holds plain arrays and a text (JSON) that says of which classes they are the fields. Reading it executes nothing: a class
is found by its name among those that derive from :class:`Saved`, every field must be there and of its type, and what a
constructor checks is checked again.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

__all__ = ["LONGEST", "Saved", "brief", "class_name", "find_class"]

LONGEST = 196
"""Characters of a value in one line."""
CLOSE = 1e-9
"""Relative: how far a constructor may move what was kept (weights divided by their sum, covariances made symmetric)."""
_PACKAGE = re.compile(r"otattn(\._?[a-z][a-z0-9_]*)+")
_CLASSES: dict[str, type[Saved]] = {}


class Saved:
    """A dataclass that is one line in print and can be part of a file."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _CLASSES[class_name(cls)] = cls
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # its own, so that dataclass makes none that prints arrays

    def _to_fields(self) -> dict[str, Any]:
        """What a file keeps by name: the fields."""
        return {f.name: getattr(self, f.name) for f in _fields(self)}

    @classmethod
    def _from_fields(cls, state: dict[str, Any]) -> Any:
        """The value again.

        Raises
        ------
        ValueError
            Fields that are unknown, missing, of another type, or that the constructor would not make.
        """
        known = [f.name for f in _fields(cls)]
        wrong = [f"{name!r} is missing" for name in known if name not in state]
        wrong += [f"{name!r} is unknown" for name in state if name not in known]
        wrong += [
            f"{name!r} must not be of type {type(state[name]).__name__}"
            for name, hint in _hints(cls).items()  # type: ignore[arg-type]
            if name in state and not _fits(state[name], hint)
        ]
        if wrong:
            raise ValueError(f"{cls.__name__}: {', '.join(wrong)}")
        if cls.__dataclass_params__.init and set(inspect.signature(cls).parameters) == set(known):  # type: ignore[attr-defined]
            return cls(**state)
        out = object.__new__(cls)
        for name, value in state.items():
            object.__setattr__(out, name, value)
        new = out._rebuilt()
        for name in known:
            own = getattr(out, name)
            if not _close(own, getattr(new, name, own)):
                raise ValueError(f"{cls.__name__}: {name!r} is not what its constructor makes")
        return out

    def _rebuilt(self) -> Any:
        """The value that the constructor makes of the fields, by which they are checked."""
        places, names = [], {}
        for key, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, key if hasattr(self, key) else f"{key}_")
            if parameter.kind is parameter.VAR_POSITIONAL:
                places = list(value)
            else:
                names[key] = value
        return type(self)(*places, **names)

    def __repr__(self) -> str:
        own: tuple[Any, ...] = fields(self) if is_dataclass(self) else ()
        shown = [f"{f.name}={brief(getattr(self, f.name))}" for f in own if f.repr]
        text = f"{type(self).__name__}({', '.join(shown)})"
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]}...)"


def brief(value: Any) -> str:
    """A value inside a line: numbers to six digits, arrays by shape and norm, containers by their size."""
    if isinstance(value, float):
        return repr(float(value)) if len(repr(float(value))) <= 8 else f"{value:.6g}"
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, str):
        return repr(str(value)) if len(value) <= 40 else f"{str(value)[:36]!r}..."
    if isinstance(value, np.ndarray):
        size = "x".join(map(str, value.shape)) or "number"
        with np.errstate(all="ignore"):
            return f"[{size}, norm {np.linalg.norm(value):.4g}]" if value.dtype.kind == "f" else f"[{size}]"
    if isinstance(value, Mapping):
        return f"{{{len(value)} entries}}"
    if isinstance(value, (list, tuple)):
        kinds = {type(item).__name__ for item in value}
        return f"({len(value)} x {kinds.pop()})" if len(kinds) == 1 else f"({len(value)} items)"
    text = repr(value) if isinstance(value, Saved) else ""
    return text if 0 < len(text) <= 80 else getattr(value, "__qualname__", type(value).__name__)


def class_name(kind: type) -> str:
    """Where a class is found again."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str) -> type:
    """The class of that name: one that derives from :class:`Saved`, or an enumeration of the package."""
    module, _, inner = name.partition(":")
    if name not in _CLASSES and _PACKAGE.fullmatch(module):
        found = getattr(import_module(module), inner, None)
        if isinstance(found, type) and issubclass(found, Enum):
            return found
    if name not in _CLASSES:
        raise ValueError(f"there is no class {name!r}; import the module that defines it first")
    return _CLASSES[name]


def _fields(value: Any) -> tuple[Any, ...]:
    if not is_dataclass(value):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be a dataclass to be kept in a file; decorate it with @dataclass(frozen=True)")
    return fields(value)


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of the fields."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in _fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; arrays by the kind of their numbers."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if hint is np.ndarray or origin is np.ndarray:
        wanted = get_args(args[1])[0] if args else np.number
        return isinstance(value, np.ndarray) and (not isinstance(wanted, type) or np.issubdtype(value.dtype, wanted))
    if origin is tuple and isinstance(value, tuple):
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if origin in (list, Sequence) and isinstance(value, Sequence):
        return all(_fits(item, args[0]) for item in value)
    if origin is Callable:
        return callable(value)
    number = {float: (float, int, np.floating, np.integer), int: (int, np.integer), bool: (bool, np.bool_)}
    kind = number.get(hint, origin or hint)
    return isinstance(value, kind) and (hint is bool or not isinstance(value, bool))


def _close(stored: Any, new: Any) -> bool:
    """Whether two fields are the same, floats to a part ``CLOSE`` of the largest."""
    if isinstance(stored, np.ndarray) and isinstance(new, np.ndarray):
        if stored.shape != new.shape or stored.dtype != new.dtype:
            return False
        return stored.dtype.kind != "f" or bool(
            np.allclose(stored, new, rtol=CLOSE, atol=CLOSE * float(np.abs(new).max(initial=0.0)))
        )
    if isinstance(stored, float) and isinstance(new, float):
        return stored == new or math.isclose(stored, new, rel_tol=CLOSE)
    if isinstance(stored, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(stored) == len(new) and all(map(_close, stored, new))
    return stored is new or (type(stored) is type(new) and (isinstance(stored, Saved) or bool(stored == new)))
