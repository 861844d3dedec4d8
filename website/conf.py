"""The site: the pages of `docs/` and the reference, which is made from docstrings. `make site` builds it.

Sphinx reads the whole clone, so that the pages' links mean the same here and in an editor: a link to a
page becomes a link, and one to any other file becomes a download.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

WEBSITE = Path(__file__).parent
sys.path[:0] = [str(WEBSITE), str(WEBSITE.parent)]

import cudnn_actor  # noqa: E402 - this clone's

gc.disable()  # nearly all that is made stays until the end: the nodes of the pages

project = "cudnn-actor"
author = "The cudnn-actor authors"
project_copyright = author
version = release = cudnn_actor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "public_names"]
root_doc = "website/index"
include_patterns = ["website/index.md", "website/reference/*", "docs/*.md", "*.md"]
exclude_patterns = [  # folders that need not be searched
    path.name for path in WEBSITE.parent.iterdir() if path.is_dir() and path.name not in ("docs", "website")
]

myst_heading_anchors = 4

default_role = "py:obj"  # a name in a docstring is a link where it is a public one, else plain code
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # what an operation overrides is documented at `Operation`
toc_object_entries = False  # the sidebar does not list the thousand names of the reference
smartquotes = False
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"cudnn-actor {release}"
html_extra_path = ["public"]
html_copy_source = False
