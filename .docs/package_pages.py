# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Copies the README.md of every package into the site, with links that hold there."""

from __future__ import annotations

import os
import pathlib
import re

from indexes import first_sentence, index_page

PACKAGES = ("jaxmoe", "sharding", "pallas_kernels", "experiments")

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def page_name(readme: pathlib.Path, root: pathlib.Path) -> str:
    """Return the name of the page of a package: `jaxmoe.routing` for jaxmoe/routing/README.md."""
    return ".".join(readme.parent.relative_to(root).parts)


def write(root: pathlib.Path, target: pathlib.Path) -> None:
    """Write one page for each README.md below the four packages, and an index of them.

    Args:
        root: Root of the repository.
        target: Folder of the generated pages; created when it does not exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    readmes = sorted(path for package in PACKAGES for path in (root / package).rglob("README.md"))
    pages = {readme: page_name(readme, root) for readme in readmes}
    for readme, name in pages.items():
        text = readme.read_text(encoding="utf-8")
        (target / f"{name}.md").write_text(_relinked(text, readme, pages, root), encoding="utf-8")
    entries = {
        name: first_sentence(readme.read_text(encoding="utf-8")) for readme, name in pages.items()
    }
    (target / "index.md").write_text(index_page("Packages", entries), encoding="utf-8")


def _relinked(
    text: str, readme: pathlib.Path, pages: dict[pathlib.Path, str], root: pathlib.Path
) -> str:
    """Return a README with links to other READMEs as links to pages, and to files as their path."""

    def replaced(match: re.Match[str]) -> str:
        path = pathlib.Path(os.path.normpath(readme.parent / match[1]))
        for candidate in (path, path / "README.md"):
            if candidate in pages:
                return f"]({pages[candidate]}.md)"
        if not path.exists():
            raise FileNotFoundError(f"{readme.relative_to(root)} links to {match[1]}: no such file")
        return f"](project:#file)<!-- {path.relative_to(root)} -->"

    text = _LINK.sub(replaced, text)
    # A link to a source file has no page: its text stays.
    return re.sub(r"\[([^\]]*)\]\(project:#file\)<!-- [^>]* -->", r"\1", text)
