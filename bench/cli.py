"""`preread bench`: options only; each benchmark is a module with `run(...)`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.settings import ENGINES
from storage.errors import UserError

app = typer.Typer(
    help="Benchmarks.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)

Model = Annotated[str | None, typer.Option(help="Model folder; default: the embedded model.")]
Out = Annotated[Path | None, typer.Option("--json", help="Also write the record to this file.")]
Workdir = Annotated[Path, typer.Option(help="Folder for what the benchmark stores.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Engine = Annotated[str, typer.Option(help="torch, or vllm: beside vLLM's own full prefill and prefix cache.")]
VLLM = Annotated[Path, typer.Option("--vllm", help="Environment with vLLM, for that engine (make vllm).")]
WORKDIR = Path("build/bench")
VLLM_ENVIRONMENT = Path("build/vllm")


@app.command()
def ingest(
    path: Annotated[Path, typer.Argument(help="Folder of documents.", exists=True, file_okay=False)],
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts of the plain prefill.")] = 1024,
) -> None:
    """Ingestion's tokens per second beside the model's own prefill; a second run computes nothing."""
    from bench.ingest import run

    record = run(
        path=path,
        out=out,
        workdir=workdir,
        model=model,
        device=device,
        dtype=dtype,
        prompt_tokens=prompt_tokens,
    )
    print(json.dumps(record))


@app.command("ingest-scale")
def ingest_scale(
    files: Annotated[int, typer.Option(help="Files of the corpus, which is made up.")] = 20_000,
    file_bytes: Annotated[int, typer.Option(help="Bytes of each.")] = 200,
    kind: Annotated[str, typer.Option(help="text, or pictures: Word documents that are mostly pictures.")] = "text",
    seconds: Annotated[float, typer.Option(help="Stop ingesting after so long; the upload is always whole.")] = 300,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
) -> None:
    """Whether memory stays flat while a large corpus is ingested, without its KV."""
    from bench.ingest_scale import run

    record = run(files=files, file_bytes=file_bytes, kind=kind, seconds=seconds, out=out, workdir=workdir, model=model)
    print(json.dumps(record))


@app.command()
def blend(
    data: Annotated[
        Path, typer.Option(help="Questions, one JSON object a line.", exists=True, dir_okay=False)
    ],
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "full,default",
    limit: Annotated[int, typer.Option(help="Questions to use.")] = 20,
    max_tokens: Annotated[int, typer.Option(help="Tokens of all chunks of a question.")] = 4096,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """Quality and first-token time of blending methods beside full prefill."""
    from bench.blend import run

    run(
        model=model, data=data, methods=_words(methods), limit=limit, max_tokens=max_tokens, out=out,
        workdir=workdir, device=device, dtype=dtype, progress=_progress,
    )  # fmt: skip


@app.command()
def ttft(
    tokens: Annotated[
        str | None, typer.Option(help="Prompt lengths, separated by commas; default: 1024,2048,4096, of vllm 4096,7700.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "full,default",
    codecs: Annotated[str, typer.Option(help="Codecs of the stored KV, separated by commas. Default: the product's.")] = "",
    engine: Engine = "torch",
    vllm: VLLM = VLLM_ENVIRONMENT,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """First-token time over the prompt's length, by method."""
    _check_engine(engine)
    if engine == "vllm":
        from bench import vllm_ttft

        chosen = [int(word) for word in _words(tokens or "4096,7700")]
        vllm_ttft.run(
            model=model, tokens=chosen, methods=_words(methods), out=out, workdir=workdir, vllm=vllm, device=device, dtype=dtype
        )
        return
    from bench.ttft import run

    options: dict[str, Any] = {"device": device, "dtype": dtype}
    if codecs:
        options["codecs"] = _words(codecs)
    lengths = [int(word) for word in _words(tokens or "1024,2048,4096")]
    run(model=model, tokens=lengths, methods=_words(methods), out=out, workdir=workdir, **options)


