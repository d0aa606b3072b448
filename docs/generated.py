"""Pages that are read off the library, so that they cannot go stale: reference, theorems, proofs, benchmarks."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import otattn
from otattn.lipschitz.theorem import Theorem

ROOT = Path(__file__).parent.parent

#: Subjects of the reference: title, module that defines what belongs to it, one sentence.
SUBJECTS = {
    "measures": ("Measures and domains", "otattn.measures", "Token measures, and the sets in which tokens lie."),
    "distances": ("Distances", "otattn.distances", "Wasserstein, conditional Wasserstein and Bures-Wasserstein."),
    "attention": ("Attention maps", "otattn.attention", "Every variant, blocks, networks, and your own function."),
    "lipschitz": (
        "Lipschitz constants",
        "otattn.lipschitz",
        "Local constants, lower and upper bounds, enclosures, whole networks, certificates near tokens.",
    ),
    "bounds": ("Closed forms", "otattn.lipschitz.bounds", "One function a theorem: published bounds and our own."),
    "relaxations": ("Relaxations", "otattn.lipschitz.relaxations", "Bounds by optimisation, with certificates."),
    "stability": ("Stability studies", "otattn.stability", "Ratios of distances over many pairs of measures."),
    "samplers": ("Samplers", "otattn.stability.samplers", "Pairs of measures for a study."),
    "dynamics": ("Flows in depth", "otattn.dynamics", "The Transformer PDE: particles, Gaussians, clusters, limits."),
    "gradient_flow": ("Gradient flows", "otattn.gradient_flow", "Which variant is the gradient flow of which energy."),
    "energies": ("Energies", "otattn.gradient_flow.energies", "Energies with their first variations."),
    "models": ("Models", "otattn.models", "Checkpoints, random models, texts."),
    "torch": ("PyTorch", "otattn.torch", "Modules, tensors, and a constant that torch differentiates."),
    "operators": ("Linear operators", "otattn.operators", "Jacobians, singular values, norms from both sides."),
    "plotting": ("Pictures", "otattn.plotting", "One function a result."),
    "report": ("Report and data", "otattn.report", "The report, and the layer that comes with the package."),
    "errors": ("Errors", "otattn.errors", "What is raised, and what is warned of."),
}
#: Rooms of the theory, in the order of reading.
PROOFS = {
    "constants": "Constants of the theory",
    "local": "At one measure",
    "lower": "From below",
    "upper": "From above",
    "regularity": "The three estimates of a field",
    "near": "Near given tokens",
}
RESULTS = ROOT / "benchmarks" / "results"


def write(folder: Path) -> None:
    """Write every generated page below ``folder``."""
    put(folder / "reference" / "index.rst", reference_index())
    for subject, names in subjects().items():
        put(folder / "reference" / f"{subject}.rst", reference(subject, names))
    put(folder / "theory" / "statements.rst", statements())
    put(folder / "theory" / "proofs.rst", proofs())
    put(folder / "theory" / "seeds.rst", seeds_page())
    for old in (folder / "theory" / "proofs").glob("*.rst"):  # of modules that are no more
        if old.stem not in proof_modules():
            old.unlink()
    for module in proof_modules():
        text = heading(module, "=") + f"\n.. automodule:: {module}\n   :members:\n"
        put(folder / "theory" / "proofs" / f"{module}.rst", text)
    benchmarks(folder / "benchmarks")


def put(path: Path, text: str) -> None:
    """Write a page where it changed, so that Sphinx reads only what is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def heading(title: str, line: str) -> str:
    """A title of reStructuredText."""
    return f"{title}\n{line * len(title)}\n"


def subjects() -> dict[str, list[str]]:
    """Every public name of the package, once, under the subject of the module that defines it."""
    found: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    homes = {module: subject for subject, (_, module, _) in SUBJECTS.items()}
    taken: set[int] = set()
    for name in otattn.__all__:
        thing = getattr(otattn, name)
        if not inspect.ismodule(thing):
            found[home(thing, homes)].append(f"otattn.{name}")
            taken.add(id(thing))
    for subject, (_, module, _) in SUBJECTS.items():
        if module == "otattn.errors":
            continue
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            if id(thing) not in taken and not inspect.ismodule(thing):
                found[subject].append(f"{module}.{name}")
                taken.add(id(thing))
    return found


