"""vLLM's KV connector of Preread: the only file that imports vLLM, whose interfaces are those of 0.32.

`--kv-transfer-config` names it: {"kv_connector": "PrereadConnector", "kv_connector_module_path": "serving.connector.adapter",
"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}. Settings are the process's PREREAD_ variables. Tried on the CPU
build; the CUDA path is written from vLLM's source and was never run.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from precompute.rope import Rope
from serving.connector.asked import Kept
from serving.connector.blending import Hook
from serving.connector.director import Asked, Director, Heard, Orders
from serving.connector.fetching import Fetches
from serving.connector.layers import Fed, Slices, learn
from serving.connector.obstacles import check_start, obstacle, rope_obstacle
from serving.connector.parts import ConnectorParts, own_profile
from serving.connector.rank import BrokenRank, Rank
from serving.connector.saving import Saver
from serving.connector.timed import Timed
from serving.connector.transfer import Heads, Pages, find_layout

log = logging.getLogger(__name__)
_LOADED: list[weakref.ref[torch.nn.Module]] = []  # the model of this process


def register() -> None:
    """The `vllm.general_plugins` entry point: from now on this process's connector finds the model that it loads."""
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker.load_model, "of_preread", False):
        return
    load = Worker.load_model

    @functools.wraps(load)
    def load_model(self: Any, *given: Any, **named: Any) -> None:
        load(self, *given, **named)
        _LOADED[:] = [weakref.ref(self.model_runner.get_model())]

    load_model.of_preread = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    orders: Orders = field(default_factory=Orders)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    heard: Heard

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(self.heard.joined(other.heard))


