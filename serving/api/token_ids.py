"""Token ids back to text. OpenAI's embedding models read cl100k_base, and so LangChain sends ids of that, whatever the model is
called. Its table comes with a package, which is installed for this file alone, or lies in the data folder."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from storage.errors import UserError

NAME = "cl100k_base.tiktoken"
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"  # as tiktoken expects it
# tiktoken's own cache of the file, under the name that it gives it there; MIT, like tiktoken.
PACKAGE, INSIDE = "llama-index-core", "llama_index/core/_static/tiktoken_cache/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"


def texts_of(data_dir: Path, arrays: Sequence[Sequence[int]]) -> list[str]:
    """The texts of arrays of token ids. Raises UserError without the table, or for an id that is not in it."""
    table = _table(table_file(data_dir))
    try:
        return [b"".join(map(table.__getitem__, ids)).decode(errors="replace") for ids in arrays]
    except KeyError as error:
        raise UserError(f"cl100k_base has no token {error.args[0]}", code="invalid_value") from None


def table_file(data_dir: Path) -> Path:
    """Where the table lies: in the package, else in the data folder. Raises UserError."""
    for path in (_packaged(), data_dir / NAME):
        if path is not None and path.is_file():
            return path
    raise UserError(
        "this server has no table of token ids: ask its operator (`preread config token-table FILE`), or send texts (in "
        "LangChain: check_embedding_ctx_length=False)",
        code="token_ids_not_served",
    )


def install_table(source: Path, data_dir: Path) -> Path:
    """Copy the table from a file that tiktoken has fetched somewhere. Raises UserError unless it is the table, to the byte."""
    try:
        content = source.read_bytes()
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    _verify(str(source), content)
    target, beside = data_dir / NAME, data_dir / f"{NAME}.part"
    data_dir.mkdir(parents=True, exist_ok=True)
    beside.write_bytes(content)
    os.replace(beside, target)
    return target


def _packaged() -> Path | None:
    try:
        return Path(str(distribution(PACKAGE).locate_file(INSIDE)))  # imports nothing of it
    except PackageNotFoundError:
        return None


def _verify(called: str, content: bytes) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        says = f"{called} is not cl100k_base: its SHA-256 is {found[:16]}…, not {SHA256[:16]}…"
        raise UserError(says, code="token_ids_not_served")


@lru_cache(maxsize=1)
def _table(path: Path) -> Mapping[int, bytes]:
    """Lines of a token in base64, a blank, and its id."""
    content = path.read_bytes()
    _verify("the table of this server", content)
    lines = (line.split() for line in content.splitlines())
    return {int(id): base64.b64decode(token) for token, id in lines}
