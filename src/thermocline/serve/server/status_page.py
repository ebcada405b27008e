"""The status page: state, load, latency and shards of a server.

`/status.json` holds the numbers, and under `html` the content of the page at `/`, which a short script refreshes every two
seconds. `status_report` makes the same page from a saved `status.json` (`thermocline serve status --report`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thermocline import __version__
from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Bar, Line, bars, columns, lines
from thermocline.report.markup import Html, element, join
from thermocline.report.numbers import Number, brief, count, seconds, share, size
from thermocline.report.page import facts, figure, figures, page, paragraph, section, table

if TYPE_CHECKING:
    from .inference_service import InferenceService
    from .metrics import MetricsHistory

Status = Mapping[str, Any]

_REFRESH = """
const live = document.getElementById("live");
setInterval(async () => {
  try {
    live.innerHTML = (await (await fetch("status.json", {cache: "no-store"})).json()).html;
    live.removeAttribute("data-lost");
  } catch { live.setAttribute("data-lost", ""); }
}, 2000);
"""


def status_page(service: InferenceService, history: MetricsHistory) -> str:
    """The page at `/`."""
    content = element("main", _content(_numbers(service, history)), id="live")
    return page("Thermocline server", content, foot=f"thermocline {__version__}; refreshed every 2 s.", live=_REFRESH)


def status_json(service: InferenceService, history: MetricsHistory) -> dict[str, Any]:
    """The content of `/status.json`."""
    numbers = _numbers(service, history)
    return {**numbers, "html": _content(numbers)}


def status_report(status: Status, address: str, at: str) -> str:
    """A self-contained page of the server at `address`, from its `status.json`."""
    return page(f"Thermocline server at {address}", _content(status), foot=f"thermocline {status['version']}, at {at}.")


def _numbers(service: InferenceService, history: MetricsHistory) -> dict[str, Any]:
    from .metrics import BOUNDS, SECONDS, quantile  # deferred: needs prometheus_client, which a report does not

    last = history.window(10)
    return {
        "version": __version__,
        "state": _state(service),
        "uptime": time.time() - service.metrics.started,
        "requests_per_second": last.answered / last.at,
        "refused_per_second": last.failed / last.at,
        "ids_per_second": last.ids / last.at,
        "p50": quantile(last.counts, 0.5),
        "p99": quantile(last.counts, 0.99),
        "refused": service.failed,
        "history_seconds": SECONDS,
        "rates": history.rates(),  # [seconds ago, requests]
        "latency": list(zip((*BOUNDS, None), history.window().counts, strict=True)),  # [upper bound in seconds, requests]
        "models": [
            {
                "name": each.name,
                "version": each.version,
                "queued": each.queued,
                "imbalance": each.imbalance,
                "staleness": None if each.staleness is None else each.staleness._asdict(),
                "cards": [shard._asdict() for shard in each.shards],
            }
            for each in service.metrics.watch()
        ],
        "repository": [
            {"name": each["name"], "version": each["version"], "state": each["state"].lower(), "note": each["reason"]}
            for each in service.repository.index()
        ],
    }


def _state(service: InferenceService) -> str:
    if service.repository.draining:
        return "draining"
    if not service.repository.ready:
        return "loading"
    down = [shard.number for model in service.metrics.watch() for shard in model.shards if not shard.ready]
    return f"shard {down[0]} down" if len(down) == 1 else f"{len(down)} shards down" if down else "ready"


def _content(status: Status) -> Html:
    entries = [(each["name"], each["version"] or "-", each["state"], each["note"]) for each in status["repository"]]
    return join(
        paragraph(f"{status['state'].capitalize()}, up for {_duration(status['uptime'])}."),
        facts(
            {
                "state": status["state"],
                "requests a second": count(_round(status["requests_per_second"])),
                "ids a second": count(_round(status["ids_per_second"])),
                "p50, last 10 s": seconds(status["p50"]),
                "p99, last 10 s": seconds(status["p99"]),
                "failed since start": count(status["refused"]),
            }
        ),
        figures(_load(status), _latency(status)),
        *(_model(each) for each in status["models"]),
        section("Repository", table(("model", "version", "state", "note"), entries)),
    )


def _load(status: Status) -> Html:
    points = [(float(ago), float(rate)) for ago, rate in status["rates"]]
    up = from_zero([rate for _, rate in points], "requests a second")
    across = Axis(-float(status["history_seconds"]), 0.0, "seconds ago", lambda value: count(abs(round(value))))
    return figure("Load", lines("Requests a second", [Line("requests", points)], across, up))


def _latency(status: Status) -> Html:
    names = ["more" if bound is None else brief(seconds(bound)) for bound, _ in status["latency"]]
    counts = [float(number) for _, number in status["latency"]]
    drawn = columns("Requests by latency", names, counts, from_zero(counts, "requests"), "at most")
    return figure("Latency", drawn, f"last {_duration(status['history_seconds'])}, measured in the server")


def _model(model: Status) -> Html:
    shards = model["cards"]
    total = sum(shard["lookups"] for shard in shards)
    rows = [
        (
            f"shard {shard['number']}", "ready" if shard["ready"] else "down", size(shard["bytes"]), count(shard["lookups"]),
            share(shard["lookups"] / max(total, 1)), str(shard["pid"]),
        )
        for shard in shards
    ]  # fmt: skip
    heads = ("shard", "state", "rows", "lookups", "share", "process")
    shown = [Bar(f"shard {shard['number']}", {"lookups": float(shard["lookups"])}) for shard in shards]
    return section(
        f"{model['name']}, version {model['version']}",
        facts({"queued": count(model["queued"]), "imbalance": Number(model["imbalance"], f"{model['imbalance']:.3f}")}),
        facts(_freshness(model["staleness"])) if model.get("staleness") else "",
        table(heads, rows) if rows else "",
        figures(figure("Lookups by shard", bars("Lookups by shard", shown, count))) if total else "",
    )


def _freshness(known: Status) -> dict[str, Number]:
    """The age of what a model answers, by lookups, and its last publish."""
    return {
        "publish": count(known["publish"]),
        "staleness, p50": seconds(known["p50"]),
        "staleness, p99": seconds(known["p99"]),
        "last publish, step to lookups": seconds(known["seconds"]),
        "published rows": count(known["rows"]),
    }


def _round(value: float) -> float:
    return float(round(value)) if value >= 10 else round(value, 1)


def _duration(passed: float) -> str:
    units = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, length = next((one for one in units if passed >= one[1]), units[-1])
    number = int(passed // length)
    return f"{number} {unit}{'' if number == 1 else 's'}"
