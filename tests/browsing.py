"""Chromium for the tests of pages: found, started, and asked what it shows."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "REKINDLE_NEEDS_BROWSER"
"""The environment variable with which tests of pages fail without a browser."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)
PATIENCE = 120.0
"""Seconds after which a test gives up to wait for the browser."""
LOGS = {"browser": "ALL", "performance": "ALL"}


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """Start Chromium with a new profile in a folder, and end it."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        _missing(
            "no Chromium with chromedriver was found: apt-get install chromium chromium-driver"
        )
    try:
        from selenium import webdriver  # noqa: PLC0415
        from selenium.webdriver.chrome.service import Service  # noqa: PLC0415
    except ImportError:
        _missing("selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = str(program)
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", LOGS)
    browser = webdriver.Chrome(options=options, service=Service(str(driver)))
    try:
        yield browser
    finally:
        browser.quit()


def _missing(reason: str) -> None:
    """Skip the test, or fail where a browser is required."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but {reason}")
    pytest.skip(reason)


class Page:
    """A page in a browser, with the document that is in it."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        self.set_width(1280)
        for log in LOGS:
            browser.get_log(log)
        browser.get(path.as_uri())
        self.document: dict[str, Any] = json.loads(
            self.run("return document.getElementById('document').textContent")
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript."""
        return self.browser.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The text of the first element that fits, as it is shown."""
        script = (
            "const e = document.querySelector(arguments[0]); return e.innerText ?? e.textContent"
        )
        return " ".join(str(self.run(script, selector)).split())

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that fit, with all that is in them."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return [" ".join(text.split()) for text in self.run(script, selector)]

    def wait_for(self, script: str) -> None:
        """Wait until JavaScript returns something that is true."""
        give_up = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < give_up, f"never true: {script}"
            time.sleep(0.01)

    def open_table(self, selector: str) -> None:
        """Open the table of a drawing; its rows are made a moment later."""
        self.find(f"{selector} summary").click()
        self.wait_for(f"return document.querySelector('{selector} tbody tr')")

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def press(self, selector: str, *keys: str) -> None:
        """Press keys in an element."""
        self.find(selector).send_keys(*keys)

    def set_width(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, theme: str) -> None:
        """Have the system prefer a theme."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def complaints(self) -> list[str]:
        """Messages of the console."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        messages = (
            json.loads(e["message"])["message"] for e in self.browser.get_log("performance")
        )
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
