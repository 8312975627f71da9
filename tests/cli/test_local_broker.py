"""The local broker: starts, answers only who has its password, ends, and never outlives a second start."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from promised import missing

from serving.celery_app import broker_url, build_celery, check_broker, ringer
from serving.local_broker import LocalBroker, answers, end_leftover, server_binary, write_private
from serving.settings import Settings

pytestmark = pytest.mark.services


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    binary = server_binary()
    if binary is None:
        missing("valkey", "no Redis-compatible server here")
    broker = LocalBroker(binary, tmp_path / "broker", tmp_path / "broker.url")
    broker.start()
    yield broker
    broker.stop()


def test_its_url_is_private_and_found_by_other_processes(broker: LocalBroker, settings: Settings) -> None:
    assert stat.S_IMODE(broker.url_file.stat().st_mode) == 0o600
    assert broker_url(settings) == broker.url
    assert answers(broker.url)


def test_without_the_password_it_refuses(broker: LocalBroker) -> None:
    client = redis.Redis(port=int(broker.url.rsplit(":", 1)[1].split("/")[0]), socket_timeout=2)
    with pytest.raises(redis.AuthenticationError):
        client.ping()
    client.close()


def test_a_bell_reaches_the_queue(broker: LocalBroker, settings: Settings) -> None:
    app = build_celery(settings)
    check_broker(app)()
    ringer(app, {"ingest": "some.task"})("ingest")
    client = redis.Redis.from_url(broker.url)
    assert client.llen("ingest") == 1
    client.close()
    app.close()


def test_stopping_ends_it_and_forgets_the_url(broker: LocalBroker) -> None:
    url = broker.url
    broker.stop()
    assert not answers(url)
    assert not broker.url_file.exists()


def test_one_left_behind_is_ended_before_the_next(broker: LocalBroker) -> None:
    url, process = broker.url, broker.process
    end_leftover(broker.url_file)
    assert process is not None
    assert process.wait(5) == 0
    assert not answers(url)


def test_an_absent_broker_is_no_error_for_who_rings(tmp_path: Path) -> None:
    app = build_celery(Settings(data_dir=tmp_path, broker_url="redis://127.0.0.1:1/0"))
    ringer(app, {"ingest": "some.task"})("ingest")
    with pytest.raises(Exception, match="refused"):
        check_broker(app)()
    app.close()


def test_without_a_server_bells_go_through_files(settings: Settings) -> None:
    app = build_celery(settings)
    ringer(app, {"ingest": "some.task"})("ingest")
    assert len(list((settings.data_dir / "broker" / "queue").iterdir())) == 1
    app.close()


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text("old and world-readable")
    write_private(path, "new")
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
