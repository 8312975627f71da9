"""Fixtures for every room."""

pytest_plugins = ["fixtures_postgres", "fixtures_s3", "fixtures_models"]
