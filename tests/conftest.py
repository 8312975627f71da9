"""Fixtures for every room."""

from hypothesis import settings

# An example may be slow on a busy machine without being wrong.
settings.register_profile("preread", deadline=None)
settings.load_profile("preread")

pytest_plugins = ["fixtures_postgres", "fixtures_s3", "fixtures_models"]
