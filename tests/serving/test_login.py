"""People log in at the operator's issuer; every way to pretend that one has is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_kit import SECRET, EchoEngine, Site, make_parts, running
from browser_kit import FEE, Browser, put
from joserfc import jwt
from oidc_issuer import CLIENT, Issuer
from oidc_issuer import SECRET as CLIENT_SECRET

from serving.api.app import build_app
from serving.auth import ensure_admin_key
from serving.local_broker import free_port
from serving.login import ATTEMPT_COOKIE, COOKIE, Login, local_path
from serving.oidc_file import read_oidc
from storage.errors import UserError

RULES: list[dict[str, Any]] = [
    {"group": "bosses", "tenant": "default", "scopes": ["admin"]},
    {"group": "staff", "tenant": "default", "scopes": ["read", "write"]},
]


@dataclass
class Club:
    site: Site
    issuer: Issuer

    def browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.site.url, timeout=20)

    def log_in(self, browser: httpx.Client, goal: str = "/") -> httpx.Response:
        """Go to the issuer and come back; the answer of the callback."""
        sent = browser.get("/auth/login", params={"next": goal})
        assert sent.status_code == 302, sent.text
        back = httpx.get(sent.headers["location"])
        return browser.get(here(self.site, back.headers["location"]))

    def refused(self) -> str:
        """Log in, be refused, and say why."""
        with self.browser() as browser:
            answer = self.log_in(browser)
            assert answer.status_code == 403, answer.text
            assert answer.json()["error"]["code"] == "login_refused"
            assert COOKIE not in answer.cookies
            assert browser.get("/v1/models").status_code == 401
            return str(answer.json()["error"]["message"])


def here(site: Site, url: str) -> str:
    """The callback as this server has it, whatever port the file names."""
    return httpx.URL(url).raw_path.decode()


def oidc_file(folder: Path, url: str, **more: Any) -> Path:
    import yaml

    (folder / "client-secret").write_text(CLIENT_SECRET + "\n")
    told = {
        "issuer": url, "client_id": CLIENT, "client_secret_file": str(folder / "client-secret"),
        "public_url": f"http://127.0.0.1:{free_port()}", "rules": RULES, **more,
    }  # fmt: skip
    (folder / "oidc.yaml").write_text(yaml.safe_dump(told))
    return folder / "oidc.yaml"


@pytest.fixture
def club(tmp_path: Path) -> Iterator[Club]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def one_club(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Club]:
    """For tests that leave nothing behind."""
    with opened(tmp_path_factory.mktemp("club")) as made:
        yield made


@contextmanager
def opened(folder: Path) -> Iterator[Club]:
    issuer, engine = Issuer(), EchoEngine()
    with issuer.running() as url:
        issuer.url = url
        parts, work = make_parts(folder, engine, [])
        key = ensure_admin_key(parts.catalogue, SECRET)
        file = read_oidc(oidc_file(folder, url))
        parts = replace(parts, login=Login(parts.catalogue, SECRET, file))
        with running(build_app(parts), httpx.URL(file.public_url).port or 0) as address:
            yield Club(Site(address, parts, engine, work, str(key), []), issuer)
        parts.catalogue.close()


def csrf(browser: httpx.Client) -> dict[str, str]:
    return {"x-csrf-token": browser.get("/auth/session").json()["csrf_token"]}


def test_a_member_logs_in_and_may_what_the_group_may(club: Club) -> None:
    assert club.issuer.asked == [], "nothing is asked of the issuer before somebody logs in"
    with club.browser() as browser:
        assert browser.get("/auth/config").json() == {"oidc": True, "login_url": "/auth/login"}
        answer = club.log_in(browser, "/corpora?x=1")
        assert (answer.status_code, answer.headers["location"]) == (302, "/corpora?x=1")
        assert browser.get("/v1/models").status_code == 200
        told = browser.get("/auth/session").json()
        assert (told["user_id"], told["tenant_id"], told["scopes"]) == ("ann", "default", ["read", "write"])
        made = browser.post("/v1/vector_stores", json={"name": "mine"}, headers=csrf(browser))
        assert made.status_code == 200
        assert browser.get("/v1/audit").status_code == 403
    with club.site.http() as http:
        actions = [(e["action"], e["user_id"]) for e in http.get("/v1/audit").json()["data"]]
    assert ("login", "ann") in actions
    assert ("POST /v1/vector_stores", "ann") in actions


def logged_in_by_the_page(club: Club, driver: Any) -> Browser:
    driver.get(f"{club.site.url}/")
    driver.delete_all_cookies()  # which know no ports
    driver.refresh()
    browser = Browser(driver, club.site.url)
    browser.press("Sign in with your organisation")
    browser.find("#nav a", "Corpora")
    return browser


def test_by_the_page_people_log_in_change_things_and_log_out(club: Club, driver: Any, tmp_path: Path) -> None:
    (tmp_path / "fees.txt").write_text(FEE)
    browser = logged_in_by_the_page(club, driver)
    kept = driver.get_cookie(COOKIE)["value"]
    driver.get(f"{club.site.url}/#corpora")
    browser.write("input[name=name]", "harbour")
    browser.press("Create")
    browser.find("h1", "harbour")
    put(browser, tmp_path / "fees.txt")
    browser.find(".uploads .pill", "queued")
    driver.get(f"{club.site.url}/#corpora")
    browser.press("Delete harbour")
    browser.press("Delete corpus", within="dialog")
    browser.find(".empty", "No corpus yet")
    browser.press("Sign out")
    browser.find("input[name=key]")
    assert driver.get_cookie(COOKIE) is None
    with httpx.Client(base_url=club.site.url, cookies={COOKIE: kept}) as thief:
        assert thief.get("/v1/models").status_code == 401
    driver.refresh()
    browser.find(".sign-in a")
    assert browser.faults() == []


def test_the_page_goes_on_after_a_login_in_another_tab_and_tells_when_a_login_has_ended(club: Club, driver: Any) -> None:
    browser = logged_in_by_the_page(club, driver)
    driver.get(f"{club.site.url}/#corpora")
    browser.write("input[name=name]", "first")
    browser.press("Create")
    browser.find("h1", "first")
    with club.browser() as other:
        club.log_in(other)
        driver.add_cookie({"name": COOKIE, "value": other.cookies[COOKIE], "httpOnly": True, "sameSite": "Lax"})
        driver.get(f"{club.site.url}/#corpora")
        browser.write("input[name=name]", "second")
        browser.press("Create")
        browser.find("#alert", "x-csrf-token")
        browser.press("Create")
        browser.find("h1", "second")
        other.post("/auth/logout", headers=csrf(other)).raise_for_status()
    driver.get(f"{club.site.url}/#jobs")
    browser.find(".sign-in .note", "Your login has ended")


def test_cookies_are_out_of_a_script_s_reach_and_of_other_sites_forms(one_club: Club) -> None:
    with one_club.browser() as browser:
        sent = browser.get("/auth/login")
        answer = one_club.log_in(browser)
    kept = [h for h in answer.headers.get_list("set-cookie") if h.startswith(COOKIE)]
    for header in (*kept, *sent.headers.get_list("set-cookie")):
        assert "httponly" in header.lower()
        assert "samesite=lax" in header.lower()
    assert "Max-Age=3600" in kept[0]


def test_behind_https_cookies_are_kept_to_it(tmp_path: Path) -> None:
    file = read_oidc(oidc_file(tmp_path, "https://login.example.com", public_url="https://preread.example.com"))
    assert Login(None, SECRET, file).is_secure  # type: ignore[arg-type]


def test_another_site_s_form_changes_nothing(club: Club) -> None:
    with club.browser() as browser, club.browser() as other:
        club.log_in(browser)
        club.log_in(other)
        wrong = ({}, {"x-csrf-token": "x"}, csrf(other))
        for headers in wrong:
            refused = browser.post("/v1/vector_stores", json={"name": "x"}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf_token_missing")
            assert browser.post("/auth/logout", headers=headers).status_code == 403
        assert browser.get("/v1/vector_stores").json()["data"] == []
    with club.site.http() as http:
        denied = http.get("/v1/audit", params={"outcome": "denied"}).json()["data"]
    assert {(event["action"], event["target"], event["user_id"]) for event in denied} == {
        ("POST unmatched", "/v1/vector_stores", "ann"), ("POST /auth/logout", "", "ann"),
    }  # fmt: skip
    assert len(denied) == 2 * len(wrong)


def test_groups_open_the_documents_that_name_them(club: Club) -> None:
    corpus = club.site.corpus_of("c", {"staff/a.txt": "Invoices.", "bosses/b.txt": "Invoices."})
    rules = [{"path": f"{name}/*", "principals": [f"group:{name}"]} for name in ("staff", "bosses")]
    with club.site.http() as http:
        http.put(f"/v1/corpora/{corpus}/settings", json={"access": rules}).raise_for_status()
    with club.browser() as browser:
        club.log_in(browser)
        listed = browser.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
    assert [file["path"] for file in listed] == ["staff/a.txt"]


def test_logging_out_ends_the_login_and_no_other_key(club: Club) -> None:
    with club.browser() as browser, club.browser() as thief:
        club.log_in(browser)
        thief.cookies.set(COOKIE, browser.cookies[COOKIE])
        assert thief.get("/v1/models").status_code == 200
        browser.post("/auth/logout", headers=csrf(browser)).raise_for_status()
        assert COOKIE not in browser.cookies
        assert thief.get("/v1/models").status_code == 401
        assert thief.get("/auth/session").status_code == 401


def test_an_admin_sees_and_ends_logins(club: Club) -> None:
    with club.browser() as browser, club.site.http() as http:
        club.log_in(browser)
        [login] = [key for key in http.get("/v1/api_keys").json()["data"] if key["user_id"] == "ann"]
        http.delete(f"/v1/api_keys/{login['id']}").raise_for_status()
        assert browser.get("/v1/models").status_code == 401


def test_a_login_ends_by_itself(club: Club) -> None:
    with club.browser() as browser, club.site.http() as http:
        club.log_in(browser)
        [login] = [key for key in http.get("/v1/api_keys").json()["data"] if key["user_id"]]
    assert abs(login["expires_at"] - time.time() - 3600) < 60


LIES = {
    "another nonce": lambda claims: claims.update(nonce="x"),
    "no nonce": lambda claims: claims.pop("nonce"),
    "another issuer": lambda claims: claims.update(iss="https://evil.example.com"),
    "another audience": lambda claims: claims.update(aud="other"),
    "several audiences, another one's": lambda claims: claims.update(aud=[CLIENT, "other"], azp="other"),
    "several audiences, nobody's": lambda claims: claims.update(aud=[CLIENT, "other"]),
    "expired": lambda claims: claims.update(exp=int(time.time()) - 120),
    "never expires": lambda claims: claims.pop("exp"),
    "from the future": lambda claims: claims.update(iat=int(time.time()) + 600),
    "no subject": lambda claims: claims.pop("sub"),
    "in no group": lambda claims: claims.update(groups=["guests"]),
    "no groups at all": lambda claims: claims.pop("groups"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_token_that_says_something_else_is_refused(one_club: Club, monkeypatch, lie) -> None:
    monkeypatch.setattr(one_club.issuer, "lie", lie)
    one_club.refused()


@pytest.mark.parametrize("how", ["unsigned", "signed_by_another", "maced_with_the_public_key"])
def test_a_token_that_the_issuer_has_not_signed_is_refused(one_club: Club, monkeypatch, how: str) -> None:
    monkeypatch.setattr(one_club.issuer, "sign", getattr(one_club.issuer, how))
    one_club.refused()


def test_after_the_issuer_has_changed_its_key_logins_go_on_and_the_old_key_is_worth_nothing(club: Club, monkeypatch) -> None:
    monkeypatch.setattr("serving.oidc.AGAIN_SECONDS", 0.0)
    with club.browser() as browser:
        assert club.log_in(browser).status_code == 302
    old = club.issuer.key
    club.issuer.rotate()
    with club.browser() as browser:
        assert club.log_in(browser).status_code == 302
    club.issuer.sign = lambda claims: jwt.encode({"alg": "RS256", "kid": old.kid}, claims, old)
    club.refused()


def test_forged_tokens_do_not_make_us_ask_for_keys_again_and_again(club: Club) -> None:
    club.issuer.sign = club.issuer.signed_by_another
    for _ in range(3):
        club.refused()
    assert club.issuer.asked.count("keys") <= 2


def test_a_state_is_good_once_and_only_where_it_was_made(one_club: Club) -> None:
    with one_club.browser() as browser, one_club.browser() as other:
        sent = browser.get("/auth/login")
        kept = browser.cookies[ATTEMPT_COOKIE]
        first, second = (here(one_club.site, httpx.get(sent.headers["location"]).headers["location"]) for _ in range(2))
        assert other.get(first).status_code == 403, "a browser that began no login"
        other.get("/auth/login")
        assert other.get(first).status_code == 403, "one that began another"
        assert browser.get(first).status_code == 302
        browser.cookies.set(ATTEMPT_COOKIE, kept, path="/auth")
        for again in (first, second):  # the same answer, and a fresh code for the same state
            replayed = browser.get(again)
            assert replayed.status_code == 403, replayed.text


def test_an_attempt_of_another_installation_or_a_changed_one_is_refused(one_club: Club) -> None:
    with one_club.browser() as browser:
        sent = browser.get("/auth/login")
        back = here(one_club.site, httpx.get(sent.headers["location"]).headers["location"])
        for kept in ("", "x", browser.cookies[ATTEMPT_COOKIE][:-4] + "AAAA"):
            with one_club.browser() as forged:
                forged.cookies.set(ATTEMPT_COOKIE, kept)
                assert forged.get(back).status_code == 403


def test_another_code_than_the_one_given_for_this_login_is_refused(one_club: Club) -> None:
    with one_club.browser() as browser, one_club.browser() as victim:
        stolen = victim.get("/auth/login")
        code = httpx.URL(httpx.get(stolen.headers["location"]).headers["location"]).params["code"]
        sent = browser.get("/auth/login")
        state = httpx.URL(sent.headers["location"]).params["state"]
        injected = browser.get("/auth/callback", params={"code": code, "state": state})
        assert injected.status_code == 403, "PKCE binds a code to the browser that asked for it"


def test_an_issuer_that_hangs_takes_no_threads_from_others(club: Club, monkeypatch) -> None:
    gone_on, waiting = threading.Event(), threading.Semaphore(0)

    def hang(*_: object) -> str:
        waiting.release()
        gone_on.wait(60)
        return "x"

    monkeypatch.setattr("serving.oidc.Issuer.login_url", hang)
    url = f"{club.site.url}/auth/login"
    asking = [threading.Thread(target=httpx.get, args=(url,), kwargs={"timeout": 90}) for _ in range(60)]
    for thread in asking:
        thread.start()
    try:
        assert waiting.acquire(timeout=60)
        while sum(waiting.acquire(timeout=1) for _ in range(4)):  # until no more come through
            pass
        with club.site.http() as http:
            assert http.get("/v1/files").status_code == 200
    finally:
        gone_on.set()
        for thread in asking:
            thread.join()


def test_an_issuer_whose_metadata_are_another_s_is_not_used(club: Club) -> None:
    club.issuer.about = {"issuer": "https://evil.example.com"}
    with club.browser() as browser:
        assert browser.get("/auth/login").status_code == 503


def test_an_endpoint_without_https_is_not_used(club: Club) -> None:
    club.issuer.about = {"token_endpoint": "http://10.0.0.1/token"}
    with club.browser() as browser:
        assert browser.get("/auth/login").status_code == 503


@pytest.mark.parametrize("goal", ["//evil.example.com", "https://evil.example.com", "/\\evil", "x", "/a\r\nset-cookie: x=y", ""])
def test_a_login_leads_nowhere_else(goal: str) -> None:
    assert local_path(goal) == "/"


def test_without_an_issuer_there_are_only_keys(site: Site) -> None:
    with site.http("") as http:
        assert http.get("/auth/config").json() == {"oidc": False, "login_url": None}
        assert http.get("/auth/login").status_code == 404
        http.cookies.set(COOKIE, site.admin_key)
        assert http.get("/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"issuer": "http://login.example.com"}, "issuer: https is needed"),
        ({"public_url": "https://a.example.com/?x=1"}, "public_url: a plain URL"),
        ({"rules": []}, "rules: List should have at least 1"),
        ({"rules": [{"group": "x", "tenant": "t", "scopes": ["root"]}]}, "rules.0.scopes.0"),
        ({"client_secret": "in the file"}, "client_secret: Extra inputs"),
        ({"client_secret_file": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_place(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    path = oidc_file(tmp_path, "https://login.example.com", **more)
    with pytest.raises(UserError, match="PREREAD_OIDC_FILE") as caught:
        read_oidc(path)
    assert said in str(caught.value)
    assert "in the file" not in str(caught.value), "a secret is not repeated"
