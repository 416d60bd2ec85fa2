# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configures Sphinx: Markdown (MyST) and notebooks, theme furo, generated reference and tables.

`make docs` builds the site into `.docs/_build/html` and fails on a warning.
"""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import combination_page  # noqa: E402  (after the path that it is found on)
import flag_tables  # noqa: E402
import navigation  # noqa: E402
import package_pages  # noqa: E402
import reference_pages  # noqa: E402

project = "jaxmoe"
author = "The jaxmoe authors"
copyright = "2026, The jaxmoe authors"
extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"  # the outputs are in the files: tests/support/notebooks.py
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jaxmoe"
html_copy_source = False
suppress_warnings = ["ref.python"]  # a bare class name of a signature may be ambiguous


def write_generated_pages(app) -> None:
    """Write the pages that are derived from the sources, before Sphinx reads any."""
    target = HERE / "generated"
    package_pages.write(HERE.parent, target / "packages")
    reference_pages.write(HERE.parent, target / "reference")
    flag_tables.write(target / "flags")
    combination_page.write(target)


def setup(app) -> None:
    """Connect the generators to the events of a build."""
    app.connect("builder-inited", write_generated_pages)
    navigation.connect(app)
