"""A headless Chromium driven by the DevTools protocol: pages as their readers see them, for the scripts in this folder, run by hand."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from websocket import create_connection


class Page:
    """One page. messages: what its console said, exceptions and refusals by its Content-Security-Policy among it."""

    def __init__(self, address: str):
        self.socket, self.number, self.messages = create_connection(address, timeout=60, suppress_origin=True), 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            heard = json.loads(self.socket.recv())
            if heard.get("id") == self.number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']['message']}")
                return heard["result"]
            if heard["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(json.dumps(heard["params"]))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it resolves to."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", script))
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} did not become true within {seconds:.0f} s. The console: {self.messages}")
            time.sleep(0.05)
        return value

    def open(self, address: str, width: int, dark: bool = False, height: int = 800) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url="about:blank")  # another fragment alone would load nothing
        self.call("Page.navigate", url=address)
        self.wait(f"location.href.startsWith({json.dumps(address.partition('#')[0])}) && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def overflows(self) -> bool:
        """Whether the page is wider than its window."""
        return self.run("document.documentElement.scrollWidth > document.documentElement.clientWidth")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))


@contextmanager
def open_browser() -> Iterator[Page]:
    """A page of a new headless Chromium, which ends with the block."""
    program = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if program is None:
        raise SystemExit("No chromium, chromium-browser or google-chrome is in PATH: install one.")
    with TemporaryDirectory() as profile:
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            for _ in range(600):
                if port_file.exists() and port_file.read_text().strip():
                    break
                time.sleep(0.1)
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                address = next(each["webSocketDebuggerUrl"] for each in json.load(answer) if each["type"] == "page")
            page = Page(address)
            yield page
            page.socket.close()
        finally:
            process.terminate()
            process.wait()
