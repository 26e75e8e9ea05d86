"""A headless Chromium, told what to do over a pipe, with what it answers and complains about.

Knows the DevTools protocol as far as tests of pages need it (Page, Runtime, Input, Emulation, Log); must not know what
is on a page. Needs no library and no port.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0


def find_chromium() -> str | None:
    """The program, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one page, closed at the end of the `with` block. `profile`: an empty folder."""

    def __init__(self, program: str, profile: Path) -> None:
        self._command = [program, *SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        self._number = 0
        self._heard = b""
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, refused and attempted requests."""
        self.requested: list[str] = []
        """What the page asked for, itself left out."""

    def __enter__(self) -> "Chromium":
        down, up = os.pipe(), os.pipe()
        # The browser reads its file descriptor 3 and writes 4.
        reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (down[0], up[1]))
        os.close(down[0])
        os.close(up[1])

        def connect() -> None:
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, stdin=quiet, stdout=quiet, stderr=quiet, close_fds=False, preexec_fn=connect
        )
        os.close(reads)
        os.close(writes)
        self._to, self._from = down[1], up[0]
        (page,) = [one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and its answer; events that come before it are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content) :]
        while True:
            answer = self._hear()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer}"
                return dict(answer["result"])

    def open(self, page: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Show a file in a window of that size, and wait until it has loaded."""
        self.complaints.clear()
        self.requested.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self._loaded = False
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._hear()

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size, that of a phone with touch if it is narrow."""
        narrow = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is worth, as JSON; a promise is waited for."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str, number: int = 0) -> None:
        """Click in the middle of the element, with a real mouse."""
        x, y = self.middle(selector, number)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)
        self.frame()

    def middle(self, selector: str, number: int = 0) -> tuple[float, float]:
        """The element's middle in the window, scrolled into it."""
        found = self.value(
            f"(() => {{const e = document.querySelectorAll({json.dumps(selector)})[{number}]; if (!e) return null;"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]})()"
        )
        assert found is not None, f"nothing matches {selector!r} ({number})"
        return found[0], found[1]

    def mouse(self, kind: str, x: float, y: float) -> None:
        """A single event of the mouse."""
        button = "none" if kind == "mouseMoved" else "left"
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def drag(self, selector: str, share: float) -> None:
        """Drag from the middle of the element to the right, by this share of its width."""
        x, y = self.middle(selector)
        width = self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().width")
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y)
        for step in range(1, 6):
            self.mouse("mouseMoved", x + width * share * step / 5, y)
        self.mouse("mouseReleased", x + width * share, y)
        self.frame()

    def frame(self) -> None:
        """Wait until what has changed is drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def shot(self, file: Path, *, whole: bool = True) -> None:
        """A picture of the page, or of the window only."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, fromSurface=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def print(self, file: Path) -> None:
        """The page as a PDF on A4."""
        printed = self.ask("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        file.write_bytes(base64.b64decode(printed["data"]))

    def _hear(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._heard:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0))
            assert ready, f"no word from Chromium within {PATIENCE_S:g} s"
            content = os.read(self._from, 1 << 20)
            assert content, f"Chromium has ended with {self._process.poll()}"
            self._heard += content
        first, _, self._heard = self._heard.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, facts: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value") for one in facts["args"]]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(facts["entry"]["text"])
        elif method == "Network.requestWillBeSent" and facts["type"] != "Document":
            self.requested.append(facts["request"]["url"])
