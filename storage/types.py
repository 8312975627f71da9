"""Vocabulary shared by every room. Plain frozen data and the small protocols that rooms hand to each other."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from storage.errors import ObjectDamaged, ObjectMissing, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    import torch

# --- documents -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anchor:
    """From character `start` of a document's text on: its page and heading path, until the next anchor."""

    start: int
    page: int | None = None
    headings: tuple[str, ...] = ()


class Block(NamedTuple):
    """A structural unit of a document's text, [start, end) in characters. Blocks are ordered and do not overlap.

    `kind`: heading | paragraph | list | table | code | definition (function, class, method).
    `header`: for a table its header row(s), for a definition its own first line below those of its classes: context for what
    begins inside the block, never text. `name`: a definition's, which ends the heading path of what begins inside.
    `breaks`: character offsets inside the block where it may be cut, best first is not implied (rows, statements).
    """

    kind: str
    start: int
    end: int
    headings: tuple[str, ...] = ()
    header: str = ""
    breaks: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class ParsedDocument:
    """What a parser makes of a file: its text, and where each character came from."""

    text: str
    blocks: tuple[Block, ...]
    anchors: tuple[Anchor, ...] = ()
    title: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A chunk as cut: an exact span of its document's text and the reader's token ids of exactly that span.

    `text == document.text[start:end]`; `token_ids` encode `text` alone, with special tokens as ordinary text.
    Lines and pages are 1-based and inclusive; `page_*` is None where the format has no pages. `header`: of the table
    or the definition inside which it begins: told to the reader before the chunk, and no part of it.
    """

    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    headings: tuple[str, ...] = ()
    page_start: int | None = None
    page_end: int | None = None
    line_start: int = 1
    line_end: int = 1
    header: str = ""


def indexed_text(text: str, headings: Sequence[str], path: str) -> str:
    """What a chunk is found by: its document's name and its heading path, as far as its text does not begin with them, and
    its text."""
    name = PurePosixPath(path).stem
    above = [line for line in (name, *headings) if line and line not in text[: 2 * len(line) + 200]]
    return "\n".join([" > ".join(above), text]) if above else text


def embedded_text(embedder: TextEmbedder, text: str, headings: Sequence[str], path: str) -> str:
    """What a chunk's vector is of: as `indexed_text`, but without what of it would push text over the limit: the outer headings
    first, then the inner ones, then the name."""
    for outer in range(len(headings) + 1):
        if embedder.count_tokens(whole := indexed_text(text, headings[outer:], path)) <= embedder.max_tokens:
            return whole
    return text


class TextTokenizer(Protocol):
    """The reader model's tokenizer as the chunker needs it: document text in, ids out, no special ids ever."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control markers inside it are ordinary text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The same of each text."""
        ...

    def count_batch(self, texts: Sequence[str]) -> Sequence[int]:
        """About the length of `encode(text)` of each, and no more than a few tokens off: for packing, not for proof."""
        ...


