"""Nothing leaves this machine but to hosts the operator lists, at addresses that were checked."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from fixtures_web import Asked, Reply, Web, certificate, web
from hypothesis import given
from hypothesis import strategies as st

from ingest.egress import AllowedHosts, HostRefused
from ingest.fetch import Answer, Fetcher, FetchFailed
from storage.errors import UserError

PUBLIC = "140.82.112.3"


def hosts(text: str, *addresses: str) -> AllowedHosts:
    return AllowedHosts.parse(text, lambda host, port: addresses or (PUBLIC,))


@pytest.fixture
def site() -> Iterator[Web]:
    with web() as made:
        yield made


@pytest.fixture
def fetcher(site: Web) -> Iterator[Fetcher]:
    made = Fetcher(AllowedHosts.parse(f"127.0.0.1:{site.port}"))
    yield made
    made.close()


def get(fetcher: Fetcher, url: str, max_bytes: int = 1000, seconds: float = 60.0) -> tuple[Answer, bytes]:
    got: list[bytes] = []
    answer = fetcher.get(url, got.append, max_bytes=max_bytes, seconds=seconds, headers={"authorization": "Basic eA=="})
    return answer, b"".join(got)


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("github.com", "https://github.com/x"),
        ("github.com", "https://GitHub.com./x"),
        ("*.corp.example", "https://git.corp.example/"),
        ("*.corp.example", "https://a.b.corp.example/"),
        ("x.example, git.corp.example:8443", "http://git.corp.example:8443/"),
        ("xn--mnchen-3ya.example", "https://münchen.example/"),
        (PUBLIC, f"https://{PUBLIC}/"),
        ("127.0.0.1:9000", "http://127.0.0.1:9000/"),
        ("[::1]:9000", "http://[::1]:9000/"),
    ],
)
def test_what_is_listed_is_allowed(listed: str, url: str) -> None:
    allowed = AllowedHosts.parse(listed)
    assert allowed.check(url).host


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("", "https://github.com/"),
        ("github.com", "https://evil.example/"),
        ("github.com", "http://github.com/"),
        ("github.com", "https://github.com:8443/"),
        ("github.com:8443", "https://github.com/"),
        ("github.com", "https://sub.github.com/"),
        ("github.com", "https://github.com.evil.example/"),
        ("github.com", "https://evilgithub.com/"),
        ("*.corp.example", "https://corp.example/"),
        ("*.corp.example", "https://evilcorp.example/"),
        ("127.0.0.1:9000", "http://127.0.0.2:9000/"),
        ("127.0.0.1:9000", "http://2130706433:9000/"),
        ("127.0.0.1:9000", "http://localhost:9000/"),
    ],
)
def test_what_is_not_listed_is_refused(listed: str, url: str) -> None:
    with pytest.raises(HostRefused):
        AllowedHosts.parse(listed).check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://user@github.com/", "https://github.com@evil.example/", "https://:p@github.com/", "https://@github.com/",
        "https://github.com\\@evil.example/", "https://evil.example\\.github.com/", "ftp://github.com/", "file:///etc/passwd",
        "ssh://git@github.com/x", "//github.com/", "github.com", "", "https://", "https:///x", "https://git hub.com/",
        "https://github.com/\nx", "https://[::1", "http://0177.0.0.1/", "gopher://github.com/", "ext::sh -c x",
        "https://evil.example#@github.com/", "https://evil.example?@github.com/",
    ],
)  # fmt: skip
def test_what_is_no_plain_web_address_is_refused(url: str) -> None:
    with pytest.raises(UserError):
        AllowedHosts.parse("github.com,*.github.com,0177.github.com").check(url)


@pytest.mark.parametrize(
    "entry",
    ["*", "*.", "a b", "https://github.com", "github.com/x", "h:0", "h:99999", "h:x", "2130706433", "0x7f.1", "h@x"],
)
def test_an_entry_that_is_no_host_stops_the_process(entry: str) -> None:
    with pytest.raises(UserError):
        AllowedHosts.parse(entry)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "168.63.129.16", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "::127.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1",
    ],
)  # fmt: skip
def test_a_listed_name_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    for addresses in ([address], [PUBLIC, address]):
        with pytest.raises(HostRefused):
            hosts("git.example", *addresses).locate("https://git.example/")


@pytest.mark.parametrize("address", [PUBLIC, "2606:50c0:8000::153", "::ffff:140.82.112.3"])
def test_a_public_address_is_reached(address: str) -> None:
    (found,) = hosts("git.example", address).locate("https://git.example/").addresses
    assert ip_address(found).is_global


def test_a_private_address_is_reached_when_the_operator_names_it() -> None:
    url = "https://git.example/"
    assert hosts("git.example,10.1.2.3", "10.1.2.3").locate(url).addresses == ("10.1.2.3",)
    assert hosts("git.example,10.0.0.0/8", "10.1.2.3").locate(url).addresses == ("10.1.2.3",)
    assert hosts("git.example,127.0.0.1", "::ffff:127.0.0.1").locate(url).addresses == ("127.0.0.1",)
    assert hosts("git.example,169.254.169.254", "169.254.169.254").locate(url).addresses
    for listed, address in [
        ("git.example,10.1.2.3", "10.1.2.4"), ("git.example,10.1.2.3:8080", "10.1.2.3"), ("git.example,0.0.0.0/0", "127.0.0.1"),
        ("git.example,0.0.0.0/0", "169.254.169.254"), ("git.example,127.0.0.0/8", "127.0.0.1"), ("git.example,::/0", "::1"),
        ("git.example,224.0.0.1", "224.0.0.1"), ("git.example,0.0.0.0", "0.0.0.0"), ("git.example,::/0", "64:ff9b::7f00:1"),
    ]:  # fmt: skip
        with pytest.raises(HostRefused):
            hosts(listed, address).locate(url)


@given(st.integers(0, 2**32 - 1))
def test_a_mapped_or_wrapped_address_is_no_way_around(number: int) -> None:
    """However an IPv4 address is written in IPv6, it is reached if and only if it is itself."""

    def reached(address: str) -> bool:
        try:
            return bool(hosts("git.example", address).locate("https://git.example/"))
        except HostRefused:
            return False

    plain = reached(str(ip_address(number)))
    assert reached(str(ip_address(number | 0xFFFF << 32))) == plain
    for wrapped in (0x0064FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert plain or not reached(str(ip_address(wrapped)))


def test_a_name_is_looked_up_once_and_its_checked_address_is_connected_to(site: Web) -> None:
    """A resolver that answers well the first time and with another address the second is asked once."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    allowed = AllowedHosts.parse(f"git.example:{site.port},127.0.0.1", lambda host, port: answers.pop(0))
    site.pages["/a"] = Reply(b"text")
    fetcher = Fetcher(allowed)
    for _ in range(2):
        assert get(fetcher, f"http://git.example:{site.port}/a")[1] == b"text"
    fetcher.close()
    assert len(answers) == 1
    assert site.asked[0].headers["host"] == f"git.example:{site.port}", "the name goes to the server, not to a resolver"


