"""The replay of traces: its figures are right where they can be known, and the tiers' rule is better than LRU."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from bench.cli import app
from bench.trace import LRU, RULES, SHARES, _replay, run
from storage.tiers.ledger import Ledger


def replay(*numbers: int, room: int) -> tuple[float, float]:
    return _replay([(number, True) for number in numbers], [1] * 10, [5] * 9 + [55], Ledger(room, LRU()))


def test_hits_and_saved_cost_are_counted() -> None:
    assert replay(1, 1, 2, 1, room=2) == (0.5, 0.5)
    assert replay(1, 2, 3, 1, room=2) == (0, 0)
    assert replay(1, 9, 9, 2, room=4) == (0.25, round(55 / 120, 4))
    assert replay(1, 1, room=0) == (0, 0)


def test_requests_that_are_not_counted_fill_the_tier_all_the_same() -> None:
    trace = [(1, True), (2, False), (3, False), (1, True)]
    assert _replay(trace, [1] * 4, [1] * 4, Ledger(1, LRU())) == (0, 0)
    assert _replay(trace, [1] * 4, [1] * 4, Ledger(9, LRU())) == (0.5, 0.5)


def test_the_command_writes_the_same_record_for_the_same_seed(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(
        app, ["trace", "--chunks", "200", "--requests", "2000", "--seed", "3", "--json", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0
    record = json.loads(out.read_text())
    del record["machine"]
    assert record == run(chunks=200, requests=2000, seed=3)
    assert record != run(chunks=200, requests=2000, seed=4)
    assert len(record["rows"]) == 3 * len(SHARES) * len(RULES)
    assert "25%" in result.output


def test_the_rule_saves_more_than_lru_and_keeps_more_through_a_scan() -> None:
    rows = run(chunks=500, requests=6000)["rows"]
    saved = {(row["trace"], row["share"], row["rule"]): row["saved_cost"] for row in rows}
    for trace, share, _ in {(trace, share, "") for trace, share, _ in saved}:
        assert saved[trace, share, "gdsf"] > saved[trace, share, "lru"], (trace, share)
    lost = {rule: saved["zipf", 0.1, rule] - saved["mix", 0.1, rule] for rule in RULES}
    assert lost["gdsf"] < lost["lru"]
