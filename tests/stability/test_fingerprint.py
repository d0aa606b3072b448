"""What tells two studies apart: code, closures, globals and content; never addresses, order of sets, or names alone."""

import dataclasses
import enum
import functools
import os
import subprocess
import sys
import threading
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special

import otattn as oa
from otattn.errors import StoreError
from otattn.stability.fingerprint import fingerprint

SOFTMAX = oa.SoftmaxAttention([[1.0, 0.5], [0.0, -1.0]], [[1.0, 0.0], [0.3, 1.0]])
study_of = functools.partial(oa.stability_study, n_pairs=12, rng=3, progress=False)
SCALE = 1.0
Rng = np.random.Generator


def cloud(rng: Rng, scale: float) -> tuple[Any, Any]:
    return scale * rng.normal(size=(3, 2)), scale * rng.normal(size=(3, 2))


class Drawing:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def draw(self, rng: Rng) -> tuple[Any, Any]:
        return cloud(rng, self.scale)

    def __call__(self, rng: Rng) -> tuple[Any, Any]:
        return cloud(rng, self.scale)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, rng: Rng) -> tuple[Any, Any]:
        return cloud(rng, self.scale)


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float

    def __call__(self, rng: Rng) -> tuple[Any, Any]:
        return cloud(rng, self.scale)


def closed(scale: float) -> Callable[[Rng], Any]:
    return lambda rng: cloud(rng, scale)


def twice_closed(scale: float) -> Callable[[Rng], Any]:
    inner = closed(scale)

    def outer(rng: Rng) -> Any:
        return inner(rng)

    return outer


def defaulted(scale: float) -> Callable[[Rng], Any]:
    def draw(rng: Rng, s: float = scale) -> Any:
        return cloud(rng, s)

    return draw


def keyword_only(scale: float) -> Callable[[Rng], Any]:
    def draw(rng: Rng, *, s: float = scale) -> Any:
        return cloud(rng, s)

    return draw


def of_text(body: str, **names: Any) -> Callable[[Rng], Any]:
    """A function ``draw`` of a source text, under the same name, file and line each time."""
    space = {"np": np, "cloud": cloud, "__name__": "somewhere", **names}
    exec(compile(body, "<a script>", "exec"), space)
    return space["draw"]  # type: ignore[return-value]


def with_module(scale: float, body: str) -> Callable[[Rng], Any]:
    module = types.ModuleType("settings_of_mine")
    module.scale = scale  # type: ignore[attr-defined]
    return of_text(body, settings=module)


READS = "def draw(rng): return cloud(rng, SCALE)"
INSIDE = "def draw(rng):\n    return [cloud(rng, SCALE) for _ in range(1)][0]"
DEEP = "def helper(rng): return cloud(rng, SCALE)\ndef draw(rng): return helper(rng)"
STORED: dict[str, Callable[[float], Any]] = {
    "closure": closed,
    "closure of a closure": twice_closed,
    "default": defaulted,
    "keyword default": keyword_only,
    "bound method": lambda s: Drawing(s).draw,
    "method of a class": lambda s: types.MethodType(cloud_of, Drawing(s)),
    "object": Drawing,
    "object with slots": Slotted,
    "frozen dataclass": Frozen,
    "partial": lambda s: functools.partial(cloud, scale=s),
    "partial by position": lambda s: functools.partial(lambda a, rng: cloud(rng, a), s),
    "edited under one name": lambda s: of_text(f"def draw(rng): return cloud(rng, {s})"),
    "a module's lambda": lambda s: of_text(f"draw = lambda rng: cloud(rng, {s})"),
    "global": lambda s: of_text(READS, SCALE=s),
    "global in a comprehension": lambda s: of_text(INSIDE, SCALE=s),
    "global of a global": lambda s: of_text(DEEP, SCALE=s),
    "global object": lambda s: of_text(
        "def draw(rng): return cloud(rng, box.scale)", box=types.SimpleNamespace(scale=s)
    ),
    "attribute of a module": lambda s: with_module(s, "def draw(rng): return cloud(rng, settings.scale)"),
    "module as a value": lambda s: with_module(s, "def draw(rng): return cloud(rng, getattr(settings, 'sc' + 'ale'))"),
    "function's attribute": lambda s: attributed(s),
    "wrapped": lambda s: functools.lru_cache(closed(s)),
    "array": lambda s: of_text("def draw(rng): return cloud(rng, box[0])", box=np.array([s])),
    "array of objects": lambda s: of_text(
        "def draw(rng): return cloud(rng, box[0])", box=np.array([s, "x"], dtype=object)
    ),
}


def cloud_of(self: Any, rng: Rng) -> tuple[Any, Any]:
    return cloud(rng, self.scale)


