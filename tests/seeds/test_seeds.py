"""The table of the papers' statements: every row names what exists, and a wrong number in it is noticed."""

import importlib.util
import re
from pathlib import Path

import pytest
from seed import PAPERS, VERDICTS, agree

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
generated = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generated)
SEEDS = generated.seeds()
NAMES = {name for names in generated.subjects().values() for name in names}


def test_there_are_ninety_rows_each_with_its_own_key() -> None:
    assert len(SEEDS) >= 90
    assert len({row.key for row in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("row", SEEDS, ids=lambda row: row.key)
def test_what_a_row_names_exists(row) -> None:
    assert row.functions
    assert NAMES.issuperset(row.functions)
    assert row.story is None or (ROOT / "examples" / row.story).is_file()
    assert row.verdict in VERDICTS
    assert all(source.partition(",")[0] in PAPERS for source in row.source.split("; "))
    assert row.statement.endswith((".", "?"))
    assert row.verdict == "agrees" or row.remark, "what differs must be said"


def test_every_story_that_reproduces_these_papers_has_a_row() -> None:
    told = {row.story for row in SEEDS}
    for story in (ROOT / "examples").glob("plot_*.py"):
        text = story.read_text(encoding="utf-8")
        authors = re.findall(r"Reproduces:.*?\n\n", text, flags=re.DOTALL)
        if authors and re.search("Castin|Geshkovski|Sinkformers|Bohbot", authors[0]):
            assert story.name in told, story.name


@pytest.mark.parametrize(
    ("printed", "found"),
    [("1.127 > 1", (1.1274, 1.0)), ("W_2 grows like n^0.24", (0.2399,)), ("1.2e-05, -3", (1.23e-5, -3.2)), ("", ())],
)
def test_numbers_that_agree(printed, found) -> None:
    agree(printed, found)


@pytest.mark.parametrize(
    ("printed", "found"), [("1.127", (1.126,)), ("1.127", ()), ("n^0.24", (0.25,)), ("2, 3", (2.0,)), ("no", (1.0,))]
)
def test_numbers_that_do_not_agree(printed, found) -> None:
    with pytest.raises(AssertionError):
        agree(printed, found)


def test_the_page_has_every_row() -> None:
    page = generated.seeds_page()
    assert all(page.count(f".. _{generated.anchor(row)}:") == 1 for row in SEEDS)
    assert all((f"<{generated.anchor(row)}>`" in page) == (row.verdict != "agrees") for row in SEEDS)
