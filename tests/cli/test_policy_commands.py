"""`preread policy`, `plan`, `storage` and `usage` from a shell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cli_kit import Running, Shell

from storage.catalogue.engine import migrate, open_catalogue
from storage.catalogue.schema import Corpus, Document, Tenant

SAMPLE = str(Path(__file__).parents[2] / "samples" / "policy.yaml")


@pytest.fixture
def catalogued(shell: Shell) -> Shell:
    """A data folder with two corpora and three documents, and nothing that runs."""
    folder = Path(shell.environ["PREREAD_DATA_DIR"])
    folder.mkdir()
    url = f"sqlite:///{folder / 'catalogue.db'}"
    migrate(url)
    catalogue = open_catalogue(url)
    with catalogue.write() as session:
        session.add(Tenant(id="t", name="t", created_at=0.0))
        session.flush()
        for name in ("policies", "empty"):
            session.add(
                Corpus(
                    id=f"vs_{name}", tenant_id="t", name=name, sharing_group="t", source=None, attributes={}, created_at=1.0,
                    last_active_at=1.0,
                )
            )  # fmt: skip
        session.flush()
        for path, attributes in (("travel.md", {}), ("leave.md", {}), ("pay.md", {"confidential": True})):
            session.add(
                Document(
                    id=f"doc-{path}", corpus_id="vs_policies", tenant_id="t", file_id="f", path=path, sha256="s",
                    status="completed", access=None, attributes=attributes, created_at=time.time(),
                )
            )  # fmt: skip
    catalogue.close()
    return shell


def test_check_names_every_mistake_and_leaves_with_an_error(shell: Shell, tmp_path: Path) -> None:
    assert shell.json("policy", "check", SAMPLE)["rules"] == ["secret", "legal", "morning", "code-in-use", "idle", "forgotten"]
    bad = tmp_path / "bad.yaml"
    bad.write_text("rules:\n- pin: ram\n- keep: {for: soon}\n")
    done = shell.run("policy", "check", str(bad), code=2)
    lines = done.stderr.strip().splitlines()
    assert [line.split(": ")[1] for line in lines] == ["line 2", "line 3"]
    assert done.stdout == ""


def test_explain_says_of_each_corpus_which_rule_holds_for_how_many(catalogued: Shell) -> None:
    told = {one["name"]: one for one in catalogued.json("policy", "explain", "--file", SAMPLE)}
    rules = {(said["action"], said["rule"]): said["documents"] for said in told["policies"]["rules"]}
    assert rules == {("store", "secret"): 1, ("prefetch", "morning"): 1, ("keep", "morning"): 1}
    assert (told["policies"]["documents"], told["empty"]["documents"], told["empty"]["rules"]) == (3, 0, [])
    text = catalogued.run("policy", "explain", "--file", SAMPLE, "--corpus", "policies").stdout
    assert "1 of 3" in text
    assert "nosuch" in catalogued.run("policy", "explain", "--file", SAMPLE, "--corpus", "nosuch", code=2).stderr


def test_explain_takes_a_document_that_is_there_with_its_tags_and_one_that_is_imagined(catalogued: Shell) -> None:
    words = ["policy", "explain", "--file", SAMPLE, "--path"]
    there = catalogued.json(*words, "pay.md")
    assert (there["known"], there["corpus"]) == (True, "policies")
    assert there["actions"]["store"] == {"value": "no", "rule": "secret"}
    imagined = catalogued.json(*words, "expenses-new.md", "--corpus", "policies", "--tag", "confidential=true")
    assert imagined["known"] is False
    assert imagined["actions"]["store"]["rule"] == "secret"
    assert imagined["actions"]["keep"] == {"value": "in memory for 7200 s after use", "rule": "morning"}
    assert imagined["actions"]["pin"] == {"value": "-", "rule": "default"}


def test_explain_uses_the_file_in_force_and_says_so_where_there_is_none(shell: Shell) -> None:
    assert "PREREAD_POLICY_FILE" in shell.run("policy", "explain", code=2).stderr
    shell.environ["PREREAD_POLICY_FILE"] = SAMPLE
    assert "morning" in shell.run("policy", "explain", "--corpus", "policies", "--path", "travel.md").stdout
    assert not Path(shell.environ["PREREAD_DATA_DIR"]).exists(), "asking makes nothing"


def test_a_broken_policy_stops_a_process_before_it_serves(shell: Shell, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("rules:\n- pin: ram\n")
    shell.environ["PREREAD_POLICY_FILE"] = str(bad)
    for command in (["up"], ["beat"]):
        done = shell.run(*command, code=2)
        assert "line 2: pin cannot be 'ram'" in done.stderr.strip().splitlines()[-1]


def test_plan_prints_sizes_times_and_break_even(shell: Shell) -> None:
    words = ["plan", "--model", "Llama-3.1-8B", "--tokens", "4000000", "--queries", "1000"]
    assert shell.json(*words) == shell.json(*words[:-2], "--queries-per-day", "1000")
    told = shell.json(*words, "--rates", SAMPLE)
    assert told["kv_bytes_per_token"] == 131_072
    assert told["stored_bytes"] == 4_000_000 * 131_072
    assert told["break_even_queries_per_day"] > 0
    assert told["currency"] == "EUR"
    assert "break-even" in shell.run(*words, "--rates", SAMPLE).stdout
    assert "unknown" in shell.run(*words).stdout
    assert "zip" in shell.run(*words, "--codec", "zip", code=2).stderr


@pytest.mark.slow
@pytest.mark.services
def test_storage_and_usage_show_what_was_stored_and_saved(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "harbour.txt"
    path.write_text("The harbour master opens the gate at dawn.")
    running.shell.run("ingest", str(path), "--corpus", "harbour")
    running.shell.run("ask", "Who opens the gate?", "--corpus", "harbour", "--max-tokens", "4")
    [held] = [one for one in running.shell.json("storage", "show")["corpora"] if one["name"] == "harbour"]
    assert held["tiers"]["object"]["bytes"] > 0
    assert "harbour" in running.shell.run("storage", "show").stdout
    end = time.monotonic() + 60
    while time.monotonic() < end:
        rows = [r for bucket in running.shell.json("usage", "--days", "2")["data"] for r in bucket["results"]]
        mine = [row for row in rows if row["corpus_id"] == held["corpus_id"] and row["num_model_requests"]]
        if mine:
            break
        time.sleep(1)
    assert mine[0]["preread"]["tokens_compiled"] > 0
    assert held["corpus_id"] in running.shell.run("usage").stdout
