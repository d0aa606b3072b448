"""A hash of what a study depends on, by content: two processes that build the same study agree on it.

Values are written into one stream in which each says its kind and its length, so nesting cannot be confused. Functions are
written by what they do: their bytecode, defaults, closure cells and the globals that they read, followed to the end; classes
by their methods. What belongs to an installed package is written by its name and the package's version.

Not seen: files, the environment and other state outside Python values that a function reads when it runs.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar

import numpy as np

from otattn.stability.references import MISSING, package_of, references, resolve

__all__ = ["fingerprint"]

_SCALARS = (type(None), bool, int, float, complex, type(Ellipsis), type(NotImplemented))
_SLOTS = (
    MemberDescriptorType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
)
_BOOKKEEPING = frozenset(
    (
        *(
            "__dict__",
            "__weakref__",
            "__module__",
            "__doc__",
            "__qualname__",
            "__firstlineno__",
            "__static_attributes__",
        ),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__", "__type_params__"),
        *("__dataclass_fields__", "__dataclass_params__"),
    )
)
"""What a class carries beside what its author wrote in it."""


def fingerprint(*parts: Any) -> str:
    """A hash of values by their content.

    Sets do not depend on their order, dicts do: a function may read them in it. Objects are what pickle would keep of them,
    and their class; values of a ``cached_property`` do not count.

    Parameters
    ----------
    *parts
        Numbers, strings, arrays, containers, functions, classes, and objects made of such.

    Raises
    ------
    ValueError
        Something has no content that could be hashed: an iterator, a lock, a compiled function, code that looks names up
        when it runs. The message says where it was found.

    Examples
    --------
    >>> fingerprint((1, (2,), 3)) == fingerprint((1, (2, 3)))
    False
    >>> def scaled(s):
    ...     return lambda x: s * x
    >>> fingerprint(scaled(1.0)) == fingerprint(scaled(1.0)), fingerprint(scaled(1.0)) == fingerprint(scaled(2.0))
    (True, False)
    """
    walk = _Walk({}, {})
    try:
        for part in parts:
            walk.value(part, "")
    except RecursionError:
        raise _refusal("", parts, "it is nested too deeply") from None
    return walk.digest.hexdigest()


def _refusal(where: str, value: Any, reason: str) -> ValueError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ValueError(
        f"{where or 'a part'} must have a content that can be hashed, because a store tells studies apart by it, received "
        f"{kind} ({reason}); give key='...', a name of your own that you change whenever what is studied changes."
    )


class _Walk:
    """One stream of bytes over values; ``seen`` numbers functions, classes and modules, ``path`` what is being written."""

    def __init__(self, seen: dict[int, int], path: dict[int, int]) -> None:
        self.digest = hashlib.sha256()
        self.seen, self.path = seen, path
        self.alive: list[Any] = []  # an id stays that of one object

    def put(self, kind: str, *payload: bytes | str) -> None:
        """A kind and its payload, each with its length in front."""
        for part in (kind, str(len(payload)), *payload):
            raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            self.digest.update(len(raw).to_bytes(8, "little") + raw)

    def sequence(self, kind: str, values: Any, where: str) -> None:
        self.put(kind, str(len(values)))
        for k, value in enumerate(values):
            self.value(value, f"{where}[{k}]")

    def attributes(self, kind: str, values: Mapping[str, Any], where: str) -> None:
        """Named values, in the order of their names."""
        self.put(kind, str(len(values)))
        for name in sorted(values):
            self.put("name", name)
            self.value(values[name], f"{where}.{name}")

    def again(self, value: Any) -> bool:
        """Whether a function, class or module was written before; its number stands for it then."""
        number = self.seen.get(id(value))
        if number is not None:
            self.put("seen", str(number))
            return True
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        return False

    def value(self, value: Any, where: str) -> None:
        kind = type(value)
        if kind in _SCALARS:
            self.put(kind.__name__, repr(value))
        elif kind is str:
            self.put("str", value)
        elif kind in (bytes, bytearray):
            self.put(kind.__name__, bytes(value))
        elif kind is np.ndarray or isinstance(value, np.generic):
            self._array(np.asarray(value), kind, where)
        elif isinstance(value, (FunctionType, type, ModuleType, CodeType)):
            self._code(value, where)
        elif id(value) in self.path:
            self.put("within", str(self.path[id(value)]))
        else:
            self.path[id(value)] = len(self.path)
            self._compound(value, where)
            del self.path[id(value)]

    def _array(self, value: np.ndarray[Any, Any], kind: type, where: str) -> None:
        self.put(kind.__name__, value.dtype.str, repr(value.dtype), repr(value.shape))
        if value.dtype.hasobject:
            self.sequence("objects", value.ravel().tolist(), where)
        else:
            self.put("data", np.ascontiguousarray(value).tobytes())

    def _code(self, value: Any, where: str) -> None:
        if isinstance(value, CodeType):
            self._bytecode(value, where)
        elif name := package_of(value):
            self.put("package", name)
        elif self.again(value):
            return
        elif isinstance(value, FunctionType):
            self._function(value, where)
        elif isinstance(value, type):
            self.put("class", value.__qualname__)
            self.value(type(value), f"{where}.__class__")
            self.sequence("bases", value.__mro__[1:], f"{where}.__mro__")
            own = {k: v for k, v in vars(value).items() if k not in _BOOKKEEPING}
            self.attributes("members", own, where)
        else:
            inside = {k: v for k, v in vars(value).items() if not (k.startswith("__") and k.endswith("__"))}
            self.attributes("module", inside, where)

    def _function(self, value: FunctionType, where: str) -> None:
        self.put("function")
        self._bytecode(value.__code__, where)
        self.value(value.__defaults__, f"{where} default")
        self.attributes("keywords", value.__kwdefaults__ or {}, f"{where} default")
        self.attributes(
            "closure", dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)), f"{where} closure"
        )
        self.attributes("attributes", vars(value), where)
        for reference in references(value.__code__):
            name, found = resolve(value, reference)
            self.put("reads", name)
            if found is eval or found is exec or found is globals or found is __import__:
                raise _refusal(where, value, f"it calls {name}, and what that reads is known only when it runs")
            if found is MISSING:
                self.put("missing")
            else:
                self.value(found, f"{where} global {name}")

    def _bytecode(self, code: CodeType, where: str) -> None:
        """Everything of the code but its name, its file and its lines."""
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        self.put("code", code.co_code, code.co_exceptiontable, repr(counts))
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self.put("names", *names)
        self.sequence("constants", code.co_consts, f"{where} constant")

    def _compound(self, value: Any, where: str) -> None:
        kind = type(value)
        if kind in (tuple, list):
            self.sequence(kind.__name__, value, where)
        elif kind is dict or kind is MappingProxyType:
            self.put(kind.__name__, str(len(value)))
            for key, entry in value.items():
                self.value(key, f"{where} key")
                self.value(entry, f"{where}.{key}".lstrip(".") if isinstance(key, str) else f"{where}[{key!r}]")
        elif isinstance(value, (set, frozenset)):
            self.value(kind, where)
            self.put("set", *sorted(self._apart(entry, f"{where} entry") for entry in value))
            self.attributes("state", getattr(value, "__dict__", {}), where)
        elif isinstance(value, CellType):
            self.sequence("cell", [value.cell_contents] if value != CellType() else [], where)
        elif isinstance(value, MethodType):
            self.sequence("method", (value.__func__, value.__self__), where)
        elif isinstance(value, partial):
            self.value(kind, where)
            self.sequence("partial", (value.func, value.args), where)
            self.attributes("keywords", value.keywords, where)
            self.attributes("state", vars(value), where)
        elif isinstance(value, (staticmethod, classmethod)):
            self.sequence(kind.__name__, (value.__func__,), where)
        elif isinstance(value, property):
            self.value(kind, where)
            self.sequence("property", (value.fget, value.fset, value.fdel), where)
        elif isinstance(value, cached_property):
            self.sequence("cached_property", (value.func,), where)
        elif isinstance(value, _SLOTS):
            owner = value.__self__ if isinstance(value, MethodWrapperType) else value.__objclass__
            self.put("slot", value.__name__)
            self.value(owner, where)
        elif isinstance(value, TypeVar):
            self.put("TypeVar", value.__name__)
        elif callable(value) and (name := package_of(value)):
            self.put("package", name)
        elif isinstance(value, BuiltinFunctionType):
            self._builtin(value, where)
        elif isinstance(value, Iterator):
            raise _refusal(where, value, "an iterator gives other values each time")
        else:
            self._object(value, where)

    def _apart(self, value: Any, where: str) -> bytes:
        """The hash of one value as it stands here, whatever its neighbours are."""
        inner = _Walk(dict(self.seen), dict(self.path))
        inner.value(value, where)
        return inner.digest.digest()

    def _builtin(self, value: Any, where: str) -> None:
        owner = value.__self__
        self.put("builtin", value.__name__)
        if not isinstance(owner, ModuleType):
            self.value(owner, where)
        elif file := getattr(owner, "__file__", None):
            self.put("binary", Path(file).read_bytes())
        else:
            raise _refusal(where, value, "it is compiled and its file is not known")

    def _object(self, value: Any, where: str) -> None:
        """The class of an object, and what pickle would keep of it."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            form: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as exc:
            raise _refusal(where, value, str(exc) or type(exc).__name__) from exc
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(form, str) and wrapped is None:
            raise _refusal(where, value, f"it is known by its name {form} only")
        self.value(type(value), f"{where}.__class__")
        if isinstance(form, str):
            self.sequence("wrapped", (wrapped,), where)
            return
        make, args, state, items, pairs = (*form, None, None, None)[:5]
        self.sequence("object", (make, args), where)
        states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in states:
            if isinstance(part, dict) and all(isinstance(name, str) for name in part):
                self.attributes("state", {k: v for k, v in part.items() if not _cached(value, k)}, where)
            else:
                self.value(part, where)
        if isinstance(value, np.ndarray) and package_of(type(value)) is None:
            self.attributes("attributes", vars(value), where)  # pickle forgets them
        self.sequence("items", list(items or ()), where)
        self.sequence("pairs", list(pairs or ()), where)


def _cached(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(value), name, None), cached_property)