class TextEmbedder(Protocol):
    """Dense encoder: texts in, unit vectors out."""

    @property
    def identity(self) -> str:
        """Name and fingerprint; vectors of two identities are never compared."""
        ...

    @property
    def dimensions(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    def count_tokens(self, text: str) -> int: ...

    def count_batch(self, texts: Sequence[str]) -> Sequence[int]:
        """`count_tokens` of each."""
        ...

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One float32 unit vector per text."""
        ...


# --- stored KV -------------------------------------------------------------------------------------------------

LAYOUT = "lkhtd-1"  # per layer: K [kv_heads, tokens, head_dim] before RoPE, then V [kv_heads, tokens, head_dim]
# Codecs to choose from. A profile says "transform:<digest of its basis>" for either of the last two;
# the others need nothing of a model.
BASISLESS_CODECS = ("raw", "lossless", "int8", "int4")
CODEC_NAMES = (*BASISLESS_CODECS, "transform", "transform8")


@dataclass(frozen=True)
class KVProfile:
    """All that determines a chunk's KV apart from its tokens and its owner. Equal profiles make equal objects."""

    model: str  # name or revision
    weights: str  # fingerprint of the weights (and adapter, if any)
    tokenizer: str  # fingerprint of the tokenizer and chat template
    frame: str  # hash of the frame's token ids
    conditioning: str  # what stands before the chunk when it is compiled, e.g. "filler:8:<hash>"
    codec: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    layers: int
    kv_heads: int
    head_dim: int
    layout: str = LAYOUT
    adapter: str = ""


@dataclass(frozen=True)
class KVRecord:
    """One chunk's KV in memory. `kv`: [layers, 2, kv_heads, tokens, head_dim], dtype of the profile, K before RoPE."""

    key: str
    profile: KVProfile
    token_ids: tuple[int, ...]
    kv: torch.Tensor


class Miss(enum.StrEnum):
    """Why a stored KV was not used. A miss is a value, never an exception."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    WRONG_KEY = "wrong_key"
    WRONG_LAYOUT = "wrong_layout"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    UNSYNCED = "unsynced"  # a child site whose lease from its parent is over


def miss_of(error: ObjectMissing | StorageUnavailable) -> Miss:
    """What an object store's refusal means to who wanted to read."""
    if isinstance(error, ObjectMissing):
        return Miss.DAMAGED if isinstance(error, ObjectDamaged) else Miss.ABSENT
    return Miss.TIMEOUT if isinstance(error, StorageTimeout) else Miss.UNAVAILABLE


@dataclass(frozen=True)
class ObjectInfo:
    """An object as it lies in a store: its size there in bytes, and when it was written (seconds since the epoch)."""

    name: str
    size: int
    modified: float


@runtime_checkable
class ObjectStore(Protocol):
    """Immutable blobs by name. Names are `/`-separated hex or ASCII words, each segment under 200 bytes."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """Store the parts joined, all or nothing; overwriting is allowed (same name means same bytes). Bytes written.

        Raises StorageUnavailable."""
        ...

    def put_new(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Store the parts joined where no object has this name, of all who try at once only one; whether it is stored. False
        also after a reply was lost: read back who it was. For small objects. Raises StorageUnavailable."""
        ...

    def size(self, name: str) -> int | None:
        """Size in bytes, or None if absent. Raises StorageUnavailable."""
        ...

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill `buffer` from byte `offset`; the number of bytes read (short at the end). Raises ObjectMissing,
        StorageUnavailable."""
        ...

    def read_all(self, name: str, allocate: Callable[[int], memoryview]) -> int:
        """Read the whole object into what `allocate(size)` gives, which may be called again when a try has failed.
        The bytes read. Saves a remote store the question for the size. Raises ObjectMissing, StorageUnavailable, and
        whatever `allocate` raises."""
        ...

    def delete(self, name: str) -> bool:
        """True if it existed. Raises StorageUnavailable."""
        ...

    def delete_many(self, names: Sequence[str]) -> dict[str, str]:
        """Delete those that exist; by name, why the others are still there. Raises StorageUnavailable, where some
        may be deleted."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Names under `prefix`, any number of them. Raises StorageUnavailable."""
        ...

    def entries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Like `list`, with each object's size and age."""
        ...

    def sweep(self, older_than_s: float) -> int:
        """Remove what writers that died left half written, if it is older; how many. Raises StorageUnavailable."""
        ...

    def counters(self) -> dict[str, int]:
        """What the store counts of itself, such as retries; empty if nothing."""
        ...


# --- retrieval -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk that answers a query, within the asker's rights. `score` is comparable within one answer only."""

    chunk_id: int
    document_id: str
    corpus_id: str
    file_id: str
    path: str
    version: str  # sha256 of the document's content
    text: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    headings: tuple[str, ...]
    page_start: int | None
    page_end: int | None
    line_start: int
    line_end: int
    score: float
    kv_key: str | None
    codec: str | None = None  # with which its KV is stored; None: the reader's own
    not_stored: bool = False  # a policy rule keeps the document's KV out of the store
    attributes: dict[str, str | float | bool] = field(default_factory=dict)
    ordinal: int = 0  # its place among its document's chunks
    header: str = ""  # see `Chunk`
