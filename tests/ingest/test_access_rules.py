"""A corpus's rules of access reach what is there already, the files in archives too."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
from fixtures_work import Work

from ingest.attach import apply_access_rules
from storage.catalogue.schema import Corpus, Document

HR, PAY = ["hr"], ["pay"]


def zipped(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, f"text of {name}")
    return data.getvalue()


def ruled_anew(work: Work, corpus: Corpus, *rules: tuple[str, list[str]]) -> dict[str, Any]:
    """Who may see which document once these rules are set."""
    with work.catalogue.write() as session:
        own = session.get_one(Corpus, corpus.id)
        own.settings = {**own.settings, "access": [{"path": path, "principals": who} for path, who in rules]}
        apply_access_rules(session, own)
    with work.catalogue.read() as session:
        return {document.path: document.access for document in session.query(Document)}


@pytest.mark.parametrize(
    ("rules", "pay", "other"),
    [
        ([("secret.zip", HR)], HR, HR),
        ([("secret.zip", HR), ("*/pay.txt", PAY)], PAY, HR),
        ([("*/pay.txt", PAY), ("secret.zip", HR)], PAY, HR),  # what is said of the file itself comes first
        ([("*/pay.txt", PAY)], PAY, None),
        ([("secret", HR)], None, None),
    ],
)
def test_a_rule_of_an_archive_is_that_of_the_files_in_it(work: Work, rules: Any, pay: Any, other: Any) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"secret.zip": zipped("pay.txt", "x.txt"), "open.zip": zipped("o.txt"), "plain.txt": "plain"})
    found = ruled_anew(work, corpus, *rules)
    assert (found["secret.zip!/pay.txt"], found["secret.zip!/x.txt"]) == (pay, other)
    assert found["open.zip!/o.txt"] is found["plain.txt"] is None
    work.ingest(corpus, {"secret.zip": zipped("pay.txt", "x.txt", "new.txt")})  # the same for what comes later
    assert ruled_anew(work, corpus, *rules) == found | {"secret.zip!/new.txt": other}


def test_a_rule_that_is_taken_away_opens_no_file_of_an_archive(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"secret.zip": zipped("pay.txt")})
    closed = ruled_anew(work, corpus, ("secret.zip", HR))
    assert ruled_anew(work, corpus) == closed == {"secret.zip": HR, "secret.zip!/pay.txt": HR}


def test_a_file_whose_name_is_like_that_of_an_archive_s_has_rules_of_its_own(work: Work) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"wow!/a.txt": "no archive"})
    assert ruled_anew(work, corpus, ("wow", HR)) == {"wow!/a.txt": None}
