"""Repositories by URL: fetched from git's own server, by nothing but that, and with nothing of ours given away."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures_web import Asked, Reply, Web, certificate, web
from git_kit import backend, commit, git, repository

from ingest.egress import AllowedHosts, HostRefused
from ingest.fetch import FetchFailed
from ingest.sources import Asker, Reach, Source, open_source
from ingest.sources.git_remote import RemoteGitSource
from storage.errors import Cancelled, UserError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
FILES: dict[str, str | bytes] = {"a.md": "# a", "docs/b.txt": "b", "image.png": b"\x89PNG\0\0", "big.bin": LFS}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Web]:
    repository(tmp_path / "served" / "docs.git", FILES)
    with web() as made:
        made.rest = backend(tmp_path / "served")
        yield made


@pytest.fixture
def reach(served: Web, tmp_path: Path) -> Reach:
    return Reach(
        hosts=AllowedHosts.parse(f"127.0.0.1:{served.port}"), credentials=tmp_path / "credentials", scratch=tmp_path / "scratch"
    )


def remote(served: Web, reach: Reach, **spec: Any) -> Source:
    return open_source({"type": "git", "url": f"{served.url}/docs.git", "ref": "main", **spec}, reach, Asker("t1"))


def left_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


def test_a_commit_is_fetched_and_read_and_nothing_of_it_stays(served: Web, reach: Reach, tmp_path: Path) -> None:
    source = remote(served, reach)
    assert [entry.path for entry in source.manifest()] == ["a.md", "docs/b.txt"]
    assert source.read("docs/b.txt") == b"b"
    assert {(left.path, left.reason) for left in source.skipped} == {
        ("image.png", "binary"), ("big.bin", "git LFS pointer; the file itself is not here"),
    }  # fmt: skip
    source.close()
    assert left_in(reach.scratch) == []


@pytest.mark.parametrize("kind", ["branch", "full branch", "tag", "commit", "HEAD"])
def test_branches_tags_and_commits_are_named_alike(served: Web, reach: Reach, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "served" / "docs.git"
    first = git(folder, "rev-parse", "HEAD")
    git(folder, "branch", "release/1.0")
    git(folder, "tag", "-a", "v1", "-m", "one")
    commit(folder, {"later.txt": "later"})
    ref = {"branch": "release/1.0", "full branch": "refs/heads/release/1.0", "tag": "v1", "commit": first}.get(kind, kind)
    source = remote(served, reach, ref=ref)
    paths = [entry.path for entry in source.manifest()]
    source.close()
    assert paths == (["later.txt"] if kind == "HEAD" else ["a.md", "docs/b.txt"])


def test_only_the_one_commit_is_fetched(served: Web, reach: Reach, tmp_path: Path) -> None:
    folder = tmp_path / "served" / "docs.git"
    old = git(folder, "rev-parse", "HEAD")
    commit(folder, {"a.md": "new"})
    source = remote(served, reach)
    source.manifest()
    (fetched,) = reach.scratch.glob("*/repository")
    with pytest.raises(Exception, match="returned non-zero"):
        git(fetched, "cat-file", "-e", old)
    source.close()


def test_symlinks_and_submodules_are_left_out_with_their_reasons(served: Web, reach: Reach, tmp_path: Path) -> None:
    folder = tmp_path / "served" / "docs.git"
    (folder / "link.txt").symlink_to("/etc/passwd")
    (folder / ".gitmodules").write_text(f'[submodule "sub"]\n\tpath = sub\n\turl = {served.url}/other.git\n')
    git(folder, "add", "-A")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    git(folder, "commit", "-qm", "two")
    source = remote(served, reach)
    source.manifest()
    reasons = {left.path: left.reason for left in source.skipped}
    source.close()
    assert (reasons["link.txt"], reasons["sub"]) == ("symlink", "submodule")
    assert not any("other.git" in asked.path for asked in served.asked)


@pytest.mark.parametrize(
    "url",
    ["https://github.com/a/b.git", "http://127.0.0.1:1/x.git", "ssh://git@github.com/a/b", "git@github.com:a/b.git", "git://github.com/a",
     "ext::sh -c touch% /tmp/x", "file:///etc", "--upload-pack=touch x", "https://user:secret@github.com/a"],
)  # fmt: skip
def test_a_repository_that_is_not_allowed_is_refused_without_being_asked(reach: Reach, url: str) -> None:
    with pytest.raises(UserError):
        open_source({"type": "git", "url": url}, reach, Asker("t1"))


@pytest.mark.parametrize("ref", ["--upload-pack=touch x", "+main", "-h", "a b", "a:b", "main~1", "a..b", "", "x\ny", "@{u}"])
def test_a_ref_that_is_none_is_refused(served: Web, reach: Reach, ref: str) -> None:
    with pytest.raises(UserError):
        RemoteGitSource(f"{served.url}/docs.git", ref, reach, Asker("t1"))


def test_what_a_dead_worker_left_is_removed(served: Web, reach: Reach) -> None:
    for name, age in {"old": 25 * 3600, "new": 60}.items():
        (reach.scratch / name / "repository").mkdir(parents=True)
        os.utime(reach.scratch / name, (time.time() - age,) * 2)
    source = remote(served, reach)
    source.manifest()
    source.close()
    assert left_in(reach.scratch) == ["new"]


@pytest.mark.parametrize("what", ["repository", "ref"])
def test_what_is_not_there_is_a_failure_with_gits_own_words(served: Web, reach: Reach, what: str) -> None:
    spec = {"url": f"{served.url}/none.git"} if what == "repository" else {"ref": "no-such-branch"}
    source = remote(served, reach, **spec)
    with pytest.raises(FetchFailed, match=r"not found|couldn't find|404"):
        source.manifest()
    source.close()
    assert left_in(reach.scratch) == []


def test_a_redirect_is_not_followed(served: Web, reach: Reach) -> None:
    with web() as other:
        served.rest = lambda asked: Reply(status=301, headers={"location": f"{other.url}{asked.path}"})
        source = remote(served, reach)
        with pytest.raises(FetchFailed):
            source.manifest()
        source.close()
        assert served.asked
        assert not other.asked


def test_the_checked_address_is_connected_to_and_no_other_look_up_is_made(served: Web, tmp_path: Path) -> None:
    """`git.example` exists for our resolver only: a git that looked it up itself would not find it."""
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    hosts = AllowedHosts.parse(f"git.example:{served.port},127.0.0.1", resolve)
    source = remote(served, Reach(hosts=hosts, scratch=tmp_path / "s"), url=f"http://git.example:{served.port}/docs.git")
    assert source.manifest()
    source.close()
    assert asked == ["git.example"]
    assert {each.headers["host"] for each in served.asked} == {f"git.example:{served.port}"}


def test_https_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path / "served" / "docs.git", FILES)
    pem, context = certificate(tmp_path, "git.example")
    monkeypatch.setenv("GIT_SSL_CAINFO", str(pem))
    with web(context) as served:
        served.rest = backend(tmp_path / "served")
        hosts = AllowedHosts.parse(f"*.example:{served.port},127.0.0.1", lambda host, port: ["127.0.0.1"])
        for name in ("git", "other"):
            url = f"https://{name}.example:{served.port}/docs.git"
            with closing(remote(served, Reach(hosts=hosts, scratch=tmp_path / "s"), url=url)) as source:
                if name == "git":
                    assert source.manifest()
                else:
                    with pytest.raises(FetchFailed):
                        source.manifest()


def test_a_name_with_a_private_address_is_not_connected_to(served: Web, tmp_path: Path) -> None:
    hosts = AllowedHosts.parse(f"git.example:{served.port}", lambda host, port: ["127.0.0.1"])
    source = remote(served, Reach(hosts=hosts, scratch=tmp_path / "s"), url=f"http://git.example:{served.port}/docs.git")
    with pytest.raises(HostRefused):
        source.manifest()
    assert not served.asked


def test_the_users_own_git_settings_are_not_heeded(
    served: Web, reach: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f'[credential]\n\thelper = "!touch {mark}"\n[http]\n\tproxy = http://127.0.0.1:1\n'
        f'[url "http://127.0.0.1:1/"]\n\tinsteadOf = {served.url}/\n[core]\n\tfsmonitor = touch {mark}\n'
    )
    proxy = "http://127.0.0.1:1"
    mine = {"HOME": str(home), "http_proxy": proxy, "GIT_CONFIG_PARAMETERS": f"'http.proxy'='{proxy}'", "GIT_DIR": str(tmp_path)}
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    source = remote(served, reach)
    assert source.manifest()
    source.close()
    assert not mark.exists()


def test_a_server_that_wants_a_password_gets_no_prompt(served: Web, reach: Reach) -> None:
    served.rest = lambda asked: Reply(status=401, headers={"www-authenticate": 'Basic realm="x"'})
    source = remote(served, reach)
    with pytest.raises(FetchFailed):
        source.manifest()
    source.close()


def credential(folder: Path, url: str, tenant: str = "t1") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "docs").write_text(f"tenant: {tenant}\nurl: {url}\nusername: reader\npassword: 'open sesame'\n")


def test_a_credential_is_shown_to_its_own_repositories_and_written_nowhere(
    served: Web, reach: Reach, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = served.rest

    def guarded(asked: Asked) -> Reply:
        if asked.headers.get("authorization") != "Basic cmVhZGVyOm9wZW4gc2VzYW1l":
            return Reply(status=401, headers={"www-authenticate": 'Basic realm="x"'})
        return answer(asked)

    served.rest = guarded
    credential(reach.credentials, f"{served.url}/docs.git")
    source = remote(served, reach, credential="docs")
    assert source.manifest()
    for file in reach.scratch.rglob("*"):
        if file.is_file():
            assert b"sesame" not in file.read_bytes()
            assert b"cmVhZGVyOm9wZW4gc2VzYW1l" not in file.read_bytes()
    source.close()
    assert "sesame" not in repr(source.__dict__)
    assert "sesame" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "case", ["another tenant's", "another place", "prefix of a name", "climbs", "absent", "not a name", "damaged"]
)
def test_a_credential_is_not_to_be_had_by_others(served: Web, reach: Reach, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    url = {
        "another place": f"{served.url}/private/",
        "prefix of a name": f"{served.url}/doc",
        "climbs": f"{served.url}/private",
    }.get(case, f"{served.url}/")
    credential(reach.credentials, url, tenant="t2" if case == "another tenant's" else "t1")
    if case == "damaged":
        (reach.credentials / "docs").write_text("password: [sesame")
    name = {"absent": "none", "not a name": "../credentials/docs"}.get(case, "docs")
    place = f"{served.url}/private/%2e%2e/docs.git" if case == "climbs" else f"{served.url}/docs.git"
    with pytest.raises(UserError, match="there is no credential") as refused:
        remote(served, reach, url=place, credential=name)
    assert "sesame" not in str(refused.value) + "".join(capfd.readouterr())


def test_a_repository_that_is_too_large_or_too_slow_is_ended(served: Web, reach: Reach, tmp_path: Path) -> None:
    commit(tmp_path / "served" / "docs.git", {"big.txt": os.urandom(3 << 20).hex()})
    url = f"{served.url}/docs.git"
    large = RemoteGitSource(url, "main", reach, Asker("t1"), most_bytes=100_000)
    with pytest.raises(FetchFailed) as refused:
        large.manifest()
    assert refused.value.code == "too_large"
    large.close()
    stalled = threading.Event()

    def stall(asked: Asked) -> Reply:
        stalled.wait(60)
        return Reply(status=500)

    served.rest = stall
    slow = RemoteGitSource(url, "main", reach, Asker("t1"), most_seconds=0.5)
    with pytest.raises(FetchFailed, match="too long"):
        slow.manifest()
    slow.close()

    def cancelled() -> None:
        raise Cancelled("the job was cancelled")

    stopped = RemoteGitSource(url, "main", reach, Asker("t1", check=cancelled))
    with pytest.raises(Cancelled):
        stopped.manifest()
    stopped.close()
    stalled.set()
    assert left_in(reach.scratch) == []