def home(thing: Any, homes: dict[str, str]) -> str:
    """The subject of an object: that of the longest module name which its own begins with."""
    module = thing.__module__
    if module.startswith("otattn.data"):
        return "report"
    return homes[max((m for m in homes if f"{module}.".startswith(f"{m}.")), key=len)]


def reference_index() -> str:
    """The reference by subject."""
    rows = "".join(f"   {subject}\n" for subject in SUBJECTS)
    lines = "".join(f":doc:`{title} <{subject}>`\n    {about}\n" for subject, (title, _, about) in SUBJECTS.items())
    return heading("API reference", "=") + f"\n{lines}\n.. toctree::\n   :hidden:\n\n{rows}"


def reference(subject: str, names: list[str]) -> str:
    """One subject: its names with their first sentences, a page each."""
    title, module, about = SUBJECTS[subject]
    groups = {"Functions": [], "Classes": [], "Values": []}  # type: dict[str, list[str]]
    for name in names:
        parent, _, last = name.rpartition(".")
        thing = getattr(importlib.import_module(parent), last)
        kind = "Classes" if inspect.isclass(thing) else "Functions" if callable(thing) else "Values"
        groups[kind].append(name)
    text = heading(title, "=") + f"\n{about} Defined in ``{module}``.\n"
    for kind, members in groups.items():
        if members:
            listed = "".join(f"   {name}\n" for name in sorted(members, key=str.lower))
            text += f"\n{heading(kind, '-')}\n.. autosummary::\n   :toctree: names\n   :nosignatures:\n\n{listed}"
    return text


def catalogue() -> tuple[Theorem, ...]:
    """The theorems."""
    return otattn.theorems().records


def statements() -> str:
    """The catalogue: one table a quantity, each row with its proof."""
    text = heading("Statements", "=") + (
        "\nEvery statement of the catalogue, read off :func:`otattn.theorems`. :math:`a = \\|A\\| R^2`, :math:`v = \\|V\\|`.\n"
        "For a given map, ``print(oa.theorems(attention, radius=R, n=n))`` says which apply, and why the others do not.\n"
        "The last column is measured: the range of the bound over a witnessed lower one (:doc:`../benchmarks/tightness`).\n"
    )
    ratios = tightness()
    for quantity in dict.fromkeys(record.row()["bounds"] for record in catalogue()):
        text += f"\n{heading(f'Bounds of: {quantity}', '-')}\n.. list-table::\n   :header-rows: 1\n   :widths: 20 32 30 8 10\n\n"
        text += "   * - Theorem\n     - Statement\n     - Hypotheses\n     - Rigorous\n     - Upper / lower\n"
        for record in catalogue():
            row = record.row()
            if row["bounds"] == quantity:
                text += (
                    f"   * - :doc:`{row['theorem']} <proofs/{row['proof']}>`\n       ({row['reference']})\n"
                    f"     - ``{row['statement']}``\n     - {escaped(row['hypotheses'])}\n"
                    f"     - {'yes' if row['rigorous'] else 'no'}\n     - {ratios.get(record.key, '')}\n"
                )
    return text


