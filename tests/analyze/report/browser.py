"""Chromium without a window, spoken to over a pipe in its DevTools protocol: no driver needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

# No service of the browser's own may look like the page's use of the network.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-default-apps",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
    "--window-size=1280,1000",
]
PATIENCE = 60  # seconds for an answer


def chromium():
    """Path of the browser, None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser(profile):
    """A Page of a fresh browser whose profile lies in an empty folder."""
    read, give = os.pipe()
    take, write = os.pipe()
    # The protocol: NUL-ended JSON, commands on descriptor 3, answers and events on 4.
    command = f'exec "$0" "$@" 3<&{read} 4>&{write}'
    words = ["bash", "-c", command, chromium(), *FLAGS, f"--user-data-dir={profile}"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, pass_fds=(read, write), **streams)
    os.close(read)
    os.close(write)
    try:
        yield Page(give, take)
    finally:
        os.close(give)
        process.terminate()
        process.wait(PATIENCE)
        os.close(take)


class Page:
    """One tab; `events` are those that the browser has sent since it was opened."""

    def __init__(self, give, take):
        self.give, self.take, self.rest = give, take, b""
        self.number, self.events, self.session = 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.give, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        while b"\0" not in self.rest:
            found = os.read(self.take, 1 << 20)
            assert found, "the browser has ended"
            self.rest += found
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, path):
        """Load a file and wait until it is drawn: `ready` of the page."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def until(self, expression):
        """Wait for a JavaScript expression to be true, and return its value."""
        end = time.monotonic() + PATIENCE
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def value(self, expression):
        """What a JavaScript expression is, as plain data."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind, x, y, **values):
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **values)

    def click(self, x, y):
        self.mouse("Moved", x, y)
        for kind in ("Pressed", "Released"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, **values):
        """PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot", **values)["data"])

    def pdf(self):
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def complaints(self):
        """Errors and warnings of the console, and exceptions that nobody caught."""
        said = {
            "Runtime.exceptionThrown": lambda p: p["exceptionDetails"],
            "Log.entryAdded": lambda p: p["entry"]["text"],
            "Runtime.consoleAPICalled": lambda p: p["type"] in ("error", "warning") and p["args"],
        }
        found = [
            said[event["method"]](event["params"])
            for event in self.events
            if event.get("method") in said
        ]
        return [each for each in found if each]

    def requests(self):
        """Addresses that the page asked for, except data that it contains itself."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]
