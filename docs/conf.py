"""Sphinx configuration of the site: `sphinx-build -W -b html docs site`."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "ort_dynamo"
author = "the ort_dynamo authors"
version = release = installed_version("ort-dynamo")
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"ort_dynamo {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": []}  # the sources of a page are in no public place yet
html_show_copyright = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"
