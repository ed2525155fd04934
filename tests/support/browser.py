"""Control a real Chromium through its debugging pipe: keys, clicks, window sizes and requests."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.waiting import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0
# Chromium reads commands from descriptor 3 and writes responses to descriptor 4.
_ON_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """Return the path of the installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


# Errors that the browser returns if the page changes before it evaluates an expression.
_LEFT = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")


class Navigated(AssertionError):
    """The browser left the page before it evaluated the expression."""


class Page:
    """One page. A context manager.

    Attributes:
        requests: addresses that the page requested, including its own address.
        troubles: errors and exceptions in the console of the page.
    """

    def __init__(self, browser: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.requests: list[str] = []
        self.troubles: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="hil-browser-", ignore_cleanup_errors=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        # Chromium's sandbox needs features that containers and root lack. The tests only open their own pages.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [
            "--remote-debugging-pipe",
            "--disable-extensions",
            "--disable-background-networking",
            f"--user-data-dir={self._profile.name}",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_3_AND_4, str(read), str(write), browser, *flags, "about:blank"],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        try:
            self._attach(dark)
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _attach(self, dark: bool) -> None:
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for part in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{part}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str) -> None:
        """Go to an address and wait until the page has loaded."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, on this page or on the page that it opens."""

        def holds() -> Any:
            try:
                return self.run(condition)
            except Navigated:
                return False

        eventually(holds, condition, PATIENCE_S)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression as JSON values. Wait for the result of a promise."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the visible text of each element that matches a CSS selector."""
        return list(
            self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.innerText.trim())")
        )

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of the first matching element."""
        self.press_mouse(selector)
        self.release_mouse()

    def press_mouse(self, selector: str) -> None:
        """Press the mouse button in the middle of the first matching element.

        If the page moves the element between the measurement and the press, the press is repeated.
        """
        measure = (
            f"(one => {{ one.scrollIntoView({{block: 'center'}}); const r = one.getBoundingClientRect();"
            " addEventListener('mousedown', event => { window.pressed = one.contains(event.target); },"
            " {capture: true, once: true}); window.pressed = null;"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )

        def press() -> bool:
            x, y = self.run(measure)
            self._mouse("mousePressed", x, y)
            if not self.run("window.pressed"):
                self._mouse("mouseReleased", 0, 0)
                return False
            self._pressed = x, y
            return True

        eventually(press, selector, PATIENCE_S)

    def release_mouse(self) -> None:
        """Release the mouse button at the position of the press."""
        self._mouse("mouseReleased", *self._pressed)

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a position in the first matching element, in CSS pixels from its upper left corner."""
        corner = self.run(
            f"(one => {{ one.scrollIntoView({{block: 'center'}}); const r = one.getBoundingClientRect();"
            f" return [r.x, r.y]; }})(document.querySelector({json.dumps(selector)}))"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=corner[0] + x, y=corner[1] + y)

    def press(self, key: str) -> None:
        """Press a key: ``Tab``, ``Enter``, ``ArrowLeft``, ``/``."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "/": 191}
        code, text = codes[key], {"text": {"Enter": "\r"}.get(key, key)} if key in ("Enter", "/") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Type a text into the focused element."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Return the visible part of the page as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol. Return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    left = any(text in answer["error"]["message"] for text in _LEFT)
                    raise (Navigated if left else AssertionError)(method, answer["error"])
                return answer["result"]
            self._hear(answer)

    def _next(self, end: float, method: str) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._in, 1 << 16) if ready else b""
            assert more, f"the browser did not answer {method} (exit code {self._process.poll()})"
            self._buffer += more
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _hear(self, event: Any) -> None:
        told = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(told["exceptionDetails"].get("exception", {}).get("description", "exception"))
        if event.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            entry = told["entry"]
            # In tests, a page can outlive its server. An interrupted event stream is not an error of the page.
            cut_off = entry.get("url", "").endswith("/events") and "net::ERR" in entry["text"]
            # Chromium aborts requests while other tests create network interfaces.
            is_outside = "net::ERR_NETWORK_CHANGED" in entry["text"]
            self.troubles += [] if cut_off or is_outside else [entry["text"]]

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the browser and all its child processes."""
        os.close(self._out)
        os.close(self._in)
        # The child processes are in the browser's process group.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._profile.cleanup()
