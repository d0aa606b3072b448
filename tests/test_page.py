"""The report as one page: what stands in it, and in a browser that it sorts and fits."""

import html.parser
import pathlib
import re

import pytest
from browser import rendered

from otattn.report.page import html_page
from otattn.report.section import Section, cells, table

ROWS = [["0", "3", "10^2.5", "b"], ["1", "-20", "7", "a"], ["2", "0.5", "inf", "-"], ["3", "0", "10^-3.0", "[0.1, 2]"]]
HEADER = ["head", "||A|| R^2", "lower", "a <b> & c"]
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="10"></svg>'


def page() -> str:
    lines = ["A *word* and `code`, 1 < 2.", "", *table(HEADER, ROWS), "The end."]
    sections = [Section("First part", lines, {}, {"a.png": object}), Section("Second", [], {}, {"b.png": object})]
    return html_page("Title & more", "About", sections, {"a.png": SVG, "b.png": "no font"})


def test_bars_in_cells_survive_markdown() -> None:
    header, rule, first, *_ = table(HEADER, ROWS)
    assert header.replace(r"\|", "").count("|") == rule.count("|") == first.count("|") == 5
    assert cells(header) == HEADER


def test_a_page_is_well_formed_and_complete() -> None:
    seen: list[str] = []
    void = {"meta", "img"}

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list) -> None:
            if tag not in void:
                seen.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert seen.pop() == tag

    text = page()
    Reader().feed(text)
    assert not seen
    assert "<em>word</em> and <code>code</code>, 1 &lt; 2." in text
    assert "a &lt;b&gt; &amp; c" in text
    assert text.count("<tr>") == 5
    assert "b.png was not drawn: no font" in text
    anchors = re.findall(r'href="#([^"]+)"', text)
    assert anchors == re.findall(r'<section id="([^"]+)"', text) == ["first-part", "second"]
    assert 'title="a value that some measures attain' in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_browser_tables_sort_and_nothing_is_wider_than_the_window(tmp_path: pathlib.Path, width: int) -> None:
    check = """<script>
      const order = () => [...document.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent).join('');
      const buttons = document.querySelectorAll('th button'), said = [];
      for (const k of [1, 1, 2, 3]) { buttons[k].click(); said.push(order()); }
      document.title = said.join(' ') + ' ' + (document.documentElement.scrollWidth <= window.innerWidth);
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page().replace("</body>", check), encoding="utf-8")
    found = rendered(file.as_uri(), tmp_path, width)
    # by norm: -20, 0, 0.5, 3, and back; by lower: 10^-3, 7, 10^2.5, inf; by the last: the number first, then the words
    assert re.search(r"<title>([^<]*)</title>", found).group(1) == "1320 0231 3102 3210 true"
