"""The page at `/` in a real Chromium: what people do with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from api_kit import Site
from browser_kit import FEE, Browser, put, scheduled, send
from model_kit import LIMIT, Service

from serving.engine.types import GenerateRequest


def test_upload_progress_ask_open_citation_delete_gone(
    driver: Any, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a tiny reader and its KV."""
    monkeypatch.setattr(GenerateRequest, "max_tokens", 24)
    rules = tmp_path / "rules.md"
    rules.write_text(f"# Harbour\n\n{LIMIT.format(10)}\n\n# Berths\n\nThe berth fee is forty crowns a night.\n")
    browser = Browser(driver, service.url)
    with service.working():
        browser.open(service.key, "corpora")
        browser.write("input[name=name]", "harbour")
        browser.press("Create")
        browser.find("h1", "harbour")
        put(browser, rules)
        browser.find(".uploads progress")
        browser.find(".uploads .pill", "completed")
        browser.find("table", "rules.md")
        assert re.search(r"1 of 1 files · \d+ chunks, 0 reused, [1-9]\d* computed", browser.find(".uploads .meta").text)

        driver.get(f"{service.url}/#ask")
        send(browser, "What is the speed limit for carts inside the harbour?")
        browser.find(".sources a", "rules.md")
        assert browser.find(".answer").text.strip()
        browser.find(".origin summary", "prompt tokens reused").click()
        reasons = [line.text for line in browser.all(".why li")]
        assert reasons
        assert all("reused: its KV was read from" in text for text in reasons)
        browser.press("Answer by full prefill too")
        assert re.search(r"\d ms blended, [\d,]+ ms by full prefill", browser.find(".compare p").text)

        browser.all(".sources a")[0].click()
        mark = browser.find("dialog mark").text
        assert LIMIT.format(10) in mark
        assert browser.find("dialog h2").text == "rules.md"
        browser.press("Close")

        browser.all(".emphasis summary")[0].click()
        slider = browser.find(".emphasis input[type=range]")
        slider.send_keys("\ue014" * 4)  # arrow to the right
        assert browser.find(".emphasis output").text == "× 2"
        browser.press("Ask again with this emphasis")
        browser.find(".asked", "(with this emphasis)")
        browser.until(lambda: len(browser.all(".answered")) == 3 and not browser.all("[aria-busy=true]"))
        assert len(browser.all(".sources")) == 3

        driver.get(f"{service.url}/#corpora")
        browser.press("harbour")
        browser.press("Delete rules.md")
        browser.press("Delete document", within="dialog")
        browser.gone("table", "rules.md")
        driver.get(f"{service.url}/#ask")
        browser.find(".sources a").click()
        assert browser.find("dialog .gone").text
        assert "speed limit" not in browser.find("dialog").text
        browser.press("Close")
        browser.press("New conversation")
        send(browser, "What is the speed limit?")
        assert "nothing" in browser.find(".answer.refused").text
        assert browser.faults() == []


def test_a_failed_file_is_named_and_can_be_tried_again(site: Site, browser: Browser, tmp_path: Path) -> None:
    corpus = site.corpus_of("harbour", {})
    for name, text in (("good.txt", FEE), ("bad.txt", "ERROR parser_timeout")):
        (tmp_path / name).write_text(text)
    browser.open(site.admin_key, f"corpus/{corpus}")
    with site.ingesting():
        put(browser, tmp_path / "good.txt", tmp_path / "bad.txt")
        assert "bad.txt" in browser.find(".uploads .error", "parser_timeout").text
        browser.find("table", "good.txt")
        site.work.parser.accident = lambda name: None
        browser.run("location.hash = 'jobs'")
        browser.find(".jobs .pill", "completed with errors")
        browser.press("Retry what failed")
        browser.until(lambda: len(browser.all(".jobs > li")) == 2)
        browser.until(lambda: browser.all(".jobs .pill")[0].text in ("failed", "completed with errors"))
        assert "of 1 files" in browser.all(".jobs > li")[0].text
        assert "of 2 files" in browser.all(".jobs > li")[1].text
    assert browser.faults() == []


def test_progress_is_resumed_where_the_stream_broke_off(site: Site, browser: Browser, tmp_path: Path) -> None:
    corpus = site.corpus_of("harbour", {})
    (tmp_path / "fees.txt").write_text(FEE)
    browser.open(site.admin_key, f"corpus/{corpus}")
    cut = """
      const real = window.fetch; window.asked = []; let first = true;
      window.fetch = async (path, options) => {
        const reply = await real(path, options);
        if (!String(path).endsWith('/events')) return reply;
        window.asked.push(options.headers['last-event-id'] ?? null);
        if (!first) return reply;
        first = false;
        const reader = reply.body.getReader(), pieces = [];
        do pieces.push((await reader.read()).value); while (!new TextDecoder().decode(pieces.at(-1)).includes('id: '));
        reader.cancel();
        const broken = (c) => (pieces.forEach((piece) => c.enqueue(piece)), setTimeout(() => c.error(new TypeError('cut')), 50));
        return new Response(new ReadableStream({ start: broken }));
      };"""
    browser.run(cut)
    put(browser, tmp_path / "fees.txt")
    browser.find(".uploads .pill", "queued")
    with site.ingesting():
        browser.find(".uploads .pill", "completed")
    asked = browser.run("return window.asked")
    assert asked[0] is None
    assert len(asked) >= 2
    assert all(int(id) > 0 for id in asked[1:])


