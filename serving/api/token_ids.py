"""Token ids back to text. OpenAI's embedding models read cl100k_base, and so LangChain sends ids of that, whatever the model is
called. Its table is OpenAI's and is not shipped; an operator may lay it, as tiktoken publishes it, into the data folder."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from storage.errors import UserError

NAME = "cl100k_base.tiktoken"


def texts_of(data_dir: Path, arrays: Sequence[Sequence[int]]) -> list[str]:
    """The texts of arrays of token ids. Raises UserError without the table, or for an id that is not in it."""
    path = data_dir / NAME
    if not path.exists():
        raise UserError(
            f"token ids need the table {NAME} in this server's data folder: ask its operator, or send texts (in LangChain: "
            "check_embedding_ctx_length=False)",
            code="token_ids_not_served",
        )
    table = _table(path)
    try:
        return [b"".join(map(table.__getitem__, ids)).decode(errors="replace") for ids in arrays]
    except KeyError as error:
        raise UserError(f"cl100k_base has no token {error.args[0]}", code="invalid_value") from None


@lru_cache(maxsize=1)
def _table(path: Path) -> Mapping[int, bytes]:
    """Lines of a token in base64, a blank, and its id."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {int(id): base64.b64decode(token) for token, id in lines}
