"""A report as one HTML file: text, numbers, tables and charts, with style inside and nothing to fetch.

The page must open from a mail attachment without network, so it has no links, and a content policy that refuses them.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

from thermocline import __version__

from .markup import Html, element, join
from .numbers import Number

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, *parts: object, foot: str = "", live: str = "") -> str:
    """The whole file. Parts are made by the functions below, or plain text.

    `live` is a script for a page that a server shows; such a page may fetch from that server only.
    """
    here = files(__package__)
    policy = f"{_POLICY}; connect-src 'self'" if live else _POLICY
    style, script = (Html((here / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        element("style", style),
    )
    end = foot if live else " · ".join(filter(None, (foot, written())))
    body = element("body", element("h1", title), *parts, element("footer", end), element("script", script, Html(live)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def written() -> str:
    """Date, version and machine of a page."""
    return f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by thermocline {__version__} on {_machine()}."


def _machine() -> str:
    """The processor and, where torch is loaded and sees one, the GPU."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8", errors="replace").splitlines() if known.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else ""
    return ", ".join(filter(None, (gpu, f"{cpu} ({os.cpu_count()} cores)")))


def verdict(*words: object) -> Html:
    """The sentence that a report begins with."""
    return element("p", *words, class_="verdict")


def section(heading: str, *parts: object) -> Html:
    return element("section", element("h2", heading), *parts)


def paragraph(*words: object) -> Html:
    return element("p", *words)


def facts(named: Mapping[str, object]) -> Html:
    """The key numbers, each with its name."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in named.items()))


def figure(title: str, chart: Html, words: str = "") -> Html:
    caption = element("figcaption", element("b", title), element("span", words) if words else "")
    return element("figure", caption, chart)


def figures(*drawn: Html) -> Html:
    """Figures side by side, as many as fit."""
    return element("div", *drawn, class_="figures two" if len(drawn) in (2, 4) else "figures")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], search: str = "") -> Html:
    """A table. Columns with numbers (`Number`, int, float) are right-aligned.

    `search` is the hint of a search box; with it the table can be searched and sorted.
    """
    rows = list(rows)
    right = [any(isinstance(row[at], (Number, int, float)) for row in rows) for at in range(len(columns))]
    heads = (
        element("th", element("button", name, type="button") if search else name, class_="n" if number else None, scope="col")
        for name, number in zip(columns, right, strict=True)
    )
    lines = join(*(element("tr", *map(_cell, row, right)) for row in rows))
    drawn = element("table", element("thead", element("tr", *heads)), element("tbody", lines))
    box = element("input", type="search", placeholder=search, aria_label=search) if search else ""
    return element("div", box, element("div", drawn, class_="scroll", tabindex=0))


def _cell(value: object, right: bool) -> Html:
    number = value.value if isinstance(value, Number) else value
    sort_by = f"{number:.6g}" if isinstance(number, (int, float)) else "-1e300" if right else None
    good = value.good if isinstance(value, Number) else None
    names = ["n"] * right + ([] if good is None else ["good" if good else "bad"])
    return element("td", value, class_=" ".join(names) or None, data_v=sort_by)