def attributed(scale: float) -> Any:
    def draw(rng: Rng) -> Any:
        return cloud(rng, draw.scale)  # type: ignore[attr-defined]

    draw.scale = scale  # type: ignore[attr-defined]
    return draw


@pytest.mark.parametrize("kind", STORED)
def test_a_sampler_of_another_scale_is_another_study(tmp_path: Path, kind: str) -> None:
    make = STORED[kind]
    first = study_of(SOFTMAX, make(1.0), store=tmp_path)
    assert first.best.value == first.ratios.max() == study_of(SOFTMAX, Frozen(1.0)).ratios.max()
    with pytest.raises(StoreError, match="must belong to this study"):
        study_of(SOFTMAX, make(20.0), store=tmp_path)
    again = study_of(SOFTMAX, make(1.0), store=tmp_path)  # built anew, and the same
    assert np.array_equal(again.ratios, first.ratios)
    second = study_of(SOFTMAX, make(20.0), store=tmp_path / "second")
    assert second.best.value == second.ratios.max() == study_of(SOFTMAX, Frozen(20.0)).ratios.max()
    assert second.best.value != first.best.value


class Scaled(oa.SoftmaxAttention):
    """An attention map that reads a global."""

    def _apply(self, *args: Any) -> Any:
        return SCALE * super()._apply(*args)


def test_a_map_that_reads_a_global(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Scaled(SOFTMAX.A, SOFTMAX.V)
    sampler = oa.samplers.uniform_ball_pairs(4, 2, 1.0)
    first = study_of(attention, sampler, store=tmp_path)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    with pytest.raises(StoreError, match="must belong to this study"):
        study_of(attention, sampler, store=tmp_path)
    second = study_of(attention, sampler)
    assert second.best.value == second.ratios.max() == pytest.approx(2.0 * first.best.value, rel=1e-12)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    assert np.array_equal(study_of(attention, sampler, store=tmp_path).ratios, first.ratios)


def subclass(body: str, **names: Any) -> Any:
    space: dict[str, Any] = {"oa": oa, "functools": functools, "__name__": "somewhere", **names}
    exec(f"class Mine(oa.SoftmaxAttention):\n{body}", space)
    return space["Mine"](SOFTMAX.A, SOFTMAX.V)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("    factor = 1.0", "    factor = 2.0"),
        (
            "    def _apply(self, *a): return super()._apply(*a)",
            "    def _apply(self, *a): return 2 * super()._apply(*a)",
        ),
        ("    @property\n    def causal(self): return False", "    @property\n    def causal(self): return not False"),
        ("    @staticmethod\n    def f(x): return x", "    @staticmethod\n    def f(x): return x + x"),
        ("    @classmethod\n    def f(cls): return 1", "    @classmethod\n    def f(cls): return 3"),
        (
            "    @functools.cached_property\n    def f(self): return 1",
            "    @functools.cached_property\n    def f(self): return 3",
        ),
    ],
)
def test_classes_are_what_is_written_in_them(one: str, other: str) -> None:
    assert fingerprint(subclass(one)) == fingerprint(subclass(one))
    assert fingerprint(subclass(one)) != fingerprint(subclass(other))


def test_bases_and_metaclasses_count() -> None:
    text = "    def _apply(self, *a): return scale(super()._apply(*a))"
    one, two = (subclass(text, scale=lambda x, s=s: s * x) for s in (1.0, 2.0))
    assert fingerprint(one) != fingerprint(two)
    children = [type("Child", (type(parent),), {})(SOFTMAX.A, SOFTMAX.V) for parent in (one, two)]
    assert fingerprint(children[0]) != fingerprint(children[1])


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


Pair = namedtuple("Pair", "a b")


class Labelled(set):
    """A set with an attribute."""


class Tagged(np.ndarray):
    """An array with an attribute, which pickle forgets."""


def with_label(value: Any, label: float) -> Any:
    value.label = label
    return value


class Caching:
    """A value that is computed once does not change what the object is."""

    def __init__(self) -> None:
        self.base = 3.0

    @functools.cached_property
    def square(self) -> float:
        return self.base**2


def knot() -> list[Any]:
    out: list[Any] = [1]
    out.append(out)
    return out


