"""The documentation: every page's code runs, every public name has a page, every page is within reach."""

import importlib.util
import pathlib
import re

import pytest

import otattn as oa

DOCS = pathlib.Path(__file__).parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
generated = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generated)

PAGES = sorted(p for p in DOCS.rglob("*.md") if "```python" in p.read_text(encoding="utf-8"))
LONG = {"start", "enclosures", "flows", "networks"}


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p.stem in LONG else (), id=p.stem) for p in PAGES]
)
def test_code_of_a_page_runs(page: pathlib.Path) -> None:
    scope: dict = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(block, scope)
    assert scope["oa"] is oa


def test_the_torch_page_runs() -> None:
    torch = pytest.importorskip("torch")
    first, second = re.findall(r"```py\n(.*?)```", (DOCS / "pytorch.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict = {}
    exec(first, scope)
    model, tokens = torch.nn.Linear(4, 4), torch.randn(6, 4)
    scope.update(model=model, tokens=tokens, task_loss=model(tokens).square().mean())
    exec(second, scope)
    assert model.weight.grad is not None


def test_every_public_name_has_a_page() -> None:
    listed = [name for names in generated.subjects().values() for name in names]
    assert len(listed) == len(set(listed))
    ends = {name.rpartition(".")[2] for name in listed}
    modules = {name for name in oa.__all__ if isinstance(getattr(oa, name), type(oa))}
    assert set(oa.__all__) - modules <= ends
    assert set(oa.bounds.__all__) <= ends


def test_every_theorem_has_its_row_and_its_proof() -> None:
    table = generated.statements()
    for row in oa.theorems().rows():
        assert f":doc:`{row['theorem']} <proofs/{row['proof']}>`" in table
        assert row["proof"] in generated.proof_modules()


def test_every_page_is_within_reach() -> None:
    for folder in (DOCS, DOCS / "guide"):
        index = (folder / "index.md").read_text(encoding="utf-8")
        for page in folder.glob("*.md"):
            assert page.stem == "index" or re.search(rf"^{page.stem}$", index, flags=re.MULTILINE), page


def test_names_in_the_table_for_users_of_pot() -> None:
    import ot

    rows = re.findall(r"^\| `(ot\.[^`]*)`", (DOCS / "pot.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(rows) >= 8
    for call in rows:
        thing = ot
        for part in re.match(r"ot\.([\w.]+)", call).group(1).split("."):
            assert hasattr(thing, part), call
            thing = getattr(thing, part)
