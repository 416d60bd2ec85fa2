# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Page of the endpoint, one file for browsers: a conversation, and what the engine does.

page.html         elements                  page.css          how they look
conversation.js   bodies, events, the part of a conversation that fits
markdown.js       Markdown as nodes         page.js           what happens
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources

_SCRIPTS = ("conversation.js", "markdown.js", "page.js")


@functools.cache
def whole_page() -> tuple[str, str]:
    """Return the page, and the policy under which a browser runs its scripts and no others."""
    folder = importlib.resources.files(__name__)

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    script = "\n".join(map(read, _SCRIPTS))
    page = read("page.html")
    page = page.replace("/* page.css */", read("page.css")).replace("/* script */", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