def test_different_values_have_different_hashes() -> None:
    values = [
        *(
            None,
            True,
            1,
            1.0,
            -1.0,
            0.0,
            -0.0,
            np.nan,
            1j,
            "1",
            b"1",
            "",
            ...,
            np.float64(1.0),
            np.float32(1.0),
            np.int64(1),
        ),
        *(
            (),
            [],
            {},
            set(),
            frozenset(),
            (1,),
            [1],
            ((1,),),
            (1, (2,), 3),
            (1, (2, 3)),
            (1, 2, (3,)),
            ((1, 2), 3),
            (1, 2, 3),
        ),
        *(
            ("ab", "c"),
            ("a", "bc"),
            ("abc",),
            (("a",), "b"),
            {1: 2},
            {2: 1},
            {1: (2,)},
            {1, 2},
            {(1, 2)},
            {"a": {"b": 1}},
        ),
        *(np.zeros(4), np.zeros((2, 2)), np.zeros((4, 1)), np.zeros(4, np.float32), np.zeros(4, np.int64), np.zeros(5)),
        *(
            np.zeros(2, ">f8"),
            np.zeros(2, "<f8"),
            np.zeros(2, [("a", "f8")]),
            np.zeros(2, [("b", "f8")]),
            np.array("a"),
        ),
        *(
            np.ma.array([1.0, 2.0], mask=[0, 1]),
            np.ma.array([1.0, 2.0], mask=[1, 0]),
            np.array([[1.0]]),
        ),
        *(
            Colour.RED,
            Colour.BLUE,
            Colour,
            Pair(1, 2),
            Pair(2, 1),
            Frozen(1.0),
            Frozen(2.0),
            Drawing(1.0),
            Slotted(1.0),
        ),
        *(np.sin, np.cos, np.add, np.add.reduce, scipy.special.erf, scipy.special.erfc, np.linalg.norm, len, str.upper),
        *(
            "a".upper,
            "b".upper,
            [1].append,
            [2].append,
            max,
            min,
            int,
            float,
            np.ndarray,
            oa.SoftmaxAttention,
            cloud,
            closed,
        ),
        *(functools.partial(cloud, 1), functools.partial(cloud, 2), functools.partial(closed, 1), range(3), range(4)),
        *(lambda x: x, lambda x: (x,), lambda x, *y: x, lambda *x: x, lambda **x: x, lambda x, /: [x], lambda x: -x),
        *(
            slice(1),
            slice(2),
            OrderedDict(a=1),
            oa.DiscreteMeasure([[1.0]]),
            oa.DiscreteMeasure([[2.0]]),
            SOFTMAX,
            knot(),
        ),
        *(
            oa.MaskedAttention(SOFTMAX),
            oa.samplers.uniform_ball_pairs(2, 2, 1.0),
            oa.samplers.uniform_ball_pairs(2, 2, 2.0),
        ),
        *(
            types.SimpleNamespace(a=1),
            types.SimpleNamespace(b=1),
            types.MappingProxyType({1: 2}),
            np.dtype("f4"),
            np.dtype("f8"),
        ),
    ]
    values += [with_label(Labelled(), 1.0), with_label(Labelled(), 2.0)]
    values += [with_label(np.zeros(2).view(Tagged), label) for label in (1.0, 2.0)]
    values += [with_label(functools.partial(cloud), label) for label in (1.0, 2.0)]
    hashes = [fingerprint(value) for value in values]
    same = [
        (repr(a), repr(b)) for k, a in enumerate(values) for j, b in enumerate(values[:k]) if hashes[k] == hashes[j]
    ]
    assert not same
    assert [fingerprint(value) for value in values] == hashes
    assert fingerprint(1, 2) != fingerprint((1, 2))
    assert fingerprint() != fingerprint(())


def test_what_does_not_matter_does_not_change_the_hash() -> None:
    caching = Caching()
    before = fingerprint(caching)
    assert caching.square == 9.0
    assert fingerprint(caching) == before
    A = np.arange(6.0).reshape(2, 3)
    assert fingerprint(A) == fingerprint(np.asfortranarray(A)) == fingerprint(np.repeat(A, 2, axis=0)[::2])
    one, two = types.SimpleNamespace(a=1, b=2), types.SimpleNamespace(b=2, a=1)
    assert fingerprint(one) == fingerprint(two)  # attributes have no order, keys of a dict have one
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"b": 2, "a": 1})
    first, second = (of_text("\n" * k + "def draw(rng): return rng") for k in (0, 5))
    assert fingerprint(first) == fingerprint(second)  # moved within its file
    attention = oa.SoftmaxAttention(SOFTMAX.A, SOFTMAX.V)
    before = fingerprint(attention)
    study_of(attention, Frozen(1.0))
    assert fingerprint(attention) == before


def test_functions_that_call_each_other_come_to_an_end() -> None:
    text = "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != {} and even(n - 1)\ndraw = even"
    assert fingerprint(of_text(text.format(0))) == fingerprint(of_text(text.format(0)))
    assert fingerprint(of_text(text.format(0))) != fingerprint(of_text(text.format(1)))


