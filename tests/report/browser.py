"""Drive a headless Chromium over its debugging pipe, without a package: commands and events are JSON ended by NUL.

>>> with open_browser() as browser:
...     page = browser.open(path, width=390)
...     page.run("document.documentElement.scrollWidth"), page.complaints, page.screenshot()
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0
"""Seconds to wait for an answer."""
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.requestWillBeSent")


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page(NamedTuple):
    """An open page. ``events`` collects everything that it reported."""

    browser: Browser
    session: str
    events: list[dict[str, Any]]

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.browser.send(
            "Runtime.evaluate", self, expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Exceptions, console messages, logged errors, and requests to anything but the page itself."""
        time.sleep(0.05)  # lets late events arrive, which the next command takes
        self.browser.send("Page.getLayoutMetrics", self)
        found = [event for event in self.events if event["method"] in COMPLAINTS]
        requests = [event["params"].get("request", {}).get("url", "") for event in found]
        return [
            json.dumps(event["params"])[:3000] for event, url in zip(found, requests) if not url.startswith("file:")
        ]

    def screenshot(self, *, height: int | None = None) -> bytes:
        """Return the page as PNG, from its top and as tall as it is, or ``height``."""
        size = self.browser.send("Page.getLayoutMetrics", self)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.browser.send("Page.captureScreenshot", self, format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def move_pointer(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.browser.send("Input.dispatchMouseEvent", self, type="mouseMoved", x=x, y=y)


class Browser:
    """A running Chromium with pipes to and from it."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read, self.count, self.buffer = write, read, 0, b""
        self.pages: dict[str, Page] = {}

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False, script: bool = True) -> Page:
        """Return a file opened in a window of this size."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, [])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable", page)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", page, **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", page, features=scheme)
        if not script:
            self.send("Emulation.setScriptExecutionDisabled", page, value=True)
        self.send("Page.navigate", page, url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in page.events):
            self._take_message()
        return page

    def send(self, method: str, page: Page | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if page is not None:
            message["sessionId"] = page.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take_message()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _take_message(self) -> dict[str, Any]:
        """Return the next message; an event is also given to its page."""
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer")
            more = os.read(self.read, 1 << 16)
            if not more:
                raise EOFError("Chromium ended")
            self.buffer += more
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message and (page := self.pages.get(message.get("sessionId", ""))):
            page.events.append(message)
        return message


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a Chromium with a profile of its own, and end it afterwards."""
    path = find_browser()
    assert path is not None, "chromium is not installed"
    to_browser, from_browser = os.pipe(), os.pipe()

    def connect() -> None:  # Chromium reads commands from descriptor 3 and answers on 4
        ends = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(to_browser[1], from_browser[0])
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
