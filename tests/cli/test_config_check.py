"""`preread config check` as a child process: what is set, where, what for, and what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_kit import Shell
from promised import missing

from serving.api import token_ids
from serving.settings import Settings, given_settings, load_settings
from storage.errors import UserError


def shell(**settings: str) -> Shell:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
    return Shell({**kept, **{f"PREREAD_{name}": value for name, value in settings.items()}})


def test_every_setting_is_explained_with_where_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "preread.toml").write_text('top_k = 5\nmethod = "full"\n')
    found = shell(CONFIG=str(tmp_path / "preread.toml"), TOP_K="3").json("config", "check")
    rows = {row["name"]: row for row in found["settings"]}
    assert len(rows) == len(Settings.__dataclass_fields__)
    assert all(len(row["about"]) > 8 for row in rows.values())
    assert (rows["PREREAD_TOP_K"]["value"], rows["PREREAD_TOP_K"]["from"]) == (3, "PREREAD_TOP_K")
    assert (rows["PREREAD_METHOD"]["value"], rows["PREREAD_METHOD"]["from"]) == ("full", str(tmp_path / "preread.toml"))
    assert rows["PREREAD_PORT"]["from"] == "default"


def test_no_secret_is_printed() -> None:
    secrets = {name: f"hidden-{name}-{'x' * 32}" for name in ("SECRET", "S3_ACCESS_KEY", "S3_SECRET_KEY", "ENCRYPTION_KEYS")}
    urls = {"DATABASE_URL": "postgresql://ann:hidden-pass@db/x", "BROKER_URL": "redis://:hidden-pass@redis/0"}
    for words in (["config", "check"], ["config", "check", "--json"]):
        printed = shell(**secrets, **urls).run(*words).stdout
        assert "hidden" not in printed
        assert "(set)" in printed
        assert "ann:***@db" in printed


def test_a_secret_is_not_in_the_settings_own_text() -> None:
    assert "hidden" not in repr(Settings(secret="hidden", s3_secret_key="hidden", parent_key="hidden"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MODEL", "/nowhere/model", "PREREAD_MODEL"),
        ("SOURCE_ROOTS", "/nowhere/at-all", "PREREAD_SOURCE_ROOTS"),
        ("POLICY_FILE", "/nowhere/rules.yaml", "policy file /nowhere/rules.yaml"),
        ("OIDC_FILE", "/nowhere/oidc.yaml", "PREREAD_OIDC_FILE=/nowhere/oidc.yaml cannot be read"),
        ("DATABASE_URL", "mysql://host/x", "catalogue"),
    ],
)
def test_what_would_not_start_is_said_and_the_exit_code_tells(name: str, value: str, said: str) -> None:
    done = shell(**{name: value}).run("config", "check", code=2)
    assert said in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk = 3", "top_k"),
        ('port = "8321"', "port in .* must be a int"),
        ("port = 99999", "PREREAD_PORT"),
        ("port = true", "must be a int"),
        ("port = = 1", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "preread.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        load_settings({"PREREAD_CONFIG": str(tmp_path / "preread.toml")})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_settings({"PREREAD_CONFIG": str(tmp_path / "absent.toml")})


def test_a_file_says_what_the_environment_leaves_open(tmp_path: Path) -> None:
    file = tmp_path / "preread.toml"
    file.write_text('data_dir = "elsewhere"\nlease_seconds = 5\ncanary_share = 0.5\n')
    settings = load_settings({"PREREAD_CONFIG": str(file), "PREREAD_CANARY_SHARE": "0"})
    assert (settings.data_dir, settings.lease_seconds, settings.canary_share) == (Path("elsewhere"), 5.0, 0.0)
    assert given_settings({"PREREAD_CONFIG": str(file)})["lease_seconds"].where == str(file)


def test_a_table_of_token_ids_is_installed_from_a_file_or_refused_in_a_line(tmp_path: Path) -> None:
    data, wrong = tmp_path / "data", tmp_path / "wrong"
    wrong.write_bytes(b"eA== 0\n")
    for refused in (wrong, tmp_path / "absent"):
        said = shell(DATA_DIR=str(data)).run("config", "token-table", str(refused), code=2).stderr
        assert said.startswith(f"preread: {refused} ")
        assert said.count("\n") == 1
    try:
        packaged = token_ids.table_file(data)
    except UserError as error:
        missing("token-table", str(error))
    shell(DATA_DIR=str(data)).run("config", "token-table", str(packaged))
    assert (data / token_ids.NAME).read_bytes() == packaged.read_bytes()
