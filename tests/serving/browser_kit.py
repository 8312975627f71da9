"""The page in a real Chromium, driven as a person would: by what is seen and by the keyboard."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api_kit import Site
from promised import missing

PATIENCE = 60.0  # seconds: the machine may be busy
FEE = "The berth fee is forty crowns a night.\n\nIt is paid at the harbour office before noon."
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1200,900", "--lang=en",
)  # fmt: skip


class Browser:
    """A window on one site."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, key: str, place: str = "") -> None:
        """Sign in as a person does, and go to a section."""
        self.driver.get(f"{self.url}/")
        self.write("input[name=key]", key)
        self.press("Sign in")
        self.find("#nav a")
        if place:
            self.driver.get(f"{self.url}/#{place}")

    def until(self, said: Callable[[], Any]) -> Any:
        """Wait for something to be so. What is not there yet, or not any more, is waited for too."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05, ignored_exceptions=(WebDriverException,))
        return wait.until(lambda _driver: said())

    def all(self, css: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", css)
        return found

    def find(self, css: str, text: str = "") -> Any:
        """The first element that is shown and holds this text."""
        return self.until(lambda: next((e for e in self.all(css) if e.is_displayed() and text in e.text), None))

    def gone(self, css: str, text: str) -> None:
        self.until(lambda: not any(text in e.text for e in self.all(css)))

    def press(self, name: str, within: str = "") -> None:
        """The button or link with this accessible name."""
        found = f"{within} button, {within} a, {within} summary"

        def press() -> bool:
            named = [e for e in self.all(found) if e.is_displayed() and e.accessible_name == name]
            if named:
                named[0].click()
            return bool(named)

        self.until(press)

    def write(self, css: str, text: str) -> None:
        def write() -> bool:  # all of it again, should the page be drawn anew meanwhile
            field = self.find(css)
            field.clear()
            field.send_keys(text)
            return True

        self.until(write)

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def faults(self) -> list[str]:
        """What the console says of errors: of scripts and of the policy, but not of answers such as 404."""
        said = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [text for text in said if "Failed to load resource" not in text]


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """A headless Chromium with a profile of its own. Skips where there is none."""
    from selenium import webdriver

    driver_path, browser_path = shutil.which("chromedriver"), shutil.which("chromium")
    if driver_path is None or browser_path is None:
        missing("chromium", "no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser_path
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
        try:
            yield driver
        finally:
            driver.quit()


def put(browser: Browser, *paths: Path, where: str = "#upload") -> None:
    browser.until(lambda: browser.all(where))[0].send_keys("\n".join(map(str, paths)))


def scheduled(site: Site, corpus: str, cron: str = "0 3 * * *") -> None:
    """Give the corpus a source, and a schedule if there is a time."""
    folder = site.parts.settings.data_dir / "sources"
    folder.mkdir(exist_ok=True)
    with site.http() as http:
        source = {"source": {"type": "folder", "path": str(folder)}}
        http.put(f"/v1/corpora/{corpus}/sources", json=source).raise_for_status()
        if cron:
            http.post("/v1/schedules", json={"corpus_id": corpus, "cron": cron}).raise_for_status()


def send(browser: Browser, question: str) -> None:
    browser.write("#question", question)
    browser.press("Send")
