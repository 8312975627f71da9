"""`preread demo`: the whole story on the sample documents, in one command that leaves nothing running."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli_ask import Answered, answer, cost, sources
from serving.cli_client import ADMIN_KEY, Api, connect, ensure_corpus
from serving.cli_jobs import follow
from serving.cli_output import Json, note
from serving.settings import Settings, load_settings
from storage.errors import UserError

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
QUESTIONS = "demo.jsonl"  # in the samples' folder: questions that the embedded model is large enough for
ROUNDS = 3
ANSWER_TOKENS = 40
WIDTH = 100


def register(app: typer.Typer) -> None:
    app.command()(demo)


class Steps:
    """Says each step as it happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        note(f"[{time.monotonic() - self._start:6.1f} s] {text}")


def demo(
    samples: Annotated[Path, typer.Option(help="Folder of the sample documents.")] = SAMPLES,
    rounds: Annotated[int, typer.Option(help="Measurements of each first token; the median is shown.")] = ROUNDS,
    as_json: Json = False,
) -> None:
    """Start everything, ingest samples, ask a few questions, end everything."""
    step = Steps()
    from serving.cli_server import check_model, first_key
    from serving.supervisor import supervised

    questions = _questions(samples)
    settings = demo_settings()
    step(f"preparing {settings.data_dir}")
    first_key(settings)
    with supervised(settings, step, lambda: _starting(settings, step, check_model)) as supervisor:
        supervisor.interrupt = True
        step("ready")
        api = connect(supervisor.address, settings.data_dir / ADMIN_KEY, settings)
        corpora = {
            name: _ingest(api, samples / name, as_json, step)
            for name in dict.fromkeys(q["corpus"] for q in questions)
        }
        step("two answers that are not measured, so that none of those that are pays for loading")
        _warm(api, corpora, questions[0])
        results = [_ask(api, corpora[q["corpus"]]["id"], q, rounds, as_json, step) for q in questions]
    if as_json:
        jobs = {name: found["job"] for name, found in corpora.items()}
        print(json.dumps({"jobs": jobs, "questions": results}, ensure_ascii=False))
    step("all ended")
    if "PREREAD_DATA_DIR" not in os.environ:
        note(f"the corpora stay: PREREAD_DATA_DIR={settings.data_dir} preread up shows them in a browser")


def _starting(settings: Settings, step: Steps, check_model: Callable[[Settings], None]) -> None:
    check_model(settings)
    step("starting broker, API, worker and beat, and loading the models")


def demo_settings() -> Settings:
    """The settings of the environment, on a data folder and a port of the demo's own."""
    from serving.local_broker import free_port

    settings = load_settings()
    data_dir = settings.data_dir if "PREREAD_DATA_DIR" in os.environ else settings.data_dir / "demo"
    # Each question is asked several times: taken up from memory, it would be quicker than a first question ever is.
    return dataclasses.replace(settings, data_dir=data_dir, port=free_port(), blended_cache_bytes=0)


def _questions(samples: Path) -> list[dict[str, Any]]:
    try:
        lines = (samples / QUESTIONS).read_text(encoding="utf-8").splitlines()
    except OSError:
        raise UserError(f"no {QUESTIONS} in {samples}: run the demo in a checkout, or use --samples") from None
    return [json.loads(line) for line in lines]


def _ingest(api: Api, folder: Path, quiet: bool, step: Steps) -> dict[str, Any]:
    from serving.cli_work import listed, sync_folder

    entries = listed(folder)
    step(f"{folder.name}: sending {len(entries)} files, which are cut, indexed and read by the model")
    corpus = ensure_corpus(api, folder.name)
    started = sync_folder(api, corpus["id"], folder, entries)
    job = follow(api, started["job_id"], quiet) if started["job_id"] else None
    if job is not None:
        p = job["progress"]
        chunks = f"{p['chunks_total']} chunks, {p['chunks_computed']} computed"
        step(f"{folder.name}: {p['files_total']} files, {chunks}: {job['status'].replace('_', ' ')}")
    return {"id": corpus["id"], "job": job}


def _warm(api: Api, corpora: dict[str, Any], question: dict[str, Any]) -> None:
    """One unmeasured answer by either method, so that neither pays for loading."""
    for method in ("full", None):
        answer(api, corpora[question["corpus"]]["id"], question["question"], method=method, max_tokens=1)


def _ask(
    api: Api, corpus_id: str, question: dict[str, Any], rounds: int, quiet: bool, step: Steps
) -> dict[str, Any]:
    """First tokens by turns, by full prefill and by blending, and then the answer."""
    text = question["question"]
    step(f"asking {question['corpus']}, {rounds} times by full prefill and {rounds} times blended")
    times: dict[str, list[float]] = {"full": [], "blended": []}
    for _ in range(rounds):
        for name, method in (("full", "full"), ("blended", None)):
            measured = answer(api, corpus_id, text, method=method, max_tokens=1)
            times[name].append(measured.first_token_s or 0.0)
    done = answer(api, corpus_id, text, max_tokens=ANSWER_TOKENS)
    plain = answer(api, corpus_id, text, method="full", max_tokens=ANSWER_TOKENS)
    full, blended = (statistics.median(times[name]) for name in ("full", "blended"))
    if not quiet:
        _print(question, done, plain, full, blended)
    return {
        "question": text,
        "expected": question["answers"],
        "answer": done.text,
        "answer_full": plain.text,
        "citations": done.citations,
        "preread": done.preread,
        "first_token_s": blended,
        "first_token_full_s": full,
    }


def _print(question: dict[str, Any], done: Answered, plain: Answered, full: float, blended: float) -> None:
    same = plain.text.strip() == done.text.strip()
    print(f"\nQ: {question['question']}")
    print(_told("A", _said(done)))
    print(_told("by full prefill", "the same answer" if same else _said(plain)))
    print(_told_by(done, question["answers"]))
    print(f"  {cost(done).split('; ', 1)[1]}")
    ratio = full / blended if blended else 0.0
    times = f"{1000 * blended:.0f} ms blended, {1000 * full:.0f} ms by full prefill ({ratio:.1f}x)"
    print(f"  first token: {times}", flush=True)


def _said(answered: Answered) -> str:
    cut_off = answered.usage.get("completion_tokens", 0) >= ANSWER_TOKENS
    return answered.text.strip() + (" …" if cut_off else "")


def _told_by(done: Answered, expected: list[str]) -> str:
    """The passage that holds what was asked for, and the line of it; where none does, the one that was found first."""
    for citation in done.citations:
        for line in citation["quote"].splitlines():
            if all(answer in line for answer in expected):
                place = sources(dataclasses.replace(done, citations=[citation]))
                return f"{place}\n{textwrap.indent(textwrap.fill(f'“{line.strip()}”', WIDTH - 6), ' ' * 6)}"
    return sources(done) + "\n      (no passage that was found holds the answer)"


def _told(name: str, text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, initial_indent=f"  {name}: ", subsequent_indent="    ")
