"""An installed Chromium browser, controlled by Playwright."""

import shutil
from contextlib import contextmanager

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

# No service of the browser's own may look like the page's use of the network.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
PATIENCE = 60_000  # ms for an answer


def chromium():
    """Return the path of the browser, or None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def missing():
    """Return the reason why no page can be tested here, or None."""
    if sync_playwright is None:
        return "no playwright here: pip install playwright"
    return None if chromium() else "no chromium here: apt-get install chromium"


@contextmanager
def started():
    """Start a headless browser."""
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield found
        found.close()


@contextmanager
def opened(browser, **values):
    """Open a Page with its own profile; `values` are arguments of Playwright's new_context."""
    size = {"width": 1280, "height": 1000}
    context = browser.new_context(**{"viewport": size, **values})
    context.set_default_timeout(PATIENCE)
    yield Page(context.new_page())
    context.close()


class Page:
    """Tab `tab` of Playwright, with its error messages and requests."""

    def __init__(self, tab):
        self.tab, self.complaints, self.requests = tab, [], []
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", self._said)
        tab.on("request", lambda request: self._asked(request.url))

    def _said(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, url):
        """Return the addresses that the page requested, except data URLs."""
        if not url.startswith(("data:", "blob:")):
            self.requests.append(url)

    def open(self, path, fragment=""):
        self.tab.goto(path.resolve().as_uri() + fragment)

    def until(self, expression):
        """Wait until a JavaScript expression is true."""
        self.tab.wait_for_function(expression)

    def value(self, expression):
        """Return the value of a JavaScript expression as plain data."""
        return self.tab.evaluate(expression)

    def click(self, x, y):
        self.tab.mouse.click(x, y)
