"""What a site's key opens: one request, of one site, for a short while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import UserError
from storage.site_key import LIFE_SECONDS, SKEW_SECONDS, SiteKey, is_signed, signature, site_secret

MASTER = b"a parent's master secret"
NAME = "kv/ab/" + "ab" * 32
SECRET = site_secret(MASTER, "site-1")
KEY = SiteKey("site-1", "default", SECRET, {"default": b"g" * 32})
NOW = 1_000_000.0


def good(**changes: object) -> bool:
    """Whether a GET of NAME, signed now, is taken for the changed request."""
    expires = int(NOW) + LIFE_SECONDS
    asked = {"secret": SECRET, "method": "GET", "site_id": "site-1", "name": NAME, "expires": expires, "now": NOW, "body": b""}
    given = signature(SECRET, "GET", "site-1", NAME, expires)
    return is_signed(**{"given": given, **asked, **changes})  # type: ignore[arg-type]


def test_a_request_as_signed_is_taken() -> None:
    assert good()


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "HEAD"},
        {"site_id": "site-2"},
        {"name": "kv/ab/" + "ab" * 31 + "ac"},
        {"expires": int(NOW) + LIFE_SECONDS + 1},
        {"body": b"{}"},
        {"secret": site_secret(MASTER, "site-2")},
        {"secret": site_secret(b"another master", "site-1")},
        {"given": "0" * 64},
        {"given": ""},
        {"given": "é" * 64},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_nothing_of_a_request_can_be_exchanged(changes: dict[str, object]) -> None:
    assert not good(**changes)


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_fields_never_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    if (a, b) != (c, d):
        assert signature(SECRET, "GET", a, b, 1) != signature(SECRET, "GET", c, d, 1)


def test_a_signature_ends_and_clocks_may_differ_a_little() -> None:
    ends = NOW + LIFE_SECONDS
    assert good(now=ends + SKEW_SECONDS)
    assert not good(now=ends + SKEW_SECONDS + 1)
    assert good(now=NOW - SKEW_SECONDS)
    assert not good(now=NOW - SKEW_SECONDS - 1), "signed for longer than anyone may ask"


def test_a_key_comes_back_from_its_text_and_shows_no_secret() -> None:
    assert SiteKey.parse(KEY.text()) == KEY
    assert SECRET.hex() not in repr(KEY)
    assert repr(SECRET) not in repr(KEY)


@pytest.mark.parametrize("text", ["", "prs_", "pr_abc", KEY.text()[:-7], KEY.text()[4:], "prs_e30", "prs_bnVsbA", "prs_W10"])
def test_a_damaged_key_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="site add"):
        SiteKey.parse(text)


def test_secrets_of_two_sites_and_of_groups_have_nothing_in_common() -> None:
    from storage.keys import group_secret

    made = {site_secret(MASTER, "default"), site_secret(MASTER, "site-1"), group_secret(MASTER, "default")}
    assert len(made) == 3