SCRIPT = """
import sys
from otattn.stability.fingerprint import fingerprint

def known(folder):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]
    sys.path[0] = folder
    from mine import helper, settings

    def draw(rng):
        from mine.settings import LEVELS
        import mine.helper
        return helper.scaled(rng) if "x" in {"x", "y", "zz", "w"} else LEVELS

    return fingerprint(draw, {"a", "b", "c", ("d", 1)}, frozenset("hello"), helper, {draw, helper.scaled})

for folder in sys.argv[1:]:
    print(known(folder))
"""


def run_script(seed: int, *folders: Path) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env).stdout.split()


def package(folder: Path, settings: str, helper: str) -> Path:
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "__init__.py").write_text("")
    (folder / "mine" / "settings.py").write_text(settings)
    (folder / "mine" / "helper.py").write_text(helper)
    return folder


def test_other_processes_agree_and_see_edits(tmp_path: Path) -> None:
    settings, other = "LEVELS = {'one', 'two', 'three'}\n", "LEVELS = {'one', 'two', 'four'}\n"
    helper = "from . import settings\ndef scaled(rng): return settings.LEVELS, rng\n"
    moved = "\n# moved\nfrom . import settings\n\n\ndef scaled(rng): return settings.LEVELS, rng\n"
    negated = "from . import settings\ndef scaled(rng): return settings.LEVELS, -rng\n"
    first = package(tmp_path / "first", settings, helper)
    (known,) = run_script(1, first)
    found = run_script(
        2,  # sets in another order
        first,
        package(tmp_path / "moved", settings, moved),
        package(tmp_path / "other", other, helper),
        package(tmp_path / "negated", settings, negated),
    )
    assert found[:2] == [known, known]
    assert known not in found[2:]
    assert len(set(found)) == 3


def hidden(rng: Rng) -> Any:
    return cloud(rng, globals()["SCALE"])


UNKNOWN: dict[str, Any] = {
    "a lock": functools.partial(lambda lock, rng: cloud(rng, 1.0), threading.Lock()),
    "an iterator": functools.partial(lambda steps, rng: cloud(rng, next(steps)), iter([1.0, 2.0])),
    "a generator": functools.partial(lambda steps, rng: cloud(rng, next(steps)), (float(k) for k in range(3))),
    "globals()": hidden,
    "eval": lambda rng: cloud(rng, eval("SCALE")),
    "numpy's compiled lambda": functools.partial(lambda f, rng: cloud(rng, 1.0), np.frompyfunc(lambda x: x, 1, 1)),
    "a file": functools.partial(lambda f, rng: cloud(rng, 1.0), sys.__stderr__),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_cannot_be_hashed_needs_a_key(tmp_path: Path, kind: str) -> None:
    sampler = UNKNOWN[kind]
    with pytest.raises(ValueError, match=r"^sampler.*must have a content that can be hashed.*give key="):
        study_of(SOFTMAX, sampler, store=tmp_path / "no")
    assert not (tmp_path / "no").exists()
    if kind in ("an iterator", "a generator"):
        return  # they end
    study = study_of(SOFTMAX, sampler, store=tmp_path / "yes", key="first")
    assert np.array_equal(study_of(SOFTMAX, sampler, store=tmp_path / "yes", key="first").ratios, study.ratios)
    for other in ({"key": "second"}, {"key": "first", "rng": 4}, {"key": "first", "p": 1}):
        with pytest.raises(StoreError, match="must belong to this study"):
            study_of(SOFTMAX, sampler, store=tmp_path / "yes", **other)
    with pytest.raises(ValueError, match="key must be a name"):
        study_of(SOFTMAX, sampler, store=tmp_path / "yes", key="")


def test_nesting_without_end_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        fingerprint(deep)


def test_a_sweep_takes_a_key(tmp_path: Path) -> None:
    options: dict[str, Any] = {"n": (2, 3), "n_pairs": 3, "progress": False, "store": tmp_path}

    def factory(n: int, dim: int, radius: float) -> Any:
        lock = threading.Lock()
        return lambda rng: (lock.locked(), cloud(rng, radius))[1]

    with pytest.raises(ValueError, match="give key="):
        oa.sweep({"a": SOFTMAX}, sampler=factory, **options)
    first = oa.sweep({"a": SOFTMAX}, sampler=factory, key="mine", **options)
    again = oa.sweep({"a": SOFTMAX}, sampler=factory, key="mine", **options)
    assert [s.best.value for s in again.studies] == [s.best.value for s in first.studies]
    with pytest.raises(StoreError, match="must belong to this study"):
        oa.sweep({"a": SOFTMAX}, sampler=factory, key="another", **options)
