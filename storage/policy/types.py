"""What a policy is told of a document, and what it may say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath

DAY = 86400
TIERS = ("device", "memory", "disk")  # into which KV may be pinned or fetched; the object store holds everything
DEFAULT_TIER = "memory"
HOME_TIER = "object"  # the object store
DEFAULT_RULE = "default"  # stands for a rule's name where no rule says anything
LANGUAGES: Mapping[str, str] = {
    "py": "python", "js": "javascript", "jsx": "javascript", "mjs": "javascript", "ts": "typescript", "tsx": "typescript",
    "java": "java", "go": "go", "c": "c", "h": "c", "cc": "cpp", "cpp": "cpp", "hpp": "cpp", "rs": "rust",
    "md": "markdown", "htm": "html",
}  # fmt: skip


@dataclass(frozen=True)
class DocumentFacts:
    """A document as rules and hooks see it. Times are UTC seconds since the epoch.

    `hits`: (day, answers that used the document), days counted since the epoch in UTC."""

    tenant_id: str
    corpus_id: str
    corpus: str  # the corpus's name
    document_id: str
    path: str
    attributes: Mapping[str, str | float | bool] = field(default_factory=dict)
    created_at: float = 0.0
    used_at: float | None = None
    hits: tuple[tuple[int, int], ...] = ()

    @property
    def language(self) -> str:
        """The attribute `language`, or else what the file's ending says: `python`, `markdown`, `pdf`."""
        said = self.attributes.get("language")
        if isinstance(said, str) and said:
            return said.lower()
        suffix = PurePosixPath(self.path).suffix.removeprefix(".").lower()
        return LANGUAGES.get(suffix, suffix)

    def hits_within(self, days: int, now: float) -> int:
        """Answers that used it today or on the `days - 1` days before, by UTC."""
        first = int(now // DAY) - days + 1
        return sum(count for day, count in self.hits if day >= first)


@dataclass(frozen=True)
class Prefetch:
    """Fetch into `tier` whenever the cron line comes due in the time zone."""

    cron: str
    timezone: str
    tier: str


@dataclass(frozen=True)
class Keep:
    """Hold in `tier` for `seconds` after each use."""

    tier: str
    seconds: float


@dataclass(frozen=True)
class Actions:
    """What is to happen to a document's KV; None: nothing is said."""

    pin: str | None = None
    prefetch: Prefetch | None = None
    keep: Keep | None = None
    codec: str | None = None  # of the stored object
    disk_codec: str | None = None  # of copies on disk; said as `codec: {disk: …}`
    replicate: tuple[str, ...] | None = None  # names of sites
    store: bool | None = None

    def tier(self, action: str) -> str | None:
        """The tier in which a named action puts KV, or whose copies it shapes; None for what is no tier's."""
        match action:
            case "pin":
                return self.pin
            case "prefetch":
                return self.prefetch.tier if self.prefetch else None
            case "keep":
                return self.keep.tier if self.keep else None
        return {"codec": HOME_TIER, "disk_codec": "disk"}.get(action)


ACTIONS = tuple(f.name for f in fields(Actions))


@dataclass(frozen=True)
class Decision:
    """What holds for a document. `by`: action → name of the rule (or "hook") that says so."""

    actions: Actions = Actions()
    by: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> bool:
        return self.actions.store is not False
