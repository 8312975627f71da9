"""Very many documents of one job: made some at a time, so that whoever else writes waits for a few of them only.

The job is under a plan meanwhile (`plans.py`): nobody works on a file before all are there, and a kill in between leaves no
file twice and none half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.attach import attach
from ingest.files import hold
from ingest.jobs import JobItem, add_items, batches, check_paths
from ingest.plans import break_off, end_plan, owned_plan, renewed
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, Document, File, Job
from storage.errors import Cancelled, PathClosed, UserError

BATCH = 500  # documents a transaction
PAUSE_SECONDS = 0.1  # between two: who waits for SQLite's lock asks for it that often
Placed = Sequence[tuple[str, File]]  # stored files, each to become the document at a path
Adopt = Callable[[Session, File], File]


def as_stored(session: Session, file: File) -> File:
    """The `Adopt` of files that are the corpus's own already."""
    return file


def items_of(
    session: Session,
    corpus: Corpus,
    placed: Placed,
    names: Collection[str] | None = None,
    adopt: Adopt = as_stored,
) -> list[JobItem]:
    """The documents of stored files, as items of a job. `names`: as of `attach`; `adopt`: the file to be shown for a stored
    one. Raises PathClosed, StorageUnavailable."""
    hold(session, [file.id for _, file in placed])
    items = []
    for path, stored in placed:
        file = adopt(session, stored)
        items.append(JobItem(path, attach(session, corpus, path, file.id, file.sha256, names=names).id, file.id))
    return items


def attach_all(
    catalogue: Catalogue,
    job: Job,
    placed: Placed,
    names: Collection[str] | None = None,
    adopt: Adopt = as_stored,
) -> None:
    """Add them to a job whose plan is leased. Raises like `items_of`, LeaseLost, Cancelled, UserError."""
    for some in batches(placed, BATCH):
        with catalogue.write() as session:
            row = owned_plan(session, job)
            corpus = session.get(Corpus, job.corpus_id)
            if corpus is None:
                raise UserError("the corpus was deleted")
            add_items(session, row, items_of(session, corpus, some, names, adopt))
        time.sleep(PAUSE_SECONDS)


def attach_for_request(
    catalogue: Catalogue, job: Job, placed: Placed, names: Collection[str], adopt: Adopt = as_stored
) -> None:
    """The same for a request, which has leased the plan and answers once all are there. If that is refused the job fails and
    the documents stay as they were; if the process dies the reaper sees to it. Raises like `items_of`."""
    try:
        with renewed(catalogue, job):
            attach_all(catalogue, job, placed, names, adopt)
    except Cancelled:
        break_off(catalogue, job, None)
    except BaseException:
        break_off(catalogue, job, "the request was refused")
        raise
    else:
        end_plan(catalogue, job)


def check_open(session: Session, corpus: Corpus, paths: Sequence[str], names: Collection[str]) -> None:
    """Raises UserError where a path appears twice, PathClosed where it is that of a document which the asker may not see."""
    check_paths(paths)
    for some in batches(paths, BATCH):
        query = select(Document.path, Document.access).where(Document.corpus_id == corpus.id, Document.path.in_(some))
        for path, access in session.execute(query):
            if not is_open(access, names):
                raise PathClosed(path)
