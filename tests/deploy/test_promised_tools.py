"""A proof that needs a tool skips where the tool is missing, and fails where CI has installed it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from promised import PROMISED, Tool, missing

ROOT = Path(__file__).parents[2]
ENDED = (pytest.skip.Exception, pytest.fail.Exception)
CI = (ROOT / ".ci" / "run").read_text()


def test_without_a_promise_a_missing_tool_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROMISED, "chromium")
    with pytest.raises(ENDED, match="no weed here") as ended:
        missing("seaweedfs", "no weed here")
    assert ended.type is pytest.skip.Exception


def test_a_promised_tool_that_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROMISED, "chromium seaweedfs")
    with pytest.raises(ENDED, match="no weed here") as ended:
        missing("seaweedfs", "no weed here")
    assert ended.type is pytest.fail.Exception, "else this test would be skipped itself"


def test_ci_promises_every_tool_by_its_name_and_before_the_tests() -> None:
    promised = re.findall(r'have\+?=(?:"([^"]*)"|(\w+))', CI)
    assert {word for words in promised for word in "".join(words).split()} == set(get_args(Tool))
    assert CI.index(f"export {PROMISED}=$have") < CI.index("make test\n")


def test_every_tool_of_the_list_is_asked_for_by_a_test() -> None:
    kits = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert set(re.findall(r'missing\("([a-z-]+)"', kits)) == set(get_args(Tool))


@pytest.mark.parametrize("tool", ["chromium", "clients"])
def test_what_may_fail_to_install_is_promised_only_once_it_is_there(tool: str) -> None:
    [line] = [line for line in CI.splitlines() if f'have+=" {tool}"' in line]
    assert re.match(r"if (make clients|command -v chromium .*); then ", line)
