"""A page of HTML that holds everything it needs: text, tables, data as JSON, styles, scripts and the plotting library.

Knows HTML and how to escape; must not know what is reported. Everything that comes in is text, and is escaped here.
The page asks for nothing from outside, and its content security policy forbids it: scripts run by their hash only, so
that a name that got past the escaping would still not run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from sim.pictures import COLOURS

_LIBRARY_NOTE: Final = (
    "Pictures are drawn with uPlot (MIT licence, © Leon Sorokin); its licence is in this page's source."
)


class Section(NamedTuple):
    """A part of the page. `body` is HTML, made with the functions below."""

    id: str
    title: str
    body: str
    heading: str | None = None
    """Of the section; `title` is for the list at the top, and for both where this is None."""


def text(value: object) -> str:
    """Any text as HTML."""
    return html.escape(str(value), quote=True)


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph; `kind` is a class of the style sheet."""
    return f'<p class="{text(kind)}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def bullets(items: Iterable[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>"


def picture(name: str, title: str, words: str) -> str:
    """A place where the script draws: `data-picture` is the name of what."""
    return (
        f'<figure class="picture" data-picture="{text(name)}"><figcaption><strong>{text(title)}</strong> '
        f'<span class="quiet">{text(words)}</span></figcaption></figure>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table; cells are HTML already, the head is text. It scrolls by itself where it is too wide."""
    heads = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{text(kind)}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def swatch(colour: str) -> str:
    """A small square in a colour."""
    return f'<i class="swatch" style="background:{text(_shade(colour))}"></i>'


def bar(share: float, colour: str) -> str:
    """A bar as long as the share (0 to 1) of its cell, with the share in percent."""
    wide = max(0.0, min(share, 1.0)) * 100
    return (
        f'<span class="bar"><i style="width:{wide:.2f}%;background:{text(_shade(colour))}"></i></span> '
        f'<span class="number">{share * 100:.2f} %</span>'
    )


def details(summary: str, body: str) -> str:
    """A part that is closed until it is asked for; it is open in print."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def embedded(value: Any) -> str:
    """JSON for a script element: nothing in it can end the element or begin another."""
    written = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(title: str, subtitle: str, sections: Sequence[Section], data: Any, foot: str) -> str:
    """The whole page. `data` is what the script gets; `foot` is text."""
    library, script = _asset("uplot.min.js"), _asset("page.js")
    licence = "\n".join(line.rstrip() for line in _asset("uplot.LICENSE.txt").splitlines())
    hashes = " ".join(_hash(one) for one in (library, script))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    links = "".join(f'<li><a href="#{text(one.id)}">{text(one.title)}</a></li>' for one in sections)
    parts = "\n".join(
        f'<section id="{text(one.id)}"><h2>{text(one.heading or one.title)}</h2>\n{one.body}</section>'
        for one in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="speckv">
<title>{text(title)}</title>
<style>{_asset("uplot.min.css")}</style>
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<div class="top"><div><h1>{text(title)}</h1><p class="quiet">{text(subtitle)}</p></div>
<button id="theme" type="button" hidden>Dark</button></div>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<p id="problems" role="alert" hidden></p>
<noscript><p class="note">Pictures and the list of single rows need JavaScript; text and tables do not.</p></noscript>
<main>
{parts}
</main>
<footer><p>{text(foot)}</p><p>{text(_LIBRARY_NOTE)}</p></footer>
<script type="application/json" id="data">{embedded(data)}</script>
<!-- uPlot:
{licence}
-->
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def _shade(colour: str) -> str:
    """Free room is drawn in the page's own shade, so that it reads as room in the dark too."""
    return "var(--free)" if colour == COLOURS["free"] else colour


@cache
def _asset(name: str) -> str:
    return (files("sim.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
