"""A key stands for all that determines a chunk's KV, and for its owner."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import PROFILE, SECRET

from storage.keys import PROFILE_FIELDS, group_secret, kv_key
from storage.types import KVProfile

GOLDEN = "d2a7476f821d9ef145e3f291848e9118e87c9c7e2a8cb3f59d80c8dd71a0f9ae"
GOLDEN_SECRET = "03a0ba6013461fc29c92e7b9c207ed6954de931bed453deafe71af34546d5ec2"
WORDS = st.text(st.sampled_from("a/_:\x00é"), max_size=4)
SIZES = st.integers(0, 300)
PROFILES = st.builds(
    KVProfile, *[WORDS] * 7, SIZES, SIZES, SIZES, layout=st.sampled_from(["lkhtd-1", "x"]), adapter=WORDS
)
INPUTS = st.tuples(PROFILES, st.lists(st.integers(0, 300), max_size=3), WORDS)


def test_keys_written_by_earlier_versions_are_still_found():
    assert kv_key(PROFILE, [1, 2, 3, 151935], "team-a", SECRET) == GOLDEN
    assert group_secret(SECRET, "team-a").hex() == GOLDEN_SECRET


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_processes_with_another_hash_seed_make_the_same_keys(seed):
    code = (
        "from storage.keys import kv_key\nfrom storage.types import KVProfile\n"
        f"print(kv_key({PROFILE!r}, [1, 2, 3, 151935], 'team-a', {SECRET!r}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GOLDEN


def test_every_field_of_the_profile_is_in_the_key():
    assert sorted(PROFILE_FIELDS) == sorted(field.name for field in dataclasses.fields(KVProfile))


@pytest.mark.parametrize("field", PROFILE_FIELDS)
def test_changing_any_field_of_the_profile_changes_the_key(field):
    value = getattr(PROFILE, field)
    changed = dataclasses.replace(PROFILE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert kv_key(changed, [1, 2], "g", SECRET) != kv_key(PROFILE, [1, 2], "g", SECRET)


def test_tokens_group_and_secret_are_in_the_key():
    keys = {
        kv_key(PROFILE, ids, group, secret)
        for ids in ([1, 2], [2, 1], [1, 2, 0], [258], [])
        for group in ("a/b", "a_b")
        for secret in (SECRET, SECRET[:-1])
    }
    assert len(keys) == 20


@given(INPUTS, INPUTS)
def test_two_inputs_share_a_key_only_if_they_are_equal(one, other):
    same_key = kv_key(one[0], one[1], one[2], SECRET) == kv_key(other[0], other[1], other[2], SECRET)
    assert same_key == (one == other)


@given(st.text("ab/_", min_size=2, max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_moving_the_boundary_between_fields_changes_the_key(text, first, second):
    keys = {
        kv_key(dataclasses.replace(PROFILE, model=text[:cut], weights=text[cut:]), [1], "g", SECRET)
        for cut in (first, second)
    }
    assert len(keys) == len({text[:first], text[:second]})


def test_models_that_differ_only_in_a_separator_never_meet():
    names = ["a/b", "a_b", "a b", "a:b", "ab", "A/b"]
    keys = {kv_key(dataclasses.replace(PROFILE, model=name), [1], "g", SECRET) for name in names}
    assert len(keys) == len(names)


def test_groups_have_unrelated_secrets():
    secrets = {group_secret(SECRET, "a"), group_secret(SECRET, "b"), group_secret(SECRET[1:], "a")}
    assert len(secrets) == 3
    assert all(len(secret) == 32 for secret in secrets)


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1.5, "7"])
def test_a_token_id_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="token ids"):
        kv_key(PROFILE, [1, bad], "g", SECRET)


def test_an_empty_secret_is_refused():
    with pytest.raises(ValueError, match="empty"):
        kv_key(PROFILE, [1], "g", b"")
    with pytest.raises(ValueError, match="empty"):
        group_secret(b"", "g")
