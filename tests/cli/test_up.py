"""`preread up` and the commands that talk to it."""

from __future__ import annotations

import stat

import pytest
from cli_kit import Running

pytestmark = pytest.mark.services
TEXT = "# Lamps\n\nThe lamp on the north pier is lit at nine. Its oil costs four crowns a week.\n"


def test_it_says_where_it_is_and_keeps_the_first_key_private(running: Running) -> None:
    path = running.data / "admin.key"
    assert running.welcome["started"] is True
    assert path.read_text().strip() == running.welcome["admin_key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_up_tells_the_address_of_the_first(running: Running) -> None:
    again = running.shell.json("up")
    assert again == {"address": running.welcome["address"], "started": False}


def test_documents_go_in_and_answers_come_out(running: Running) -> None:
    folder = running.data.parent / "lamps"
    folder.mkdir()
    (folder / "lamps.md").write_text(TEXT)
    job = running.shell.json("ingest", str(folder))
    assert job["status"] == "completed"
    assert job["progress"]["chunks_computed"] == 1
    again = running.shell.json("ingest", str(folder))
    assert again["progress"]["chunks_computed"] == 0
    (corpus,) = running.shell.json("corpora")
    assert (corpus["name"], corpus["file_counts"]["completed"]) == ("lamps", 1)

    answer = running.shell.json("ask", "When is the lamp lit?", "--max-tokens", "8")
    assert answer["citations"][0]["quote"] in TEXT
    assert answer["preread"]["tokens_reused"] > 0
    assert answer["first_token_s"] > 0
    told = running.shell.run("ask", "When is the lamp lit?", "--max-tokens", "8", "--method", "full").stdout
    assert "lamps.md" in told
    assert "0 reused" in told


def test_a_single_file_goes_in_by_its_name(running: Running) -> None:
    path = running.data.parent / "single.txt"
    path.write_text("The ferry leaves at noon.")
    told = running.shell.run("ingest", str(path), "--corpus", "ferries").stdout
    assert "completed" in told
    assert "1 (1 computed, 0 reused)" in told


def test_documents_are_listed_and_deleted_with_a_receipt(running: Running) -> None:
    folder = running.data.parent / "leaving"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.md").write_text(f"# {name}\n\nThe {name} leaves at noon.")
    running.shell.run("ingest", str(folder))
    assert sorted(row["path"] for row in running.shell.json("documents", "leaving")) == ["one.md", "two.md"]
    assert "one.md" in running.shell.run("documents", "leaving").stdout
    receipt = running.shell.json("delete", "leaving", "one.md")["receipt"]
    assert (receipt["documents"], receipt["chunks"]) == (1, 1)
    assert "one.md" in running.shell.run("delete", "leaving", "one.md", code=2).stderr
    assert [row["path"] for row in running.shell.json("documents", "leaving")] == ["two.md"]
    assert "1 documents" in running.shell.run("delete", "leaving", "--yes").stdout
    assert "leaving" in running.shell.run("documents", "leaving", code=2).stderr


def test_a_corpus_follows_its_source(running: Running) -> None:
    (running.sources / "one.md").write_text("# One\n\nThe first.")
    job = running.shell.json("sync", "followed", "--source", str(running.sources))
    assert job["progress"]["files_done"] == 1
    (running.sources / "one.md").rename(running.sources / "two.md")
    job = running.shell.json("sync", "followed")
    assert job["progress"]["chunks_computed"] == 0
    refused = running.shell.run("sync", "elsewhere", "--source", "/", code=2)
    assert len(refused.stderr.strip().splitlines()) == 1


def test_jobs_are_listed_and_shown(running: Running) -> None:
    listed = running.shell.json("jobs")
    shown = running.shell.json("jobs", listed[0]["id"])
    assert shown["id"] == listed[0]["id"]
    assert listed[0]["id"] in running.shell.run("jobs").stdout
    assert running.shell.json("jobs", listed[0]["id"], "--cancel") == shown, "what has ended stays as it is"
    assert "no file of this job failed" in running.shell.run("jobs", listed[0]["id"], "--retry", code=2).stderr
    assert "name one job" in running.shell.run("jobs", "--cancel", code=2).stderr
    assert "job-nothing" in running.shell.run("jobs", "job-nothing", code=2).stderr


def test_keys_are_made_used_and_revoked(running: Running) -> None:
    made = running.shell.json("key", "create", "reader", "--scope", "read")
    path = running.data.parent / "reader.key"
    path.write_text(made["key"])
    assert running.shell.json("corpora", "--key-file", str(path))
    assert running.shell.run("ingest", str(path), "--key-file", str(path), code=2)
    running.shell.run("key", "revoke", made["id"])
    assert "key" in running.shell.run("corpora", "--key-file", str(path), code=2).stderr
    states = {key["id"]: key["revoked_at"] for key in running.shell.json("key", "list")}
    assert states[made["id"]] is not None
    assert "revoked" in running.shell.run("key", "list").stdout


def test_a_wrong_method_is_one_line(running: Running) -> None:
    refused = running.shell.run("ask", "Why?", "--corpus", "lamps", "--method", "magic", code=2)
    assert "magic" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
