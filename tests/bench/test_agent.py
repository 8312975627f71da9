"""The recorded agent, and its replay over a tiny model."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fixtures_models import Models
from typer.testing import CliRunner

from bench.agent import BLOCK, TRACE, _shared, read_trace
from bench.cli import app

RULES = "Carts keep to ten knots inside the harbour. " + " ".join(f"Berth {n} is swept at {n}." for n in range(30))


def test_the_recorded_agent_takes_twenty_turns_trims_and_reorders_and_reads_files_again() -> None:
    requests, folder = read_trace(TRACE)
    assert len(requests) == 20
    said = [[m.content for m in messages] for _, messages in requests]
    grown = [later[: len(earlier)] == earlier for earlier, later in pairwise(said)]
    assert grown.count(False) == 3  # the second agent, then the trimmed history, and later the re-ordered one
    files = {path.name: path.read_text() for path in folder.rglob("*.*")}
    held = [sum(text in content for contents in said for content in contents) for text in files.values()]
    assert sum(count > 1 for count in held) >= 5


def test_a_prefix_cache_has_whole_blocks_and_never_the_last_token() -> None:
    ids = np.arange(100)
    other = ids.copy()
    other[37] = 5
    assert _shared(ids, ids) == 99 // BLOCK * BLOCK
    assert _shared(ids, other) == 32
    assert _shared(ids, ids[:50]) == 48
    assert _shared(ids, ids[1:]) == 0


@pytest.mark.slow
def test_the_replay_counts_every_token_once(tmp_path: Path, tiny_models: Models) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rules.md").write_text(RULES)
    said = {
        "system": {"role": "system", "text": "Be brief."}, "ask": {"role": "user", "text": "Where are the rules?"},
        "look": {"role": "assistant", "text": "I read them."}, "rules": {"role": "user", "text": "Here:\n\n", "file": "rules.md"},
        "edited": {"role": "user", "text": "Now:\n\n", "file": "rules.md", "replace": [["ten knots", "nine knots"]]},
    }  # fmt: skip
    sent = [["system", "ask"], ["system", "ask", "look", "rules"], ["system", "rules", "look", "ask"], ["system", "edited"]]
    requests = [{"note": str(n), "send": names} for n, names in enumerate(sent)]
    (tmp_path / "trace.json").write_text(json.dumps({"files": "files", "messages": said, "requests": requests}))
    out = tmp_path / "out.json"
    options = ["--trace", str(tmp_path / "trace.json"), "--workdir", str(tmp_path / "work"), "--dtype", "float32"]
    folder = str(tiny_models.folder("llama"))
    result = CliRunner().invoke(app, ["agent", *options, "--model", folder, "--json", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert [row["reused"] + row["recomputed"] + row["computed"] for row in rows] == [row["prompt"] for row in rows]
    assert rows[1]["as_before"] >= rows[1]["prefix_cache"] > 0
    assert rows[1]["in_text"] > 100
    assert rows[2]["moved"] > 100 > rows[2]["prefix_cache"]
    assert rows[3]["in_text"] < rows[1]["in_text"] - 100  # the edit is near the start of a chunk
    assert record["total"]["reused"] == sum(row["reused"] for row in rows)
    assert json.loads(result.stdout.splitlines()[-1])["total"] == record["total"]
