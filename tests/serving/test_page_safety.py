"""The page against hostile names, texts and addresses: nothing runs, and the key stays where it is."""

from __future__ import annotations

import json
import re
import time
from importlib.resources import files

import pytest
from api_kit import Site
from browser_kit import Browser, scheduled, send

from serving.api import page
from serving.engine.loading import SLOW
from storage.types import Miss

ATTACK = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>{{7*7}}"
ELSEWHERE = ("javascript:alert(1)", "//evil.example/x", "https://evil.example/", "/\\\\evil.example")
HOSTILE_URLS = [(url, "/auth/login") for url in ELSEWHERE]


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


def test_the_page_has_words_for_every_reason_why_a_chunk_is_computed() -> None:
    words = re.search(r"const WHY = \{(.*?)\};", page._shipped()["origin.js"].decode(), re.DOTALL)
    assert words is not None
    assert {*Miss, SLOW} <= set(re.findall(r"(\w+): \"", words[1]))


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


@pytest.mark.parametrize(("url", "followed"), [("/auth/login", "/auth/login"), ("/auth/start", "/auth/start"), *HOSTILE_URLS])
def test_single_sign_on_is_offered_where_it_is_on_and_leads_to_this_service(browser: Browser, url: str, followed: str) -> None:
    config = json.dumps({"oidc": True, "login_url": url})
    script = f"""
      const real = window.fetch, said = {json.dumps(config)};
      window.fetch = (path, ...rest) => path === '/auth/config' ? Promise.resolve(new Response(said)) : real(path, ...rest);"""
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        browser.driver.refresh()
        link = browser.find(".sign-in a", "Sign in with your organisation")
        assert link.get_attribute("href") == browser.url + followed
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
