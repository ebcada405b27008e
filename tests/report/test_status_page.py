"""The status page of a running server in a real browser: it shows the shards, and refreshes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serve" / "server"))

import tritonclient.grpc as client
from fake_server import make_folder, start, until
from test_browser import BEYOND, CONTRAST, VISIBLE, WINDOWS

from forked import thermocline


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running, stop = start(make_folder(tmp_path_factory.mktemp("status"), "shop", "film/3"))
    yield running
    stop()


def ask(running, times):
    tensor = client.InferInput("user", [5], "INT64")
    tensor.set_data_from_numpy(np.arange(5))
    with client.InferenceServerClient(running.grpc) as asking:
        for _ in range(times):
            asking.infer("shop", [tensor])


@pytest.mark.parametrize("width, dark", WINDOWS)
def test_the_page_shows_every_model_and_shard(browser, server, screenshots, width, dark):
    ask(server, 7)
    server.do(a_second(server))
    browser.open(f"http://{server.http}/", width, dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width, browser.run(BEYOND)
    assert browser.run(BEYOND) == [] and browser.run(CONTRAST) >= 4.5
    assert browser.run(VISIBLE, "h2") == ["film, version 3", "shop, version 1", "Repository"]
    assert browser.run(VISIBLE, "td:first-child") == ["shard 0", "shard 1"] * 2 + ["film", "shop"]
    assert "ready" in browser.run(VISIBLE, "dd")
    assert len(browser.run(VISIBLE, "svg")) == 3, "film had no requests"
    browser.screenshot(screenshots / f"status_{width}_{'dark' if dark else 'light'}.png")
    assert browser.log() == []


def test_the_page_refreshes_and_shows_a_shard_that_is_down(browser, server):
    browser.open(f"http://{server.http}/")
    before = browser.run(VISIBLE, "td.n")
    (shop,) = [model for model in server.models if model.name == "shop"]
    ask(server, 11)
    shop.down = 1
    try:
        until(lambda: "shard 1 down" in browser.run(VISIBLE, "dd"), "the page was not refreshed")
        assert browser.run(VISIBLE, "td.n") != before
        assert "down" in browser.run(VISIBLE, "td:nth-child(2)")
    finally:
        shop.down = None
    until(lambda: "ready" in browser.run(VISIBLE, "dd"), "the page was not refreshed")
    assert browser.run("return document.getElementById('live').hasAttribute('data-lost')") is False
    assert browser.log() == []


def test_the_page_shows_that_the_server_is_gone(browser, tmp_path):
    running, stop = start(make_folder(tmp_path, "."))
    browser.open(f"http://{running.http}/")
    stop()
    until(lambda: browser.run("return document.getElementById('live').hasAttribute('data-lost')"), "the page shows no sign")
    shown = browser.run("return getComputedStyle(document.getElementById('live'), '::before').content")
    assert "does not answer" in shown


def status(*arguments):
    """`thermocline serve status` in a process of its own."""
    return thermocline("serve", "status", *arguments)


def test_the_status_can_be_saved_as_a_page(browser, server, tmp_path):
    ask(server, 3)
    server.do(a_second(server))
    done = status(server.http, "--report", tmp_path / "kept.html", "--json", tmp_path / "kept.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ready: ") and "shard 1" in done.stdout
    found = json.loads((tmp_path / "kept.json").read_text())
    assert [model["name"] for model in found["models"]] == ["film", "shop"] and "html" not in found
    browser.open(tmp_path / "kept.html")
    assert browser.run(VISIBLE, "h2") == ["film, version 3", "shop, version 1", "Repository"]
    assert browser.run("return performance.getEntriesByType('resource').length") == 0 and browser.log() == []


def test_the_exit_code_shows_a_shard_that_is_down_or_no_server(server, tmp_path):
    (shop,) = [model for model in server.models if model.name == "shop"]
    shop.down = 1
    try:
        done = status(f"http://{server.http}/", "--quiet")
    finally:
        shop.down = None
    assert done.returncode == 1 and "shard 1 down" in done.stdout
    absent = status("http://127.0.0.1:1")
    assert absent.returncode == 2 and "127.0.0.1:1" in absent.stderr and "Traceback" not in absent.stderr


async def a_second(running):
    """Sample the metrics, as the server does once a second."""
    running.server._service.history._samples[-1] = running.server._service.history._samples[-1]._replace(
        at=time.monotonic() - 1
    )
    running.server._service.history.sample()
