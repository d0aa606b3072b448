"""The house: imports run one way, the public names resolve, the modules stay small."""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys

import pytest

import otattn as oa

PACKAGE = pathlib.Path(oa.__file__).parent
# a room imports only from rooms of a lower floor, or from itself
FLOORS = {
    "errors": 0,
    "_validate": 0,
    "_linalg": 0,
    "_files": 0,
    "_progress": 0,
    "_arguments": 0,
    "_tabular": 1,
    "_derivatives": 1,
    "measures": 1,
    "distances": 2,
    "attention": 3,
    "operators": 4,
    "data": 4,
    "models": 5,
    "lipschitz": 5,
    "stability": 6,
    "torch": 6,
    "dynamics": 6,
    "gradient_flow": 7,
    "plotting": 8,
    "report": 9,
    "cli": 10,
    "__main__": 11,
    "__init__": 11,
}
STUB = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: pathlib.Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_rooms(path: pathlib.Path) -> set[str]:
    rooms = set()
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            names = [f"{node.module}.{alias.name}" if node.module == "otattn" else node.module for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("otattn.")}
        # the base package itself is the public interface, which no room may lean on
        if isinstance(node, ast.Import) and any(alias.name == "otattn" for alias in node.names):
            rooms.add("__init__")
    return rooms & (set(FLOORS) | {"__init__"})


def test_imports_point_downwards() -> None:
    upwards = {
        f"{path.relative_to(PACKAGE)} (floor {FLOORS[room(path)]}) imports {other} (floor {FLOORS[other]})"
        for path in MODULES
        for other in imported_rooms(path) - {room(path)}
        if FLOORS[other] >= FLOORS[room(path)]
    }
    assert upwards == set()


# the rooms of lipschitz, each on its floor: what carries a number's error, what is stated, the constants of the theory, the
# bounds, and what puts them side by side
STORIES = {
    "arithmetic": 0,
    "catalogue": 1,
    "theorem": 1,
    "hypotheses": 1,
    "containment": 1,
    "bound": 1,
    "certificate": 1,
    "papers": 1,
    "constants": 2,
    "near": 3,
    "rigorous": 3,
    "local": 3,
    "upper": 3,
    "forms": 3,
    "lower": 3,
    "table": 4,
    "edits": 4,
    "regularity": 4,
    "upper_bound": 4,
    "enclosure": 4,
    "comparison": 4,
    "bounds": 4,
    "relaxations": 4,
}


def stays_on_its_floor(path: pathlib.Path) -> None:
    parts = path.relative_to(PACKAGE / "lipschitz").with_suffix("").parts
    if parts == ("__init__",):
        return
    for node in parsed(path).body:  # an import inside a function makes no circle
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("otattn.lipschitz"):
            continue
        names = (
            [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module == "otattn.lipschitz"
            else [node.module]
        )
        for name in names:
            other = name.split(".")[2]
            assert other == parts[0] or STORIES[other] <= STORIES[parts[0]], f"{parts[0]} imports {other}"
            both = {other, parts[0]}
            assert other == parts[0] or not both <= {"local", "upper", "forms", "lower"}, f"{parts[0]} imports {other}"


def test_lipschitz_has_five_floors() -> None:
    for path in sorted((PACKAGE / "lipschitz").rglob("*.py")):
        stays_on_its_floor(path)


def test_folders_are_small() -> None:
    folders = {path.parent for path in MODULES}
    sizes = {str(f.relative_to(PACKAGE)): len(list(f.glob("*.py"))) for f in folders}
    assert {name for name, size in sizes.items() if size > 21} == set()  # twenty rooms and the door


def test_imports_make_no_circle() -> None:
    """Modules that import each other when they are read, directly or through others."""
    edges: dict[str, set[str]] = {}
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    for name, path in names.items():
        edges[name] = set()
        for node in parsed(path).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("otattn"):
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    edges[name].add(target if target in names else str(node.module))
    edges = {name: {t for t in found if t in names and t != name} for name, found in edges.items()}
    while leaves := {name for name, found in edges.items() if not found}:
        edges = {name: found - leaves for name, found in edges.items() if name not in leaves}
    assert edges == {}


def test_the_direction_check_can_fail(tmp_path: pathlib.Path) -> None:
    wrong = tmp_path / "x.py"
    wrong.write_text("from otattn.lipschitz import Bound\nimport otattn\n", encoding="utf-8")
    assert imported_rooms(wrong) == {"lipschitz", "__init__"}


def test_modules_hold_one_concept() -> None:
    names = {path.relative_to(PACKAGE): path for path in MODULES}
    long = {str(name) for name, path in names.items() if len(path.read_text(encoding="utf-8").splitlines()) > 350}
    assert long == set()
    assert {str(name) for name in names if len(name.parts) > 3} == set()


def test_public_names_resolve_and_are_documented() -> None:
    values = {name: getattr(oa, name) for name in oa.__all__}
    silent = {name for name, value in values.items() if not (value.__doc__ or "").strip()}
    assert {name for name in silent if not name.startswith("__")} == set()


def _fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_the_import_is_light_and_leaves_the_process_alone() -> None:
    code = """
import os, sys, warnings
before = dict(os.environ), list(warnings.filters)
import otattn
print(before == (dict(os.environ), list(warnings.filters)), sorted(
    m for m in ("ot", "cvxpy", "matplotlib", "scipy", "numpy", "joblib", "otattn.lipschitz") if m in sys.modules))
otattn.enclose_lipschitz, otattn.stability_study, otattn.flow, otattn.models, otattn.plotting, otattn.build_report
print(sorted(m for m in ("ot", "cvxpy", "matplotlib", "scipy.stats", "torch", "pandas") if m in sys.modules))
"""
    assert _fresh(code).splitlines() == ["True []", "[]"]


def test_the_stub_lists_what_it_imports() -> None:
    assert isinstance(STUB.body[-1], ast.Assign)
    listed = ast.literal_eval(STUB.body[-1].value)
    imported = [alias.name for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(listed) == sorted(imported) == sorted(oa.__all__)
    assert set(oa.__all__) <= set(dir(oa))
    unknown = "no_such_name"
    with pytest.raises(AttributeError, match=unknown):
        getattr(oa, unknown)


def test_every_module_has_a_docstring_and_imports() -> None:
    for path in MODULES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if path.stem != "__main__":
            assert (importlib.import_module(name).__doc__ or "").strip(), f"{name} has no docstring"


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in pathlib.Path(__file__).parent.rglob("*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
