"""The report as one HTML file: pictures inline, tables that sort, what each column means, light and dark, printable."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otattn.report.section import Section, cells

__all__ = ["html_page"]

HERE = Path(__file__).parent

MEANINGS = {
    r"head|variant|attention|t": "",
    r"real tokens": "the local constant at the tokens that were given",
    r"lower|.*: largest \(certified\)": "a value that some measures attain, so the constant is at least this",
    r"upper": "a theorem over all tokens of the ball, so the constant is at most this",
    r"upper / lower": "how far the two ends of the enclosure are apart; 1 is exact",
    r"published.*": "the bound of Castin, Ablin and Peyré (n tokens) or Geshkovski et al. (any measure)",
    r"ours.*": "our bound of the same quantity",
    r"upper bound by": "the theorem that won; its statement and proof are in the documentation",
    r"median": "the middle ratio of all pairs",
    r"95% of the median": "an interval that holds the median of all such pairs with 95 percent confidence",
    r"n = \d+": "the local constant at the first n tokens, mean over windows",
    r"growth exponent": "the power of n that fits these values, with its standard error",
    r"crossover n.*": "from so many tokens on the bound without n is the smaller one",
    r"ratio": "W_2 of two flows that started close, over its value at the start",
    r"log10.*": "a power of ten, since the number itself does not fit into floats",
    r"radius": "the largest token norm",
    r"clusters": "groups of tokens that are closer to one another than to the rest",
    r"field|wasserstein|twisted|mobility|bures|dissipation": "0 where the structure holds (1e-16 is rounding); a dash: not asked",
    r"verdict": "the strongest structure that holds",
    r"followed_until": "the time at which the integration ended: 50, the blow-up, or where a thousand steps were not enough",
    r"blow_up_time": "the time at which the covariance becomes infinite; inf where it never does",
    r"limit_rank": "the rank of the limit of the covariance",
}


def html_page(title: str, about: str, sections: Sequence[Section], pictures: Mapping[str, bytes | str]) -> str:
    """The whole page.

    Parameters
    ----------
    title, about : str
    sections : sequence of Section
    pictures : mapping of str to bytes or str
        Of each picture's file name, its SVG; a str is the reason why it was not drawn.
    """
    style, script = ((HERE / f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    anchors = [re.sub(r"\W+", "-", section.title.lower()) for section in sections]
    contents = "".join(
        f'<li><a href="#{anchor}">{_text(section.title)}</a></li>'
        for anchor, section in zip(anchors, sections, strict=True)
    )
    body = "".join(
        f'<section id="{anchor}"><h2>{_text(section.title)}</h2>\n{_lines(section.lines)}'
        + "".join(_figure(section.title, name, pictures.get(name, "not drawn yet")) for name in section.pictures)
        + "</section>\n"
        for anchor, section in zip(anchors, sections, strict=True)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head>\n<body><main><h1>{_text(title)}</h1><p>{_text(about)}</p>"
        f'<nav aria-label="Contents"><ol>{contents}</ol></nav>\n{body}</main><script>{script}</script></body></html>\n'
    )


def _figure(title: str, name: str, picture: bytes | str) -> str:
    if isinstance(picture, str):
        return f'<p class="missing">{_text(f"{name} was not drawn: {picture}")}</p>'
    coded = base64.b64encode(picture).decode("ascii")
    return f'<figure><img alt="{_text(f"{title}: {name}")}" src="data:image/svg+xml;base64,{coded}"></figure>'


def _lines(lines: Sequence[str]) -> str:
    """Paragraphs and tables of a section."""
    parts, rows, prose = [], [], []  # type: list[str], list[list[str]], list[str]
    for line in [*lines, ""]:
        if line.startswith("|"):
            rows.append(cells(line))
            continue
        if rows:
            parts.append(_table(rows))
            rows = []
        if line:
            prose.append(line)
        elif prose:
            parts.append(f"<p>{_text(' '.join(prose))}</p>\n")
            prose = []
    return "".join(parts)


def _table(rows: list[list[str]]) -> str:
    header, _, *body = rows
    meanings = {name: found for name in header if (found := _meaning(name))}
    heads = "".join(
        f"<th{_title(meanings.get(name))}><button type='button'>{_text(name)}</button></th>" for name in header
    )
    table = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in body)
    notes = "".join(f"<dt>{_text(name)}</dt><dd>{_text(what)}</dd>" for name, what in meanings.items())
    foot = f"<details><summary>What the columns mean</summary><dl>{notes}</dl></details>" if notes else ""
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{table}</tbody></table></div>{foot}\n'


def _meaning(name: str) -> str:
    return next((what for pattern, what in MEANINGS.items() if re.fullmatch(pattern, name)), "")


def _title(meaning: str | None) -> str:
    return f' title="{html.escape(meaning)}"' if meaning else ""


def _text(text: Any) -> str:
    """Text as HTML, with the code and the emphasis of Markdown."""
    safe = html.escape(str(text))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", safe)
