"""Drives the headless Chromium of `scripts/setup browser` over its DevTools protocol, by a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peer import GENEROUS

FOLDER = Path(__file__).resolve().parents[2] / ".deps" / "browser"

_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>"""
# One process: the package's program is made for places where a browser's own sandboxes cannot be.
_OPTIONS = (
    "--headless=shell",
    "--no-sandbox",
    "--no-zygote",
    "--single-process",
    "--in-process-gpu",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def why_not() -> str | None:
    """Why there is no browser; None if there is one."""
    if (FOLDER / ".stamp").is_file():
        return None
    return f"no browser in {FOLDER}: run scripts/setup browser"


def require_browser() -> None:
    """Skips the test without a browser, or fails it where KVFERRY_REQUIRE names one."""
    why = why_not()
    if why is None:
        return
    if "browser" in os.environ.get("KVFERRY_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"KVFERRY_REQUIRE names browser, but {why}")
    pytest.skip(why)


class Page:
    """One page of the browser. What goes wrong in it is in `errors`; what it asked the network for in `requests`."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._buffer, self._number = to, back, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._back], [], [], left)[0]:
                raise AssertionError("the browser did not answer")
            data = os.read(self._back, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        got: dict[str, Any] = json.loads(message)
        self._note(got)
        return got

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {params['message']}")
        elif method == "Page.loadEventFired":
            self.loaded = True

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + GENEROUS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Loads a file and waits until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.loaded, self.requests = False, []
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + GENEROUS
        while not self.loaded:
            self._receive(deadline)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What is to be read in an element."""
        text: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with one page; `folder` is its own."""
    fonts = _FONTS.format(fonts=FOLDER / "fonts", cache=folder / "font-cache")
    (folder / "fonts.conf").write_text(fonts, encoding="utf-8")
    to_read, to = os.pipe()
    back, back_write = os.pipe()

    def pipes() -> None:
        # The browser's ends are its descriptors 3 and 4.
        ends = os.dup(to_read), os.dup(back_write)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    environment = {**os.environ, "HOME": str(folder), "FONTCONFIG_PATH": str(folder)}
    environment["LD_LIBRARY_PATH"] = str(FOLDER / "lib")
    process = subprocess.Popen(
        [str(FOLDER / "chromium"), *_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        preexec_fn=pipes,
        close_fds=False,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    os.close(to_read)
    os.close(back_write)
    try:
        yield Page(to, back)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(back)
