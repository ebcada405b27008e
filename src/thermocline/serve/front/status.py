"""The status page: whether the server is well, at one look, from a phone too.

The page and its updates are drawn by the same code: `/status.json` holds the numbers for programs, and under `html` what the
page shows. A script of six lines fetches it every two seconds; without the script the page is right, but stands still.
"""

from __future__ import annotations

import time
from typing import Any

from thermocline import __version__
from thermocline.pages.axes import Axis, from_zero
from thermocline.pages.charts import Bar, Line, bars, columns, lines
from thermocline.pages.markup import Html, element, join
from thermocline.pages.numbers import Number, brief, count, seconds, share, size
from thermocline.pages.page import facts, figure, figures, page, paragraph, section, table

from .desk import Desk
from .history import SECONDS, History
from .metrics import BOUNDS, Seen

_LIVE = """
const live = document.getElementById("live");
setInterval(async () => {
  try {
    live.innerHTML = (await (await fetch("status.json", {cache: "no-store"})).json()).html;
    live.removeAttribute("data-lost");
  } catch { live.setAttribute("data-lost", ""); }
}, 2000);
"""


def status_page(desk: Desk, history: History) -> str:
    """The whole page."""
    shown = element("main", _body(desk, history), id="live")
    return page("Thermocline server", shown, foot=f"thermocline {__version__}; updates by itself every 2 s.", live=_LIVE)


def status_json(desk: Desk, history: History) -> dict[str, Any]:
    """The same in numbers, and drawn."""
    last = history.window(10)
    return {
        "state": _state(desk),
        "uptime": time.time() - desk.metrics.started,
        "requests_per_second": last.requests,
        "refused_per_second": last.refused,
        "ids_per_second": last.ids,
        "p50": last.p50,
        "p99": last.p99,
        "models": [
            {
                "name": one.name,
                "version": one.version,
                "queued": one.queued,
                "imbalance": one.imbalance,
                "cards": [card._asdict() for card in one.cards],
            }
            for one in desk.metrics.watch
        ],
        "html": _body(desk, history),
    }


def _state(desk: Desk) -> str:
    if desk.repository.draining:
        return "draining"
    if not desk.server_ready():
        return "loading"
    down = [card.number for one in desk.metrics.watch for card in one.cards if not card.ready]
    return f"card {down[0]} down" if len(down) == 1 else f"{len(down)} cards down" if down else "ready"


def _body(desk: Desk, history: History) -> Html:
    last, models = history.window(10), list(desk.metrics.watch)
    refused = sum(sum(one.refused.values()) for one in desk.metrics.models.values())
    return join(
        paragraph(f"{_state(desk).capitalize()}, for {_duration(time.time() - desk.metrics.started)}."),
        facts(
            {
                "state": _state(desk),
                "requests a second": count(_round(last.requests)),
                "ids a second": count(_round(last.ids)),
                "p50, last 10 s": seconds(last.p50),
                "p99, last 10 s": seconds(last.p99),
                "refused since start": count(refused),
            }
        ),
        figures(_load(history), _latency(history)),
        *(_model(one) for one in models),
        section("Repository", _repository(desk)),
    )


def _load(history: History) -> Html:
    points = history.rates()
    up = from_zero([rate for _, rate in points], "requests a second")
    across = Axis(-float(SECONDS), 0.0, "seconds ago", lambda value: count(abs(round(value))))
    return figure("Load", lines("Requests a second", [Line("requests", points)], across, up))


def _latency(history: History) -> Html:
    counts = history.window().counts
    names = [brief(seconds(bound)) for bound in BOUNDS] + ["more"]
    up = from_zero([float(number) for number in counts], "requests")
    return figure(
        "Latency", columns("Requests by latency", names, counts, up, "no longer than"), "last 2 minutes, in the server"
    )


def _model(one: Seen) -> Html:
    looked_up = sum(card.lookups for card in one.cards)
    total = max(looked_up, 1)
    rows = [
        (
            f"card {card.number}",
            "ready" if card.ready else "down",
            size(card.bytes),
            count(card.lookups),
            share(card.lookups / total),
            str(card.pid),
        )
        for card in one.cards
    ]
    heads = ("card", "state", "rows", "lookups", "share", "process")
    shown = [Bar(f"card {card.number}", {"lookups": float(card.lookups)}) for card in one.cards]
    return section(
        f"{one.name}, version {one.version}",
        facts({"waiting": count(one.queued), "imbalance": Number(one.imbalance, f"{one.imbalance:.3f}")}),
        table(heads, rows) if rows else "",
        figures(figure("Lookups by card", bars("Lookups by card", shown, count))) if looked_up else "",
    )


def _repository(desk: Desk) -> Html:
    return table(
        ("model", "version", "state", "note"),
        [(one.name, one.version or "-", one.state.lower(), one.reason) for one in desk.repository.index()],
    )


def _round(value: float) -> float:
    return float(round(value)) if value >= 10 else round(value, 1)


def _duration(passed: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if passed >= length or unit == "second":
            number = int(passed // length)
            return f"{number} {unit}{'' if number == 1 else 's'}"
    raise AssertionError
