"""Small changes of a module's formulas, found in its syntax tree (for `benchmarks.mutation`)."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "least": "max", "argmin": "argmax"}
"""Functions and methods that take one another's place."""
SKIPPED = (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert)
"""Messages, types and imports are no formulas."""
QUIET = ("__repr__", "__str__", "_repr_html_", "plot")
MEMORY = ("_BLOCK", "MAX_BYTES", "ASSIGNMENT_BYTES", "SIMPLEX_BYTES", "__all__")
"""Names whose numbers only bound memory."""


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` at bytes ``start`` to ``stop`` of the module; lines ``first`` to ``last`` are its statement."""

    path: str
    line: int
    old: str
    new: str
    start: int
    stop: int
    first: int
    last: int
    code: str

    @property
    def key(self) -> str:
        return f"{self.path}: {self.code} | {self.old} -> {self.new}"

    @classmethod
    def of_text(cls, path: str, source: bytes, old: str, new: str) -> Mutant | None:
        """The mutant that replaces a text; None when the module does not hold it (any more)."""
        start = source.find(old.encode())
        if start < 0:
            return None
        line = source[:start].count(b"\n") + 1
        return cls(path, line, old, new, start, start + len(old.encode()), line, line, _line(source, start))

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def _line(source: bytes, start: int) -> str:
    """The line of a byte, stripped, with a mark before that byte: it stays when lines above are added."""
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", start)
    return f"{source[first:start].decode()}^{source[start:last].decode()}".strip()


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a module."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    out = []
    for node, (first, last) in _expressions(ast.parse(source)):
        a = starts[node.lineno - 1] + node.col_offset
        b = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        text = source[a:b].decode()
        for new in dict.fromkeys(_changes(node)):
            if new != text:
                out.append(Mutant(path, node.lineno, " ".join(text.split()), new, a, b, first, last, _line(source, a)))
    return out


def _expressions(tree: ast.AST) -> Iterator[tuple[ast.expr, tuple[int, int]]]:
    """Expressions of formulas, with the lines of their statements."""

    def walk(node: ast.AST, span: tuple[int, int]) -> Iterator[tuple[ast.expr, tuple[int, int]]]:
        if isinstance(node, SKIPPED) or (isinstance(node, ast.FunctionDef) and node.name in QUIET):
            return
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in MEMORY for t in node.targets):
            return
        if isinstance(node, ast.stmt):
            # of a compound statement, the line of the expression itself
            body = hasattr(node, "body")
            span = (0, 0) if body else (node.lineno, node.end_lineno or node.lineno)
        if isinstance(node, ast.expr):
            yield node, span if span[0] else (node.lineno, node.end_lineno or node.lineno)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "slice"):
                continue
            if isinstance(node, ast.keyword) and node.arg in ("axis", "ndmin", "keepdims", "strict", "dtype", "out"):
                continue
            if isinstance(node, ast.AnnAssign) and name == "target":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, span)

    return walk(tree, (0, 0))


def _changes(node: ast.expr) -> Iterator[str]:
    """What may stand in the place of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        v = node.value
        yield from (repr(w) if w >= 0 else f"({w!r})" for w in (2 * v, 0 * v, v + 1, -v) if w != v)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new = copy.copy(node)
        new.op = OPERATORS[type(node.op)]()
        yield f"({ast.unparse(new)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for op in COMPARISONS.get(type(node.ops[0]), ()):
            yield f"({ast.unparse(ast.Compare(node.left, [op()], node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[str]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in NAMES:
        func = copy.copy(node.func)
        setattr(func, "id" if isinstance(func, ast.Name) else "attr", NAMES[name])
        yield ast.unparse(ast.Call(func, node.args, node.keywords))
    elif name == "sqrt" and len(node.args) == 1:
        yield f"({ast.unparse(node.args[0])})"
