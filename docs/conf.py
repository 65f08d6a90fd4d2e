"""Sphinx configuration. Build with ``python -m sphinx -W -n docs docs/_build``."""

import os
import sys

from pathlib import Path

import pymc_sghmc

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import api
import inventories

DOCS = Path(__file__).parent

project = "pymc_sghmc"
author = "The pymc_sghmc developers"
copyright = author
version = release = pymc_sghmc.__version__

extensions = [
    "api",
    "decisions",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax is copied into the site: no network is needed to read it
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
]
# jupyter_execute is written by the build; reference/papers/ holds parts of papers.md
exclude_patterns = ["_build", "jupyter_execute", "reference/papers"]
suppress_warnings = ["mystnb.unknown_mime_type"]  # PyMC's progress bars, where one is shown
highlight_language = "none"  # blocks without a language are commands and what they print
nitpicky = True
nitpick_ignore = [("py:obj", "np.memmap")]  # by its everyday name in a docstring
default_role = "autolink"  # a name in single backticks in a docstring is a link where it can be one
templates_path = ["_templates"]

# Text and notebooks: pages that begin with a notebook header are executed, the others are text.
myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"  # a page is executed again when its code has changed
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

# API pages
autosummary_generate = True
autosummary_context = {"api_members": api.MEMBERS}
maximum_signature_line_length = 70  # above it each argument has a line of its own
autodoc_typehints = "none"  # the docstrings have the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

# With a network the neighbours' own inventories are read; without one, a list of what we link to.
intersphinx_mapping = inventories.mapping(
    DOCS / "_ext/inventories.txt",
    DOCS / "_build/inventories",
    online="READTHEDOCS" in os.environ or "GITHUB_ACTIONS" in os.environ,
)

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "pymc_sghmc"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navigation_depth": 3,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"index": []}
