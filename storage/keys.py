"""Names of stored KV: one key for all that determines the bytes, not to be guessed outside its group."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence

from storage.types import KVProfile

# Written out, not derived from the dataclass: reordering fields there must not rename every stored object.
# The version in the tag changes when this list does.
PROFILE_FIELDS = (
    "model",
    "weights",
    "tokenizer",
    "frame",
    "conditioning",
    "codec",
    "dtype",
    "layers",
    "kv_heads",
    "head_dim",
    "layout",
    "adapter",
)
_KEY_TAG = b"preread-kv-1"
_GROUP_TAG = b"preread-group-1"


def kv_key(
    profile: KVProfile, token_ids: Sequence[int], group: str, group_secret: bytes, before: Sequence[Sequence[int]] = ()
) -> str:
    """The key of one chunk's KV: 64 lower-case hex digits, HMAC-SHA256 of profile, group and token ids, and of the chunks
    that were read `before` it.

    Keyed by the group's secret, so that nobody outside the sharing group can compute a key from known text.
    Raises ValueError for an empty secret or a token id outside u32.
    """
    if not group_secret:
        raise ValueError("the group secret is empty")
    values = [str(getattr(profile, name)).encode() for name in PROFILE_FIELDS]
    fields = [_KEY_TAG, *values, group.encode(), token_bytes(token_ids), *map(token_bytes, before)]
    return hmac.new(group_secret, length_prefixed(fields), hashlib.sha256).hexdigest()


def group_secret(master: bytes, group: str) -> bytes:
    """The 32-byte secret of a sharing group, derived from the installation's; ValueError if that is empty."""
    if not master:
        raise ValueError("the master secret is empty")
    return hmac.new(master, length_prefixed([_GROUP_TAG, group.encode()]), hashlib.sha256).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. Raises ValueError where one is no integer in [0, 2**32)."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from None


def length_prefixed(fields: Iterable[bytes]) -> bytes:
    """Each field behind its u64 length: two different lists of fields never give the same bytes."""
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)
