"""A headless Chromium for a test, over the pipes of its DevTools protocol: nothing but the browser has to be installed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
]


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """with Browser(tmp_path) as page:
        page.open("http://127.0.0.1:9464/")
        page.wait_for("document.title !== ''")

    One page. What it asked the network for, and what it or the browser complained about, is kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.requests: list[str] = []  # URLs
        self.complaints: list[str] = []
        self.number = 0
        self.unread = b""
        self.session = None
        self.loaded = False

    def __enter__(self) -> "Browser":
        read_end, self.to_browser = os.pipe()
        self.from_browser, write_end = os.pipe()
        flags = FLAGS + [f"--user-data-dir={self.folder / 'profile'}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium has none for root
        # It reads from 3 and writes to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}', find_browser(), *flags, "about:blank"],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stderr=(self.folder / "browser.log").open("wb"),
            env=os.environ | {"HOME": str(self.folder)},
        )
        os.close(read_end)
        os.close(write_end)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.close(self.to_browser)  # it ends when its pipe does
        os.close(self.from_browser)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # --- the protocol -------------------------------------------------------------------------------------------------

    def call(self, method: str, seconds: float = 60, **parameters) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self.read(deadline, method)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.note(answer)

    def read(self, deadline: float, method: str) -> dict:
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.from_browser], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {method} in time"
            part = os.read(self.from_browser, 1 << 16)
            assert part, f"the browser ended; its log:\n{(self.folder / 'browser.log').read_text()}"
            self.unread += part
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def note(self, event: dict) -> None:
        method, what = event.get("method"), event.get("params", {})
        self.loaded = self.loaded or method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(what["exceptionDetails"]))
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("warning", "error"):
            self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("warning", "error", "assert"):
            self.complaints.append(json.dumps(what["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {what['message']}")
            raise AssertionError(self.complaints[-1])

    # --- what a test does ---------------------------------------------------------------------------------------------

    def open(self, url: str, seconds: float = 60) -> None:
        self.loaded = False
        self.call("Page.navigate", url=url)
        while not self.loaded:
            self.note(self.read(time.monotonic() + seconds, f"for the end of loading {url}"))

    def evaluate(self, expression: str, seconds: float = 60):
        result = self.call(
            "Runtime.evaluate", seconds, expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Until the expression is true in the page."""
        turns = int(seconds / 0.05)
        promise = f"""new Promise((done) => {{
            let turns = {turns};
            const look = () => (({condition}) ? done(true) : turns-- ? setTimeout(look, 50) : done(false));
            look();
        }})"""
        assert self.evaluate(promise, seconds * 2 + 20), f"never true: {condition}\n{self.text()}"

    def text(self, selector: str = "body") -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=CODES[key])

    def show_as(self, scheme: str, width: int, height: int = 900) -> None:
        """scheme: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


CODES = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27}
