"""The status page of a running server in a real browser: it shows the cards, and goes on by itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serve_front"))

import tritonclient.grpc as client
from running import make_folder, start, until
from test_browser import BEYOND, CONTRAST, VISIBLE, WINDOWS


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
def test_the_page_shows_every_model_and_card(browser, server, screenshots, width, dark):
    ask(server, 7)
    server.do(a_second(server))
    browser.open(f"http://{server.http}/", width, dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width, browser.run(BEYOND)
    assert browser.run(BEYOND) == [] and browser.run(CONTRAST) >= 4.5
    assert browser.run(VISIBLE, "h2") == ["film, version 3", "shop, version 1", "Repository"]
    assert browser.run(VISIBLE, "td:first-child") == ["card 0", "card 1"] * 2 + ["film", "shop"]
    assert "ready" in browser.run(VISIBLE, "dd")
    assert len(browser.run(VISIBLE, "svg")) == 3, "nobody has asked film for anything"
    browser.screenshot(screenshots / f"status_{width}_{'dark' if dark else 'light'}.png")
    assert browser.log() == []


def test_the_page_updates_itself_and_says_when_a_card_is_down(browser, server):
    browser.open(f"http://{server.http}/")
    before = browser.run(VISIBLE, "td.n")
    (shop,) = [model for model in server.models if model.name == "shop"]
    ask(server, 11)
    shop.down = 1
    try:
        until(lambda: "card 1 down" in browser.run(VISIBLE, "dd"), "the page did not go on")
    finally:
        shop.down = None
    assert browser.run(VISIBLE, "td.n") != before
    assert "down" in browser.run(VISIBLE, "td:nth-child(2)")
    until(lambda: "ready" in browser.run(VISIBLE, "dd"), "the page did not go on")
    assert browser.run("return document.getElementById('live').hasAttribute('data-lost')") is False
    assert browser.log() == []


def test_the_page_says_when_the_server_is_gone(browser, tmp_path):
    running, stop = start(make_folder(tmp_path, "."))
    browser.open(f"http://{running.http}/")
    stop()
    until(lambda: browser.run("return document.getElementById('live').hasAttribute('data-lost')"), "it seems well")
    shown = browser.run("return getComputedStyle(document.getElementById('live'), '::before').content")
    assert "does not answer" in shown


async def a_second(running):
    """Let the server look at itself, as it does once a second."""
    running.server._history._samples[-1] = running.server._history._samples[-1]._replace(at=time.monotonic() - 1)
    running.server._history.sample()