def _guarded(answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An exception in a hook would end the server: it is logged, and `answer` given instead."""

    def guard(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def guarded(*given: Any, **named: Any) -> Any:
            try:
                return hook(*given, **named)
            except Exception:
                log.exception("a hook of the connector failed: %s", hook.__name__)
                return answer() if callable(answer) else answer

        return guarded

    return guard


class PrereadConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One in the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_start(vllm.__version__, vllm_config.kv_transfer_config.kv_load_failure_policy)
        super().__init__(vllm_config, role, kv_cache_config)
        self._kept = Kept()
        self._parts = ConnectorParts(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._rank: Rank | BrokenRank | None = None
        self._director: Any = None  # in the scheduler a `Director`
        self._heard: Heard | None = None
        if role == KVConnectorRole.SCHEDULER:
            own = own_profile(vllm_config.model_config)
            self._director = Director(
                self._parts.plan_secret, own, block=vllm_config.cache_config.block_size,
                ranks=vllm_config.parallel_config.tensor_parallel_size, obstacle=obstacle(vllm_config, kv_cache_config),
            )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache does its best, and promises nothing."""
        return False

    # --- scheduler ---

    @_guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        asked = Asked(
            request.request_id, (request.prompt_token_ids or ())[: request.num_prompt_tokens], request.kv_transfer_params,
            request.cache_salt, num_computed_tokens, _request_obstacle(request),
        )  # fmt: skip
        tokens = self._director.claim(asked)
        return tokens, tokens > 0

    @_guarded(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._director.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    @_guarded(Metadata)
    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        beside = scheduler_output.total_num_scheduled_tokens
        return Metadata(self._director.orders(_computed(scheduler_output), self._blocks, beside=beside))

    @_guarded(list)
    def _blocks(self, request_id: str) -> list[int]:
        return list(self._kv_cache_manager.get_block_ids(request_id)[0])

    @_guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        self._director.hear(said.heard if said else Heard(), list(connector_output.finished_recving or ()))

    @_guarded((False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._kept.finished(request.kv_transfer_params, self._director.finished(request.request_id))

    @_guarded((False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._kept.finished(request.kv_transfer_params, self._director.finished(request.request_id))

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self._rank = self._make_rank(kv_caches)
        except Exception as error:
            log.exception("the connector cannot blend here")
            self._rank = BrokenRank(f"The connector could not start in a worker ({type(error).__name__}).")

    def _make_rank(self, kv_caches: dict[str, torch.Tensor]) -> Rank | BrokenRank:
        config = self._vllm_config
        if reason := obstacle(config, self._kv_cache_config):
            return BrokenRank(reason)
        model = _LOADED[0]() if _LOADED else None
        if model is None:
            return BrokenRank("vLLM has not loaded Preread's plugin: the package is not installed, or VLLM_PLUGINS omits it.")
        names = sorted(kv_caches, key=_layer_number)
        paged = PagedModel(model, config, self._kv_cache_config, names)
        block = int(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        layout = find_layout(paged.attention[0], block)
        if layout is None:
            return BrokenRank("What vLLM's attention backend writes cannot be read back: its layout is not known here.")
        rope = _rope(model)
        if isinstance(rope, str):
            return BrokenRank(rope)
        tp = get_tp_group()
        heads = Heads.of(tp.rank_in_group, tp.world_size, config.model_config.get_total_num_kv_heads())
        pages = Pages(paged.attention, layout, rope, heads, block)
        self._parts.keep_in_step(lambda: own_profile(config.model_config))
        paged.learn_layers(pages.device)
        timed = Timed(paged)
        timed.measure(block, pages.device)
        fetches = Fetches(self._parts.kv_store, self._parts.missed, self._parts.rates, lambda: timed.tokens_per_s)
        return Rank(timed, pages, fetches, Saver(self._parts.kv_store, _gather))

    @_guarded(None)
    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        if self._rank is not None:
            self._rank.carry_out(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A prompt is computed further when all its pages are filled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """What is stored is read from the pages behind the forward pass: under CUDA graphs nobody comes by here."""

    @_guarded(None)
    def wait_for_save(self) -> None:
        if self._rank is not None:
            self._rank.save(self._get_connector_metadata().orders)

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._rank is None:
            return KVConnectorTransferResults()
        self._heard = self._rank.say()
        ended = self._heard.ended
        failed = {request_id for request_id, told in ended.items() if told.refused}
        return KVConnectorTransferResults(finished_recving=set(ended), failed_recving=failed)

    @_guarded(None)
    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        heard, self._heard = self._heard, None
        return WorkerMetadata(heard) if heard is not None else None

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()
        self._parts.close()

    @property
    def counts(self) -> dict[str, int]:
        """What is kept, for tests of leaks."""
        each = self._director or self._rank
        return each.counts if each is not None else {}


def _request_obstacle(request: Any) -> str:
    if request.lora_request is not None:
        return "The request has an adapter: stored KV is of the model alone."
    if request.prompt_token_ids is None or getattr(request, "mm_features", None):
        return "The prompt is not made of token ids alone."
    return ""


def _computed(output: Any) -> dict[str, int]:
    """Tokens of each scheduled request that will have been computed at the step's end."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {request_id: tokens + scheduled.get(request_id, 0) for request_id, tokens in before.items()}


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


class _Layer:
    """`PagedLayer` of one of vLLM's attention layers."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.pages: torch.Tensor = attention.kv_cache

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        self.attention.impl.do_kv_cache_update(self.attention, k, v, self.pages, slots)


class PagedModel:
    """`SlicedModel` over vLLM's own: any set of rows is computed as pseudo-requests, one for each run of positions, that share
    the prompt's blocks. So its attention kernel, weights, quantised or not, and tensor parallelism are used as they are."""

    def __init__(self, model: torch.nn.Module, config: Any, kv_cache_config: Any, names: list[str]) -> None:
        self._model: Any = model.model  # without the head: no logits are wanted
        self._config, self._names = config, names
        context = config.compilation_config.static_forward_context
        self.attention = [_Layer(context[name]) for name in names]
        self.layers = len(names)
        self.piece = min(512, config.scheduler_config.max_num_batched_tokens)
        self.tokens = int(config.model_config.max_model_len)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        first = self.attention[0]
        builder = first.attention.attn_backend.get_builder_cls()
        self._builder = builder(spec, names, config, first.pages.device)
        self._block = int(spec.block_size)
        self.decoder = list(getattr(self._model, "layers", ()))
        self.fed: Fed | None = None

    @property
    def sliced(self) -> bool:
        """See `SlicedModel`."""
        return self.fed is not None

    @torch.inference_mode()
    def learn_layers(self, device: torch.device) -> None:
        """So that a pass may be computed in slices: by a pass of its own, before anything is in the pages."""
        zero = torch.zeros(1, dtype=torch.long, device=device)
        slots = zero + self._block  # of the block 1
        with self.context(slots, self._metadata(zero, zero + 1, slots), None, None):
            self.fed = learn(self.decoder, functools.partial(self.forward, zero, zero))

    def open(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, before: Hook | None, after: Hook | None
    ) -> PagedPass:
        """See `SlicedModel`."""
        slots = table[positions // self._block] * self._block + positions % self._block
        metadata = self._metadata(positions, table, slots)
        return PagedPass(self, ids, positions, slots, metadata, before, after)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """All layers, in a `context`."""
        self._model(input_ids=ids, positions=positions, intermediate_tensors=None)

    @contextmanager
    def context(
        self, slots: torch.Tensor, metadata: Any, before: Hook | None, after: Hook | None
    ) -> Iterator[None]:
        """What layers need around them. It is left between slices: vLLM's own passes are in between."""
        hooks = self._hook(before, after)
        attention, mapping = dict.fromkeys(self._names, metadata), dict.fromkeys(self._names, slots)
        try:
            with set_forward_context(attention, self._config, num_tokens=len(slots), slot_mapping=mapping, skip_compiled=True):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, before: Hook | None, after: Hook | None) -> list[Any]:
        found = []
        for number, layer in enumerate(self.attention):
            if before is not None:
                found.append(layer.attention.register_forward_pre_hook(functools.partial(_told, before, number)))
            if after is not None:
                found.append(layer.attention.register_forward_hook(functools.partial(_told, after, number)))
        return found

    def _metadata(self, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> Any:
        breaks = (positions[1:] - positions[:-1] != 1).nonzero()[:, 0] + 1
        zero, rows = breaks.new_zeros(1), breaks.new_full((1,), len(positions))
        starts = torch.cat((zero, breaks, rows)).to(torch.int32)
        ends = (positions[starts[1:].long() - 1] + 1).to(torch.int32)
        runs = len(ends)
        return self._builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=ends, num_reqs=runs,
                num_actual_tokens=len(positions), max_query_len=int((starts[1:] - starts[:-1]).max()),
                max_seq_len=int(ends[-1]), block_table_tensor=table.to(torch.int32).expand(runs, -1).contiguous(),
                slot_mapping=slots, causal=True, positions=positions, seq_lens_cpu_upper_bound=ends.cpu(),
                is_prefilling=torch.ones(runs, dtype=torch.bool),
            ),
            fast_build=True,
        )  # fmt: skip

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        tp = get_tp_group()
        return tp.all_reduce(values) if tp.world_size > 1 else values


class PagedPass:
    """`Pass` over `PagedModel`."""

    def __init__(
        self, model: PagedModel, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, metadata: Any,
        before: Hook | None, after: Hook | None,
    ) -> None:  # fmt: skip
        self._context = functools.partial(model.context, slots, metadata, before, after)
        forward = functools.partial(model.forward, ids, positions)
        self._slices = Slices(model.decoder, model.fed, forward)

    @property
    def left(self) -> int:
        return self._slices.left

    def advance(self, count: int) -> None:
        with self._context():
            self._slices.advance(count)


def _told(hook: Hook, number: int, _module: Any, given: Any, *_: Any) -> None:
    hook(number, *given[:3])


def _gather(own: torch.Tensor) -> torch.Tensor | None:
    tp = get_tp_group()
    if tp.world_size == 1:
        return own
    every = tp.all_gather(own, dim=2)
    return every if tp.rank_in_group == 0 else None


class _Rotary:
    """cos and sin by position, in fp32, as `Rope` wants them of a Hugging Face model."""

    def __init__(self, rotary: Any) -> None:
        self.attention_scaling = float(getattr(rotary, "mscale", 1.0))
        cos, sin = rotary._compute_cos_sin_cache().float().chunk(2, -1)
        self.positions = len(cos)
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def __call__(self, _probe: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = positions.cpu()
        return self._cos[at].to(positions.device), self._sin[at].to(positions.device)


def _rope(model: torch.nn.Module) -> Rope | str:
    """The model's rotation, or why K cannot be rotated to another place."""
    rotaries = {id(module): module for name, module in model.named_modules() if name.split(".")[-1] == "rotary_emb"}
    if reason := rope_obstacle(list(rotaries.values())):
        return reason
    rotary = _Rotary(next(iter(rotaries.values())))
    device = next(model.parameters()).device
    return Rope(rotary, rotary.positions, device)
