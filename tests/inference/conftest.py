"""The families and choices of the contract tests, here too."""

from models.conftest import pytest_generate_tests  # noqa: F401 (a hook of pytest)
