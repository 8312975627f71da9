"""Settings and the master secret."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from precompute.reader import check_device
from serving.settings import Settings, load_settings, master_secret
from storage.errors import UserError


def test_an_unknown_setting_is_refused_with_its_nearest_name() -> None:
    with pytest.raises(UserError, match="PREREAD_TOP_K"):
        load_settings({"PREREAD_TOPK": "3"})


def test_other_users_of_the_machine_have_no_way_into_the_data_folder(tmp_path: Path) -> None:
    master_secret(Settings(data_dir=tmp_path / "new" / "data"))
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "data" / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "open").mkdir(mode=0o755)
    master_secret(Settings(data_dir=tmp_path / "open"))
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_a_bad_value_names_its_variable() -> None:
    with pytest.raises(UserError, match="PREREAD_PORT"):
        load_settings({"PREREAD_PORT": "many"})


@pytest.mark.parametrize(("name", "value"), [("PREREAD_PORT", "99999"), ("PREREAD_PORT", "0"), ("PREREAD_DTYPE", "float7")])
def test_a_value_that_nothing_could_start_with_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*{value}"):
        load_settings({name: value})


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    check_device("cpu")
    with pytest.raises(UserError, match="PREREAD_DEVICE=nosuch cannot be used here"):
        check_device("nosuch")


def test_kv_is_small_where_bytes_are_paid_for_and_fast_where_they_are_not() -> None:
    assert load_settings({}).stored_codec == "raw"
    assert load_settings({"PREREAD_OBJECT_STORE": "s3://bucket/kv"}).stored_codec == "transform"
    assert load_settings({"PREREAD_OBJECT_STORE": "s3://bucket/kv", "PREREAD_CODEC": "int8"}).stored_codec == "int8"


def test_no_plain_copies_lie_on_disk_where_objects_are_encrypted() -> None:
    s3 = {"PREREAD_OBJECT_STORE": "s3://bucket/kv"}
    assert load_settings(s3).disk_cache == 8 << 30
    assert load_settings({**s3, "PREREAD_ENCRYPTION_KEYS": "master"}).disk_cache == 0


def test_a_codec_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert load_settings({"PREREAD_CODEC": "int8"}).codec == "int8"
    with pytest.raises(UserError, match=r"PREREAD_CODEC.*raw.*transform.*'int7'"):
        load_settings({"PREREAD_CODEC": "int7"})


def test_other_programs_variables_are_left_alone() -> None:
    assert load_settings({"TOP_K": "3"}).top_k == Settings().top_k


def _secret(folder: str) -> bytes:
    return master_secret(Settings(data_dir=Path(folder)))


def test_processes_that_start_together_share_one_secret(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        found = pool.map(_secret, [str(tmp_path)] * 8)
    assert len(set(found)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_a_damaged_secret_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    with pytest.raises(UserError, match="damaged"):
        _secret(str(tmp_path))
