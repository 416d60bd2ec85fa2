# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes self-contained HTML pages from sections, cards and tables.

Pages follow the light or dark theme of the browser, fit small screens and print. Text from a run is
escaped here.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --soft: #5b6472; --line: #e2e6ec;
        --page: #f6f7f9; --card: #ffffff; --accent: #2563a8; --low: 37 99 168; --high: 205 62 40;
        --c0: #2563a8; --c1: #d1571f; --c2: #1e8a5b; --c3: #8b4fb3; --c4: #b8860b; --c5: #0e8c9c;
        --c6: #c23b6b; --c7: #5b6472; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --soft: #9aa5b5; --line: #303a4a; --page: #10151e; --card: #19212d;
          --accent: #7db4ea; --c0: #7db4ea; --c1: #f0975f; --c2: #63c79a; --c3: #c59be6;
          --c4: #e0b84c; --c5: #56c5d3; --c6: #ef86ad; --c7: #9aa5b5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem; background: var(--page);
       color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 0.6rem; color: var(--accent); }
h3 { font-size: 0.9rem; margin: 0 0 0.3rem; font-weight: 600; }
p { margin: 0.4rem 0; } .soft { color: var(--soft); } .small { font-size: 0.85rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 0.6rem;
        padding: 1rem; overflow-x: auto; }
.card + .card { margin-top: 1rem; }
.cards { display: grid; gap: 0.8rem; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr));
         margin-top: 1.2rem; }
.cards .card { margin: 0; padding: 0.8rem 1rem; }
.cards dt { color: var(--soft); font-size: 0.82rem; }
.cards dd { margin: 0; font-size: 1.45rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.cards dd.note { font-size: 0.8rem; color: var(--soft); line-height: 1.4; }
.pair { display: grid; gap: 1rem 1.6rem;
        grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
dl.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr));
     gap: 0.9rem 1.5rem; margin: 0; }
.fields dt { color: var(--soft); font-size: 0.82rem; }
.fields dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 0; } svg { display: block; width: 100%; height: auto; }
figure svg[viewBox^="0 0 960"] { min-width: 38rem; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .reference text { stroke: var(--card); stroke-width: 3px; paint-order: stroke; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; font-size: 0.85rem;
          color: var(--soft); margin: 0 0 0.3rem 3.2rem; }
.legend i { display: inline-block; width: 1.1rem; height: 0; border-top: 3px solid;
            border-radius: 2px; margin-right: 0.4rem; vertical-align: middle; }
COLORS
img.plot { display: block; width: 100%; height: auto; background: #fff; border-radius: 0.3rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem;
        font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; overflow-wrap: anywhere; min-width: 3.6rem; }
th { color: var(--soft); font-weight: 500; overflow-wrap: normal; }
tr:last-child > * { border-bottom: 0; }
pre { margin: 0; font: 0.85rem/1.45 ui-monospace, monospace; white-space: pre-wrap;
      overflow-wrap: anywhere; }
.lead { font-size: 1.05rem; max-width: 46rem; margin: 0.8rem 0 0; } .narrow { display: none; }
@media (max-width: 40rem) {
  body { padding: 1rem 0.75rem 2rem; } .card { padding: 0.75rem; }
  .cards { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 0.5rem; }
  .cards dd { font-size: 1.2rem; } .legend { margin-left: 0; }
  .wide { display: none; } .narrow { display: block; } }
summary { cursor: pointer; color: var(--accent); }
details > pre, details > dl { margin-top: 0.8rem; }
@media print { body { max-width: none; padding: 0; } .card { break-inside: avoid; } }
""".replace(
    "COLORS",
    "\n".join(f".legend i.c{n} {{ border-color: var(--c{n}); }}" for n in range(8)),
)


def page(
    title: str,
    sections: Iterable[str],
    *,
    introduction: str = "",
    lead: str = "",
    style: str = "",
) -> str:
    """Return a whole page.

    Args:
        title: Its heading.
        sections: HTML, in order.
        introduction: A line beneath the heading.
        lead: What the page says, in a few sentences.
        style: CSS beyond `STYLE`.
    """
    line = f'<p class="soft">{escape(introduction)}</p>\n' if introduction else ""
    line += f'<p class="lead">{escape(lead)}</p>\n' if lead else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{line}{"".join(sections)}</body>
</html>
"""


def section(heading: str, *contents: str) -> str:
    """Return a heading with its cards."""
    cards = "".join(f'<div class="card">{content}</div>\n' for content in contents if content)
    return f"<h2>{escape(heading)}</h2>\n{cards}"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Return large numbers with label and note."""
    return (
        '<div class="cards">'
        + "".join(
            f'<dl class="card"><dt>{escape(label)}</dt><dd>{escape(value)}</dd>'
            f'<dd class="note">{escape(note)}</dd></dl>'
            for label, value, note in items
        )
        + "</div>\n"
    )


def pair(*figures: str) -> str:
    """Return figures side by side where the page is wide enough."""
    return f'<div class="pair">{"".join(figures)}</div>'


def by_width(wide: str, narrow: str) -> str:
    """Return content for a wide page, and other content for the width of a phone."""
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def fields(values: Mapping[str, Any]) -> str:
    """Return names and values of a flat record."""
    pairs = [
        f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(spell(value))}</dd></div>"
        for name, value in values.items()
    ]
    return f'<dl class="fields">{"".join(pairs)}</dl>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first cell of a row is its heading."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def fold_content(label: str, content: str) -> str:
    """Return content that a click unfolds."""
    return f"<details><summary>{escape(label)}</summary>{content}</details>"


def spell(value: Any) -> str:
    """Return a value of summary.json as text."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {spell(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(spell, value)) or "-"
    return "-" if value is None else str(value)


def escape(text: object) -> str:
    """Return text escaped for HTML."""
    return html.escape(str(text))
