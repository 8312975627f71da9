"""What rules say of a document: the grammar, its mistakes, matching, and who wins."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from storage.policy.parse import parse_policy
from storage.policy.rules import Hits, Match, Policy, Rule, Span
from storage.policy.source import PolicyError
from storage.policy.types import DAY, Actions, DocumentFacts, Keep, Prefetch
from storage.types import CODEC_NAMES

NOW = 1_780_000_000.0
SAMPLE = Path(__file__).parents[2] / "samples" / "policy.yaml"


def facts(path: str = "policies/leave.md", **values: Any) -> DocumentFacts:
    usual: dict[str, Any] = {"tenant_id": "t", "corpus_id": "vs_1", "corpus": "handbook", "document_id": "doc-1"}
    return DocumentFacts(path=path, **{**usual, "created_at": NOW - 10 * DAY, **values})


def policy(text: str) -> Policy:
    return parse_policy(text.encode())


def mistakes(text: str | bytes) -> list[str]:
    with pytest.raises(PolicyError) as refused:
        parse_policy(text if isinstance(text, bytes) else text.encode())
    return refused.value.mistakes


# --- actions ---


def test_every_action_is_read() -> None:
    said = policy(
        """
rules:
  - name: hot
    pin: memory
    prefetch: every working day at 07:45 Europe/Berlin
    keep: {tier: disk, for: 2h}
    codec: {store: raw, disk: int8}
    replicate: [lyon, oslo]
    store: yes
"""
    ).decide(facts(), NOW)
    prefetch = Prefetch("45 7 * * 1-5", "Europe/Berlin", "memory")
    assert said.actions == Actions("memory", prefetch, Keep("disk", 7200), "raw", "int8", ("lyon", "oslo"), True)
    assert set(said.by.values()) == {"hot"}


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_rule_may_name_every_codec_that_a_setting_may(name: str) -> None:
    assert policy(f"rules:\n- codec: {{object: {name}}}").decide(facts(), NOW).actions.codec == name


def test_the_codec_of_copies_is_said_by_itself_and_may_depend_on_use() -> None:
    rules = policy("""
rules:
  - {name: idle, match: {use: {last: "> 7d"}}, codec: {disk: int4, memory: raw}}
  - {name: legal, match: {tag: {team: legal}}, codec: {object: lossless}}
  - {name: rest, codec: {store: int8, disk: raw}}
""")
    decided = rules.decide(facts(attributes={"team": "legal"}), NOW)
    assert (decided.actions.codec, decided.actions.disk_codec) == ("lossless", "int4")
    assert (decided.by["codec"], decided.by["disk_codec"]) == ("legal", "idle")
    used = rules.decide(facts(used_at=NOW - DAY), NOW)
    assert (used.actions.codec, used.actions.disk_codec) == ("int8", "raw")


def test_both_forms_of_a_time_mean_the_same() -> None:
    forms = [
        "every working day at 07:45 Europe/Berlin",
        '{at: "every working day at 7:45", timezone: Europe/Berlin}',
        '{cron: "45 7 * * 1-5", timezone: Europe/Berlin, tier: memory}',
    ]
    found = {policy(f"rules:\n- prefetch: {form}").decide(facts(), NOW).actions.prefetch for form in forms}
    assert found == {Prefetch("45 7 * * 1-5", "Europe/Berlin", "memory")}


def test_the_first_rule_that_speaks_of_an_action_wins_and_leaves_the_other_actions_open() -> None:
    said = policy(
        """
rules:
  - {name: special, match: {path: "policies/*"}, pin: disk}
  - {name: general, pin: memory, keep: {for: 1h}}
