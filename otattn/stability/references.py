"""What the code of a function refers to: the globals and imports it reads, and which package a name belongs to."""

from __future__ import annotations

import builtins
import dis
import importlib
import importlib.util
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

__all__ = ["MISSING", "package_of", "references", "resolve"]

MISSING = object()
"""A name that stands for nothing (yet)."""
Reference = tuple[str, ...]
"""A global and the attributes read from it at once; or ``"import"``, the module, its level and the name taken from it."""

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_SILENT = {"EXTENDED_ARG", "PUSH_NULL", "CACHE", "PRECALL", "NOP"}
_HERE = Path(__file__).resolve().parents[1]


def references(code: CodeType) -> list[Reference]:
    """What the code reads by name, that of functions inside it included, sorted.

    Examples
    --------
    >>> references(compile("lambda x: np.linalg.norm(x) * scale", "", "eval"))
    [('np', 'linalg', 'norm'), ('scale',)]
    """
    found: set[Reference] = set()
    current: Reference = ()
    before: list[Any] = [0, None]  # what the last two steps loaded: for an import its level and the names taken
    for step in dis.get_instructions(code):
        if step.opname in _SILENT:
            continue
        if current and step.opname in _ATTRIBUTE:
            current = (*current, str(step.argval))
            continue
        if current:
            found.add(current)
        current = (str(step.argval),) if step.opname in _GLOBAL else ()
        if step.opname == "IMPORT_NAME":
            level, taken = before
            found.update(("import", str(step.argval), str(level), name) for name in taken or ("",))
        before = [before[1], step.argval]
    if current:
        found.add(current)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(references(constant))
    return sorted(found)


def resolve(function: FunctionType, reference: Reference) -> tuple[str, Any]:
    """A reference in words, and what it stands for in the function's globals (:data:`MISSING` if nothing).

    Attributes are followed through modules that are nobody's package; a package is told by its version.
    """
    space = function.__globals__
    if reference[0] == "import":
        _, name, level, taken = reference
        value, rest, words = _module(name, int(level), taken, space), [taken] if taken else [], f"import {name} {taken}"
    else:
        value = space.get(reference[0], getattr(builtins, reference[0], MISSING))
        rest, words = list(reference[1:]), ".".join(reference)
    while rest and isinstance(value, ModuleType) and package_of(value) is None:
        value = getattr(value, rest.pop(0), MISSING)
    return words, value


def _module(name: str, level: int, taken: str, space: dict[str, Any]) -> Any:
    try:
        full = importlib.util.resolve_name("." * level + name, space.get("__package__") or "") if level else name
        module = importlib.import_module(full)
        if taken and not hasattr(module, taken) and hasattr(module, "__path__"):
            importlib.import_module(f"{full}.{taken}")  # a module of a package, taken by its name
        return module
    except ImportError:
        return MISSING


def package_of(value: Any) -> str | None:
    """The name and version by which a module, function or class of a package is known; None for what is no package's.

    Packages are the standard library, what lies in ``site-packages``, and otattn. A function or class counts only if the
    package really holds it under its name: closures that a package has made do not.
    """
    if isinstance(value, ModuleType):
        return _package(value.__name__)
    candidates: list[tuple[Any, Any]]
    if isinstance(value, np.ufunc):
        candidates = [(module, value.__name__) for module in ("numpy", "scipy.special")]
    else:
        candidates = [(getattr(value, "__module__", None), getattr(value, "__qualname__", None))]
    for module, name in candidates:
        if not isinstance(module, str) or not isinstance(name, str) or (package := _package(module)) is None:
            continue
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is value:
            return f"{package}:{name}"
    return None


def _package(module: str) -> str | None:
    known = sys.modules.get(module)
    top = module.partition(".")[0]
    if known is None or module == "__main__":
        return None
    origin = getattr(getattr(known, "__spec__", None), "origin", None)
    file = getattr(known, "__file__", None)
    if origin in ("built-in", "frozen"):
        return f"{module} of Python {sys.version_info[0]}.{sys.version_info[1]}"
    if file is None:
        return None
    place = Path(file).resolve()
    if "site-packages" in place.parts or "dist-packages" in place.parts or place.is_relative_to(_HERE):
        return f"{module} of {top} {_version(top)}"
    if any(place.is_relative_to(folder) for folder in _standard()):
        return f"{module} of Python {sys.version_info[0]}.{sys.version_info[1]}"
    return None


@cache
def _standard() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib"))


@cache
def _version(top: str) -> str:
    from importlib import metadata

    try:
        return str(getattr(sys.modules.get(top), "__version__", None) or metadata.version(top))
    except metadata.PackageNotFoundError:
        return "of unknown version"
