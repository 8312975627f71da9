"""The embedded model's place in the user's cache: shared, whole or absent, made once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precompute import embedded
from storage.errors import ModelUnsupported

# A process that asks for the model. Its conversion is a stand-in: it notes that it began, waits for a file, then writes.
PROCESS = """
import os, pathlib, sys, time
from precompute import embedded

def convert(gguf, out):
    (out / "model.safetensors").write_text("half")
    with open(os.environ["NOTES"], "a") as notes:
        notes.write("began\\n")
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_text("whole")

embedded._gguf_file = lambda: pathlib.Path(os.environ["GGUF"])
embedded._convert = convert
print(embedded.embedded_model())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user, and a package whose model is a small file."""
    (tmp_path / "model.gguf").write_bytes(b"weights")
    monkeypatch.setattr(embedded, "_gguf_file", lambda: tmp_path / "model.gguf")
    for name, path in (("XDG_CACHE_HOME", "cache"), ("GGUF", "model.gguf"), ("NOTES", "notes"), ("GO", "go")):
        monkeypatch.setenv(name, str(tmp_path / path))
    return tmp_path / "cache"


def begun() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True)


def wait_for_notes(folder: Path) -> str:
    until = time.monotonic() + 60
    while not (folder / "notes").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    return (folder / "notes").read_text()


def test_it_lies_in_the_users_cache_whatever_the_data_folder_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = embedded.embedded_place()
    assert place.is_relative_to(cache / "preread" / "models")
    assert place.name == "SmolLM2-135M-Instruct-bf16", "it is the model's id, in the API and in keys"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(cache.parent))
    assert embedded.embedded_place().is_relative_to(cache.parent / ".cache" / "preread")


def test_another_release_of_the_package_is_another_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = embedded.embedded_place()
    monkeypatch.setattr(embedded, "CONVERSION", embedded.CONVERSION + 1)
    assert embedded.embedded_place() != place
    monkeypatch.undo()
    (cache.parent / "model.gguf").write_bytes(b"other weights")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(embedded, "_gguf_file", lambda: cache.parent / "model.gguf")
    assert embedded.embedded_place() != place


def test_of_two_processes_one_converts_and_both_get_the_whole_model(cache: Path) -> None:
    first, second = begun(), begun()
    wait_for_notes(cache.parent)
    time.sleep(0.5)
    (cache.parent / "go").touch()
    places = {Path(p.communicate(timeout=60)[0].strip()) for p in (first, second)}
    assert places == {embedded.embedded_place()}
    assert (cache.parent / "notes").read_text() == "began\n"
    assert (places.pop() / "model.safetensors").read_text() == "whole"


def test_a_killed_conversion_leaves_no_half_model_and_what_it_left_goes(cache: Path) -> None:
    process = begun()
    wait_for_notes(cache.parent)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    place = embedded.embedded_place()
    assert not place.exists()
    assert list(place.parent.glob(".convert-*"))
    (cache.parent / "go").touch()
    assert begun().communicate(timeout=60)[0].strip() == str(place)
    assert [path.name for path in place.parent.iterdir() if path.name != ".lock"] == [place.name]


def test_a_conversion_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise ValueError("no such tensor")

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(ValueError, match="no such tensor"):
        embedded.embedded_model()
    assert os.listdir(embedded.embedded_place().parent) == [".lock"]


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(ModelUnsupported, match="XDG_CACHE_HOME"):
        embedded.embedded_model()
