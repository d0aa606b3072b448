"""A seed: one statement or experiment of the papers, and the test that checks its verdict.

A row of ``docs/theory/seeds.rst`` is a test function below this folder::

    @seed(CAP24, "agrees", "otattn.lipschitz_lower_bound", value="1.41", story="plot_enclosure.py")
    def test_name_of_the_row() -> float:
        '''Statement, as rst. What else is to be said comes in further paragraphs.'''
        ...
        return number

The module is one of ``PARTS``. Numbers that ``value`` prints are those that the test returns, in this
order and rounded as printed (see :func:`agree`).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PARTS = {
    "test_seeds_maps": "Attention as a map of measures",
    "test_seeds_local": "Local constants",
    "test_seeds_upper": "Upper bounds",
    "test_seeds_lower": "Lower bounds, and how they grow",
    "test_seeds_masked": "Masked attention",
    "test_seeds_estimates": "The three estimates of a field",
    "test_seeds_flows": "The Transformer PDE",
    "test_seeds_clusters": "Clusters",
    "test_seeds_gaussians": "Gaussians",
    "test_seeds_limits": "Limits of Gaussian flows",
    "test_seeds_gradient_flows": "Gradient flows",
    "test_seeds_samples": "Finitely many tokens of a law",
    "test_seeds_experiments": "Experiments on text",
}
VERDICTS = ("agrees", "differs", "false as printed", "open", "not reproduced")

CAP24, CACP25, KPM21, SABP22, VBC20 = "CAP24", "CACP25", "KPM21", "SABP22", "VBC20"
GLPR23, GLPR24, BKKRW25, BLPV25, KPR24 = "GLPR23", "GLPR24", "BKKRW25", "BLPV25", "KPR24"
TALKS, CODE = "talks", "code"

PAPERS = {
    CAP24: "Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024",
    CACP25: "Castin, Ablin, Carrillo, Peyré, *A Unified Perspective on the Dynamics of Deep Transformers*, arXiv:2501.18322",
    KPM21: "Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021",
    SABP22: "Sander, Ablin, Blondel, Peyré, *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022",
    VBC20: "Vuckovic, Baratin, Tachet des Combes, *A Mathematical Theory of Attention*, arXiv:2007.02876",
    GLPR23: "Geshkovski, Letrouit, Polyanskiy, Rigollet, *The Emergence of Clusters in Self-Attention Dynamics*, NeurIPS 2023",
    GLPR24: "Geshkovski, Letrouit, Polyanskiy, Rigollet, *A Mathematical Perspective on Transformers*, arXiv:2312.10794",
    BKKRW25: "Burger, Kabri, Korolev, Roith, Weigand, *Analysis of Mean-Field Models Arising from Self-Attention Dynamics in "
    "Transformer Architectures with Layer Normalization*, Phil. Trans. R. Soc. A 383, 2025",
    BLPV25: "Bohbot, Letrouit, Peyré, Vialard, *Token Sample Complexity of Attention*, arXiv:2512.10656",
    KPR24: "Karagodin, Polyanskiy, Rigollet, *Clustering in Causal Attention Masking*, arXiv:2411.04990",
    TALKS: "slides of talks on these papers",
    CODE: "published code for local constants, as reported to us",
}

Number = float | Sequence[float] | None


@dataclass(frozen=True)
class Seed:
    """One row of the table."""

    key: str
    part: str
    statement: str
    remark: str
    source: str
    verdict: str
    functions: tuple[str, ...]
    story: str | None
    value: str


SEEDS: list[Seed] = []


def seed(
    source: str, verdict: str, *functions: str, value: str = "", story: str | None = None, slow: bool = False
) -> Callable[[Callable[[], Number]], Callable[[], None]]:
    """Make a row of a test: it passes when its own assertions hold and the numbers of ``value`` are those that it returns."""

    def recorded(test: Callable[[], Number]) -> Callable[[], None]:
        statement, _, remark = inspect.cleandoc(test.__doc__ or "").partition("\n\n")
        SEEDS.append(
            Seed(
                test.__name__.removeprefix("test_"),
                PARTS[test.__module__],
                statement,
                remark,
                source,
                verdict,
                functions,
                story,
                value,
            )
        )

        @functools.wraps(test)
        def run() -> None:
            found = test()
            agree(value, () if found is None else found if isinstance(found, Sequence) else (found,))

        pytest = sys.modules.get("pytest")  # the documentation reads the records without it
        return pytest.mark.slow(run) if slow and pytest else run

    return recorded


def agree(printed: str, found: Sequence[float]) -> None:
    """Raise where a printed number is not the computed one, in the digits in which it is printed.

    Numbers stand free in the text: those of names (``W_2``) and bounds in words (``below one``) are none.
    """
    numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)", printed)
    assert len(numbers) == len(found), f"{printed!r} prints {len(numbers)} numbers, the test returned {len(found)}"
    for number, value in zip(numbers, found, strict=True):
        mantissa, e, _ = number.partition("e")
        rounded = f"{value:.{len(mantissa.partition('.')[2])}{'e' if e else 'f'}}"
        assert float(rounded) == float(number), f"{printed!r} prints {number}, computed is {value:.6g}"
