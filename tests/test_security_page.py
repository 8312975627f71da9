"""SECURITY.md names a test for each threat; what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
ROWS = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
THREATS = [row for row in ROWS[1:] if not set(row) <= set("|-: ")]


def test_every_threat_has_a_test() -> None:
    assert len(THREATS) > 25
    for row in THREATS:
        assert NAMED.search(row.split("|")[3]), row


def test_every_test_that_is_named_exists() -> None:
    for row in THREATS:
        for path, name in NAMED.findall(row):
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not name or re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), (path, name)
            assert "def test_" in text, path
