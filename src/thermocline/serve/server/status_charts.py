"""The status of a server, drawn from its numbers alone: for the page it shows, and for one that is kept.

`status.json` is all that is needed, so a report of a server can be made anywhere (`thermocline serve status`), after it has
ended too. Nothing here knows the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Bar, Line, bars, columns, lines
from thermocline.report.markup import Html, join
from thermocline.report.numbers import Number, brief, count, seconds, share, size
from thermocline.report.page import facts, figure, figures, page, paragraph, section, table

Status = Mapping[str, Any]


def report(status: Status, address: str, at: str) -> str:
    """One file that says how the server at `address` was at that moment."""
    return page(f"Thermocline server at {address}", body(status), foot=f"thermocline {status['version']}, as it was {at}.")


def body(status: Status) -> Html:
    """What a page shows."""
    return join(
        paragraph(f"{status['state'].capitalize()}, for {_duration(status['uptime'])}."),
        facts(
            {
                "state": status["state"],
                "requests a second": count(_round(status["requests_per_second"])),
                "ids a second": count(_round(status["ids_per_second"])),
                "p50, last 10 s": seconds(status["p50"]),
                "p99, last 10 s": seconds(status["p99"]),
                "refused since start": count(status["refused"]),
            }
        ),
        figures(_load(status), _latency(status)),
        *(_model(one) for one in status["models"]),
        section("Repository", _repository(status)),
    )


def _load(status: Status) -> Html:
    points = [(float(ago), float(rate)) for ago, rate in status["rates"]]
    up = from_zero([rate for _, rate in points], "requests a second")
    across = Axis(-float(status["history_seconds"]), 0.0, "seconds ago", lambda value: count(abs(round(value))))
    return figure("Load", lines("Requests a second", [Line("requests", points)], across, up))


def _latency(status: Status) -> Html:
    names = ["more" if bound is None else brief(seconds(bound)) for bound, _ in status["latency"]]
    counts = [float(number) for _, number in status["latency"]]
    drawn = columns("Requests by latency", names, counts, from_zero(counts, "requests"), "no longer than")
    return figure("Latency", drawn, f"last {_duration(status['history_seconds'])}, in the server")


def _model(one: Status) -> Html:
    looked_up = sum(card["lookups"] for card in one["cards"])
    rows = [
        (
            f"card {card['number']}",
            "ready" if card["ready"] else "down",
            size(card["bytes"]),
            count(card["lookups"]),
            share(card["lookups"] / max(looked_up, 1)),
            str(card["pid"]),
        )
        for card in one["cards"]
    ]
    heads = ("card", "state", "rows", "lookups", "share", "process")
    shown = [Bar(f"card {card['number']}", {"lookups": float(card["lookups"])}) for card in one["cards"]]
    return section(
        f"{one['name']}, version {one['version']}",
        facts({"waiting": count(one["queued"]), "imbalance": Number(one["imbalance"], f"{one['imbalance']:.3f}")}),
        table(heads, rows) if rows else "",
        figures(figure("Lookups by card", bars("Lookups by card", shown, count))) if looked_up else "",
    )


def _repository(status: Status) -> Html:
    return table(
        ("model", "version", "state", "note"),
        [(one["name"], one["version"] or "-", one["state"], one["note"]) for one in status["repository"]],
    )


def _round(value: float) -> float:
    return float(round(value)) if value >= 10 else round(value, 1)


def _duration(passed: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if passed >= length or unit == "second":
            number = int(passed // length)
            return f"{number} {unit}{'' if number == 1 else 's'}"
    raise AssertionError
