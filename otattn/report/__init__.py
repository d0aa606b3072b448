"""The main job: one report on a layer of attention, in Markdown, JSON and pictures."""

import lazy_loader  # type: ignore[import-untyped]

# the command line needs the folder of the output before it needs the sections, which load the whole package
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"build": ["build_report"], "section": ["Section"], "stability_section": ["LayerPairs"]},
)
