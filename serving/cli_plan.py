"""`preread plan`: what storing a corpus's KV would take and save, before anything is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli_output import Json, show, size
from serving.plan import PRESETS, SPEED_AT, Load, Shape, plan, shape_of
from serving.settings import load_settings
from storage.errors import UserError
from storage.policy.file import read_policy
from storage.policy.rules import Rates

if TYPE_CHECKING:
    from storage.codecs import Codec

SAMPLE_TOKENS = 256


def register(app: typer.Typer) -> None:
    app.command("plan")(plan_command)


def plan_command(
    model: Annotated[str, typer.Option(help=f"A model folder, or {', '.join(PRESETS)}.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all documents.")],
    queries_per_day: Annotated[float, typer.Option("--queries-per-day", "--queries", min=0, help="Questions a day.")],
    chunks_per_query: Annotated[int, typer.Option(min=1, help="Chunks that a question is answered from.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 400,
    codec: Annotated[str, typer.Option(help="Codec of what is stored.")] = "raw",
    gpu_tokens_per_s: Annotated[
        float, typer.Option(min=1e-3, help=f"Prefill speed over a prompt of {SPEED_AT} tokens.")
    ] = 20_000.0,
    gb_per_s: Annotated[float, typer.Option(min=1e-6, help="From the store to one engine, 1e9 bytes a second.")] = 1.0,
    rates: Annotated[Path | None, typer.Option(help="Policy file with rates; default: PREREAD_POLICY_FILE.")] = None,
    as_json: Json = False,
) -> None:
    """Storage, bandwidth, times and break-even for a model's shape."""
    from serving.blend.methods.default import recompute_share

    shape = shape_of(model)
    load = Load(
        tokens=tokens,
        queries_per_day=queries_per_day,
        chunks_per_query=chunks_per_query,
        chunk_tokens=chunk_tokens,
        codec_ratio=codec_ratio(codec, shape),
        recomputed=recompute_share(chunks_per_query * chunk_tokens),
        tokens_per_s=gpu_tokens_per_s,
        bandwidth=gb_per_s * 1e9,
    )
    show({"codec": codec, "recomputed": load.recomputed, **plan(shape, load, _rates(rates))}, as_json, _shown)


def _rates(file: Path | None) -> Rates:
    chosen = file or (Path(name) if (name := load_settings().policy_file) else None)
    return Rates() if chosen is None else read_policy(chosen).rates


def codec_ratio(name: str, shape: Shape) -> float:
    """Stored bytes of a byte of KV, found by encoding one layer of normally distributed numbers. Exact for a codec whose size
    does not depend on the numbers. Of a transform codec, whose basis only the model itself can tell, a bound more than an
    estimate: K, whose basis saves the most, is taken to cost as much as V. Raises UserError."""
    import torch

    from storage.codecs import CODECS
    from storage.types import CODEC_NAMES

    if name not in CODEC_NAMES:
        raise UserError(f"there is no codec {name!r}: use {', '.join(CODEC_NAMES)}")
    codec: Codec = CODECS[name] if name in CODECS else _flat(name, shape)
    generator = torch.Generator().manual_seed(0)
    layer = torch.randn(2, shape.kv_heads, SAMPLE_TOKENS, shape.head_dim, generator=generator).to(torch.bfloat16)
    return len(codec.encode(layer)) / layer.nbytes


def _flat(name: str, shape: Shape) -> Codec:
    """The transform codec for KV of which no direction is stronger than another."""
    import torch

    from precompute.calibration import STEPS
    from storage.codecs.basis import Basis
    from storage.codecs.transform import Transform

    step, heads, width = STEPS[name][1], shape.kv_heads, shape.head_dim
    matrices = (step * torch.eye(width)).expand(1, heads, width, width).to(torch.bfloat16).contiguous()
    return Transform(Basis(torch.zeros(1, 2, heads, width), torch.tensor([step]), matrices))


def _shown(told: dict[str, Any]) -> str:
    lines = [
        f"{told['model']}: {told['parameters'] / 1e9:.2f} billion parameters, {told['kv_bytes_per_token']} bytes of KV a token, "
        f"{told['stored_bytes_per_token']:.0f} stored with {told['codec']}",
        f"storage      {size(told['stored_bytes'])}",
        f"a question   {told['tokens_per_query']} tokens of chunks, {size(told['bytes_per_query'])} to load",
        f"             load {told['load_seconds']:.3f} s, prefill {told['prefill_seconds']:.3f} s, of which "
        f"{told['recomputed']:.0%} are computed again",
        f"bandwidth    {size(told['mean_bandwidth'])}/s on average; loading is quicker than prefill above "
        f"{size(told['bandwidth_to_break_even'])}/s",
        f"GPU          {told['compile_seconds'] / 3600:.2f} h to read everything once, "
        f"{told['gpu_seconds_saved_per_day'] / 3600:.2f} h saved a day",
        *_money(told),
    ]
    return "\n".join(lines)


def _money(told: dict[str, Any]) -> list[str]:
    if told["storage_cost_per_month"] is None or told["compile_cost"] is None:
        return ["money        unknown: name a policy file with rates for gpu_hour and gb_month.object (--rates FILE)"]
    unit = f" {told['currency']}" if told["currency"] else ""
    lines = [
        f"money        storing {told['storage_cost_per_month']:.2f}{unit} a month, "
        f"reading once {told['compile_cost']:.2f}{unit}, saved {told['saved_per_month']:.2f}{unit} a month"
    ]
    if told["break_even_queries_per_day"] is None:
        return [*lines, "break-even   never: a question's transfer costs as much as its prefill"]
    repaid = told["days_to_repay_compiling"]
    return [
        *lines,
        f"break-even   {told['break_even_queries_per_day']:.1f} questions a day, each token used "
        f"{told['break_even_uses_per_token_and_month']:.3g} times a month",
        "             reading once is " + (f"repaid in {repaid:.1f} days" if repaid is not None else "never repaid at this use"),
    ]
