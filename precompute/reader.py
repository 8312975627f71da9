"""The reader: a Hugging Face decoder that reads each chunk once and hands out its KV, free of position."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from precompute import attention
from precompute.pace import pace
from precompute.passes import ContiguousPass, PackedPass
from precompute.rope import Rope
from precompute.spec import DEFAULT_FILLER, ReaderSpec
from storage.conditioning import Reading
from storage.errors import UserError

log = logging.getLogger(__name__)
PIECE = 512  # rows of one forward pass while prefilling


def check_device(device: str) -> None:
    """Raises UserError where this installation of torch cannot use it."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"PREREAD_DEVICE={device} cannot be used here: {reason}") from None


class Reader(ReaderSpec):
    """One loaded model. `compile` and `forward` are to be called by one thread at a time."""

    def __init__(
        self, folder: Path, *, device: str = "cpu", dtype: str = "bfloat16", codec: str = "raw", filler: int = DEFAULT_FILLER
    ) -> None:
        super().__init__(folder, dtype=dtype, codec=codec, filler=filler)
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        implementation = None if self.full_prefill_reason else attention.NAME  # None: the model's own best
        attention.register()
        factory: Any = AutoModelForCausalLM  # its methods are not typed
        self.model = factory.from_pretrained(
            folder, dtype=self.dtype, attn_implementation=implementation, local_files_only=True
        )
        self.model.to(self.device).eval()
        self.prefill_tokens_per_s: float | None = None  # a moving average, over pieces of prefill
        self.check: Callable[[], None] = lambda: None  # raises to end a compile before its time
        self._lock = threading.Lock()
        self._prefix: torch.Tensor | None = None
        self._frame: torch.Tensor | None = None
        self._labels: list[torch.Tensor] | None = None
        if self.full_prefill_reason:
            log.warning("model %s is served by full prefill: %s", self.name, self.full_prefill_reason)
            return
        self.rope = Rope(self.model.base_model.rotary_emb, self.max_positions, self.device)

    def refuse_blending(self, reason: str) -> None:
        """Serve this model by full prefill from now on, through its own attention and cache."""
        self.full_prefill_reason = reason
        self.model.set_attn_implementation(self.model.get_correct_attn_implementation(None))

    def buffer(self, tokens: int) -> torch.Tensor:
        """An unwritten KV buffer [layers, 2, kv_heads, tokens, head_dim]."""
        shape = (self.layers, 2, self.kv_heads, tokens, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, kv_pass: attention.KVPass, logits: bool = True
    ) -> torch.Tensor | None:
        """Run `ids` [rows] at `positions` [rows]; logits of the last row [vocab] in fp32, or None."""
        arguments = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "kv_pass": kv_pass}
        if not logits:
            self.model.base_model(**arguments)
            return None
        return self.model(**arguments, logits_to_keep=1).logits[0, -1].float()  # type: ignore[no-any-return]

    def prefill(self, kv: torch.Tensor, ids: Sequence[int], start: int = 0) -> torch.Tensor | None:
        """Full prefill of `ids` into `kv` from position `start` on; the last token's logits."""
        pieces = self.prefill_pieces(kv, torch.tensor(ids, device=self.device), start)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def prefill_pieces(
        self, kv: torch.Tensor, ids: torch.Tensor, start: int = 0, bias: torch.Tensor | None = None, *, logits: bool = True
    ) -> Generator[None, None, torch.Tensor | None]:
        """`prefill` of `ids` [tokens] that yields after every piece. `bias`: see `ContiguousPass`; `logits`: False for None."""
        result = None
        for at in range(0, len(ids), PIECE):
            piece = ids[at : at + PIECE]
            positions = torch.arange(start + at, start + at + len(piece), device=self.device)
            last = logits and at + PIECE >= len(ids)
            begun = time.perf_counter()
            result = self.forward(piece, positions, ContiguousPass(kv, start + at, bias), logits=last)
            self._note_speed(len(piece), begun)
            yield
        return result

    def _note_speed(self, rows: int, begun: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.prefill_tokens_per_s = pace(self.prefill_tokens_per_s, rows, time.perf_counter() - begun)

    @torch.inference_mode()
    def compile(self, batch: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Read each chunk of `batch` behind the frame and filler passages, and behind nothing else.

        One tensor per chunk [layers, 2, kv_heads, tokens, head_dim] in the model's dtype, K before RoPE."""
        return self.compile_readings([(tuple(ids),) for ids in batch])

    @torch.inference_mode()
    def compile_readings(self, batch: Sequence[Reading]) -> list[torch.Tensor]:
        """As `compile`, each chunk as the last of its reading; readings that begin alike are read once."""
        texts = [r for r in dict.fromkeys(batch) if not any(len(o) > len(r) and o[: len(r)] == r for o in batch)]
        inputs, ends = zip(*map(self.behind_prefix, texts), strict=True)
        compiled = self.compile_behind(self.prefix_kv(), inputs)
        found = []
        for reading in batch:
            at = next(i for i, text in enumerate(texts) if text[: len(reading)] == reading)
            end = ends[at][len(reading) - 1]
            found.append(compiled[at][:, :, :, end - len(reading[-1]) : end].contiguous())
        return found

    @torch.inference_mode()
    def compile_behind(
        self, prefix: torch.Tensor, batch: Sequence[Sequence[int]], offset: int | None = None
    ) -> list[torch.Tensor]:
        """As `compile`, behind a given prefix KV; `offset`: position of a chunk's first token, by default the prefix's end."""
        lengths = [len(ids) for ids in batch]
        offset = prefix.shape[3] if offset is None else offset
        ids = torch.tensor([i for chunk in batch for i in chunk], device=self.device)
        positions = torch.cat([torch.arange(offset, offset + n, device=self.device) for n in lengths])
        packed = PackedPass(prefix, lengths, self.check)
        self.forward(ids, positions, packed, logits=False)
        kv = torch.stack(packed.kept)
        kv[:, 0] = self.rope.unplace(kv[:, 0], positions)
        return [part.contiguous() for part in torch.split(kv, lengths, 3)]

    def prefix_kv(self) -> torch.Tensor:
        """KV of frame, filler and label, computed once per process; K at its position."""
        with self._lock:
            if self._prefix is None:
                kv = self.buffer(len(self.prefix_ids))
                self.prefill(kv, self.prefix_ids)
                self._prefix = kv
            return self._prefix

    def frame_kv(self) -> torch.Tensor:
        """KV of the frame alone [layers, 2, kv_heads, frame, head_dim], computed once per process; K at its position."""
        with self._lock:
            if self._frame is None:
                kv = self.buffer(len(self.format.frame))
                self.prefill(kv, self.format.frame)
                self._frame = kv
            return self._frame

    def label_kv(self) -> list[torch.Tensor]:
        """Position-free KV of the first LABELS labels, each [layers, 2, kv_heads, label, head_dim]; fewer where the model's
        context ends.

        Read once per process in a prompt of numbered passages, as labels stand in every prompt; by one thread at a time."""
        if self._labels is None:
            self._labels = self._read_labels()
        return self._labels

    @torch.inference_mode()
    def _read_labels(self) -> list[torch.Tensor]:
        ids, spans = self.label_prompt(self.max_positions)
        kv = self.buffer(len(ids))
        self.prefill(kv, ids)
        kv[:, 0] = self.rope.unplace(kv[:, 0], torch.arange(len(ids), device=self.device))
        return [kv[:, :, :, start:end].clone() for start, end in spans]
