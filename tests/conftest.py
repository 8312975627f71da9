"""Fixtures for every room."""

from hypothesis import settings

# An example may be slow on a busy machine without being wrong. The same examples every time, so that a run tells about the
# change and not about luck; `pytest --hypothesis-profile=search` draws new ones.
settings.register_profile("preread", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("preread")

pytest_plugins = ["fixtures_postgres", "fixtures_s3", "fixtures_models"]
