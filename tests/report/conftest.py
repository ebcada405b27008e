"""A real browser for the tests of pages: headless Chromium, told what to do through chromedriver.

WebDriver is JSON over HTTP, and these tests need six of its commands; the standard library speaks both. The rejected
alternative, selenium, brings a dozen packages and a program that downloads browsers by itself.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import pytest

from thermocline.heat.cardinality import registers_of
from thermocline.heat.profile import BatchRepeats, HeatProfile, LogSlice, TableHeat
from thermocline.plan.model import (
    Alternative,
    Lever,
    PlacementKind,
    Plan,
    RankPlan,
    Sensitivity,
    StepPlan,
    TablePlan,
    Tier,
    Traffic,
)
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
# A proxy named in the environment must not come between us and a program on this machine.
ASK = build_opener(ProxyHandler({}))


class Browser:
    """One window, and everything its pages logged."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._at = f"{driver}/session"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._at += "/" + self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def open(self, page: Path | str, width: int = 1200, dark: bool = False) -> None:
        """Show a file, or what an address has, in a window so many CSS pixels wide. What was logged before is forgotten."""
        window = {"width": width, "height": 844, "deviceScaleFactor": 2 if width < 600 else 1, "mobile": width < 600}
        self._tell("Emulation.setDeviceMetricsOverride", window)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.log()
        self._ask("POST", "/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function in JavaScript returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def log(self) -> list[str]:
        """What has been logged since the last time this was asked: errors, warnings, and everything else."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> Path:
        """The whole page as a PNG."""
        shot = self._tell("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        self._ask("DELETE", "")

    def _tell(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of Chromium's own protocol, for what WebDriver has no word for."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._at + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with ASK.open(request, timeout=300) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:  # its body says what was wrong
            raise AssertionError(f"{method} {path}: {json.load(error)['value']['message']}") from None


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if DRIVER is None or BROWSER is None:
        pytest.skip("no chromium and chromedriver here; install them with: sudo apt install chromium chromium-driver")
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        window = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("browser"))
        yield window
        window.close()
    finally:
        driver.terminate()
        driver.wait()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """Where screenshots go: a folder that is thrown away, or the one that THERMOCLINE_SCREENSHOTS names, to look at them."""
    folder = Path(os.environ.get("THERMOCLINE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


HOSTILE = (
    "<script>alert(1)</script>",
    "\"quotes\" & 'more'",
    "emoji 🌊🔥",
    "x" * 120,
    "\x00\x1b[31mcontrol\ud800",
    "</svg>]]>-->",
)


def make_up_plan(tables: int, nodes: int, cards: int, names: Sequence[str] = ()) -> Plan:
    """A plan that nobody made, with numbers of a likely size: tables fall in size, hot ones have three tiers."""
    topology = Topology(
        name=f"{nodes} nodes of {cards} H200",
        nodes=nodes,
        gpus_per_node=cards,
        gpu=GpuSpec(memory=141_000_000_000, bandwidth=4e12),
        links=Links(node=Link(bandwidth=450e9), cluster=Link(bandwidth=50e9)),
    )
    planned = tuple(_make_up_table(number, (*names, *(f"C{n}" for n in range(tables)))[number]) for number in range(tables))
    held = {"tables": 61 << 30, "optimizer state": 9 << 30, "cache": 12 << 30, "maps": 1 << 29, "buffers": 3 << 30}
    groups = [
        RankPlan(first=node * cards, count=cards, bytes={part: n + n * (node % 7) // 50 for part, n in held.items()})
        for node in range(nodes)
    ]
    sent = {"ids": 2e6, "rows": 41e6, "gradients": 37e6, "sync": 5.5e6}
    times = {"lookup": 4.1e-4, "rows": 9.3e-4, "gradients": 8.2e-4, "update": 6e-4, "ids": 7e-5, "sync": 1.7e-4, "dense": 4e-3}
    total = sum(times.values()) - 1e-3
    return Plan(
        created="2026-11-15",
        goal="train",
        objective="the shortest training step",
        heat="3f" * 32,
        topology=topology,
        budget=100 << 30,
        batch=2048,
        dense=4e-3,
        optimizer="rowwise_adagrad",
        gradients="fp32",
        tables=planned,
        ranks=tuple(groups),
        traffic=tuple(
            Traffic(link=link, direction=direction, bytes=sent[direction] * times)
            for link, times in (("node", 1.0), ("cluster", 0.31))
            for direction in sent
        ),
        step=StepPlan(parts=times, overlaps=("rows", "ids"), hidden=1e-3, total=total, throughput=2048 * nodes * cards / total),
        balance=1.021,
        binding="the links between nodes carry 31 MB a card and step",
        sensitivities=(
            Sensitivity(what="1 GiB more a card", time=total - 9e-5, saves=9e-5, detail="goes to tier 1 of 3 tables"),
            Sensitivity(what="one card more a node", time=total, saves=-1e-6),
            Sensitivity(what="one node more", time=None, saves=None, detail="not worked out"),
        ),
        candidates=(
            Alternative(name="tiers", feasible=True, time=total, bytes=86 << 30),
            Alternative(name="row-wise", feasible=True, time=total * 1.37, bytes=71 << 30),
            Alternative(name="table-wise", feasible=True, time=total * 2.9, bytes=88 << 30, detail="balance 1.6"),
            Alternative(name="full replication", feasible=False, time=None, bytes=612 << 30),
        ),
        notes=("heat was measured on 80 days",),
    )


def _make_up_table(number: int, name: str) -> TablePlan:
    rows = 400_000_003 // (number + 1) ** 2 + 50
    steps = [int(rows ** (k / 40)) for k in range(41)]
    curve = tuple((float(reach), (reach / rows) ** 0.18) for reach in dict.fromkeys(steps))
    tiers: tuple[Tier, ...] = (Tier(tier=3, rows=rows, threshold=0, lookups=1.0, precision="int8", cached=rows // 20),)
    if number % 3 == 0:
        hot, warm = rows // 5000, rows // 300
        tiers = (
            Tier(tier=1, rows=hot, threshold=400, lookups=0.22, precision="fp32"),
            Tier(tier=2, rows=warm, threshold=31, lookups=0.19, precision="int8", cached=warm // 20),
            Tier(tier=3, rows=rows - hot - warm, threshold=0, lookups=0.59, precision="int4", near=rows // 50),
        )
    placement: PlacementKind = "replicated" if rows < 10_000 else "tiers"
    other = Alternative(name="row-wise", feasible=True, time=6.3e-3 + 1e-5 * number, bytes=80 << 30)
    return TablePlan(
        name=name,
        rows=rows,
        dim=128,
        pooling="sum",
        features=(name,),
        lookups=40_000 / (number + 1),
        precision="int8",
        cache=0.05,
        near=0.0,
        placement=placement,
        tiers=tiers if placement == "tiers" else (Tier(tier=1, rows=rows, threshold=0, lookups=1.0, precision="int8"),),
        exchange="none" if placement == "replicated" else "flat",
        pooled_by="asker",
        wire_rows="int8",
        wire_gradients="fp32",
        levers=(Lever(kind="prune", features=(name,), rows=rows * 2, saved=rows * 132, detail="seen once"),)
        if number % 4 == 1
        else (),
        bytes={"tables": rows * 132, "optimizer state": rows * 4, "cache": rows * 27},
        traffic=(),
        time={"lookup": 2e-4 / (number + 1), "rows": 4e-4 / (number + 1)},
        runner_up=None if number % 5 == 4 else other,
        binding="the budget of a card" if number % 2 else "nothing: a faster choice was not found",
        curve=curve,
    )


def make_up_heat(tables: int, names: Sequence[str] = ()) -> HeatProfile:
    """Heat by Zipf's law, falling in lookups from table to table; every third is sketched, every fourth has bags."""
    made = {}
    for number in range(tables):
        name = (*names, *(f"C{n}" for n in range(tables)))[number]
        draw = np.random.default_rng(number)
        ids_H, counts_H = np.unique(draw.zipf(1.2 + 0.1 * (number % 5), 20_003 // (number + 1)), return_counts=True)
        order = np.argsort(-counts_H, kind="stable")
        lookups, exact = int(counts_H.sum()), number % 3 != 2
        lengths_L = np.arange(0, 40 if number % 8 == 0 else 5) if number % 4 == 0 else np.array([1])
        made[name] = TableHeat(
            name=name,
            samples=lookups,
            lookups=lookups,
            distinct=len(ids_H),
            exact=exact,
            ids_H=ids_H[order],
            counts_H=counts_H[order],
            lengths_L=lengths_L,
            bags_L=np.full(len(lengths_L), lookups // len(lengths_L)),
            missing=number * 7,
            batches=(BatchRepeats(2048, lookups, lookups // 3), BatchRepeats(16_384, lookups, lookups // 2)),
            slices=tuple(LogSlice(1000, 400.0 + 20 * k, 610.0 + 13 * k, k == 0) for k in range(9)),
            registers=None if exact else registers_of(ids_H),
        )
    return HeatProfile(made, "a made-up log")


@pytest.fixture(scope="session")
def heat_of() -> Callable[..., HeatProfile]:
    return make_up_heat


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    return make_up_plan


@pytest.fixture(scope="session")
def hostile() -> tuple[str, ...]:
    """Names that no table should have and one day one will."""
    return HOSTILE
