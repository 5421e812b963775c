"""Sphinx settings. `make docs` builds with -W -n: a warning or a dangling reference is an error."""

from __future__ import annotations

import trainpath

project = "trainpath"
author = "The trainpath authors"
copyright = "The trainpath authors"
version = release = trainpath.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"trainpath {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# The two fixed paragraphs of every component's docstring: prose, not lists of parameters.
napoleon_custom_sections = ["Cost", "Guarantee"]
# Docstrings write code as Markdown does, in single backticks.
default_role = "code"

# References to our own documented names must resolve. Those into torch, numpy and the standard
# library, and private names in annotations, have no inventory: the build uses no network.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!trainpath\.)[\w.\[\], |]*"),
    (r"py:.*", r"trainpath\.(\w+\.)*_\w+(\.\w+)*"),
]
