"""A passage from the middle of a table is shown to the model under the table's header, and cited as the rows that it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_kit import EngineSite
from fixtures_models import Models
from model_kit import Shared, counted, serving

from bench.harness import drive
from serving.blend.assembly import Segment, assemble
from serving.blend.methods import parse_method
from serving.engine.types import GenerateRequest, Message
from serving.engine.vllm_request import kv_plan, prompt_ids
from serving.prompt import PromptPlan, plan_prompt
from storage.errors import UserError
from storage.types import RetrievedChunk

HEADER = "vessel,berth,harbour dues in euros"
ROWS = [f"Vessel{n} of the northern line,{n % 17},{n * 13}" for n in range(12)]
QUESTION = (Message("user", "What are the dues?"),)


@pytest.fixture
def site(tiny_models: Models, tmp_path: Path) -> Iterator[EngineSite]:
    made = EngineSite(tiny_models.reader("llama"), tmp_path / "kv", blended_bytes=64 << 20)
    yield made
    made.engine.close()


def headed(site: EngineSite, header: str = HEADER, which: int = 1) -> tuple[RetrievedChunk, ...]:
    """The site's chunks, of which one begins inside a table."""
    return tuple(replace(each, header=header) if n == which else each for n, each in enumerate(site.chunks))


def planned(site: EngineSite, room: int | None = None) -> PromptPlan:
    return plan_prompt(site.reader.format, QUESTION, headed(site), room or site.reader.max_positions, 16)


def test_a_late_passage_of_a_table_is_read_under_its_header_and_cited_exactly(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(shared, tmp_path, dtype="float32", chunk_tokens=64) as service:
        seen: list[str] = []
        plan, decode = service.wiring.engine.prepare, service.wiring.reader.tokenizer.decode

        def prepare(request: GenerateRequest) -> object:
            prepared = plan(request)
            seen.append(decode(prompt_ids(prepared.plan)))
            return prepared

        monkeypatch.setattr(service.wiring.engine, "prepare", prepare)
        service.corpus("dues", {"dues.csv": "\n".join([HEADER, *ROWS]) + "\n"})
        answer = service.chat("dues", "Vessel10 of the northern line: which harbour dues?", max_tokens=2, timeout=300)
        late = [each for each in answer.citations if "Vessel10" in each["quote"]]
        assert late
        for citation in late:
            quote = citation["quote"]
            assert HEADER not in quote
            assert service.source_of(citation)[citation["start"] : citation["end"]] == quote
            assert f"[{citation['n']}] {HEADER}\n{quote}" in seen[-1]
        report = counted(answer)
        assert report["not_reused"] == []
        assert report["tokens_reused"] > report["tokens_computed"]


def test_the_header_stands_between_label_and_chunk_and_counts_in_the_prompts_room(site: EngineSite) -> None:
    plan = planned(site)
    fmt = site.reader.format
    expected = [
        *plan.frame, *fmt.label(1), *site.chunks[0].token_ids, *fmt.label(2), *fmt.header(HEADER), *site.chunks[1].token_ids,
        *fmt.label(3), *site.chunks[2].token_ids, *plan.tail,
    ]  # fmt: skip
    assert prompt_ids(plan) == expected
    assert plan.tokens == len(expected)
    for passage, chunk in zip(plan.passages, site.chunks, strict=True):
        assert tuple(expected[passage.start : passage.end]) == chunk.token_ids
    assert len(planned(site, len(expected) + 16).chunks) == 3
    assert len(planned(site, len(expected) + 15).chunks) == 2


def test_what_vllm_is_told_names_each_chunk_behind_its_header(site: EngineSite) -> None:
    plan = planned(site)
    ids = prompt_ids(plan)
    request = site.request(method="default")
    told = kv_plan(site.reader, request, plan, plan.passages, frozenset({("a", "g")}), 0.0, "")
    assert told is not None
    assert [tuple(ids[span.start : span.end]) for span in told.spans] == [each.token_ids for each in site.chunks]
    assert told.tail_start == len(ids) - len(plan.tail)


@pytest.mark.parametrize("method", ["default", "reuse", "full", "epic:4", "cacheblend:0.2", "question:0.3"])
def test_every_method_computes_the_header_and_reuses_the_chunk_behind_it(method: str, site: EngineSite) -> None:
    extra = len(site.reader.format.header(HEADER))
    bare, outcome = site.answer(method=method), site.answer(method=method, chunks=headed(site))
    assert outcome.prompt_tokens == bare.prompt_tokens + extra
    report = outcome.report
    assert report.tokens_reused + report.tokens_recomputed + report.tokens_computed == outcome.prompt_tokens
    assert report.tokens_computed == bare.report.tokens_computed + extra
    assert {each.chunk_id for each in report.reused} == (set() if method == "full" else {0, 1, 2})


def test_all_computed_again_a_prompt_with_a_header_is_a_full_prefill(site: EngineSite) -> None:
    reader, plan = site.reader, planned(site)
    stored = reader.compile([each.token_ids for each in site.chunks])
    segments = [Segment("frame", plan.frame)]
    for label, header, chunk, kv in zip(plan.labels, plan.headers, site.chunks, stored, strict=True):
        segments += [Segment("label", label), *[Segment("header", header)] * bool(header)]
        segments.append(Segment("chunk", chunk.token_ids, kv))
    segments.append(Segment("tail", plan.tail))
    again = assemble(reader, segments, 1, stored_labels=True)
    assert [b - a for a, b in again.spans] == [
        len(each) for label, chunk in zip(plan.labels, site.chunks, strict=True) for each in (label, chunk.token_ids)
    ]
    logits = drive(parse_method("cacheblend:1").blend(reader, again))
    ids = [Segment("tail", tuple(prompt_ids(plan)))]
    whole = drive(parse_method("full").blend(reader, assemble(reader, ids, 1)))
    assert torch.allclose(logits, whole, atol=1e-4)


def test_a_conversation_goes_on_over_the_same_header_only(site: EngineSite) -> None:
    """The same rows under another header have the same stored KV, and are another prompt."""
    turns = (*QUESTION, Message("assistant", "Ten."), Message("user", "And for two?"))
    site.answer(method="default", messages=QUESTION, chunks=headed(site))
    assert not site.answer(method="default", messages=turns, chunks=headed(site, "vessel,length,draught")).report.resumed
    assert not site.answer(method="default", messages=turns, chunks=headed(site, which=2)).report.resumed
    other_order = tuple(headed(site)[n] for n in (2, 1, 0))
    resumed = site.answer(method="default", messages=turns, chunks=other_order)
    assert resumed.report.resumed
    assert [each.header for each in resumed.used_chunks] == ["", HEADER, ""]


def test_control_markers_in_a_header_are_text(site: EngineSite) -> None:
    ids = site.reader.format.header("<|im_end|>,<s>,[INST]")
    assert site.reader.tokenizer.decode(ids).startswith("<|im_end|>,<s>,[INST]")
    assert not set(ids) & set(site.reader.tokenizer.template.all_special_ids)


def test_a_header_that_leaves_no_room_for_its_chunk_drops_the_chunk(site: EngineSite) -> None:
    wide = headed(site, ",".join(f"column{n}" for n in range(120)), which=0)
    plan = plan_prompt(site.reader.format, QUESTION, wide, 300, 16)
    assert plan.chunks == ()
    with pytest.raises(UserError):
        plan_prompt(site.reader.format, QUESTION, wide, 20, 16)
