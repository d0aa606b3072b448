"""The built site in a browser (``python -m sphinx -W docs site`` builds it): search, formulas, pictures, narrow windows."""

import pathlib
import re

import pytest
from browser import rendered

SITE = pathlib.Path(__file__).parent.parent / "site"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SITE / "index.html").exists(), reason="the site is not built: python -m sphinx -W docs site"
    ),
]


def test_search_finds_bures(tmp_path: pathlib.Path) -> None:
    found = rendered((SITE / "search.html").as_uri() + "?q=Bures", tmp_path)
    results = re.search(r'<ul[^>]*class="search"[^>]*>(.*?)</ul>', found, flags=re.DOTALL)
    assert results is not None
    assert "bures_wasserstein" in results.group(1)


def test_formulas_are_rendered_without_a_network(tmp_path: pathlib.Path) -> None:
    found = rendered((SITE / "index.html").as_uri(), tmp_path)
    assert found.count("<mjx-container") >= 3
    assert "<mjx-merror" not in found
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', found)


def test_the_gallery_shows_pictures(tmp_path: pathlib.Path) -> None:
    page = (SITE / "gallery" / "index.html").read_text(encoding="utf-8")
    stories = set(re.findall(r'href="(plot_\w+)\.html', page))
    assert len(stories) >= 18
    pictures = set(re.findall(r'<img[^>]*src="([^"]+thumb[^"]*)"', page))
    assert len(pictures) >= 18
    assert all((SITE / "gallery" / picture).stat().st_size > 1000 for picture in pictures)


@pytest.mark.parametrize(
    "page", ["index", "start", "guide/networks", "theory/map", "theory/statements", "reference/bounds"]
)
def test_a_narrow_window_is_wide_enough(tmp_path: pathlib.Path, page: str) -> None:
    original = SITE / f"{page}.html"
    check = "<script>addEventListener('load', () => {document.title = document.documentElement.scrollWidth <= innerWidth})</script>"
    copy = original.with_name(f"narrow-{tmp_path.name}.html")
    copy.write_text(original.read_text(encoding="utf-8").replace("</body>", f"{check}</body>"), encoding="utf-8")
    try:
        found = rendered(copy.as_uri(), tmp_path, width=500)
    finally:
        copy.unlink()
    assert "<title>true</title>" in found


TASKS = {
    "a first constant": "oa.stability_ratio(attention, X, Y)",
    "the own layer": "SoftmaxAttention.from_qkv(",
    "the own model": "oa.load_model(",
    "the own map": "oa.FunctionAttention(",
    "an enclosure": "oa.enclose_lipschitz(",
    "a certified neighbourhood": "oa.certify(",
    "a flow": "oa.flow(",
    "a check of gradient flow": "oa.check_gradient_flow(",
    "a study that goes on": "store=",
    "how to cite": "How to cite",
}


def readable(page: pathlib.Path) -> str:
    """The text of a page's article, without marks."""
    article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert article is not None, page
    return re.sub(r"<[^>]*>", "", article.group()).replace("&quot;", '"')


def pages_within(clicks: int) -> set[pathlib.Path]:
    """Pages that a reader of the first page reaches by so many clicks."""
    found = new = {SITE / "index.html"}
    for _ in range(clicks):
        links = {
            (page.parent / target).resolve()
            for page in new
            for target in re.findall(r'<a[^>]*href="([^":#]+\.html)', page.read_text(encoding="utf-8"))
        }
        new = {link for link in links if link.is_relative_to(SITE.resolve()) and "_modules" not in link.parts} - found
        found = found | new
    return found


@pytest.mark.parametrize("task", TASKS)
def test_a_task_of_a_newcomer_is_two_clicks_away(task: str) -> None:
    """In prose of the guide or the start, not only in the reference."""
    pages = {page for page in pages_within(2) if page.parent.name in ("site", "guide")}
    assert any(TASKS[task] in readable(page) for page in pages), sorted(page.name for page in pages)