@pytest.mark.parametrize("name", ["git.example", "other.example"])
def test_https_is_verified_by_the_name_and_connected_to_by_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pem, context = certificate(tmp_path, "git.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with web(context) as served:
        served.pages["/a"] = Reply(b"text")
        fetcher = Fetcher(AllowedHosts.parse(f"*.example:{served.port},127.0.0.1", lambda host, port: ["127.0.0.1"]))
        url = f"https://{name}:{served.port}/a"
        if name == "git.example":
            assert get(fetcher, url)[1] == b"text"
        else:
            with pytest.raises(FetchFailed):
                get(fetcher, url)
            assert served.asked == []
        fetcher.close()


def test_a_rebound_name_is_refused_when_it_is_met_anew(site: Web) -> None:
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    allowed = AllowedHosts.parse(f"git.example:{site.port},127.0.0.1", lambda host, port: answers.pop(0))
    site.pages["/a"] = Reply(b"text")
    for refused in (False, True):
        fetcher = Fetcher(allowed)
        if refused:
            with pytest.raises(HostRefused):
                get(fetcher, f"http://git.example:{site.port}/a")
        else:
            get(fetcher, f"http://git.example:{site.port}/a")
        fetcher.close()
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    "where",
    ["http://127.0.0.1:1/", "http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.1]:1/", "file:///etc/passwd",
     "http://2130706433/", "//127.0.0.2/x", "http://u@127.0.0.1/", "gopher://127.0.0.1/"],
)  # fmt: skip
def test_a_redirect_to_what_is_not_allowed_is_not_followed(site: Web, fetcher: Fetcher, where: str) -> None:
    site.pages["/a"] = Reply(status=302, headers={"location": where})
    with pytest.raises(UserError):
        get(fetcher, f"{site.url}/a")
    assert len(site.asked) == 1


