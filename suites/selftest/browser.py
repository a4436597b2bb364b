"""Pages in a headless Chromium, by the DevTools protocol on the pipe of `--remote-debugging-pipe`.

Keys and clicks are the browser's own events: Tab moves the focus, and a field gets what is typed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root and most containers cannot have; all pages are this project's
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no page, nor the browser itself, reaches a network
)
# The browser reads commands from descriptor 3 and writes answers to 4.
LAUNCHER = """\
import os, sys
for number in (3, 4):
    os.dup2(int(sys.argv[1]), number)
os.execv(sys.argv[2], sys.argv[2:])
"""
# Names of keys, with the codes that Windows has for them: without one a key has no effect of its own.
KEYS = {
    "Backspace": 8,
    "Tab": 9,
    "Enter": 13,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
SECONDS = 30
"""Seconds that an answer may take, on a busy machine."""


class Box(NamedTuple):
    """Edges of an element, in pixels of CSS."""

    left: float
    top: float
    right: float
    bottom: float


class BrowserError(Exception):
    """An error of the browser, or of a script in a page."""


def find_browser() -> str | None:
    """Return the path of a Chromium on this machine, or None.

    The variable LOCKSTEP_BROWSER names another one; where it is empty, there is none.
    """
    names = (os.environ["LOCKSTEP_BROWSER"],) if "LOCKSTEP_BROWSER" in os.environ else NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def start_browser(program: str, width: int = 900, height: int = 700) -> Iterator[Browser]:
    """Start a browser with one empty page; it ends with the block."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory(prefix="lockstep-browser-", ignore_cleanup_errors=True) as folder:
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(theirs.fileno())]
        process = subprocess.Popen(
            [*launcher, program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": folder},
            start_new_session=True,
        )
        theirs.close()
        try:
            browser = Browser(ours)
            browser.resize(width, height)
            yield browser
        finally:
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Browser:
    """A browser and its one page.

    Args:
        connection: socket for commands and answers.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(SECONDS)
        self._received = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._socket.sendall(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass  # an event: the page is asked for what is needed
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = self._socket.recv(1 << 20)
            if not part:
                raise BrowserError("the browser has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Set the size of the window.

        Args:
            width: pixels of CSS.
            height: pixels of CSS.
            scale: pixels of a picture for each.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def open(self, path: Path, scripts: bool = True) -> None:
        """Load a file, in light colours, with or without its scripts."""
        light = [{"name": "prefers-color-scheme", "value": "light"}]
        self.call("Emulation.setEmulatedMedia", features=light)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        address = path.resolve().as_uri()
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState == 'complete' && location.href == {json.dumps(address)}")

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript, or of a promise."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            error = done["exceptionDetails"]
            raise BrowserError(error.get("exception", {}).get("description", error["text"]))
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true."""
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"waited {SECONDS} s, without result: {condition}")
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press and release keys, of KEYS, one after another."""
        for key in keys:
            # A text makes Enter choose what has the focus.
            event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type a text into what has the focus, a key a character."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def boxes(self, selector: str) -> list[Box]:
        """Return the places, in the window, of all elements that a selector finds."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.getBoundingClientRect())"
        return [Box(*edges) for edges in self.run(f"{found}.map(b => [b.left, b.top, b.right, b.bottom])")]

    def click(self, selector: str) -> None:
        """Click at the middle of the first element that a selector finds."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.boxes(selector)[0]
        place = {"x": (box.left + box.right) / 2, "y": (box.top + box.bottom) / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def picture(self, top: float, bottom: float) -> bytes:
        """Return a part of the page, in the width of the window, as PNG.

        Args:
            top: pixels of CSS from the top of the page.
            bottom: pixels of CSS from the top of the page.
        """
        width = self.run("innerWidth")
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])
