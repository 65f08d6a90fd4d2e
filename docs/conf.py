"""Sphinx configuration. Build with ``python -m sphinx -W docs docs/_build``."""

import pymc_sghmc

project = "pymc_sghmc"
author = "The pymc_sghmc developers"
version = release = pymc_sghmc.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}  # .rst: numpydoc asks for it
autosummary_generate = False
exclude_patterns = ["_build", "papers"]  # papers/ holds parts of papers.md
suppress_warnings = ["toc.empty_glob"]  # decisions/ may be empty

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"
numpydoc_show_class_members = False

html_theme = "alabaster"
html_theme_options = {"description": "Stochastic-gradient MCMC step methods for PyMC"}