"""
    )
    special, general = said.decide(facts(), NOW), said.decide(facts("other/x.md"), NOW)
    assert (special.actions.pin, special.by["pin"]) == ("disk", "special")
    assert (special.actions.keep, special.by["keep"]) == (Keep("memory", 3600), "general")
    assert (general.actions.pin, general.by["pin"]) == ("memory", "general")


def test_a_rule_of_nothing_leaves_everything_as_it_is() -> None:
    said = policy("").decide(facts(), NOW)
    assert said.actions == Actions()
    assert said.stored
    assert policy("rules: []\n").decide(facts(), NOW).by == {}


def test_sites_are_told_by_document() -> None:
    said = policy('rules:\n- {match: {path: "a/*"}, replicate: lyon}')
    assert said.decide(facts("a/x.md"), NOW).actions.replicate == ("lyon",)
    assert said.decide(facts("b/x.md"), NOW).actions.replicate is None


def test_the_sample_file_is_a_policy() -> None:
    said = parse_policy(SAMPLE.read_bytes())
    assert {rule.name for rule in said.rules} >= {"morning", "legal"}
    assert said.rates.gpu_hour > 0


@pytest.mark.parametrize("page", ["policies", "economics"])
def test_what_the_documentation_shows_is_a_policy(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.policy.parse.importlib.import_module", lambda name: SimpleNamespace(placement=dict))
    blocks = re.findall(r"```yaml\n(.*?)```", (SAMPLE.parents[1] / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        policy(block)


# --- matching ---

MATCHES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "corpus by name": ("corpus: handbook", {}, {"corpus": "other"}),
    "corpus by id": ("corpus: [x, vs_1]", {}, {"corpus_id": "vs_2"}),
    "path": ('path: "policies/*.md"', {"path": "policies/a/b.md"}, {"path": "policies/a.txt"}),
    "one of several paths": ('path: ["x/*", "policies/*"]', {}, {"path": "y/a"}),
    "tag": ("tag: {team: legal}", {"attributes": {"team": "legal"}}, {"attributes": {"team": "hr"}}),
    "one of several tags": ("tag: {team: [hr, legal]}", {"attributes": {"team": "legal"}}, {"attributes": {}}),
    "all tags": ("tag: {a: x, b: y}", {"attributes": {"a": "x", "b": "y"}}, {"attributes": {"a": "x"}}),
    "a number": ("tag: {year: 2024}", {"attributes": {"year": 2024.0}}, {"attributes": {"year": 2025.0}}),
    "a truth": ("tag: {live: true}", {"attributes": {"live": True}}, {"attributes": {"live": False}}),
    "one is no truth": ("tag: {live: true}", {"attributes": {"live": True}}, {"attributes": {"live": 1.0}}),
    "language by ending": ("language: python", {"path": "a/b.py"}, {"path": "a/b.rs"}),
    "language by attribute": ("language: no", {"attributes": {"language": "NO"}}, {"attributes": {"language": "de"}}),
    "young": ('age: "< 7d"', {"created_at": NOW - 6 * DAY}, {"created_at": NOW - 8 * DAY}),
    "old": ('age: "> 7d"', {"created_at": NOW - 8 * DAY}, {"created_at": NOW - 6 * DAY}),
    "much used": (
        'use: {hits: ">= 5", days: 7}',
        {"hits": ((int(NOW // DAY) - 6, 2), (int(NOW // DAY), 3))},
        {"hits": ((int(NOW // DAY) - 7, 2), (int(NOW // DAY), 3))},
    ),
    "little used": ('use: {hits: "< 1", days: 30}', {}, {"hits": ((int(NOW // DAY), 1),)}),
    "used lately": ('use: {last: "< 2h"}', {"used_at": NOW - 60}, {"used_at": NOW - 3 * 3600}),
    "unused": ('use: {last: "> 9d"}', {"used_at": None}, {"used_at": NOW - DAY}),
}


@pytest.mark.parametrize("case", MATCHES)
def test_a_condition_holds_where_it_should_and_nowhere_else(case: str) -> None:
    text, holds, fails = MATCHES[case]
    said = policy(f"rules:\n- match: {{{text}}}\n  pin: memory")
    assert said.decide(facts(**holds), NOW).actions.pin == "memory"
    assert said.decide(facts(**fails), NOW).actions.pin is None


words = st.sampled_from(["a", "b", "legal", "a/b", "x.py", "legal/a.md", "", "*"])
some = st.lists(words, max_size=3).map(tuple)
spans = st.none() | st.builds(Span, st.sampled_from("<>"), st.sampled_from([60.0, 3600.0, 7.0 * DAY]))
matches = st.builds(
    Match, corpus=some, path=some, tag=st.dictionaries(words, some, max_size=2), language=some, age=spans,
    hits=st.none() | st.builds(Hits, st.sampled_from([">=", "<"]), st.integers(0, 4), st.integers(1, 9)), used=spans,
)  # fmt: skip
documents = st.builds(
    facts, path=words, corpus=words, corpus_id=words,
    attributes=st.dictionaries(words, words | st.booleans() | st.floats(allow_nan=False), max_size=3),
    created_at=st.floats(NOW - 20 * DAY, NOW), used_at=st.none() | st.floats(NOW - 20 * DAY, NOW),
    hits=st.lists(st.tuples(st.integers(int(NOW // DAY) - 12, int(NOW // DAY)), st.integers(1, 4)), max_size=4).map(tuple),
)  # fmt: skip
spoken = st.builds(Actions, pin=st.sampled_from([None, "memory", "disk"]), store=st.sampled_from([None, True, False]))


def plainly(match: Match, doc: DocumentFacts) -> bool:
    """Matching, condition by condition."""
    if match.corpus and doc.corpus not in match.corpus and doc.corpus_id not in match.corpus:
        return False
    if match.path and all(not fnmatchcase(doc.path, p) for p in match.path):
        return False
    for key, wanted in match.tag.items():
        held = doc.attributes.get(key)
        if not isinstance(held, str) or held not in wanted:
            return False
    if match.language and doc.language not in match.language:
        return False
    since_use = NOW - (doc.created_at if doc.used_at is None else doc.used_at)
    for span, seconds in ((match.age, NOW - doc.created_at), (match.used, since_use)):
        if span and (seconds >= span.seconds if span.sign == "<" else seconds <= span.seconds):
            return False
    if match.hits:
        total = sum(n for day, n in doc.hits if int(NOW // DAY) - day < match.hits.days)
        return (total >= match.hits.count) == (match.hits.sign == ">=")
    return True


@given(st.lists(st.tuples(matches, spoken), max_size=5), documents)
def test_any_rules_decide_as_reading_them_from_the_top_does(rules: list[tuple[Match, Actions]], doc: DocumentFacts) -> None:
    made = Policy(tuple(Rule(f"r{n}", match, actions) for n, (match, actions) in enumerate(rules)))
    decision = made.decide(doc, NOW)
    for action in ("pin", "store"):
        saying = [
            (f"r{n}", getattr(said, action))
            for n, (match, said) in enumerate(rules)
            if plainly(match, doc) and getattr(said, action) is not None
        ]
        assert (decision.by.get(action), getattr(decision.actions, action)) == (saying[0] if saying else (None, None))
    if decision.by:
        assert made.reaches(doc.corpus_id, doc.corpus), "a corpus that is passed over must have nothing said of it"


# --- mistakes ---

WRONG: dict[str, tuple[str, str]] = {
    "an unknown field": ("rules:\n- {mtach: {}, pin: memory}", "line 2: unknown field 'mtach' in a rule; did you mean 'match'?"),
    "an unknown tier": ("rules:\n\n- pin: ram", "line 3: pin cannot be 'ram': use device, memory, disk"),
    "an unknown codec": ("rules:\n- codec: zip", "line 2: codec cannot be 'zip': use raw"),
    "a packed memory": ("rules:\n- codec: {memory: int8}", "where KV lies as it is used, cannot be 'int8': use raw"),
    "an unknown codec of a copy": ("rules:\n- codec: {disk: zip}", "line 2: codec on disk cannot be 'zip': use raw"),
    "a basis for a copy": ("rules:\n- codec: {disk: transform}", "line 2: codec on disk cannot be 'transform': use raw"),
    "a codec of no tier": ("rules:\n- codec: {disc: int8}", "unknown field 'disc' in codec; did you mean 'disk'?"),
    "two codecs of one object": ("rules:\n- codec: {store: raw, object: raw}", "the stored object's codec is named twice"),
    "a basis in a rule": ("rules:\n- codec: 'transform:ab'", "line 2: codec cannot be 'transform:ab'"),
    "a codec by age": ('rules:\n- {match: {age: "> 1d"}, codec: raw}', "leave age and use out"),
    "no such time": ("rules:\n- prefetch: every tuesdy at 07:45", "line 2: 'tuesdy' names no days"),
    "no such hour": ("rules:\n- prefetch: every day at 24:00", "line 2: 24:00 is no time of day"),
    "no such zone": ("rules:\n- prefetch: every day at 07:00 Mars/Base", "line 2: there is no time zone 'Mars/Base'"),
    "no such cron": ('rules:\n- prefetch: {cron: "61 * * * *"}', "line 2: the schedule '61 * * * *' cannot be read"),
    "two times": ('rules:\n- prefetch: {at: "every day at 07:00", cron: "0 7 * * *"}', "line 2: prefetch needs either"),
    "two zones": ("rules:\n- prefetch: {at: every day at 07:00 UTC, timezone: UTC}", "line 2: the time zone is named twice"),
    "no duration": ("rules:\n- keep: {for: soon}", "line 2: 'soon' is no length of time"),
    "a rule of nothing": ("rules:\n- name: x", "line 2: the rule says nothing"),
    "two of a name": ("rules:\n- {name: x, pin: disk}\n- {name: x, pin: disk}", "line 3: the rule's name 'x' is used by line 2"),
    "a taken name": ("rules:\n- {name: default, pin: disk}", "line 2: the rule's name 'default' is used by preread itself"),
    "a field twice": ("rules:\n- pin: disk\n  pin: memory", "line 3: 'pin' stands here a second time"),
    "no age": ("rules:\n- {match: {age: 3d}, pin: disk}", "line 2: '3d' compares nothing"),
    "no use": ("rules:\n- {match: {use: {days: 3}}, pin: disk}", "line 2: use is"),
    "too many days": ('rules:\n- {match: {use: {hits: "< 1", days: 400}}, pin: disk}', "line 2: days is a whole number"),
    "a negative price": ("rates: {gpu_hour: -1}", "line 1: gpu_hour is a number, 0 or more"),
    "an unknown price": ("rates: {gb_month: {tape: 1}}", "line 1: unknown field 'tape' in gb_month"),
    "no function": ("hook: storage.policy.types", "line 1: the hook 'storage.policy.types' is not written as"),
    "an absent function": ("hook: storage.policy.types:nothing", "line 1: the hook 'storage.policy.types:nothing' cannot be"),
    "no mapping": ("- pin: disk", "line 1: a policy is a mapping"),
    "a site's name": ("rules:\n- replicate: http://x", "line 2: 'http://x' is no name of a site"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_with_its_place_and_what_is_allowed(case: str) -> None:
    text, said = WRONG[case]
    [found] = mistakes(text)
    assert said in found
    assert "\n" not in found


def test_all_mistakes_are_told_at_once_in_the_order_of_their_lines() -> None:
    found = mistakes("hook: x\nrules:\n- pin: ram\n- keep: {for: 0s}\nrates: {gpu_hour: much}\n")
    assert [line.split(":")[0] for line in found] == ["line 1", "line 3", "line 4", "line 5"]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a bomb of anchors": (b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", "anchors"),
    "an object": (b"!!python/object/apply:os.system [true]", "tags"),
    "a tag on a text": (b"hook: !!python/name:os.system x", "tags"),
    "depth": (b"[" * 100_000, "deeper than"),
    "depth by indentation": (b"".join(b" " * n + b"- \n" for n in range(400)), "deeper than"),
    "size": (b"#" * 300_000, "bytes"),
    "no text": (b"\xff\xfe\x00", "UTF-8"),
    "no YAML": (b"rules: [", "not YAML"),
    "a control character": (b"rules: \x00", "not YAML"),
    "two documents": (b"rules: []\n---\nrules: []\n", "not YAML"),
    "a list as a name": (b"? [a]\n: b\n", "a field's name is a text"),
    "a merge": (b"<<: {rules: []}\n", "unknown field '<<'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(case: str) -> None:
    data, said = HOSTILE[case]
    [found] = mistakes(data)
    assert found.startswith("line ")
    assert said in found
    assert "\n" not in found


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes_are_a_policy_or_a_list_of_mistakes(data: bytes) -> None:
    try:
        assert isinstance(parse_policy(data), Policy)
    except PolicyError as refused:
        assert refused.mistakes  # noqa: PT017
        assert all("\n" not in line for line in refused.mistakes)  # noqa: PT017


# --- hooks ---


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Writes a module with a function `say(facts)`; the policy that calls it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> Policy:
        name = f"hook_{uuid4().hex}"  # a name once imported stays imported
        (tmp_path / f"{name}.py").write_text(f"def say(facts):\n    {body}\n")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return policy(f"hook: {name}:say\nrules:\n- {{name: all, pin: memory, keep: {{for: 1h}}}}")

    return write


def test_a_hook_speaks_last_of_what_it_names(hook: Any) -> None:
    said = hook('return {"pin": "disk", "store": False} if facts.language == "markdown" else None')
    decision = said.decide(facts(), NOW)
    assert (decision.actions.pin, decision.by["pin"], decision.stored) == ("disk", "hook", False)
    assert (decision.actions.keep, decision.by["keep"]) == (Keep("memory", 3600), "all")
    assert said.decide(facts("a.py"), NOW).actions.pin == "memory"


FAILING = ("return 1 / 0", 'return {"pin": "ram"}', 'return {"x": 1}', "return object()", "raise SystemError")


@pytest.mark.parametrize("body", FAILING)
def test_a_hook_that_fails_leaves_the_rules_alone(hook: Any, body: str) -> None:
    with capture_logs() as logged:
        decision = hook(body).decide(facts(), NOW)
    assert (decision.actions.pin, decision.by["pin"]) == ("memory", "all")
    assert [entry["event"] for entry in logged] == ["policy_hook_failed"]
    assert decision.actions.store is None


def test_a_hook_cannot_change_what_it_is_told(hook: Any) -> None:
    decision = hook('facts.path = "x"').decide(facts(), NOW)
    assert decision.by == {"pin": "all", "keep": "all"}
