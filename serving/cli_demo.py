"""`preread demo`: the whole story on the sample documents, in one command that leaves nothing running."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import textwrap
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
QUESTIONS = ("policies-03", "policies-02", "codebase-02")
ROUNDS = 3
ANSWER_TOKENS = 64
WIDTH = 100


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    samples: Annotated[Path, typer.Option(help="Folder of the sample documents.")] = SAMPLES,
    rounds: Annotated[int, typer.Option(help="Measurements of each first token; the median is shown.")] = ROUNDS,
    as_json: Json = False,
) -> None:
    """Start everything, ingest the samples, ask three questions, end everything."""
    from serving.cli_server import first_key
    from serving.supervisor import supervised

    questions, names = _questions(samples)
    settings = demo_settings()
    note(f"starting Preread on {settings.data_dir} …")
    first_key(settings)
    with supervised(settings, note) as supervisor:
        supervisor.interrupt = True
        api = connect(supervisor.address, settings.data_dir / ADMIN_KEY, settings)
        corpora = {name: _ingest(api, samples / name, as_json) for name in names}
        _warm(api, corpora, questions[0])
        results = [_ask(api, corpora[q["corpus"]]["id"], q, rounds, as_json) for q in questions]
    if as_json:
        jobs = {name: found["job"] for name, found in corpora.items()}
        print(json.dumps({"jobs": jobs, "questions": results}, ensure_ascii=False))
    else:
        note("all ended; the corpora stay in " + str(settings.data_dir))


def demo_settings() -> Settings:
    """The settings of the environment, on a data folder and a port of the demo's own."""
    from serving.cli_server import embedded_folder
    from serving.local_broker import free_port

    settings = load_settings()
    model = settings.model
    if model == "embedded":  # shared with the data folder of every day, so that it is converted once
        model = str(embedded_folder(settings.data_dir))
    data_dir = settings.data_dir if "PREREAD_DATA_DIR" in os.environ else settings.data_dir / "demo"
    # Each question is asked several times: taken up from memory, it would be quicker than a first question ever is.
    return dataclasses.replace(settings, data_dir=data_dir, port=free_port(), model=model, blended_cache_bytes=0)


def _questions(samples: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The questions to ask, and the names of all corpora."""
    path = samples / "questions.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise UserError(f"no sample documents in {samples}: run the demo in a checkout, or use --samples") from None
    known = {q["id"]: q for q in map(json.loads, lines)}
    chosen = [known[name] for name in QUESTIONS if name in known] or list(known.values())[:3]
    return chosen, sorted({q["corpus"] for q in known.values()})


def _ingest(api: Api, folder: Path, quiet: bool) -> dict[str, Any]:
    from serving.cli_work import listed, sync_folder

    entries = listed(folder)
    corpus = ensure_corpus(api, folder.name)
    started = sync_folder(api, corpus["id"], folder, entries)
    job = follow(api, started["job_id"], quiet) if started["job_id"] else None
    if job is not None and not quiet:
        p = job["progress"]
        print(
            f"{folder.name}: {p['files_total']} files, {p['chunks_total']} chunks, "
            f"{p['chunks_computed']} computed: {job['status'].replace('_', ' ')}",
            flush=True,
        )
    return {"id": corpus["id"], "job": job}


def _warm(api: Api, corpora: dict[str, Any], question: dict[str, Any]) -> None:
    """One unmeasured answer by either method, so that neither pays for loading."""
    for method in ("full", None):
        answer(api, corpora[question["corpus"]]["id"], question["question"], method=method, max_tokens=1)


def _ask(api: Api, corpus_id: str, question: dict[str, Any], rounds: int, quiet: bool) -> dict[str, Any]:
    """First tokens by turns, by full prefill and by blending, and then the answer."""
    text = question["question"]
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
    print(_told("A", done.text))
    print(_told("by full prefill", "the same answer" if same else plain.text))
    print(_told("in the document", "; ".join(question["answers"])))
    print(sources(done))
    print(f"  {cost(done).split('; ', 1)[1]}")
    ratio = full / blended if blended else 0.0
    times = f"{1000 * blended:.0f} ms blended, {1000 * full:.0f} ms by full prefill ({ratio:.1f}x)"
    print(f"  first token: {times}", flush=True)


def _told(name: str, text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, initial_indent=f"  {name}: ", subsequent_indent="    ")
