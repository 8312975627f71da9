"""`preread storage show` and `preread usage`: where KV lies and why, and what it costs and saves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serving.cli_client import KeyFile, Url, connect
from serving.cli_output import Json, show, size, table

_ACTIONS = {"disk_codec": "codec"}  # as the rules file has it


def register(app: typer.Typer) -> None:
    """Put `show` into the group of storage commands."""
    app.command("show")(show_storage)


def show_storage(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """What lies where, which rule says so, and what it costs and saves."""
    show(connect(url, key_file).get("/storage"), as_json, _storage)


def usage(
    days: Annotated[int, typer.Option(help="The last so many days.", min=1, max=180)] = 31,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """What was reused, saved and spent, by day and corpus."""
    show(connect(url, key_file).get("/usage", limit=days), as_json, _usage)


def _storage(told: dict[str, Any]) -> str:
    head = ("CORPUS", "TIER", "CHUNKS", "BYTES", "PINNED", "WHY")
    rows = []
    for corpus in told["corpora"]:
        for tier, held in corpus["tiers"].items():
            why = _why(corpus, tier)
            rows.append((corpus["name"], tier, held["chunks"], size(held["bytes"]), held["pinned"], why))
        rows += [(corpus["name"], "not stored", f"{n} documents", "-", "-", rule) for rule, n in corpus["not_stored"].items()]
    lines = [table([head, *rows], "no corpora"), "", *(_money(corpus) for corpus in told["corpora"])]
    if told["policy"]["status"] != "ok":
        lines.append("the policy file has mistakes: an earlier version is in force (preread policy check FILE)")
    return "\n".join(lines)


def _why(corpus: dict[str, Any], tier: str) -> str:
    """Rules that bring KV into this tier or choose its codec here; the object store holds everything by default."""
    held = corpus["tiers"][tier]
    said = [f"{_ACTIONS.get(action, action)} by {rule}" for action, rules in held["rules"].items() for rule in rules]
    if tier == "object":
        unsaid = not said or corpus["rules"].get("codec", {}).get("default")
        return ", ".join([*(["default"] if unsaid else []), *said])
    if not held["rules"].keys() - {"disk_codec"}:
        said = ["used lately", *said]
    said += [f"{n} through {codec}" for codec, n in held["codecs"].items()]
    return ", ".join([*said, *([f"no room for {held['refused']} pinned"] if held["refused"] else [])])


def _money(corpus: dict[str, Any]) -> str:
    unit = f" {corpus['currency']}" if corpus["currency"] else ""
    saved = "unknown" if corpus["gpu_seconds_saved"] is None else f"{corpus['gpu_seconds_saved']:.1f} s"
    money = "unknown" if corpus["money_saved"] is None else f"{corpus['money_saved']:.4f}{unit}"
    return (
        f"{corpus['name']}: {corpus['tokens_not_recomputed']} tokens not recomputed, prefill saved {saved} ({money}), "
        f"spent {corpus['gpu_seconds_spent']:.1f} s ({corpus['money_spent']:.4f}{unit}), "
        f"holding costs {corpus['cost_per_month']:.4f}{unit} a month"
    )


def _usage(page: dict[str, Any]) -> str:
    head = ("DAY", "CORPUS", "ANSWERS", "PROMPT TOKENS", "REUSED", "COMPILED", "S SAVED", "S SPENT", "SAVED", "SPENT")
    rows = [
        _usage_row(datetime.fromtimestamp(bucket["start_time"], UTC).strftime("%Y-%m-%d"), result)
        for bucket in page["data"]
        for result in bucket["results"]
    ]
    return table([head, *rows], "nothing was used in these days")


def _usage_row(day: str, result: dict[str, Any]) -> tuple[object, ...]:
    more, corpus = result["preread"], result["corpus_id"] or ("tasks" if result["kind"] == "task" else "-")
    seconds, money = ("-" if more[name] is None else f"{more[name]:.2f}" for name in ("gpu_seconds_saved", "money_saved"))
    return (
        day, corpus, result["num_model_requests"], result["input_tokens"], result["input_cached_tokens"],
        more["tokens_compiled"], seconds, f"{more['gpu_seconds_spent']:.2f}", money, f"{more['money_spent']:.4f}",
    )  # fmt: skip
