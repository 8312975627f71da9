"""A file is no larger than its reader has memory for, however it came."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from fixtures_work import make_work, paragraphs


def test_what_is_no_archive_and_too_large_is_refused_unread(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    work.max_bytes = 2000
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(4):
            archive.writestr(f"{number}.txt", paragraphs(8, tag=f"t{number}x")[:1500])
    assert len(packed.getvalue()) > work.max_bytes
    job = work.upload(work.corpus(), {"large.txt": "word " * 401, "small.txt": "word " * 400, "all.zip": packed.getvalue()})
    work.worker().drain()
    work.compute_kv()
    shown = work.view(job)
    assert [(e["filename"], e["code"], e["retryable"]) for e in shown["errors"]] == [("large.txt", "too_large", False)]
    assert "large.txt" not in work.parser.parsed
    assert {"small.txt", *(f"all.zip!/{n}.txt" for n in range(4))} == set(work.parser.parsed)
    work.catalogue.close()
