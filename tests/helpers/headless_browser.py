"""A headless Chromium, driven over its DevTools protocol: what a reader's browser makes of a page."""

from __future__ import annotations

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
from typing import Any
from urllib.request import Request, urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One page. `problems` are its console errors, uncaught exceptions and refusals by its own security policy."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._count = socket, 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.call(f"{domain}.enable", **({"timeDomain": "threadTicks"} if domain == "Performance" else {}))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._count:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        event, details = message.get("method"), message.get("params", {})
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.problems.append(json.dumps(details["args"])[:500])
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])

    def show(self, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, code: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition} {self.problems}"
            time.sleep(0.05)

    def draw_all(self) -> None:
        """Scrolls through the page as a reader would, until every figure is drawn."""
        self.run("document.querySelectorAll('.plot').forEach(p => p.scrollIntoView())")
        for place in range(self.run("document.querySelectorAll('.plot').length")):
            self.run(f"document.querySelectorAll('.plot')[{place}].scrollIntoView()")
            self.wait(f"document.querySelectorAll('.plot')[{place}].querySelector('.main-svg')")
        self.run("scrollTo(0, 0)")

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        made = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": clip} if whole else {}))
        file.write_bytes(base64.b64decode(made["data"]))

    def main_thread_seconds(self) -> float:
        """CPU time of the page's thread so far: what does not depend on who else uses the machine."""
        metrics = {m["name"]: m["value"] for m in self.call("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])


@contextmanager
def open_browser() -> Iterator[Tab]:
    with running_browser() as browser, open_tab(browser) as tab:
        yield tab


@contextmanager
def open_tab(browser: str) -> Iterator[Tab]:
    """A new page of a running browser."""
    with urlopen(Request(f"{browser}/new", method="PUT")) as answer:
        page = json.load(answer)
    with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
        yield Tab(socket)
    urlopen(f"{browser}/close/{page['id']}").close()


@contextmanager
def running_browser() -> Iterator[str]:
    """The address that its pages are listed, opened and closed at."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [CHROMIUM, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--disable-gpu",
                 "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", *sandbox, "about:blank"]  # fmt: skip
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _address(Path(profile), process)
        finally:
            process.terminate()
            process.wait(timeout=20)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Chromium writes its port to a file once it listens."""
    end = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < end, "Chromium did not start"
        try:
            address = f"http://127.0.0.1:{(profile / 'DevToolsActivePort').read_text().split()[0]}/json"
            urlopen(address).close()
            return address
        except (OSError, IndexError):
            time.sleep(0.1)
