"""A headless Chromium, driven through its debugging pipe: JSON messages that end with a zero byte, on descriptors 3 and 4."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS = 30.0


def executable() -> str | None:
    """Where Chromium is; None where it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own.

    Args:
        profile: an empty directory that it may fill.
        size: of the window, in pixels.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1440, 1500)) -> None:
        found = executable()
        assert found is not None
        for_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        script = f'exec "$0" "$@" 3<&{for_browser} 4>&{from_browser}'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        flags += [f"--window-size={size[0]},{size[1]}", f"--user-data-dir={profile}", "--no-first-run"]
        flags += [
            "--disable-quic",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, found, *flags],
            pass_fds=(for_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_browser)
        os.close(from_browser)
        self._numbers = 0
        self._buffer = b""
        self.logs: list[str] = []
        """What the page wrote to its console, its exceptions and refused requests among it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the debugging protocol, and its result."""
        self._numbers += 1
        message = {"id": self._numbers, "method": method, "params": parameters}
        if method.partition(".")[0] != "Target":
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + START_SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._numbers:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.logs.append(str(event["params"]["exceptionDetails"].get("exception", {}).get("description")))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.logs.append(str([argument.get("value") for argument in event["params"]["args"]]))
        elif event.get("method") == "Log.entryAdded":
            self.logs.append(event["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 15.0) -> Any:
        """Waits until an expression is true; returns it."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()")):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {expression}; {self.logs}; {self.text()[:2000]}"
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """What an element reads."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))

    def dark(self) -> None:
        """From now on as a user who prefers dark pages sees it."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def close(self) -> None:
        """Ends the browser."""
        os.write(self._write, b'{"id": 0, "method": "Browser.close"}\0')  # a signal would leave its files in /tmp behind
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
