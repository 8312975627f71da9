"""Commands that need no server: their mistakes are one line on standard error and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import Shell

WRONG = {
    "an unknown command": (["frobnicate"], "frobnicate"),
    "an unknown option": (["corpora", "--colour"], "--colour"),
    "a missing argument": (["ask"], "QUESTION"),
    "a path that is not there": (["ingest", "nowhere/at/all"], "nowhere/at/all"),
    "no key yet": (["corpora"], "preread up"),
    "an unknown queue": (["worker", "--queues", "ingest,laundry"], "laundry"),
    "a benchmark without its folder": (["bench", "ingest", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(shell: Shell, case: str) -> None:
    words, named = WRONG[case]
    done = shell.run(*words, code=2)
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert named in done.stderr


def test_an_unknown_setting_stops_the_command_with_its_nearest_name(shell: Shell) -> None:
    shell.environ["PREREAD_PROT"] = "1"
    assert "PREREAD_PORT" in shell.run("corpora", code=2).stderr


def test_without_a_server_the_error_says_how_to_start_one(shell: Shell, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("pr_x")
    done = shell.run("corpora", "--url", "http://127.0.0.1:9", "--key-file", str(key), code=2)
    assert "preread up" in done.stderr


def test_a_model_that_is_no_folder_is_refused_before_anything_starts(shell: Shell) -> None:
    shell.environ["PREREAD_MODEL"] = "no/such/folder"
    assert "no/such/folder" in shell.run("up", code=2).stderr


@pytest.mark.parametrize("command", [[], ["key"], ["source"], ["webhook"], ["bench"]])
def test_help_lists_what_there_is(shell: Shell, command: list[str]) -> None:
    assert "Commands:" in shell.run(*command, "--help").stdout


def test_output_helpers_say_sizes_and_tables() -> None:
    from serving.cli_output import size, table

    assert [size(n) for n in (0, 999, 1000, 30_100_000, 2.5e12)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "30.1 MB",
        "2.5 TB",
    ]
    assert table([("A", "B"), ("long", 1)], "none") == "A     B\nlong  1"
    assert table([("A", "B")], "none") == "none"


def test_a_stream_is_heard_out() -> None:
    from serving.cli_ask import Answered, cost, sources

    answered = Answered()
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Nine"}}]},
        {"choices": [{"delta": {"content": " [1]."}}], "usage": None},
        {
            "choices": [{"delta": {}, "finish_reason": "stop"}],
            "preread": {"tokens_reused": 90, "tokens_recomputed": 4, "tokens_computed": 6},
            "citations": [
                {"n": 1, "cited": True, "filename": "a.pdf", "page_start": 3, "page_end": 4, "headings": ["X", "Y"]},
                {"n": 2, "cited": False, "filename": "b.md", "page_start": None, "page_end": None, "headings": []},
            ],
        },
    ]
    texts = [answered.take(0.1 * n, json.loads(json.dumps(event))) for n, event in enumerate(events)]
    assert "".join(texts) == answered.text == "Nine [1]."
    assert answered.first_token_s == pytest.approx(0.1)
    assert sources(answered) == "  [1] a.pdf, pages 3-4 (X > Y)"
    assert "90 reused, 4 recomputed, 6 computed" in cost(answered)
