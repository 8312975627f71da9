"""One leased file from its bytes to searchable chunks: fetch, parse, cut, embed, and one commit.

Nothing of a file is visible before the commit, and running a file twice stores it once: the commit belongs
to the
lease, and ends the file in the same transaction.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cached_property, partial

from sqlalchemy.orm import Session

from ingest import versions
from ingest.archive import is_archive
from ingest.commit import Prepared, commit, drop_chunks, keep
from ingest.deletes import delete_documents
from ingest.embedding import Asked, EmbedQueue, Vectors
from ingest.expand import Unpacked, commit_members, members, refuse_within
from ingest.files import drop_source_files, open_file
from ingest.jobs import STAGES, advance, lock_job, settle
from ingest.languages import suffix_of
from ingest.leases import FileLease, Hold, JobStatus, finish, owned
from ingest.purge import release, try_sweep
from ingest.reindex import Reindexer
from ingest.renames import Renamer
from ingest.run import FileRun, Rest, end_file
from ingest.types import Cut, Decide, KVDelete, Parser, SearchIndex
from ingest.unpacking import Unpacker
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, File, Job, JobFile
from storage.conditioning import WINDOW_TOKENS, KVKeys, readings
from storage.errors import Cancelled, FileError, ObjectMissing, StorageUnavailable
from storage.policy.types import Decision
from storage.tracing import span
from storage.types import Chunk, ObjectStore, ParsedDocument, TextEmbedder, embedded_text

REMEMBERED = 1000  # jobs whose stage is known
LONG_TEXT = 1 << 20  # characters; what is longer takes a while to be cut


@dataclass(frozen=True)
class Work:
    """A file as it was when its run began."""

    row: JobFile
    document: Document
    corpus: Corpus
    file: File | None

    @property
    def path(self) -> str:
        """What the document is called."""
        return self.document.path if self.row.action == "refresh" else self.row.path


@dataclass(frozen=True)
class Pipeline:
    """The parts that a file passes through. `identity` names the versions of all that shape its chunks:
    parsers,
    chunker, tokenizer, model profile, embedder and chunk settings; a change of any makes every file work
    again."""

    catalogue: Catalogue
    objects: ObjectStore
    parser: Parser
    cut: Cut
    embedder: TextEmbedder
    index: SearchIndex
    kv_keys: KVKeys
    kv_delete: KVDelete
    identity: str
    lease_seconds: float = 60.0
    max_bytes: int = 512 << 20  # of a file that is no archive: whoever parses it has all of it in memory
    decide: Decide = lambda document, corpus: Decision()  # by the operator's policy
    reindexer: Reindexer | None = None
    stopping: Callable[[], bool] = lambda: False  # whether this process has been told to end: then files are handed over
    _stages: dict[str, int] = field(default_factory=dict)  # how far a job was when it was last advanced

    @cached_property
    def embedding(self) -> EmbedQueue:
        return EmbedQueue(self.embedder)

    @cached_property
    def job_status(self) -> JobStatus:
        return JobStatus(self.catalogue)

    @cached_property
    def unpacker(self) -> Unpacker:
        return Unpacker(self.catalogue, self.objects)

    @cached_property
    def cutters(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="cut")

    def process(self, lease: FileLease) -> None:
        """Bring the file to its end, whatever comes; only a lost lease leaves it to whoever holds it now."""
        self.begin(lease).finish()

    def begin(self, lease: FileLease) -> FileRun:
        """Fetch and parse the file, or begin to unpack it; what is left to do may be done in another thread."""
        first = partial(self._first, lease)
        return FileRun(self.catalogue, lease, self.lease_seconds, first, self.job_status, self.stopping)

    # --- the run ---

    def _first(self, lease: FileLease, hold: Hold) -> Rest | None:
        reindexer = self.reindexer
        if reindexer is not None and reindexer.takes(lease):
            return _in_steps(reindexer.run(lease, hold))
        work = self._load(lease)
        if work is None:
            end_file(self.catalogue, lease, lambda session, row: finish(session, row, "done"))
            return None
        if work.row.action == "delete":
            return Rest(lambda: self._delete(lease))
        if work.row.action == "rename":
            return Rest(lambda: Renamer(self.catalogue, self.index, self._ask, self._locked).run(lease, hold))
        return self._upsert(lease, work, hold)

    def _load(self, lease: FileLease) -> Work | None:
        """What the run is about; None where a document is to be deleted that has gone already."""
        with self.catalogue.read() as session:
            row = session.get(JobFile, lease.job_file_id)
            document = session.get(Document, row.document_id) if row is not None else None
            corpus = session.get(Corpus, document.corpus_id) if document is not None else None
            if row is not None and row.action == "delete" and document is None:
                return None
            if row is None or document is None or corpus is None:
                raise Cancelled("the document was deleted")
            file_id = document.file_id if row.action == "refresh" else row.file_id
            return Work(row, document, corpus, session.get(File, file_id) if file_id else None)

    def _upsert(self, lease: FileLease, work: Work, hold: Hold) -> Rest | None:
        if (file := work.file) is None:
            raise ObjectMissing("the file was deleted")
        done_hash = self.done_hash(file.sha256, work.path, work.corpus.conditioning)
        if work.document.done_hash == done_hash and self._keep(lease, file, done_hash):
            return None
        with ExitStack() as opened:
            stream = opened.enter_context(open_file(self.objects, file))
            self._stage(lease, "extract", hold)
            if is_archive(stream):
                refuse_within(work.path)
                end = partial(self._commit_archive, lease, file, done_hash)
                return self.unpacker.begin(lease.tenant_id, work.path, stream, opened.pop_all(), hold, end)
            if file.bytes > self.max_bytes:
                raise FileError(f"the file has {file.bytes:,} bytes, and {self.max_bytes:,} are read at most", code="too_large")
            data = stream.read()
            with span("ingest.parse", {"preread.bytes": len(data)}):
                parsed = self.parser.parse(data, work.path, hold.check)
            part = partial(self._cut, lease, work, file, parsed, done_hash, hold)
            size = len(parsed.text)
            return Rest(part, size=size) if size <= LONG_TEXT else Rest(partial(self._beside, part, size), size=size, slow=True)

    def _beside(self, part: Callable[[], Rest], size: int) -> Rest:
        """Do the next part of a run in a thread of its own, since it takes long: others are worked on meanwhile."""

        def drop(done: Future[Rest]) -> None:
            if done.exception() is None:
                done.result().undo()

        def undo() -> None:
            done.add_done_callback(drop)

        done = self.cutters.submit(copy_context().run, part)
        return Rest(lambda: done.result(), undo, done, size, slow=True)

    def _cut(self, lease: FileLease, work: Work, file: File, parsed: ParsedDocument, done_hash: str, hold: Hold) -> Rest:
        """Cut the document, and ask for its vectors; they are computed beside those of other files."""
        self._stage(lease, "chunk", hold)
        with span("ingest.chunk"):
            chunks = list(self.cut(parsed))
        if not chunks:
            raise FileError("the file holds no text", code="no_text_extracted")
        self._stage(lease, "embed", hold)
        asked, warnings = self._ask(lease, chunks, work.path), parsed.warnings

        def end() -> None:
            with span("ingest.embed", {"preread.chunks": len(chunks)}):
                vectors = asked.result(hold.check)
            self._commit(lease, self._prepare(work, file, chunks, vectors, warnings, done_hash), hold)

        return Rest(end, asked.drop, asked.done, len(parsed.text))

    def _commit(self, lease: FileLease, new: Prepared, hold: Hold) -> None:
        hold.check()
        with span("ingest.commit", {"preread.chunks": len(new.chunks)}), self.catalogue.write() as session:
            row, document = self._locked(session, lease, new.file)
            corpus = session.get_one(Corpus, document.corpus_id)
            is_new, old_files = document.generation == 0, [document.file_id]
            names = session.get_one(Job, lease.job_id).request.get("names")
            # It was an archive until now, if there are any.
            if inside := [each.id for each in members(session, document) if is_open(each.access, names)]:
                old_files += delete_documents(session, self.index, inside, keep=True)[1]
            commit(session, self.index, row, document, corpus, new)
            settle(session, lease.job_id)
        left = [old for old in old_files if old != new.file.id]
        if left or not is_new:
            self._clean_up(lease.tenant_id, left)

    def done_hash(self, sha256: str, path: str, conditioning: str) -> str:
        """What a document's chunks depend on: its content, its name (which chooses the parser), what its corpus is
        conditioned on, and our versions."""
        of_corpus = [conditioning, WINDOW_TOKENS] if conditioning != "none" else []
        return hashlib.sha256(json.dumps([sha256, suffix_of(path), self.identity, *of_corpus]).encode()).hexdigest()

    def _keep(self, lease: FileLease, file: File, done_hash: str) -> bool:
        """End the file without any work if its document is up to date, whatever else happened since it was
        read."""
        with self.catalogue.write() as session:
            row, document = self._locked(session, lease, file)
            if document.done_hash != done_hash:
                return False
            old_file = document.file_id
            keep(session, row, document, session.get_one(Corpus, document.corpus_id), file)
            settle(session, lease.job_id)
        self._clean_up(lease.tenant_id, [old_file] if old_file != file.id else [])
        return True

    def _prepare(
        self,
        work: Work,
        file: File,
        chunks: Sequence[Chunk],
        vectors: Vectors,
        warnings: tuple[str, ...],
        done_hash: str,
    ) -> Prepared:
        good = [(chunk, vector) for chunk, vector in zip(chunks, vectors, strict=True) if vector is not None]
        if not good:
            raise FileError("no chunk of the file could be embedded", code="embedding_failed")
        kept = [chunk for chunk, _ in good]
        read = readings([chunk.token_ids for chunk in kept], work.corpus.conditioning)
        decision = self.decide(work.document, work.corpus)
        codec = decision.actions.codec if decision.stored else None
        keys = self.kv_keys(read, work.corpus.sharing_group, codec) if decision.stored else [None] * len(read)
        return Prepared(
            file=file,
            done_hash=done_hash,
            chunks=kept,
            vectors=[vector for _, vector in good],
            kv_keys=keys,
            skipped=len(chunks) - len(good),
            warnings=warnings,
            not_stored=decision.by["store"] if not decision.stored else None,
            codec=codec,
        )

    def _stage(self, lease: FileLease, stage: str, hold: Hold) -> None:
        """Move the job's stage forward: seldom more than once for all its files."""
        hold.check()
        reached = STAGES.index(stage)
        if self._stages.get(lease.job_id, -1) >= reached:
            return
        with self.catalogue.write() as session:
            advance(session, lease.job_id, stage)
        if len(self._stages) >= REMEMBERED:
            self._stages.clear()
        self._stages[lease.job_id] = reached

    def _ask(self, lease: FileLease, chunks: Sequence[Chunk | ChunkRow], path: str) -> Asked:
        """Have a vector computed for each chunk."""
        texts = [embedded_text(self.embedder, chunk.text, chunk.headings, path) for chunk in chunks]
        return self.embedding.ask(texts, lease.tenant_id)

    def _commit_archive(self, lease: FileLease, file: File, done_hash: str, found: Unpacked) -> None:
        """End an archive: it has no chunks itself, and its files are in the job from now on."""
        with self.catalogue.write() as session:
            row, document = self._locked(session, lease, file)
            corpus = session.get_one(Corpus, document.corpus_id)
            now = time.time()
            versions.keep(session, self.index, document, corpus, now)
            release(session, drop_chunks(session, self.index, [document.id]))
            document.current_since = max(now, document.current_since or now)
            warning = commit_members(session, session.get_one(Job, lease.job_id), corpus, document, found)
            old_file = document.file_id
            document.file_id, document.sha256, document.done_hash = file.id, file.sha256, done_hash
            document.generation += 1
            document.status, document.usage_bytes = "completed", 0
            row.error_message = document.error_message = warning
            finish(session, row, "done")
        self._clean_up(lease.tenant_id, [old_file] if old_file != file.id else [])

    def _delete(self, lease: FileLease) -> None:
        with self.catalogue.write() as session:
            row, document = self._locked(session, lease)
            _, files = delete_documents(session, self.index, [document.id], keep=True)
            finish(session, row, "done")
            settle(session, lease.job_id)
        self._clean_up(lease.tenant_id, files)

    def _locked(self, session: Session, lease: FileLease, read: File | None = None) -> tuple[JobFile, Document]:
        """The file and its document, locked for the commit. Raises Cancelled if it must not be, and StorageUnavailable if it is
        to be tried again: a refresh has `read` a content that the document no longer holds."""
        row = owned(session, lease)
        job = lock_job(session, lease.job_id)
        if job is None or job.status == "cancelling":
            raise Cancelled("the job was cancelled")
        document = session.get(Document, row.document_id, with_for_update=True, populate_existing=True)
        if document is None:
            raise Cancelled("the document was deleted")
        if read is not None and row.action == "refresh" and document.file_id != read.id:
            raise StorageUnavailable("the document holds another content by now")
        return row, document

    def _clean_up(self, tenant_id: str, old_files: Sequence[str]) -> None:
        """Delete what a commit left without a use: KV objects, and contents that a sync or an archive had
        brought."""
        try_sweep(self.catalogue, self.kv_delete)
        drop_source_files(self.catalogue, self.objects, tenant_id, old_files)


def _in_steps(steps: Iterator[None]) -> Rest:
    """What does a step at a time, so that other files are worked on between two."""

    def step() -> Rest | None:
        for _ in steps:
            return _in_steps(steps)
        return None

    return Rest(step, slow=True)
