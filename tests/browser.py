"""Drives headless Chromium with the DevTools protocol over a pipe, without a further package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser's path; None without one."""
_CODES = {"Backspace": 8, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


class Browser:
    """One page of a browser with its own profile and download folder, both in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self.downloads, self._profile = folder / "downloads", folder / "profile"
        self.downloads.mkdir()
        self.errors: list[str] = []
        self._numbers, self._unread, self._session = itertools.count(1), b"", None

    def __enter__(self) -> Browser:
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = f"exec 3<&{from_us} 4>&{to_us}; exec \"$@\""
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                 "--no-first-run", "--disable-background-networking", f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(["bash", "-c", shell, "bash", PROGRAM, *flags], pass_fds=(from_us, to_us),
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(from_us)
        os.close(to_us)
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Errors of the page meanwhile are added to `errors`."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        os.write(self._write, json.dumps({"id": number, "method": method, "params": parameters} | session).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"]["exception"]["description"])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])

    def _message(self, seconds: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], seconds)
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)

    def open(self, path: pathlib.Path) -> None:
        """Loads a file, and returns when its scripts have run."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} did not become true"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        code = _CODES.get(key) or ord(key.upper())
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def downloaded(self, seconds: float = 30.0) -> pathlib.Path:
        """The newest file in the download folder, once it is complete."""
        end = time.monotonic() + seconds
        while not (files := [path for path in self.downloads.iterdir() if path.suffix != ".crdownload"]):
            assert time.monotonic() < end, "nothing was downloaded"
            time.sleep(0.05)
        return max(files, key=lambda path: path.stat().st_mtime)

    def screenshot(self, path: pathlib.Path, width: int, height: int) -> None:
        """Writes a PNG file of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
