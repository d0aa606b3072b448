"""Sphinx: one command builds the site, ``python -m sphinx -W docs site``."""

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "examples"), os.environ.get("PYTHONPATH")]))

import gallery  # noqa: E402
import generated  # noqa: E402

import otattn  # noqa: E402

project = "otattn"
author = copyright = "The otattn developers"
release = version = otattn.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinx-mathjax-offline",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns = ["_build", "_templates"]
suppress_warnings = ["config.cache", "ref.citation"]  # citations are named in running text
templates_path = ["_templates"]
default_role = None
nitpicky = False

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "substitution"]
myst_substitutions = {"version": version}
myst_heading_anchors = 3

autosummary_generate = True
autosummary_imported_members = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

html_theme = "pydata_sphinx_theme"
html_title = "otattn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_prev_next": False,
    "navbar_align": "left",
    "header_links_before_dropdown": 5,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False

PICTURES = Path(tempfile.gettempdir()) / f"otattn-pictures-{os.getuid()}"
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_(?!trained_with_penalty)",  # that one needs torch, and shows its stored picture
    "ignore_pattern": r"_gallery\.py",
    "copyfile_regex": r"never copied",
    "image_scrapers": (gallery.Pictures(PICTURES),),
    "reset_argv": gallery.Arguments(PICTURES),
    "reset_modules": (),
    "within_subsection_order": gallery.Order,
    "first_notebook_cell": gallery.first_cell(),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "parallel": 2,
    "plot_gallery": os.environ.get("OTATTN_GALLERY", "run") == "run",
}

generated.write(HERE)