def test_a_good_redirect_is_followed_and_another_host_gets_no_credentials(site: Web) -> None:
    with web() as other:
        site.pages["/a"] = Reply(b"ignored", 307, {"location": "/b"})
        site.pages["/b"] = Reply(status=301, headers={"location": f"{other.url}/c"})
        other.pages["/c"] = Reply(b"text")
        fetcher = Fetcher(AllowedHosts.parse(f"127.0.0.1:{site.port},127.0.0.1:{other.port}"))
        answer, body = get(fetcher, f"{site.url}/a")
        fetcher.close()
        assert (answer.status, answer.url, body) == (200, f"{other.url}/c", b"text")
        assert [asked.headers.get("authorization") for asked in (*site.asked, *other.asked)] == ["Basic eA=="] * 2 + [None]


def test_a_circle_of_redirects_ends(site: Web, fetcher: Fetcher) -> None:
    site.pages["/a"] = Reply(status=302, headers={"location": "/a"})
    with pytest.raises(FetchFailed, match="more than"):
        get(fetcher, f"{site.url}/a")
    assert len(site.asked) == 6


@pytest.mark.parametrize("size", [1000, 1001, 100_000])
def test_a_body_is_read_up_to_its_limit(site: Web, fetcher: Fetcher, size: int) -> None:
    site.pages["/a"] = Reply(b"x" * size)
    if size <= 1000:
        assert len(get(fetcher, f"{site.url}/a")[1]) == size
        return
    with pytest.raises(FetchFailed, match="larger"):
        get(fetcher, f"{site.url}/a")


def test_a_packed_body_counts_as_unpacked(site: Web, fetcher: Fetcher) -> None:
    site.pages["/ok"] = Reply(gzip.compress(b"x" * 1000), headers={"content-encoding": "gzip"})
    site.pages["/bomb"] = Reply(gzip.compress(b"\0" * (64 << 20)), headers={"content-encoding": "gzip"})
    site.pages["/broken"] = Reply(b"no gzip", headers={"content-encoding": "gzip"})
    site.pages["/other"] = Reply(b"?", headers={"content-encoding": "br"})
    assert get(fetcher, f"{site.url}/ok")[1] == b"x" * 1000
    got: list[bytes] = []
    with pytest.raises(FetchFailed, match="larger"):
        fetcher.get(f"{site.url}/bomb", got.append, max_bytes=100_000, seconds=60)
    assert sum(map(len, got)) <= 100_000
    for page in ("broken", "other"):
        with pytest.raises(FetchFailed, match="packed"):
            get(fetcher, f"{site.url}/{page}")
    assert "gzip" not in site.asked[0].headers["accept-encoding"]


@pytest.mark.parametrize("head", [False, True])
def test_what_drips_ends_with_the_time_it_has(site: Web, fetcher: Fetcher, head: bool) -> None:
    """Each byte comes in time; all of them would take 100 s."""
    slow = Reply(b"x" * 1000, headers={f"x-{i}": "y" for i in range(1000)} if head else {}, drip=0.1, drip_head=head)
    site.pages["/a"] = slow
    began = time.monotonic()
    with pytest.raises(FetchFailed, match="too long"):
        get(fetcher, f"{site.url}/a", seconds=1.0)
    assert time.monotonic() - began < 60


def test_a_name_without_an_address_and_a_closed_port_are_failures_and_no_refusals(site: Web) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such host")

    fetcher = Fetcher(AllowedHosts.parse("git.example,127.0.0.1:1", unknown))
    for url in ("https://git.example/", "http://127.0.0.1:1/"):
        with pytest.raises(FetchFailed):
            get(fetcher, url)


def test_a_posts_redirect_is_an_answer(site: Web, fetcher: Fetcher) -> None:
    def moved(asked: Asked) -> Reply:
        return Reply(asked.body, 308, {"location": "/b"})

    site.pages["/a"] = moved
    assert fetcher.post(f"{site.url}/a", b"body", max_bytes=100, seconds=60, headers={}).status == 308
    assert [(asked.method, asked.path, asked.body) for asked in site.asked] == [("POST", "/a", b"body")]
