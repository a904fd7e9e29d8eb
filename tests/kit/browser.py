"""A headless Chromium over its debugging pipe: pages are opened, asked and photographed. Needs no package of Python."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
_TIMEOUT_S = 30.0


class Browser:
    """One browser with one tab. `problems` are what pages reported: exceptions, and violations of their policy."""

    def __init__(self, *options: str) -> None:
        assert CHROMIUM is not None, "check CHROMIUM first"
        self._profile = tempfile.mkdtemp(prefix="flagstone-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def place() -> None:
            # The browser reads commands from descriptor 3 and writes answers to 4; one of ours may have that number.
            source, sink = os.dup(to_read), os.dup(to_write)
            high_source, high_sink = os.dup2(source, 63), os.dup2(sink, 62)
            os.dup2(high_source, 3)
            os.dup2(high_sink, 4)

        self._process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-extensions",
                "--disable-quic",
                "--disable-sync",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._profile}",
                *options,
                "about:blank",
            ],
            preexec_fn=place,  # noqa: PLW1509 - there are no other threads yet
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = next(
            each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"
        )
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and the colours that the person prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def before_pages(self, script: str) -> None:
        """Run a script in every page before its own."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, address: str) -> None:
        """Go to an address. Use `until` to wait for the content."""
        self._call("Page.navigate", url=address)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                found = self.run(f"!!({expression})")
            except AssertionError:
                found = False  # the page is being replaced
            if found:
                return
            time.sleep(0.02)
        raise AssertionError(f"it never came true in the browser: {expression}; problems: {self.problems}")

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Save a screenshot: the whole page, or what the window shows."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser and delete its profile."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(found["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.problems.append(found["params"]["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.problems.append(f"a dialog opened: {found['params']['message']}")
                self._call("Page.handleJavaScriptDialog", accept=False)
            case "Network.requestWillBeSent":
                self.requests.append(found["params"]["request"]["url"])
        return found
