# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the navigation tree of a page from titles alone.

The theme asks for the titles of all pages on every page. Sphinx copies the tables of contents of
all pages with their sections first, and then drops the sections: three quarters of the time of a
build. Here the sections are dropped once.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes

EARLIER = 400
"""Priority of the handler; the theme builds its tree at 500."""


def connect(app: Any) -> None:
    """Connect the handler to a build."""
    app.connect("html-page-context", use_titles, priority=EARLIER)


def use_titles(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Replace the function of a page that returns the navigation tree by one that reads titles."""
    del page, template, doctree
    whole_tree = context.get("toctree")
    if whole_tree is None:
        return

    def tree(**options: Any) -> Any:
        if not options.get("titles_only"):
            return whole_tree(**options)
        contents = app.env.tocs
        app.env.tocs = _titles(app.env)
        try:
            return whole_tree(**options)
        finally:
            app.env.tocs = contents

    context["toctree"] = tree


def _titles(env: Any) -> dict[str, nodes.Element]:
    """Return the table of contents of each page without its sections, made once."""
    if not hasattr(env, "title_tocs"):
        env.title_tocs = {name: without_sections(contents) for name, contents in env.tocs.items()}
    return env.title_tocs


def without_sections(contents: nodes.Element) -> nodes.Element:
    """Return a table of contents with its titles and links to other pages alone.

    Args:
        contents: Bullet list of a page; not changed.
    """
    titles = contents.deepcopy()
    for item in titles.children:
        if len(item) > 1:
            subtrees = list(item.findall(addnodes.toctree))
            if subtrees:
                item[1][:] = subtrees
            else:
                item.pop(1)
    return titles
