"""Settings of Sphinx for the documentation: `make site`."""

import tomllib
from pathlib import Path

project = "Steadfast"
release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
html_title = f"Steadfast {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

myst_heading_anchors = 4
# The diagram of architecture.md, in Mermaid, is shown as text: its renderer is loaded from a network.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Docstrings are Markdown in places: `name` is code, not a cross-reference.
default_role = "code"
