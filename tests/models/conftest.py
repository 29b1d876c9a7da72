"""Runs every test that asks for `family`, `head` or `choice` over the rows of the table in families.py."""

import pytest
from models.families import FAMILIES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [name for name in ("family", "head", "choice") if name in metafunc.fixturenames]
    if "family" not in names:
        return
    rows = []
    for family in (FAMILIES | getattr(metafunc.module, "OTHER_FAMILIES", {})).values():
        found = [(family,)]
        if "head" in names:
            found = [(*row, head) for row in found for head in family.classes]
        if "choice" in names:
            wanted = getattr(metafunc.module, "ONLY_CHOICES", family.choices)
            found = [(*row, choice) for row in found for choice in family.choices if choice in wanted]
        rows += [pytest.param(*row, id="-".join([family.name, *map(str, row[1:])])) for row in found]
    metafunc.parametrize(names, rows)


def pytest_configure(config: pytest.Config) -> None:
    # The marks of transformers' own tests, see test_transformers_mixins.py.
    for mark in ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: of transformers' mixins")
