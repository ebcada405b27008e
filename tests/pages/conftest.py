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
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --force-color-profile=srgb"
).split()
# A proxy named in the environment must not come between us and a program on this machine.
ASK = build_opener(ProxyHandler({}))


class Browser:
    """One window, and everything its pages logged."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._at = f"{driver}/session"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._at += "/" + self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def open(self, page: Path, width: int = 1200, dark: bool = False) -> None:
        """Show the file in a window so many CSS pixels wide. What was logged before is forgotten."""
        window = {"width": width, "height": 844, "deviceScaleFactor": 2 if width < 600 else 1, "mobile": width < 600}
        self._tell("Emulation.setDeviceMetricsOverride", window)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.log()
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

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
        with ASK.open(request, timeout=60) as answer:
            return json.load(answer)["value"]


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
