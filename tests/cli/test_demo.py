"""`preread demo`: what it asks, what it says while it works, and what it shows of an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_kit import Shell

from serving.cli_ask import Answered
from serving.cli_demo import QUESTIONS, SAMPLES, Steps, _said, _told_by

ASKED = [json.loads(line) for line in (SAMPLES / QUESTIONS).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("asked", ASKED, ids=lambda q: str(q["id"]))
def test_what_it_asks_stands_on_one_line_of_its_document(asked: dict[str, str]) -> None:
    text = (SAMPLES / asked["document"]).read_text(encoding="utf-8")
    assert any(all(answer in line for answer in asked["answers"]) for line in text.splitlines())
    assert asked["document"].startswith(asked["corpus"] + "/")


def cited(n: int, quote: str) -> dict[str, object]:
    place = {"filename": f"{n}.md", "line_start": n, "line_end": n, "page_start": None, "headings": []}
    return {"n": n, "quote": quote, "cited": False, **place}


def test_the_passage_that_holds_the_answer_is_shown_and_where_none_does_that_is_said() -> None:
    answered = Answered(text="x", citations=[cited(1, "Taxis are permitted."), cited(2, "Rome is big.\nZurich: EUR 210")])
    assert _told_by(answered, ["Zurich", "EUR 210"]) == "  [2] 2.md, line 2\n      “Zurich: EUR 210”"
    lacking = _told_by(answered, ["Oslo"])
    assert "[1] 1.md" in lacking
    assert "no passage" in lacking


def test_an_answer_that_was_cut_off_ends_in_dots() -> None:
    assert _said(Answered(text=" It is so. ", usage={"completion_tokens": 4})) == "It is so."
    assert _said(Answered(text="It is so and", usage={"completion_tokens": 40})) == "It is so and …"


def test_each_step_is_said_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    step = Steps()
    step("starting")
    step("ready")
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"\[ +\d+\.\d s\] starting\n\[ +\d+\.\d s\] ready\n", said.err)


def test_a_folder_without_its_questions_is_refused_before_anything_is_started(shell: Shell, tmp_path: Path) -> None:
    refused = shell.run("demo", "--samples", str(tmp_path), code=2).stderr
    assert QUESTIONS in refused
    assert len(refused.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.usefixtures("running")  # has converted the model, or skips
def test_it_asks_and_answers_with_sources_and_leaves_nothing_running(shell: Shell, tmp_path: Path) -> None:
    lamps = tmp_path / "samples" / "lamps"
    lamps.mkdir(parents=True)
    (lamps / "lamps.md").write_text("# Lamps\n\nThe lamp on the north pier is lit at nine.\n")
    asked = {"id": "1", "corpus": "lamps", "question": "When is the lamp lit?", "answers": ["at nine"]}
    (lamps.parent / QUESTIONS).write_text(json.dumps(asked) + "\n")
    done = shell.run("demo", "--samples", str(lamps.parent), "--rounds", "1")
    assert "“The lamp on the north pier is lit at nine.”" in done.stdout
    steps = re.findall(r"^\[ *(\d+\.\d) s\] (.*)$", done.stderr, re.MULTILINE)
    assert [float(seconds) for seconds, _ in steps] == sorted(float(seconds) for seconds, _ in steps)
    told = " ".join(text for _, text in steps)
    for word in ("preparing", "starting broker", "ready", "lamps: sending 1 files", "completed", "asking lamps", "all ended"):
        assert word in told
    assert not (tmp_path / "data" / "up.json").read_text()
