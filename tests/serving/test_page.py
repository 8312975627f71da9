"""The page at `/` in a real Chromium: the story, the keyboard alone, hostile texts, and rules of access."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from api_kit import Site
from browser_kit import Browser, chromium
from model_kit import LIMIT, Service

from serving.api import page
from serving.engine.types import GenerateRequest

FEE = "The berth fee is forty crowns a night.\n\nIt is paid at the harbour office before noon."
ATTACK = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>{{7*7}}"
ELSEWHERE = ("javascript:alert(1)", "//evil.example/x", "https://evil.example/", "/\\\\evil.example")
HOSTILE_URLS = [(url, "/auth/login") for url in ELSEWHERE]


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def browser(driver: Any, site: Site) -> Browser:
    made = Browser(driver, site.url)
    driver.get(f"{site.url}/")
    made.run("sessionStorage.clear(); localStorage.clear()")
    made.faults()
    return made


def put(browser: Browser, *paths: Path) -> None:
    browser.until(lambda: browser.all("#upload"))[0].send_keys("\n".join(map(str, paths)))


def scheduled(site: Site, corpus: str, cron: str = "0 3 * * *") -> None:
    """Give the corpus a source, and a schedule if there is a time."""
    folder = site.parts.settings.data_dir / "sources"
    folder.mkdir(exist_ok=True)
    with site.http() as http:
        source = {"source": {"type": "folder", "path": str(folder)}}
        http.put(f"/v1/corpora/{corpus}/source", json=source).raise_for_status()
        if cron:
            http.post("/v1/schedules", json={"corpus_id": corpus, "cron": cron}).raise_for_status()


def send(browser: Browser, question: str) -> None:
    browser.write("#question", question)
    browser.press("Send")


# --- the files themselves ---


def test_every_answer_has_the_strict_policy_and_nothing_but_the_pages_files_is_served(site: Site) -> None:
    with site.http("") as http:
        for name in ("", *(f"page/{f.name}" for f in files("serving").joinpath("page").iterdir())):
            reply = http.get(f"/{name}")
            assert (reply.status_code, reply.headers["x-content-type-options"]) == (200, "nosniff")
            policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
            assert policy.pop("require-trusted-types-for") == "'script'"
            closed = ("default-src", "frame-ancestors", "base-uri", "form-action", "trusted-types")
            assert {policy.pop(rule) for rule in closed} == {"'none'"}
            assert policy == dict.fromkeys(("script-src", "style-src", "connect-src", "img-src"), "'self'")
        assert http.get("/", headers={"if-none-match": http.get("/").headers["etag"]}).status_code == 304
        for name in ("../parts.py", "%2e%2e%2fparts.py", "..%2f..%2fsettings.py", "app.py", "__init__.py", "INDEX.HTML"):
            assert http.get(f"/page/{name}").status_code == 404, name


def test_the_page_needs_no_other_host_and_makes_no_markup_of_text() -> None:
    for name, data in page._shipped().items():
        text = data.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+=[\"']", text), name
        assert not re.search(r"style=[\"']|javascript:|localStorage\.setItem\((?!\"preread\.theme\")", text), name
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, name


# --- in the browser ---


def test_upload_progress_ask_open_citation_delete_gone(
    driver: Any, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the real model and its KV."""
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


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hostile_names_headings_and_texts_are_shown_and_do_nothing(site: Site, browser: Browser, theme: str) -> None:
    named = {f"{ATTACK.replace('/', '_')}.md": f"# {ATTACK}\n\nberth {ATTACK}", "bad.txt": f"ERROR {ATTACK}"}
    corpus = site.corpus_of(f"c {ATTACK}", named)
    scheduled(site, corpus)
    site.engine.answer = f"see [1] {ATTACK} [1](javascript:document.title='run')"
    browser.open(site.admin_key)
    browser.run("document.documentElement.dataset.theme = arguments[0]", theme)
    send(browser, f"berth {ATTACK}")
    browser.find(".sources a", "<img src=x onerror").click()
    assert "<script>document.title='run'" in browser.find("dialog mark").text
    browser.press("Close")
    assert ATTACK in browser.find(".asked").text
    assert ATTACK in browser.find(".answer").text
    for place in ("corpora", f"corpus/{corpus}", "jobs", "savings", f"corpus/{ATTACK}", f"passage/{ATTACK}/x/1-2", ATTACK):
        browser.run("location.hash = encodeURI(arguments[0])", place)
        browser.find("h1, dialog h2")
        time.sleep(0.3)
        assert ATTACK[:20] in browser.find("body").text or place.endswith((ATTACK, "1-2"))
    made = "return [document.querySelectorAll('img[src=x], main script, dialog script').length, document.title === 'run']"
    assert browser.run(made) == [0, False]
    assert browser.faults() == []


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
    axe_core = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    axe = (Path(axe_core.__file__).parent / "axe.min.js").read_text()
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
        const reader = reply.body.getReader(), one = await reader.read();
        reader.cancel();
        const broken = (c) => (c.enqueue(one.value), setTimeout(() => c.error(new TypeError('cut')), 50));
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
    assert browser.run(f"return [...document.querySelectorAll('figure svg rect.s0')].some({drawn})")


def test_the_key_is_in_this_tab_only_and_gone_after_sign_out(site: Site, browser: Browser) -> None:
    browser.open(site.admin_key)
    browser.driver.refresh()
    browser.find("#nav a")
    assert site.admin_key not in json.dumps(browser.run("return [{...localStorage}, document.cookie, location.href]"))
    browser.press("Sign out")
    browser.find("input[name=key]")
    assert browser.run("return sessionStorage.getItem('preread.key')") is None
    browser.write("input[name=key]", "pr_wrong")
    browser.press("Sign in")
    browser.find("#alert", "Incorrect API key")


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


@pytest.mark.parametrize(("url", "followed"), [("/auth/login", "/auth/login"), ("/auth/start", "/auth/start"), *HOSTILE_URLS])
def test_single_sign_on_is_offered_where_it_is_on_and_leads_to_this_service(browser: Browser, url: str, followed: str) -> None:
    config = json.dumps({"enabled": True, "name": f"Harbour {ATTACK}", "login_url": url})
    script = f"""
      const real = window.fetch, said = {json.dumps(config)};
      window.fetch = (path, ...rest) => path === '/auth/config' ? Promise.resolve(new Response(said)) : real(path, ...rest);"""
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        browser.driver.refresh()
        link = browser.find(".sign-in a", f"Sign in with Harbour {ATTACK}")
        assert link.get_attribute("href") == browser.url + followed
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


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
