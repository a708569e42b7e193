"""A real headless Chromium, driven over a pair of pipes by its own DevTools protocol: no port, no driver, no library.

https://chromedevtools.github.io/devtools-protocol/ has the methods; a message is a JSON object that ends with a zero byte.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# The headless shell is the smallest package that Debian has of it.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_WITHIN_S = 60.0


def program() -> str | None:
    """The path of a Chromium, or None where none is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Chromium:
    """A running browser with one tab, as a context. events: all that the tab has reported, in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._unread = b""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        from_us, self._to = os.pipe()
        self._from, to_us = os.pipe()
        # It reads from descriptor 3 and writes to 4; the shell puts the pipes there, whatever their numbers here.
        command = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={self._profile.name}", "about:blank"]
        path = program()
        assert path is not None
        self._process = subprocess.Popen(["bash", "-c", command, path, *options], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL)
        os.close(from_us)
        os.close(to_us)
        self._session = None
        tab = next(found for found in self.call("Target.getTargets")["targetInfos"] if found["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session = None
        try:
            if kind is None:
                self.call("Browser.close")
                self._process.wait(_WITHIN_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._end()

    def _end(self) -> None:
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol answers; an AssertionError with its words where it is refused."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _WITHIN_S
        while number not in self._answers:
            self._read(deadline, method)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, page: Path, width: int, height: int = 800, scheme: str = "light") -> None:
        """Show a file at so many pixels across, in a light or a dark scheme, until it has loaded; earlier events are forgotten."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + _WITHIN_S
        while not self.named("Page.loadEventFired"):
            self._read(deadline, "loading")

    def named(self, method: str) -> list[dict[str, Any]]:
        """The events of one name that came since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, to: Path) -> None:
        """The whole page as a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        to.write_bytes(base64.b64decode(data))

    def _read(self, deadline: float, what: str) -> None:
        left_s = max(deadline - time.monotonic(), 0)
        ready, _, _ = select.select([self._from], [], [], left_s)
        data = os.read(self._from, 1 << 20) if ready else b""
        assert data, f"Chromium gave no answer within {_WITHIN_S:.0f} s, or ended: {what}"
        *messages, self._unread = (self._unread + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)
