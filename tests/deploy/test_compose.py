"""docker-compose.yml and the Dockerfile say what the documentation promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SECRETS = ("PREREAD_SECRET", "POSTGRES_PASSWORD", "BROKER_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")
OURS = ("api", "worker", "beat")
BACKENDS = ("valkey", "postgres", "seaweedfs")


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compose(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_all_services_are_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {*OURS, *BACKENDS}


@pytest.mark.parametrize("name", OURS)
def test_our_processes_run_their_command_from_one_image(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["command"] == ["serve" if name == "api" else name]
    assert service["image"] == compose["services"]["api"]["image"]


def test_settings_of_the_containers_are_known(compose: dict[str, Any]) -> None:
    from serving.settings import load_settings

    plain = {k: re.sub(r"\$\{[^}]*\}", "x", v) for k, v in compose["services"]["api"]["environment"].items()}
    settings = load_settings(plain)
    assert settings.database.startswith("postgresql+psycopg://")
    assert settings.objects.startswith("s3://")
    assert settings.broker_url.startswith("redis://")


def test_secrets_have_no_defaults(text: str) -> None:
    for name in SECRETS:
        uses = re.findall(r"\$\{" + name + r"([^}]*)\}", text)
        assert uses, name
        assert all(use.startswith(":?") for use in uses), name
    plain_secret = re.compile(r"^\s*\w*(PASSWORD|SECRET|SECRET_KEY):\s*(?!\$\{)\S", re.M)
    assert not plain_secret.search(text)


@pytest.mark.parametrize("name", [*BACKENDS, "worker", "beat"])
def test_only_the_api_is_published(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert "ports" not in service
    assert service["networks"] == ["inner"]
    assert compose["networks"]["inner"]["internal"] is True


@pytest.mark.parametrize("name", ["api", *BACKENDS])
def test_health_is_checked(compose: dict[str, Any], name: str) -> None:
    assert compose["services"][name]["healthcheck"]["test"]


def test_the_api_waits_for_what_it_needs(compose: dict[str, Any]) -> None:
    needs = compose["services"]["api"]["depends_on"]
    assert {name: need["condition"] for name, need in needs.items()} == dict.fromkeys(
        BACKENDS, "service_healthy"
    )


def test_workers_scale(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    assert worker["deploy"]["replicas"] == "${WORKERS:-2}"
    assert "container_name" not in worker


def test_what_must_last_is_in_named_volumes(compose: dict[str, Any]) -> None:
    for name in ("postgres", "seaweedfs", "api"):
        (mount,) = compose["services"][name]["volumes"]
        assert mount.split(":")[0] in compose["volumes"]


def test_images_are_pinned_to_a_version(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        _, _, tag = service["image"].partition(":")
        assert tag not in ("", "latest"), name


def test_the_image_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert "USER preread" in lines
    assert lines.index("USER preread") > max(i for i, line in enumerate(lines) if line.startswith("RUN"))


def test_docker_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no docker CLI with compose here")
    environ = os.environ | dict.fromkeys(SECRETS, "checked")
    done = subprocess.run(
        [docker, "compose", "-f", str(ROOT / "docker-compose.yml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