def tightness() -> dict[str, str]:
    """The range of each theorem's ratios in the table that ``benchmarks.tightness`` wrote."""
    found: dict[str, list[float]] = {}
    for line in (RESULTS / "tightness.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 3 and cells[0] in {record.key for record in catalogue()}:
            found.setdefault(cells[0], []).extend(float(cell) for cell in cells[3:] if cell)
    return {key: f"{min(values):.3g} to {max(values):.3g}" for key, values in found.items()}


def seeds() -> list[Any]:
    """The rows that the tests of ``tests/seeds`` check."""
    folder = ROOT / "tests" / "seeds"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    records = importlib.import_module("seed")
    for module in records.PARTS:
        importlib.import_module(module)
    return sorted(records.SEEDS, key=lambda row: list(records.PARTS.values()).index(row.part))


def seeds_page() -> str:
    """What the papers say: one table a part, each row a test."""
    rows, records = seeds(), importlib.import_module("seed")
    text = heading("What the papers say, statement by statement", "=") + (
        f"\n{len(rows)} statements and experiments of the papers that this package comes from. Each row is a test in\n"
        "``tests/seeds``: it computes the value that stands here and fails where the verdict is wrong. Where no theorem's number\n"
        "is given, we know the statement and not its number; *open* is what the papers ask or leave open, and what we find stands\n"
        "beside it. Counterexamples are in :doc:`papers`.\n\n"
    )
    for verdict in records.VERDICTS:
        found = [row for row in rows if row.verdict == verdict]
        named = ", ".join(f":ref:`{row.key.replace('_', ' ')} <{anchor(row)}>`" for row in found if verdict != "agrees")
        text += f"- **{verdict}** {len(found)}{': ' if named else ''}{named}\n" if found else ""
    for part in dict.fromkeys(row.part for row in rows):
        text += f"\n{heading(part, '-')}\n.. list-table::\n   :header-rows: 1\n   :widths: 50 11 17 22\n\n"
        text += "   * - Statement\n     - Source\n     - Verdict\n     - Function, story\n"
        text += "".join(seed_row(row) for row in rows if row.part == part)
    return text + f"\n{heading('References', '-')}\n" + "".join(f"- {k}: {v}\n" for k, v in records.PAPERS.items())


def anchor(row: Any) -> str:
    """Where a row can be linked."""
    return f"seed-{row.key.replace('_', '-')}"


def seed_row(row: Any) -> str:
    """One row of the table."""
    said = f".. _{anchor(row)}:\n\n{row.statement}\n\n{row.remark}".strip()
    verdict = f"**{row.verdict}**" + (f": {escaped(row.value)}" if row.value else "")
    links = [f":obj:`~{name}`" for name in row.functions]
    if row.story:
        story = row.story.removesuffix(".py")
        links.append(f":doc:`{story.removeprefix('plot_').replace('_', ' ')} <../gallery/{story}>`")
    cells = (said, escaped(row.source), verdict, ", ".join(links))
    return "".join(
        f"   {'*' if k == 0 else ' '} - " + cell.replace("\n", "\n       ") + "\n" for k, cell in enumerate(cells)
    )


def escaped(text: str) -> str:
    """Prose as reStructuredText."""
    return "".join(f"\\{c}" if c in "*`|_\\" else c for c in text)


def proof_modules() -> list[str]:
    """The modules of the theory that have something to read."""
    names = []
    for room in PROOFS:
        package = importlib.import_module(f"otattn.lipschitz.{room}")
        names += [f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"]
    outside = {record.row()["proof"] for record in catalogue()} - set(names)
    return names + sorted(outside)


def proofs() -> str:
    """The map of the theory, then each module with its proofs."""
    text = heading("Proofs", "=") + "\nThe proof of each statement is the docstring of the code that computes it.\n"
    modules = proof_modules()
    for room, title in {**PROOFS, "": "Elsewhere"}.items():
        inside = (
            [m for m in modules if m.startswith(f"otattn.lipschitz.{room}.")]
            if room
            else [m for m in modules if not any(m.startswith(f"otattn.lipschitz.{r}.") for r in PROOFS)]
        )
        if inside:
            text += f"\n{heading(title, '-')}\n"
            for module in inside:
                first = (importlib.import_module(module).__doc__ or "").strip().partition("\n")[0]
                text += f":doc:`{module.removeprefix('otattn.lipschitz.')} <proofs/{module}>`\n    {first}\n"
    return text + "\n.. toctree::\n   :hidden:\n\n" + "".join(f"   proofs/{module}\n" for module in modules)


def benchmarks(folder: Path) -> None:
    """The tables and pictures that the benchmarks wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = sorted(RESULTS.glob("*.md"))
    for picture in RESULTS.glob("*.png"):
        shutil.copyfile(picture, folder / picture.name)
    for page in pages:
        put(folder / page.name, page.read_text(encoding="utf-8"))
    names = "\n".join(page.stem for page in pages)
    put(
        folder / "index.md",
        "# Benchmarks\n\nWhat `python -m benchmarks` measured; each page says on which machine and with which call.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n",
    )
