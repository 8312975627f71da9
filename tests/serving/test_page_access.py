"""The page for those who use a keyboard, a screen reader, the dark, or no motion."""

from __future__ import annotations

from pathlib import Path

import axe_core_python
import pytest
from api_kit import Site
from browser_kit import FEE, Browser, scheduled, send


def test_everything_can_be_done_with_the_keyboard_alone(site: Site, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    browser.find("input[name=key]")
    browser.keys(site.admin_key, Keys.ENTER)
    browser.find("#question")
    browser.driver.refresh()
    browser.find("#question")
    names = []
    while "Question" not in names:
        browser.keys(Keys.TAB)
        focused = browser.driver.switch_to.active_element
        names.append(focused.accessible_name)
        seen = browser.run("const s = getComputedStyle(arguments[0]); return s.outlineStyle + s.outlineWidth", focused)
        assert seen == "solid2px", (names, seen)
        assert len(names) < 20
    order = ["Ask", "Corpora", "Jobs", "Savings", "Theme: system", "Sign out", "Question"]
    assert [name for name in names if name in order] == order
    browser.keys("when is it paid?", Keys.ENTER)
    browser.find(".sources a")
    for _ in range(30):
        browser.keys(Keys.TAB)
        if browser.driver.switch_to.active_element.text == "fees.txt":
            break
        if browser.run("return document.activeElement === document.body"):
            browser.run("document.getElementById('main').focus()")
    browser.keys(Keys.ENTER)
    browser.find("dialog mark", "berth fee")
    assert browser.run("return document.querySelector('dialog').contains(document.activeElement)")
    browser.keys(Keys.ESCAPE)
    browser.until(lambda: not browser.all("dialog"))
    assert browser.driver.switch_to.active_element.text == "fees.txt"
    browser.driver.get(f"{site.url}/#corpus/{corpus}")
    browser.find("h1", "harbour")
    browser.run("document.querySelector('td button').focus()")
    browser.keys(Keys.ENTER)
    browser.find("dialog h2", "Delete")
    browser.keys(Keys.TAB, Keys.ENTER)
    browser.gone("table", "fees.txt")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_rule_of_access_is_broken(site: Site, browser: Browser, theme: str) -> None:
    axe = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text()
    corpus = site.corpus_of("harbour", {"fees.txt": FEE, "bad.txt": "ERROR empty_file"})
    scheduled(site, corpus)

    def check(where: str) -> None:
        browser.run("document.documentElement.dataset.theme = arguments[0]", theme)
        browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        browser.run(axe)
        shown = "r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)])"
        script = f"const done = arguments[0]; axe.run().then((r) => done({shown}))"
        assert browser.driver.execute_async_script(script) == [], where

    browser.find("input[name=key]")
    check("sign in")
    browser.open(site.admin_key)
    send(browser, "when is it paid?")
    browser.find(".sources a")
    check("ask")
    browser.all(".sources a")[0].click()
    browser.find("dialog mark")
    check("passage")
    browser.press("Close")
    for place, seen in (("corpora", "Corpora"), (f"corpus/{corpus}", "harbour"), ("jobs", "Jobs"), ("savings", "Savings")):
        browser.run("location.hash = arguments[0]", place)
        browser.find("h1", seen)
        check(place)


def test_answers_and_progress_are_said_and_regions_have_names(site: Site, browser: Browser) -> None:
    site.corpus_of("harbour", {"fees.txt": FEE})
    browser.open(site.admin_key)
    for landmark in ("header", "nav[aria-label]", "main", "[role=status][aria-live=polite]", "[role=alert]"):
        assert len(browser.all(landmark)) == 1, landmark
    send(browser, "when is it paid?")
    browser.until(lambda: "when is it paid?" in browser.run("return document.getElementById('status').textContent"))
    browser.run("document.querySelector('#corpus').focus()")
    site.engine.refuse = RuntimeError("x")
    send(browser, "again")
    browser.find("#alert", "The server had an error")
    browser.press("Dismiss")
    controls = [e for e in browser.all("button, a, input, select, textarea, summary") if e.is_displayed()]
    assert [e.get_attribute("outerHTML") for e in controls if not e.accessible_name] == []


def test_the_systems_wishes_are_heeded(browser: Browser) -> None:
    def ground(scheme: str) -> str:
        wishes = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wishes})
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    try:
        browser.find("input[name=key]")
        assert ground("dark") != ground("light")
        moving = """const answer = document.createElement('div');
          answer.className = 'answer';
          answer.setAttribute('aria-busy', 'true');
          document.body.append(answer);
          return getComputedStyle(answer, '::after').animationName;"""
        assert browser.run(moving) == "none"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_theme_can_be_chosen_and_is_remembered(browser: Browser) -> None:
    def ground() -> str:
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    browser.press("Theme: system")
    light = ground()
    browser.press("Theme: light")
    assert ground() != light
    browser.driver.refresh()
    browser.find("#theme", "Theme: dark")
    assert ground() != light
