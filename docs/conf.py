"""The site: `make docs`. Pages of methods, commands and names are made from the package by `_ext/generated.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from fedloom import __version__  # noqa: E402

project = "fedloom"
author = project_copyright = "The fedloom developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery", "generated"]
exclude_patterns = ["_build", "gallery/GALLERY_HEADER.rst", "results/tables", "results/verdicts.md"]  # parts of pages

html_theme = "furo"
html_title = f"fedloom {release}"
for name in ("extra", "pictures"):  # what `generated` fills, and Sphinx looks for before
    (HERE / "_generated" / name).mkdir(parents=True, exist_ok=True)
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_generated/extra"]
html_show_sphinx = False
templates_path: list[str] = []

# `:::` for the directives of pages that are read on the site only; TeX between dollars; anchors of headings, for links
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
html_math_renderer = "mathml"  # of `_ext/formulas.py`: TeX without a script from elsewhere
myst_heading_anchors = 4
# lexers that Pygments lacks or that code in our docstrings is not
highlight_language = "text"

# docstrings are plain text, not reStructuredText: `generated` sets them
autodoc_typehints = "signature"
autodoc_member_order = "alphabetical"

sphinx_gallery_conf = {
    "examples_dirs": ["gallery"],
    "gallery_dirs": ["_generated/gallery"],
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "write_computation_times": False,  # its page loads scripts from elsewhere
    "within_subsection_order": "FileNameSortKey",
    "min_reported_time": 20,
}
# sphinx-gallery puts functions into its configuration
suppress_warnings = ["config.cache"]
