"""The child's side of reading an archive: `python -m ingest.archive_child <memory bytes> <CPU seconds> <caps>`.

Standard input is the archive itself, a file. Messages are those of `pipes.py`: `{"network_cut"}` at the start, then
`{"path", "bytes"}` with the bytes for a file, `{"path", "reason"}` for what is skipped, and at the end `{"end"}` or
`{"code", "message"}`.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

from ingest.archive import Caps, Skipped, expand
from ingest.no_network import cut_network
from ingest.parser_child import confined
from ingest.pipes import frame_head
from storage.errors import FileError


def main() -> None:
    """Limit this process, and send what is in the archive."""
    memory, cpu_s, *caps = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    answers = confined(memory)
    answers.write(frame_head({"network_cut": cut_network()}))
    answers.flush()
    full = "Reading this archive takes more memory than is allowed; split it."
    no_memory = frame_head({"code": "archive_limit", "message": full})  # made while there is some
    try:
        _send_files(sys.stdin.buffer, Caps(*caps), answers)
        answers.write(frame_head({"end": True}))
    except FileError as error:
        answers.write(frame_head({"code": error.code, "message": str(error)}))
    except MemoryError:
        answers.write(no_memory)
    answers.flush()


def _send_files(archive: BinaryIO, caps: Caps, answers: BinaryIO) -> None:
    archive.seek(0)
    for part in expand(archive, caps):
        if isinstance(part, Skipped):
            answers.write(frame_head({"path": part.path, "reason": part.reason}))
        else:
            answers.write(frame_head({"path": part.path, "bytes": len(part.data)}))
            answers.write(part.data)
        answers.flush()


if __name__ == "__main__":
    main()
