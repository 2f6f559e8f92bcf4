"""A browser, driven through the pipe of its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """Return the browser's program, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One open page: what it logs and asks for is kept."""

    def __init__(self, reading: IO[bytes], writing: IO[bytes]) -> None:
        self._reading, self._writing = reading, writing
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        """Of the console, and errors that nobody caught."""
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writing.write(json.dumps(message).encode() + b"\0")
        self._writing.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        data = bytearray()
        while (byte := self._reading.read(1)) != b"\0":
            assert byte, "the browser has gone"
            data += byte
        message = json.loads(data)
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.messages.append(str(message["params"]["args"]))
            case "Runtime.exceptionThrown":
                self.messages.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.messages.append(str(message["params"]["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def open(self, path: Path, width: int, height: int, scheme: str) -> None:
        """Load a page from the file system at a size and with a preference of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=False, **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()

    def ask(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < end, f"{expression} did not come true"
            time.sleep(0.05)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextmanager
def tab(program: str) -> Iterator[Tab]:
    """Start the browser, and end it."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = f"--headless --no-sandbox --disable-gpu --user-data-dir={profile}"
        redirected = (
            f"exec {program} {options} --remote-debugging-pipe 3<&{to_browser} 4>&{from_browser}"
        )
        process = subprocess.Popen(
            ["bash", "-c", redirected],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            with os.fdopen(to_us, "rb") as reading, os.fdopen(from_us, "wb") as writing:
                yield Tab(reading, writing)
        finally:
            process.terminate()
            process.wait(timeout=120)