@app.command()
def storage(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Questions, one JSON object a line; may be repeated. Default: those of samples/.", exists=True),
    ] = None,
    limit: Annotated[int, typer.Option(help="Questions to use of each file.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of all chunks of a question.")] = 1500,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """Codecs: bytes, answers after blending, speed of encoding and decoding; the cost of encryption; eviction beside LRU."""
    from bench.storage import run

    run(
        model=model, data=data or [], limit=limit, max_tokens=max_tokens, out=out, workdir=workdir, device=device,
        dtype=dtype, progress=_progress,
    )  # fmt: skip


@app.command()
def peers(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """First-token time of the same context in this engine and in its neighbours."""
    from bench.peers import run

    run(model=model, tokens=tokens, out=out, workdir=workdir, device=device, dtype=dtype)


@app.command()
def loads(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 2048,
    rates: Annotated[str, typer.Option(help="Bandwidths in MB/s; a stalled source is always added.")] = "400,50,10",
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """First-token time when stored KV comes slowly, or not at all."""
    from bench.loads import run

    rates_mb_s = [float(word) for word in _words(rates)]
    run(model=model, tokens=tokens, rates_mb_s=rates_mb_s, out=out, workdir=workdir, device=device, dtype=dtype)


@app.command()
def s3(
    sizes: Annotated[str, typer.Option(help="Sizes of the objects in MiB, separated by commas.")] = "1,4,16,64",
    readers: Annotated[int, typer.Option(help="Objects read at once.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.")] = 7,
    out: Out = None,
) -> None:
    """Reading from the S3 server of PREREAD_S3_*: the store beside a plain parallel download, plain and encrypted."""
    from bench.s3 import run

    run(sizes=[int(word) for word in _words(sizes)], readers=readers, rounds=rounds, out=out)


@app.command()
def plan(
    tokens: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "256,2048,4096",
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """The formulae of `preread plan` beside a real model: an object's size, and prefill time over length."""
    from bench.plan import run

    run(model=model, tokens=[int(w) for w in _words(tokens)], out=out, workdir=workdir, device=device, dtype=dtype)


@app.command()
def retrieval(
    corpus: Annotated[Path, typer.Option(help="Folder of documents.", exists=True, file_okay=False)],
    questions: Annotated[
        Path,
        typer.Option(help='Lines of {"question","spans":[{"path","start","end"}]}.', exists=True, dir_okay=False),
    ],
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    dtype: Dtype = "bfloat16",
) -> None:
    """Recall and precision of gold spans: our chunks beside other splitters, at equal tokens."""
    from bench.retrieval import run

    run(
        corpus=corpus, questions=questions, out=out, workdir=workdir, model=model, dtype=dtype, progress=_progress
    )


@app.command()
def search(
    chunks: Annotated[int, typer.Option(help="Chunks of the corpus that is made.")] = 100_000,
    questions: Annotated[int, typer.Option(help="Searches of each kind.")] = 50,
    database: Annotated[str, typer.Option(help="URL of an empty catalogue. Default: SQLite in the workdir.")] = "",
    out: Out = None,
    workdir: Workdir = WORKDIR,
    dtype: Dtype = "bfloat16",
) -> None:
    """Time of a search by stage in a large corpus, with access lists and filters."""
    from bench.search import run

    run(chunks=chunks, questions=questions, database=database, out=out, workdir=workdir, dtype=dtype)


@app.command()
def trace(
    chunks: Annotated[int, typer.Option(help="Chunks that questions are about.")] = 2000,
    requests: Annotated[int, typer.Option(help="Requests to replay.")] = 30_000,
    seed: Annotated[int, typer.Option(help="Of the trace.")] = 0,
    out: Out = None,
) -> None:
    """What the tiers' eviction rule keeps of a Zipf trace, a scan and both, beside LRU."""
    from bench.trace import run

    run(chunks=chunks, requests=requests, seed=seed, out=out)


@app.command()
def agent(
    trace: Annotated[Path | None, typer.Option(help="A recorded trace. Default: that of samples/.", exists=True)] = None,
    turns: Annotated[int, typer.Option(help="Requests to replay, from the first on.")] = 1000,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
) -> None:
    """An agent's plain prompts: what is reused of them, beside prefix caching and full prefill."""
    from bench.agent import TRACE, run

    record = run(
        trace=trace or TRACE, turns=turns, out=out, workdir=workdir, model=model, device=device, dtype=dtype
    )
    print(json.dumps({name: record[name] for name in ("trace", "model", "total")}))


@app.command()
def parse(
    path: Annotated[Path | None, typer.Argument(help="Folder of files; default: generated ones.", exists=True)] = None,
    megabytes: Annotated[float, typer.Option(help="Generated of each kind.")] = 4.0,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
) -> None:
    """Reading and cutting files, by parser and stage, beside the reader's tokenizer alone."""
    from bench.parse import run

    run(path=path, megabytes=megabytes, out=out, workdir=workdir, model=model)


@app.command()
def serve(
    rates: Annotated[str, typer.Option(help="Requests a second, separated by commas.")] = "0.2,0.5,2",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas; of a trace also lmcache.")] = "full,default",
    seconds: Annotated[float, typer.Option(help="How long each rate is offered, twice for each method.")] = 60,
    ttft_limit: Annotated[float, typer.Option(help="Seconds within which a first token counts as goodput.")] = 10,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 32,
    idle: Annotated[int, typer.Option(help="Instead: what so many idle streams cost.")] = 0,
    requests: Annotated[int, typer.Option(help="Instead: memory over so many mixed requests.")] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="With a very small model, whose answers are nonsense.")] = False,
    url: Annotated[str | None, typer.Option(help="A service that runs already; default: one is started.")] = None,
    key: Annotated[str | None, typer.Option(help="Its API key.", envvar="BENCH_KEY")] = None,
    engine: Engine = "torch",
    vllm: VLLM = VLLM_ENVIRONMENT,
    trace: Annotated[str | None, typer.Option(help="Of vLLM, instead: recurring, prefix or chats.")] = None,
    out: Out = None,
    workdir: Workdir = WORKDIR,
    model: Model = None,
) -> None:
    """The real service under load: first tokens, goodput and shedding; or its memory, idle or over many requests."""
    from bench import endurance, idle_streams, vllm_trace
    from bench import serve as serve_load

    _check_engine(engine)
    if engine == "vllm" and (idle or requests or url):
        raise UserError("--engine vllm starts a service of its own, under load")
    if trace and engine != "vllm":
        raise UserError("--trace is one of vLLM's: add --engine vllm")
    if (idle or requests) and url:
        raise UserError("--idle and --requests look at a process's memory: they start a service of their own")
    if tiny:
        model = str(endurance.tiny_model(workdir))
    if idle:
        record = idle_streams.run(streams=idle, out=out, workdir=workdir, model=model)
    elif requests:
        record = endurance.run(requests=requests, out=out, workdir=workdir, model=model)
    elif trace:
        record = vllm_trace.run(
            trace=trace, rates=[float(word) for word in _words(rates)], methods=_words(methods), seconds=seconds,
            ttft_limit=ttft_limit, answer_tokens=answer_tokens, vllm=vllm, out=out, workdir=workdir, model=model,
        )  # fmt: skip
    else:
        record = serve_load.run(
            rates=[float(word) for word in _words(rates)], methods=_words(methods), seconds=seconds,
            ttft_limit=ttft_limit, answer_tokens=answer_tokens, url=url, key=key, out=out, workdir=workdir, model=model,
            vllm=vllm if engine == "vllm" else None,
        )  # fmt: skip
    print(json.dumps(record))


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise UserError(f"--engine is one of {', '.join(ENGINES)}, not {engine!r}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)
