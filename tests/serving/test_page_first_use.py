"""The page as one meets it: the first visit, what is waited for, where the keyboard is, and narrow screens."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from api_kit import Site
from browser_kit import FEE, Browser, put, scheduled, send

LONG = "a-name-without-any-place-to-break-" * 4


def focused(browser: Browser) -> str:
    """The text of what has the keyboard, or its accessible name."""
    element = browser.driver.switch_to.active_element
    return str(element.text or element.accessible_name)


def test_a_first_visit_leads_from_the_key_to_a_folder_that_is_read(site: Site, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "harbour" / "fees").mkdir(parents=True)
    (tmp_path / "harbour" / "fees" / "berths.txt").write_text(FEE)
    assert "admin.key" in browser.find(".sign-in").text
    assert not [e for e in browser.all("#leave, nav") if e.is_displayed()]
    browser.write("input[name=key]", "pr_…")
    browser.press("Sign in")
    browser.find("#alert", "no key")
    browser.open(site.admin_key)
    assert "Nothing has been read yet" in browser.find(".beginning").text
    assert focused(browser) == "Question"
    browser.write(".beginning input", "harbour")
    browser.press("Create")
    browser.until(lambda: focused(browser) == "harbour")
    browser.press("Ask about it")
    assert "has no documents yet" in browser.find(".beginning").text
    browser.press("Upload documents")
    browser.find("h1", "harbour")
    with site.ingesting():
        put(browser, tmp_path / "harbour", where="#upload-folder")
        browser.find("table", "harbour/fees/berths.txt")
    browser.press("Ask about it")
    assert "1 document has been read" in browser.find(".beginning").text


def test_the_keyboard_has_a_place_wherever_one_goes(site: Site, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    browser.open(site.admin_key)
    browser.find(".beginning")
    send(browser, "when is it paid?")
    browser.find(".sources a").click()
    browser.find("dialog mark")
    assert focused(browser) == "fees.txt"
    browser.run("location.hash = 'corpora'")
    browser.until(lambda: focused(browser) == "Corpora")
    assert not browser.all("dialog"), "it goes with the section that it was opened over"
    browser.press("Delete harbour")
    browser.find("dialog h2", "Delete")
    browser.driver.back()
    browser.find("h1", "Ask")
    browser.until(lambda: not browser.all("dialog"))
    with site.http() as http:
        assert [s["name"] for s in http.get("/v1/vector_stores").json()["data"]] == ["harbour"]
    browser.run(f"location.hash = 'corpus/{corpus}'")
    browser.press("Delete fees.txt")
    browser.press("Keep", within="dialog")
    browser.until(lambda: browser.driver.switch_to.active_element.accessible_name == "Delete fees.txt")
    browser.run("location.hash = arguments[0]", f"passage/{corpus}/file-none/1-2")
    browser.find("dialog .gone")
    browser.keys(Keys.ESCAPE)
    browser.until(lambda: browser.run("return location.hash") == f"#corpus/{corpus}")  # not another section
    browser.press("Delete fees.txt")
    browser.press("Delete document", within="dialog")
    browser.until(lambda: focused(browser) == "harbour")  # the button went with its row
    assert browser.faults() == []


def test_what_takes_its_time_says_so(site: Site, browser: Browser) -> None:
    site.corpus_of("harbour", {"fees.txt": FEE})
    browser.open(site.admin_key)
    browser.find(".beginning")
    site.engine.first_pause = 30.0
    send(browser, "when is it paid?")
    browser.find(".answer .waiting", "Finding passages and preparing the prompt 1 s")
    browser.write("#question", "and where?")
    browser.keys("\n")
    browser.press("Stop")
    assert "Stopped." in browser.find(".answered .error").text
    assert not browser.all(".waiting")
    assert len(browser.all(".asked")) == 1, "one answer at a time"
    slow = """
      const real = window.fetch, wait = arguments[0];
      window.fetch = async (...what) => (await new Promise((go) => setTimeout(go, wait)), real(...what));"""
    browser.run(slow, 1000)
    browser.run("location.hash = 'jobs'")
    assert browser.find("main .waiting").text == "Loading"
    browser.find("main .jobs")
    assert not browser.all("main .waiting")
    down = "window.fetch = async () => new Response('{\"error\": {\"message\": \"resting\"}}', { status: 503 });"
    browser.run(f"window.kept = window.fetch; {down}")
    browser.run("location.hash = 'corpora'")
    browser.find("main .error", "resting")
    browser.run("window.fetch = window.kept")
    browser.press("Try again")
    browser.find("main table", "harbour")
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": down})
    browser.driver.refresh()
    browser.find("main .error", "resting")
    browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    browser.driver.get(f"{site.url}/?again#%")
    browser.find("#question")  # the key was kept, and an address that cannot be read is no reason to ask for it


def test_nothing_is_wider_than_a_narrow_screen(site: Site, browser: Browser) -> None:
    corpus = site.corpus_of(LONG, {f"{LONG}.txt": f"{FEE}\n\n{LONG * 5}", "bad.txt": f"ERROR {LONG}"})
    scheduled(site, corpus)
    site.engine.answer = f"[1] {LONG * 3}"
    browser.open(site.admin_key)
    size = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        send(browser, f"berth {LONG}")
        browser.find(".sources a")
        browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        browser.press("Answer by full prefill too")
        browser.find(".compare rect")
        places = {"": ".compare", f"corpus/{corpus}": ".drop", "corpora": "td", "jobs": ".jobs li", "savings": "rect"}
        for place, seen in places.items():
            if place:
                browser.run("location.hash = arguments[0]", place)
            browser.find(seen)
            wide = "return [...document.querySelectorAll('main *, header *')].filter((e) => !e.closest('.unseen') && "
            wide += "e.getBoundingClientRect().right > 321 && !e.closest('thead')).map((e) => e.outerHTML.slice(0, 200))"
            assert browser.run(wide) == [], place
            assert browser.run("return document.documentElement.scrollWidth") <= 320, place
        browser.run("location.hash = 'corpora'")
        roles = "return [...document.querySelectorAll('main table, main tr, main td')].every((e) => e.getAttribute('role'))"
        browser.find("td")
        assert browser.run(roles), "drawn as cards, it is still a table to a screen reader"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_plot_of_savings_has_its_days_and_its_scale(site: Site, browser: Browser) -> None:
    site.corpus_of("harbour", {"fees.txt": FEE})
    browser.open(site.admin_key, "savings")
    browser.find(".empty", "No answers yet")
    with site.http() as http:
        question = {"model": "echo-1@harbour", "messages": [{"role": "user", "content": "berth"}]}
        used = http.post("/v1/chat/completions", json=question).json()["usage"]["prompt_tokens"]
    site.parts.meter.flush()
    browser.driver.refresh()
    browser.find("figure rect.s0")
    labels = [e.text for e in browser.all("main section:first-child svg text.middle")]
    now = datetime.now(UTC)
    assert labels[-1] == f"{now.day} {now:%b}"
    assert len(labels) >= 10
    scale = [float(e.text.replace(",", "")) for e in browser.all("main section:first-child svg text.end")][:3]
    assert scale[0] == 0
    assert scale[1] == scale[2] / 2
    assert used <= scale[2] <= 2.5 * used
    inside = """const box = (e) => e.getBoundingClientRect().right, svg = box(document.querySelector('figure svg'));
      return [...document.querySelectorAll('main section:first-child svg text.middle')].every((t) => box(t) <= svg + 3);"""
    assert browser.run(inside)
    rows = browser.run("return [...document.querySelectorAll('main section:first-child tbody tr')].map((r) => r.innerText)")
    assert len(rows) >= 30, json.dumps(rows)
