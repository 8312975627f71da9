"""`.ci/audit`: what is weak fails, and a service that knows nothing is not taken for good news."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit"
# Stands for pip-audit: answers as the mode says, in pip-audit's own format.
FAKE = """#!{python}
import json, pathlib, sys
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
mode = pathlib.Path("mode").read_text()
names = pathlib.Path(arguments["--requirement"]).read_text().split()
weak = {{"name": "x", "version": "1", "vulns": [{{"id": "CVE-1", "fix_versions": ["2"]}}]}}
unknown = {{"name": "x", "skip_reason": "not found"}}
canary = "canary" in arguments["--requirement"]
vllm = arguments["--requirement"] == "tests/vllm.txt"
pypi = arguments["--vulnerability-service"] == "pypi"
if mode == "away" or (mode == "osv only" and pypi) or (mode == "weak, then away" and vllm):
    sys.exit("ConnectionError")
is_weak = mode in ("weak", "weak, then away") or (mode == "vllm weak" and vllm) or (canary and mode != "mirror")
found = [weak] if is_weak else [unknown]
pathlib.Path(arguments["--output"]).write_text(json.dumps({{"dependencies": found}}))
sys.exit(1 if found == [weak] else 0)
"""


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("sound", 0, "audited: no known weakness"),
        ("osv only", 0, "audited: no known weakness in the pinned dependencies (osv)"),
        ("weak", 1, "x 1: CVE-1, mended in 2"),
        ("weak, then away", 1, "x 1: CVE-1, mended in 2"),
        ("mirror", 0, "NOT AUDITED"),
        ("away", 0, "NOT AUDITED"),
    ],
)
def test_the_audit_says_what_it_knows(tmp_path: Path, mode: str, code: int, said: str) -> None:
    done = audited(tmp_path, mode)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mode", "named"), [("weak", ["constraints.txt", "tests/vllm.txt"]), ("vllm weak", ["tests/vllm.txt"])]
)
def test_every_list_of_pins_is_audited(tmp_path: Path, mode: str, named: list[str]) -> None:
    done = audited(tmp_path, mode)
    assert done.returncode == 1
    assert [line.split()[3] for line in done.stderr.splitlines() if " pins " in line] == named


def audited(tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "audit")
    tool = tmp_path / "build" / "audit" / "bin" / "pip-audit"
    tool.parent.mkdir(parents=True)
    tool.write_text(FAKE.format(python=sys.executable))
    tool.chmod(0o755)
    (tmp_path / "mode").write_text(mode)
    (tmp_path / "tests").mkdir()
    for pins in ("constraints.txt", "tests/vllm.txt"):
        (tmp_path / pins).write_text("x==1\n")
    environ = {**os.environ, "PYTHON": sys.executable}
    command = [tmp_path / ".ci" / "audit"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
