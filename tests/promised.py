"""Tools that a machine may lack. A test that needs one skips with the reason, unless whoever runs it has promised that it is
there: then its proof must not go missing unseen."""

from __future__ import annotations

import os
from typing import Literal, NoReturn, get_args

import pytest

PROMISED = "TESTS_HAVE"  # the tools that are there, with blanks between; .ci/run sets it
Tool = Literal["chromium", "clients", "postgresql", "seaweedfs", "token-table", "valkey"]


def missing(tool: Tool, reason: str) -> NoReturn:
    """Ends a test for want of `tool`."""
    assert tool in get_args(Tool)
    if tool in os.environ.get(PROMISED, "").split():
        pytest.fail(f"{PROMISED} promises {tool}, but: {reason}")
    pytest.skip(reason)
