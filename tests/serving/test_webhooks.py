"""The ends of jobs are told to whoever asked, signed, until they have been heard."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from api_kit import SECRET, Site, running_site
from fixtures_web import Asked, Reply, Web, web
from openai import InvalidWebhookSignatureError
from sqlalchemy import select, update

from ingest.egress import AllowedHosts
from ingest.webhooks import KEPT_SECONDS, LEASE_SECONDS, OVERLAP_SECONDS, PAUSES, Courier
from storage.catalogue.engine import open_catalogue
from storage.catalogue.schema import Job, Webhook, WebhookDelivery

TEXT = "Invoices are due after thirty days."


@pytest.fixture
def receiver() -> Iterator[Web]:
    with web() as made:
        made.pages["/told"] = Reply(b"thank you")
        yield made


@pytest.fixture
def site(tmp_path: Path, receiver: Web) -> Iterator[Site]:
    with running_site(tmp_path, f"127.0.0.1:{receiver.port}") as made:
        yield made


class Clock:
    def __init__(self, site: Site) -> None:
        self._now, self.ahead = site.parts.clock, 0.0

    def __call__(self) -> float:
        return self._now() + self.ahead


@pytest.fixture
def clock(site: Site) -> Clock:
    return Clock(site)


@pytest.fixture
def courier(site: Site, clock: Clock) -> Courier:
    return Courier(site.parts.catalogue, site.parts.reach.hosts, SECRET, clock)


def add(site: Site, receiver: Web, key: str | None = None, **body: Any) -> dict[str, Any]:
    with site.http(key) as http:
        reply = http.post("/v1/webhooks", json={"url": f"{receiver.url}/told", **body})
        assert reply.status_code == 200, reply.text
        made: dict[str, Any] = reply.json()
        return made


def deliveries(site: Site, webhook_id: str) -> list[dict[str, Any]]:
    with site.http() as http:
        found: list[dict[str, Any]] = http.get(f"/v1/webhooks/{webhook_id}").json()["deliveries"]
        return found


def unwrap(asked: Asked, secret: str) -> Any:
    return openai.OpenAI(api_key="none").webhooks.unwrap(asked.body, asked.headers, secret=secret)


def test_openais_client_verifies_what_we_send(site: Site, receiver: Web, courier: Courier) -> None:
    made = add(site, receiver)
    corpus = site.corpus_of("handbook", {"terms.txt": TEXT})
    courier.tick()
    (asked,) = receiver.asked
    event = unwrap(asked, made["secret"])
    assert (event.type, event.object, event.data.id[:4]) == ("job.completed", "event", "job-")
    body = json.loads(asked.body)
    assert (body["data"]["status"], body["data"]["corpus_id"], body["data"]["progress"]["files_done"]) == ("completed", corpus, 1)
    for wrong in ("whsec_" + base64.b64encode(b"x" * 32).decode(), add(site, receiver)["secret"]):
        with pytest.raises(InvalidWebhookSignatureError):
            unwrap(asked, wrong)
    with pytest.raises(InvalidWebhookSignatureError):
        unwrap(replace(asked, body=asked.body.replace(b"completed", b"cancelled")), made["secret"])


def test_the_signature_is_that_of_standard_webhooks(site: Site, receiver: Web, courier: Courier) -> None:
    secret = add(site, receiver)["secret"]
    site.corpus_of("handbook", {"terms.txt": TEXT})
    courier.tick()
    (asked,) = receiver.asked
    id, at, signature = (asked.headers[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    mac = hmac.new(key, f"{id}.{at}.".encode() + asked.body, hashlib.sha256).digest()
    assert signature == "v1," + base64.b64encode(mac).decode()
    assert asked.headers["content-type"] == "application/json"


def test_nothing_of_a_document_is_told(site: Site, receiver: Web, courier: Courier) -> None:
    add(site, receiver)
    site.corpus_of("handbook", {"secret-name.txt": TEXT, "bad-name.txt": "ERROR invalid_file " + TEXT})
    courier.tick()
    (asked,) = receiver.asked
    assert json.loads(asked.body)["data"]["errors_total"] == 1
    assert b"name" not in asked.body
    assert b"Invoices" not in asked.body


def test_the_secret_is_shown_once_and_stored_nowhere(site: Site, receiver: Web, tmp_path: Path) -> None:
    made = add(site, receiver)
    with site.http() as http:
        shown = http.get("/v1/webhooks").text + http.get(f"/v1/webhooks/{made['id']}").text
    assert "secret" not in shown
    raw = base64.b64decode(made["secret"].removeprefix("whsec_"))
    for file in tmp_path.glob("catalogue.db*"):
        data = file.read_bytes()
        assert made["secret"].encode() not in data
        assert raw not in data


def test_each_end_is_told_once_and_only_those_after_the_webhook(site: Site, receiver: Web, courier: Courier) -> None:
    site.corpus_of("before", {"a.txt": TEXT})
    add(site, receiver)
    site.corpus_of("after", {"a.txt": TEXT})
    for _ in range(3):
        courier.tick()
    assert len(receiver.asked) == 1


def test_only_the_events_asked_for_are_told(site: Site, receiver: Web, courier: Courier) -> None:
    add(site, receiver, events=["job.failed"])
    site.corpus_of("good", {"a.txt": TEXT})
    site.corpus_of("bad", {"a.txt": "ERROR invalid_file"})
    courier.tick()
    assert [json.loads(asked.body)["type"] for asked in receiver.asked] == ["job.failed"]


def test_a_webhook_of_some_corpora_hears_of_no_others(site: Site, receiver: Web, courier: Courier) -> None:
    corpus = site.corpus_of("mine", {})
    key = site.key("admin", corpora=[corpus])
    with site.http(key) as http:
        assert http.post("/v1/webhooks", json={"url": f"{receiver.url}/told"}).status_code == 403
        other = site.corpus_of("other", {})
        assert http.post("/v1/webhooks", json={"url": f"{receiver.url}/told", "corpora": [other]}).status_code == 404
    made = add(site, receiver, key=key, corpora=[corpus])
    whole = add(site, receiver)
    with site.http(key) as http:
        assert [each["id"] for each in http.get("/v1/webhooks").json()["data"]] == [made["id"]]
        assert http.delete(f"/v1/webhooks/{whole['id']}").status_code == 404
        files = [("files", ("a.txt", TEXT.encode()))]
        http.post(f"/v1/corpora/{corpus}/documents", files=files).raise_for_status()
    with site.http() as http:
        http.post(f"/v1/corpora/{other}/documents", files=files).raise_for_status()
    site.ingest()
    courier.tick()
    heard = {made["id"]: [], whole["id"]: []}  # type: dict[str, list[str]]
    with site.parts.catalogue.read() as session:
        for row in session.scalars(select(WebhookDelivery)):
            heard[row.webhook_id].append(row.payload["data"]["corpus_id"])
    assert heard[made["id"]] == [corpus]
    assert sorted(heard[whole["id"]]) == sorted([corpus, other])


@pytest.mark.parametrize(
    "url",
    ["https://example.org/x", "http://127.0.0.1:1/", "http://169.254.169.254/", "file:///x", "ftp://h/", "http://u:p@127.0.0.1/"],
)
def test_an_address_the_operator_does_not_list_is_refused(site: Site, url: str) -> None:
    with site.http() as http:
        reply = http.post("/v1/webhooks", json={"url": url})
        assert reply.status_code == 400, reply.text
        assert http.get("/v1/webhooks").json()["data"] == []


def test_an_address_is_checked_again_when_it_is_told(site: Site, receiver: Web, clock: Clock) -> None:
    """The operator's list may have been shortened since, and a name's address may be another by now."""
    add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    Courier(site.parts.catalogue, AllowedHosts(), SECRET, clock).tick()
    assert receiver.asked == []


@pytest.mark.parametrize("trouble", [500, 302, 404, "refused"])
def test_what_was_not_heard_is_told_again_later_under_the_same_id(
    site: Site, receiver: Web, courier: Courier, clock: Clock, trouble: Any
) -> None:
    made = add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    receiver.pages["/told"] = Reply(status=trouble if trouble != "refused" else 200, headers={"location": "/elsewhere"})
    if trouble == "refused":
        with site.parts.catalogue.write() as session:
            session.execute(update(Webhook).values(url=f"http://127.0.0.3:{receiver.port}/told"))
    courier.tick()
    (first,) = deliveries(site, made["id"])
    assert (first["status"], first["attempts"]) == ("pending", 1)
    courier.tick()
    assert deliveries(site, made["id"])[0]["attempts"] == 1, "not before its time"
    with site.parts.catalogue.write() as session:
        session.execute(update(Webhook).values(url=f"{receiver.url}/told"))
    receiver.pages["/told"] = Reply()
    clock.ahead = PAUSES[0] * 1.3
    courier.tick()
    (then,) = deliveries(site, made["id"])
    assert (then["status"], then["attempts"], then["answer"]) == ("delivered", 2, "HTTP 200")
    assert {asked.headers["webhook-id"] for asked in receiver.asked} == {first["id"]}
    assert not any(asked.path == "/elsewhere" for asked in receiver.asked)
    assert unwrap(receiver.asked[-1], made["secret"]), "signed for the time at which it was sent"


def test_after_the_last_attempt_it_has_failed(site: Site, receiver: Web, courier: Courier, clock: Clock) -> None:
    made = add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    receiver.pages["/told"] = Reply(status=500)
    for pause in (0.0, *PAUSES, 1e5, 1e5):
        clock.ahead += pause * 1.3
        courier.tick()
    (one,) = deliveries(site, made["id"])
    assert (one["status"], one["attempts"], len(receiver.asked)) == ("failed", len(PAUSES) + 1, len(PAUSES) + 1)


def test_what_a_dead_process_was_sending_is_sent_by_another(
    site: Site, receiver: Web, courier: Courier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    courier.collect()
    assert len(courier._claim()) == 1  # and then the process dies
    courier.tick()
    assert receiver.asked == []
    clock.ahead = LEASE_SECONDS + 1
    courier.tick()
    assert [d["status"] for d in deliveries(site, made["id"])] == ["delivered"]


def test_several_processes_tell_it_once(site: Site, receiver: Web, tmp_path: Path) -> None:
    for _ in range(3):
        add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    catalogues = [open_catalogue(f"sqlite:///{tmp_path / 'catalogue.db'}") for _ in range(4)]
    barrier = threading.Barrier(4)

    def tick(courier: Courier) -> None:
        barrier.wait()
        courier.tick()

    threads = [threading.Thread(target=tick, args=(Courier(c, site.parts.reach.hosts, SECRET),)) for c in catalogues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for catalogue in catalogues:
        catalogue.close()
    assert len(receiver.asked) == 3
    assert len({asked.headers["webhook-id"] for asked in receiver.asked}) == 3


def test_an_address_that_hangs_holds_up_no_other(site: Site, receiver: Web, courier: Courier) -> None:
    heard = threading.Event()

    def hang(asked: Asked) -> Reply:
        heard.wait(60)  # its answer comes only after the other was told
        return Reply()

    def hear(asked: Asked) -> Reply:
        heard.set()
        return Reply()

    receiver.pages["/hangs"], receiver.pages["/told"] = hang, hear
    add(site, receiver, url=f"{receiver.url}/hangs")
    add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    courier.tick()
    assert heard.is_set()


def test_an_end_that_is_committed_late_is_told_and_an_old_one_is_not_looked_for_again(
    site: Site, receiver: Web, courier: Courier, clock: Clock
) -> None:
    add(site, receiver)
    corpus = site.corpus_of("handbook", {"a.txt": TEXT})
    clock.ahead = 3600.0
    courier.collect()  # now the look has gone an hour further
    with site.parts.catalogue.write() as session:
        late = Job(
            id="job-late", tenant_id="default", corpus_id=corpus, type="ingest", status="completed", stage="commit", request={},
            result={}, created_at=clock(), finished_at=clock() - OVERLAP_SECONDS + 60, attempt=0, max_attempts=3,
        )  # fmt: skip
        session.add(late)
    assert courier.collect() == 1
    clock.ahead += KEPT_SECONDS + 3600
    courier.tick()
    with site.parts.catalogue.write() as session:
        session.execute(update(WebhookDelivery).values(finished_at=clock() - KEPT_SECONDS - 1))
    told = len(receiver.asked)
    courier.tick()
    courier.tick()
    assert site.work.count(WebhookDelivery) == 0
    assert len(receiver.asked) == told


def test_a_removed_webhook_is_told_nothing_more(site: Site, receiver: Web, courier: Courier) -> None:
    made = add(site, receiver)
    site.corpus_of("handbook", {"a.txt": TEXT})
    courier.collect()
    with site.http() as http:
        assert http.delete(f"/v1/webhooks/{made['id']}").json()["deleted"]
        assert http.get(f"/v1/webhooks/{made['id']}").status_code == 404
    courier.tick()
    assert receiver.asked == []
    assert site.work.count(WebhookDelivery) == 0
