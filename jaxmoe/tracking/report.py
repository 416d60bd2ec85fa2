# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`report.html`: a run on one page.

Self-contained (the pictures are inside, nothing is fetched, there is no script), readable in a
light and a dark browser and on paper. What it shows is given to it; the files are read by
`experiments/pretrain.py`. To add a section: one more `_section` in `write_report`.
"""

from __future__ import annotations

import base64
import html
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.tracking.disk import replace_file

TITLES = {
    "loss": "Loss",
    "router_load": "Router load",
    "optimizer": "Learning rate and gradient norm",
}
"""Headings of known pictures, by the stem of the file; others go by their file name."""

STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --soft: #6b7280; --line: #e5e7eb;
        --page: #f8fafc; --card: #ffffff; --accent: #2563a8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --soft: #9ca3af; --line: #334155; --page: #0f172a; --card: #1e293b;
          --accent: #7db4ea; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--page);
       color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 0.6rem; color: var(--accent); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 0.6rem;
        padding: 1rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr));
     gap: 0.9rem 1.5rem; margin: 0; }
dt { color: var(--soft); font-size: 0.82rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 0.3rem; }
pre { margin: 0; font: 0.85rem/1.45 ui-monospace, monospace; white-space: pre-wrap;
      overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--accent); }
details pre { margin-top: 0.8rem; }
@media print { body { max-width: none; padding: 0; } .card { break-inside: avoid; } }
"""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: Mapping[str, Any],
    plots: Sequence[str | os.PathLike[str]] = (),
    samples: str = "",
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write the page.

    Args:
        path: The HTML file.
        title: Its heading, such as the name of the run.
        summary: The numbers of `summary.json`.
        plots: PNG files, in the order of the page.
        samples: Generated text.
        config: The resolved config, as JSON.

    Raises:
        OSError: If the file cannot be written, or a picture read.
    """
    sections = [_section("Summary", _summary(summary))]
    for plot in map(pathlib.Path, plots):
        image = base64.b64encode(plot.read_bytes()).decode()
        heading = TITLES.get(plot.stem, plot.stem.replace("_", " ").capitalize())
        picture = f'<img alt="{_escape(heading)}" src="data:image/png;base64,{image}">'
        sections.append(_section(heading, picture))
    if samples:
        sections.append(_section("Samples", f"<pre>{_escape(samples)}</pre>"))
    if config is not None:
        text = _escape(json.dumps(config, indent=2))
        details = f"<details><summary>All fields</summary><pre>{text}</pre></details>"
        sections.append(_section("Configuration", details))
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_escape(title)}</h1>
{"".join(sections)}</body>
</html>
"""
    replace_file(path, page)


def _section(heading: str, content: str) -> str:
    return f'<h2>{_escape(heading)}</h2>\n<div class="card">{content}</div>\n'


def _summary(summary: Mapping[str, Any]) -> str:
    pairs = [
        f"<div><dt>{_escape(name.replace('_', ' '))}</dt><dd>{_escape(_spell(value))}</dd></div>"
        for name, value in summary.items()
    ]
    return f"<dl>{''.join(pairs)}</dl>"


def _spell(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_spell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_spell, value))
    return "-" if value is None else str(value)


def _escape(text: object) -> str:
    return html.escape(str(text))
