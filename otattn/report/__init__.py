"""The main job: one report on a layer of attention, in Markdown, JSON and pictures."""

from otattn.report.build import build_report
from otattn.report.section import Section
from otattn.report.stability_section import LayerPairs

__all__ = ["LayerPairs", "Section", "build_report"]
