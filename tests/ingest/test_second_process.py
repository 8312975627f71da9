"""Another process that searches, warm from the searches before, sees an update and a deletion at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_work import Work

from storage.catalogue.schema import Corpus

SEARCHES = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fixtures_work import open_work
from storage.catalogue.schema import Corpus
work = open_work(Path(sys.argv[1]))
for line in sys.stdin:
    with work.catalogue.read() as session:
        corpus = session.get_one(Corpus, sys.argv[3])
    print(json.dumps(work.search(corpus, line.strip())), flush=True)
"""


class Searcher:
    """The other process."""

    def __init__(self, folder: Path, corpus_id: str) -> None:
        command = [sys.executable, "-c", SEARCHES, str(folder), str(Path(__file__).parent.parent), corpus_id]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def found(self, words: str) -> tuple[list[str], list[str]]:
        """Texts by meaning and by words."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        dense, lexical = json.loads(self.process.stdout.readline())
        return dense, lexical


@pytest.fixture
def other(work: Work, tmp_path: Path) -> Iterator[Searcher]:
    searcher = Searcher(tmp_path, work.corpus().id)
    yield searcher
    searcher.process.kill()
    searcher.process.communicate()


def test_a_warm_second_process_finds_the_new_text_and_never_the_old(work: Work, other: Searcher) -> None:
    with work.catalogue.read() as session:
        corpus = session.query(Corpus).one()
    old = "\n\n".join(f"The limit is 10 in the case number {number} of the list of cases that we know" for number in range(10))
    work.ingest(corpus, {"rule.txt": old, "else.txt": "Nothing about it."})
    for _ in range(2):
        dense, lexical = other.found("limit 10")
        assert len([text for text in dense if "limit is 10" in text]) == len(lexical) == 10
    new = [f"The limit is 20 in {which} case of the list of all the cases that we know of" for which in ("each", "any")]
    work.ingest(corpus, {"rule.txt": "\n\n".join(new)})
    dense, lexical = other.found("limit 10")
    assert sorted(lexical) == sorted(new)
    assert sorted(dense) == sorted([*new, "Nothing about it."])
    document = work.document(corpus, "rule.txt")
    assert document is not None
    work.deleter.document("t1", document.id)
    assert other.found("limit 20") == (["Nothing about it."], [])
