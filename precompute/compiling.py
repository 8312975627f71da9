"""The compiler with a model of its own: chunks are read by the reader in this process, and stored from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
import torch

from precompute.types import LoadedReader, Made, RecordStore, Wanted
from storage.errors import Cancelled, Stopping, StorageUnavailable
from storage.types import KVRecord

log = structlog.get_logger()


class OwnCompiler:
    """`Compiler` by a loaded reader."""

    def __init__(self, reader: LoadedReader, store: RecordStore) -> None:
        self._reader, self._store = reader, store

    def compile(self, batch: Sequence[Wanted]) -> Callable[[], Made]:
        """See `Compiler`."""
        try:
            results = self._reader.compile_readings([each.reading for each in batch])
            tensors = {each.key: kv for each, kv in zip(batch, results, strict=True)}
        except (Stopping, Cancelled):
            raise
        except Exception as error:  # noqa: BLE001 - one chunk's fault must not fail the chunks beside it
            log.warning("compile_failed", chunks=len(batch), error=type(error).__name__)
            tensors = self._one_by_one(batch) if len(batch) > 1 else {}
        return partial(self._put, batch, tensors)

    def _one_by_one(self, batch: Sequence[Wanted]) -> dict[str, torch.Tensor]:
        tensors = {}
        for each in batch:
            try:
                [tensors[each.key]] = self._reader.compile_readings([each.reading])
            except (Stopping, Cancelled):
                raise
            except Exception as error:  # noqa: BLE001 - it is tried again, and fails alone
                log.warning("compile_failed", key=each.key[:12], error=type(error).__name__)
        return tensors

    def _put(self, batch: Sequence[Wanted], tensors: Mapping[str, torch.Tensor]) -> Made:
        written: dict[str, int] = {}
        failed = [each.key for each in batch if each.key not in tensors]
        for each in batch:
            if (kv := tensors.get(each.key)) is None:
                continue
            record = KVRecord(each.key, self._reader.stored_as(each.codec), each.reading[-1], kv.cpu())
            try:
                written[each.key] = self._store.put(record)
            except StorageUnavailable as error:
                log.warning("kv_store_unavailable", error=type(error).__name__)
                break  # the others would wait in vain as well
            except ValueError as error:
                log.warning("kv_refused", key=each.key[:12], error=str(error))
                failed.append(each.key)
        ended = {*written, *failed}
        return Made(written, [each.key for each in batch if each.key not in ended], failed)
