"""The status of this server: whether it is well, at one look, from a phone too.

`/status.json` holds the numbers for programs, and under `html` what the page at `/` shows. A script of six lines fetches it
every two seconds; without the script the page is right, but stands still. `drawn.py` draws both.
"""

from __future__ import annotations

import time
from typing import Any

from thermocline import __version__
from thermocline.report.markup import element
from thermocline.report.page import page

from .history import SECONDS, History
from .inference_service import Desk
from .metrics import BOUNDS
from .status_charts import body

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
    shown = element("main", body(_numbers(desk, history)), id="live")
    return page("Thermocline server", shown, foot=f"thermocline {__version__}; updates by itself every 2 s.", live=_LIVE)


def status_json(desk: Desk, history: History) -> dict[str, Any]:
    """The same in numbers, and drawn."""
    numbers = _numbers(desk, history)
    return {**numbers, "html": body(numbers)}


def _numbers(desk: Desk, history: History) -> dict[str, Any]:
    last = history.window(10)
    return {
        "version": __version__,
        "state": _state(desk),
        "uptime": time.time() - desk.metrics.started,
        "requests_per_second": last.requests,
        "refused_per_second": last.refused,
        "ids_per_second": last.ids,
        "p50": last.p50,
        "p99": last.p99,
        "refused": sum(sum(one.refused.values()) for one in desk.metrics.models.values()),
        "history_seconds": SECONDS,
        "rates": history.rates(),  # [seconds ago, requests]
        "latency": list(zip((*BOUNDS, None), history.window().counts, strict=True)),  # [at most so many seconds, requests]
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
        "repository": [
            {"name": one.name, "version": one.version, "state": one.state.lower(), "note": one.reason}
            for one in desk.repository.index()
        ],
    }


def _state(desk: Desk) -> str:
    if desk.repository.draining:
        return "draining"
    if not desk.server_ready():
        return "loading"
    down = [card.number for one in desk.metrics.watch for card in one.cards if not card.ready]
    return f"card {down[0]} down" if len(down) == 1 else f"{len(down)} cards down" if down else "ready"