def test_settings_schedules_and_savings_are_shown_and_kept(site: Site, browser: Browser) -> None:
    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    scheduled(site, corpus, "")
    browser.open(site.admin_key, f"corpus/{corpus}")
    browser.write(".stack textarea", "fees* = 2.5")
    browser.press("Save settings")
    with site.http() as http:
        browser.until(lambda: http.get(f"/v1/corpora/{corpus}/settings").json()["emphasis"] == {"fees*": 2.5})
        browser.run("location.hash = 'jobs'")
        browser.press("Add schedule")
        browser.find("table", "0 3 * * *")
        browser.press("Schedule 0 3 * * * of harbour")
        browser.find("[role=switch][aria-checked=false]")
        [schedule] = http.get("/v1/schedules").json()["data"]
        assert schedule["enabled"] is False
        question = {"model": "echo-1@harbour", "messages": [{"role": "user", "content": "berth"}]}
        http.post("/v1/chat/completions", json=question).raise_for_status()
    site.parts.meter.flush()
    browser.run("location.hash = 'savings'")
    browser.find("h1", "Savings")
    assert browser.find(".facts dd").text == "1"
    drawn = "(r) => r.height.baseVal.value > 5 && r.width.baseVal.value > 5"
    browser.until(lambda: browser.run(f"return [...document.querySelectorAll('figure svg rect.s0')].some({drawn})"))


def test_a_link_to_a_passage_opens_it_after_signing_in(site: Site, browser: Browser) -> None:
    corpus = site.corpus_of("harbour", {"fees.txt": FEE})
    with site.http() as http:
        body = {"model": f"echo-1@{corpus}", "messages": [{"role": "user", "content": "berth"}]}
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    url = message["annotations"][0]["url_citation"]["url"]
    browser.driver.get("about:blank")
    browser.driver.get(url)
    browser.write("input[name=key]", site.admin_key)
    browser.press("Sign in")
    assert "berth fee" in browser.find("dialog mark").text


def test_what_is_chosen_on_the_page_is_what_is_asked(site: Site, browser: Browser) -> None:
    site.corpus_of("harbour", {"fees.txt": FEE, "lamps.txt": "The lamps on the pier are lit at nine."})
    site.corpus_of("empty", {})
    browser.open(site.admin_key)
    assert browser.find("#corpus option:checked").text == "harbour"
    send(browser, "the berth and the lamps")
    browser.find(".sources a", "lamps.txt")
    first = site.engine.requests[-1]
    assert (first.method, first.needs_chunks, first.emphasis) == (site.parts.settings.method, True, {})

    browser.press("Answer by full prefill too")
    browser.find(".compare")
    assert (site.engine.requests[-1].method, site.engine.requests[-1].messages) == ("full", first.messages)

    browser.all(".emphasis summary")[0].click()
    [slide] = [e for e in browser.all(".emphasis input") if e.accessible_name == "lamps.txt" and e.is_displayed()]
    slide.send_keys("\ue014" * 4)  # arrow to the right
    assert slide.get_attribute("aria-valuetext") == "2 times"
    browser.all(".emphasis button")[0].click()
    browser.until(lambda: len(site.engine.requests) == 3)
    last = site.engine.requests[-1]
    weights = {c.path: [e.weight for e in last.emphasis.get(c.chunk_id, ())] for c in last.chunks}
    assert weights == {"fees.txt": [], "lamps.txt": [2.0]}

    send(browser, "and then?")
    browser.until(lambda: len(site.engine.requests) == 4)
    assert [m.role for m in site.engine.requests[-1].messages] == ["user", "assistant", "user"]
    browser.find("#corpus").send_keys("empty")
    send(browser, "the berth?")
    assert "nothing" in browser.find(".answer.refused").text
    browser.find("#corpus").send_keys("No corpus")
    send(browser, "hello")
    browser.until(lambda: len(site.engine.requests) == 5)
    assert (site.engine.requests[-1].chunks, len(site.engine.requests[-1].messages)) == ((), 1)


def test_files_can_be_dropped(site: Site, browser: Browser) -> None:
    corpus = site.corpus_of("harbour", {})
    browser.open(site.admin_key, f"corpus/{corpus}")
    drop = """
      const data = new DataTransfer();
      data.items.add(new File(['The lamps are lit at nine.'], arguments[0]));
      const drop = new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true });
      document.querySelector('.drop').dispatchEvent(drop);"""
    with site.ingesting():
        browser.until(lambda: browser.all(".drop"))
        browser.run(drop, "größe 你好.txt")
        browser.find("table", "größe 你好.txt")
    with site.http() as http:
        assert [d["path"] for d in http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]] == ["größe 你好.txt"]


def test_a_folder_is_dropped_with_all_that_is_in_it(site: Site, browser: Browser, tmp_path: Path) -> None:
    """Folders in it too, and more files than a browser lists at a time (100). The drop is the browser's own."""
    corpus = site.corpus_of("harbour", {})
    folder = tmp_path / "größe"
    written = {f"größe/deep/{number}.txt" for number in range(105)} | {"größe/top.txt", "größe/deep/er/last.txt", "beside.txt"}
    for path in written:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"The lamps of {path} are lit at nine.")
    browser.open(site.admin_key, f"corpus/{corpus}")
    zone = browser.find(".drop").rect
    middle = {"x": zone["x"] + zone["width"] / 2, "y": zone["y"] + zone["height"] / 2}
    data = {"items": [], "files": [str(folder), str(tmp_path / "beside.txt")], "dragOperationsMask": 1}
    with site.ingesting():
        for kind in ("dragEnter", "dragOver", "drop"):
            browser.driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, **middle, "data": data})
        browser.find(".uploads .pill", "completed")
    with site.http() as http:
        listed = http.get(f"/v1/vector_stores/{corpus}/files", params={"limit": 100}).json()
        rest = http.get(f"/v1/vector_stores/{corpus}/files", params={"limit": 100, "after": listed["last_id"]}).json()
    assert {each["path"] for each in listed["data"] + rest["data"]} == written
    assert browser.faults() == []
