"""Zstandard (RFC 8878) frames whose decoded size is known beforehand: hostile bytes cannot make a reader allocate more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

# KV is noise: what repeats in it repeats by chance, and a match that saves no byte costs the reader time. So the search is
# as short as the library lets it be, and Huffman codes do the work: smaller than level 1, and up to 1.7 times as fast to read.
_SYMBOLS_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=8,
    chain_log=6,
    search_log=1,
    min_match=7,
    write_content_size=True,
    write_checksum=False,
)


class Packer:
    """Makes frames. Its working memory is used again; by one thread at a time."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdCompressor(compression_params=_SYMBOLS_ONLY)

    def pack(self, *parts: memoryview) -> bytes:
        """One frame of these parts, one after another, that says how long they are together. Each part begins a block, and so
        has symbols of its own. Equal data gives equal bytes for one version of the library."""
        stream = self._context.compressobj(size=sum(part.nbytes for part in parts))
        blocks = [piece for part in parts for piece in (stream.compress(part), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))]
        return b"".join(blocks) + stream.flush()


class Unpacker:
    """Reads frames. Its working memory is used again; by one thread at a time."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor()

    def unpack(self, frame: memoryview, size: int) -> npt.NDArray[np.uint8]:
        """The content of exactly one frame, uint8 [size], read-only. Raises ValueError unless it is `size` bytes, and
        allocates no more than these."""
        try:
            # Content that a frame does not announce would be allocated as it comes: only announced sizes are read.
            if zstandard.frame_content_size(frame) != size:
                raise ValueError("a compressed frame is not as long as it must be")
            content = self._context.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"a compressed frame is damaged: {error}") from None
        return np.frombuffer(content, np.uint8)
