"""Zstandard (RFC 8878) frames whose decoded size is known beforehand: hostile bytes cannot make a reader allocate more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

LEVEL = 1  # higher levels gain under 2 % on symbols of noise and cost most of the encoder's speed


class Packer:
    """Makes frames. Its working memory is used again; by one thread at a time."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)

    def pack(self, data: memoryview) -> bytes:
        """One frame that says how long its content is. Equal data gives equal bytes for one version of the library."""
        return self._context.compress(data)


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
