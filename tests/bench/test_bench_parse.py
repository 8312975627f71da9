"""`bench parse` reads what it is given, says what it refused, and its samples are of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures_models import Models

from bench.documents import generated
from bench.parse import run
from ingest.detect import detect
from ingest.parsers import PARSERS, parse
from storage.errors import UserError


def test_a_folder_is_measured_by_parser_and_what_is_refused_is_counted(tmp_path: Path, tiny_models: Models) -> None:
    folder = tmp_path / "files"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.md").write_text("# One\n\nSome words.\n" * 40)
    (folder / "b.md").write_text("Words.\n")
    (folder / "inner" / "c.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    out = tmp_path / "record.json"
    record = run(path=folder, megabytes=1, out=out, workdir=tmp_path, model=str(tiny_models.folder("llama")))
    assert record["refused_files"] == 2
    assert {name: row["files"] for name, row in record["parsers"].items()} == {"csv": 1, "markdown": 2}
    markdown = record["parsers"]["markdown"]
    assert markdown["bytes"] == sum((folder / name).stat().st_size for name in ("a.md", "b.md"))
    assert markdown["all_mb_s"] == pytest.approx(
        markdown["bytes"] / 1e6 / (markdown["detect"] + markdown["parse"] + markdown["cut"])
    )
    shares = [markdown[f"{stage}_share"] for stage in ("detect", "parse", "chunk", "tokenise")]
    assert sum(shares) == pytest.approx(1)
    assert markdown["tokenise"] > 0
    assert markdown[f"{markdown['limit']}_share"] == max(shares)
    assert json.loads(out.read_text())["parsers"] == record["parsers"]


def test_a_folder_without_a_file_to_read_is_a_clear_error(tmp_path: Path, tiny_models: Models) -> None:
    (tmp_path / "files").mkdir()
    with pytest.raises(UserError, match="no file that can be read"):
        run(path=tmp_path / "files", megabytes=1, out=None, workdir=tmp_path, model=str(tiny_models.folder("llama")))


def test_the_generated_files_are_of_every_kind_and_the_same_each_time() -> None:
    files = list(generated(0.05))
    assert {detect(data, name) for data, name in files} == set(PARSERS) - {"email"}
    again = list(generated(0.05))
    assert [name for _, name in again] == [name for _, name in files]
    for (data, name), (same, _) in zip(files, again, strict=True):
        if name.endswith((".pdf", ".docx", ".pptx", ".xlsx")):  # the libraries write the time of day into them
            assert parse(data, name) == parse(same, name)
        else:
            assert data == same
