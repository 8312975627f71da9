"""Requests made to harm: slow ones, deep ones, and ones that would be something else to a browser or a proxy."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from api_kit import Site

DEEP = "[" * 100_000 + "]" * 100_000
BOMBS = {
    "deep": DEEP,
    "deep in a field": '{"name":"x","metadata":{"a":%s}}' % ("[" * 900 + "]" * 900),
    "deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a number of 5,000 digits": '{"name":"x","metadata":{"a":%s}}' % ("1" * 5000),
    "not a number": '{"name":"x","metadata":{"a":NaN}}',
    "infinite": '{"name":"x","metadata":{"a":1e999}}',
    "half a character": '{"name":"\\ud800","query":"\\ud800"}',
    "one field twice": '{"name":"x","name":"y","query":"x","query":"y"}',
    "one field twice, deep": '{"name":"x","query":"x","metadata":{"a":"x","a":"y"}}',
    "minus infinity": '{"query":"x","max_num_results":-Infinity}',
    "nothing": "null",
    "a list": "[]",
    "a text": '"{}"',
    "no UTF-8": b"\xff\xfe{",
    "no JSON": "{" * 1000,
}


def connect(site: Site) -> socket.socket:
    url = httpx.URL(site.url)
    return socket.create_connection((url.host, url.port or 80), timeout=60)


def ended(connection: socket.socket) -> bytes:
    """What comes until the server closes; fails if it does not within a minute."""
    got = b""
    while piece := connection.recv(65536):
        got += piece
    return got


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: "])
def test_who_does_not_finish_a_head_is_not_waited_for(site: Site, monkeypatch, sent: bytes) -> None:
    monkeypatch.setattr("serving.http_protocol.HEAD_SECONDS", 0.5)
    with connect(site) as connection:
        connection.sendall(sent)
        assert ended(connection) == b""


def test_a_head_that_drips_is_not_waited_for_either(site: Site, monkeypatch) -> None:
    monkeypatch.setattr("serving.http_protocol.HEAD_SECONDS", 0.5)
    with connect(site) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")
        until = time.monotonic() + 60
        closed = False
        while not closed and time.monotonic() < until:
            time.sleep(0.1)
            try:
                connection.sendall(b"x-a: 1\r\n")
            except OSError:
                closed = True
        assert closed


def test_an_answer_may_take_longer_than_a_head(site: Site, monkeypatch) -> None:
    monkeypatch.setattr("serving.http_protocol.HEAD_SECONDS", 0.5)
    monkeypatch.setattr("serving.api.middleware.BODY_PAUSE_S", 0.5)
    site.engine.first_pause = 2.0
    with site.http() as http:
        body = {"model": "echo-1", "messages": [{"role": "user", "content": "one two"}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "pause"), [("BODY_PAUSE_S", 0.5, 2.0), ("BODY_GRACE_S", 0.5, 0.1)], ids=["stalls", "drips"]
)
def test_a_body_that_does_not_come_is_given_up(site: Site, monkeypatch, name: str, value: float, pause: float) -> None:
    monkeypatch.setattr(f"serving.api.middleware.{name}", value)
    head = (
        f"POST /v1/vector_stores HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.admin_key}\r\n"
        "content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    )
    with connect(site) as connection:
        connection.sendall(head.encode())
        connection.settimeout(pause)
        answer, until = b"", time.monotonic() + 60
        while b"HTTP/1.1" not in answer and time.monotonic() < until:
            try:
                answer += connection.recv(65536)
            except TimeoutError:
                connection.sendall(b" ") if name == "BODY_GRACE_S" else None
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_json_bomb_is_a_refusal_and_no_accident(site: Site, bomb: str | bytes) -> None:
    json_type = {"content-type": "application/json"}
    with site.http() as http:
        corpus = http.post("/v1/vector_stores", json={"name": "c"}).json()["id"]
        for method, path in (
            ("POST", "/v1/vector_stores"), ("POST", f"/v1/vector_stores/{corpus}/search"),
            ("POST", "/v1/chat/completions"), ("PUT", f"/v1/corpora/{corpus}/settings"), ("POST", "/v1/tenants"),
        ):  # fmt: skip
            answer = http.request(method, path, content=bomb, headers=json_type)
            assert answer.status_code == 400, (path, answer.text[:200])
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert http.get("/v1/models").status_code == 200


def test_what_many_delete_at_once_is_deleted_once(site: Site) -> None:
    """Whoever comes too late is told that it is gone; who adds to it meanwhile, too."""
    corpus = site.corpus_of("c", {"a.txt": "some words", "b.txt": "other words"})
    with site.http() as http:
        [first, second] = [each["id"] for each in http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]]
    asked = [
        *6 * [("DELETE", f"/v1/vector_stores/{corpus}/files/{first}", None)], *4 * [("DELETE", f"/v1/files/{second}", None)],
        *4 * [("POST", f"/v1/vector_stores/{corpus}/files", {"file_id": first})],
        *4 * [("DELETE", f"/v1/vector_stores/{corpus}", None)],
        *4 * [("POST", f"/v1/vector_stores/{corpus}/search", {"query": "words"})],
    ]  # fmt: skip

    def ask(each: tuple[str, str, dict[str, str] | None]) -> tuple[str, str, int]:
        method, path, body = each
        with site.http() as http:
            return method, path, http.request(method, path, **({"json": body} if body else {})).status_code

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(ask, asked))
    deleted = [status for method, path, status in answers if (method, path) == ("DELETE", f"/v1/vector_stores/{corpus}")]
    assert deleted.count(200) >= 1
    # 400: the file is still being read; 429: the catalogue is busy.
    assert {status for *_, status in answers} <= {200, 400, 404, 429}, answers
    with site.http() as http:
        assert http.get(f"/v1/vector_stores/{corpus}").status_code == 404


def test_an_accident_tells_the_number_under_which_it_is_logged(site: Site) -> None:
    site.engine.fail_at = 0
    body = {"model": "echo-1", "messages": [{"role": "user", "content": "hello"}]}
    with site.http() as http:
        whole = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True}, headers={"x-request-id": "mine-2"})
    assert whole.status_code == 500
    assert "mine-1" in whole.json()["error"]["message"]
    assert "mine-2" in streamed.text
    assert "secret text" not in whole.text + streamed.text


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/nowhere", "/auth/config", "/openapi.json"])
def test_every_answer_tells_browsers_to_make_nothing_of_it(site: Site, path: str) -> None:
    with site.http() as http:
        headers = http.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("name", ['a"\r\nx-evil: 1', "a\r\n\r\n<script>", "../../etc/passwd", "\u2028x-evil: 1", "a;b=c"])
def test_a_name_makes_no_header(site: Site, name: str) -> None:
    client = site.client()
    file = client.files.create(file=(name, b"x"), purpose="assistants")
    headers = client.files.with_raw_response.content(file.id).headers
    assert "x-evil" not in headers
    assert headers["content-disposition"].isascii()
    assert file.filename == name


@pytest.mark.parametrize("header", ["x-request-id: a\r\n b", "x-request-id: <script>", "x-request-id: " + "a" * 70])
def test_a_request_id_that_could_be_a_header_or_a_page_is_not_echoed(site: Site, header: str) -> None:
    with connect(site) as connection:
        connection.sendall(f"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n\r\n".encode())
        answer = ended(connection)
    assert b"x-request-id: req-" in answer or answer.startswith(b"HTTP/1.1 400")
    assert b"<script>" not in answer


@pytest.mark.parametrize(
    "framing",
    ["content-length: 5\r\ntransfer-encoding: chunked", "content-length: 5\r\ncontent-length: 6",
     "transfer-encoding: chunked, identity", "content-length: +5"],
)  # fmt: skip
def test_a_request_with_two_lengths_is_not_read_as_two(site: Site, framing: str) -> None:
    smuggled = "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    with connect(site) as connection:
        head = f"POST /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{framing}\r\n\r\n"
        connection.sendall((head + "0\r\n\r\n" + smuggled).encode())
        answer = ended(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"HTTP/1.1 200" not in answer
