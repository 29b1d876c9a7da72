"""Runs every test that asks for `family`, `head` or `choice` over the rows of the table in families.py."""

from collections.abc import Iterator

import pytest
from models.families import FAMILIES, READ_BY_HEADS, SHARED, built_once, fingerprint


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The head "model" over all choices, the others over those they read; `@pytest.mark.choices` names fewer."""
    names = [name for name in ("family", "head", "choice") if name in metafunc.fixturenames]
    if "family" not in names:
        return
    mark = metafunc.definition.get_closest_marker("choices")
    rows = []
    for family in (FAMILIES | getattr(metafunc.module, "OTHER_FAMILIES", {})).values():
        choices = [name for name in family.choices if mark is None or name in ("default", *mark.args)]
        for head in family.classes if "head" in names else ["model"]:
            read = choices if head == "model" else ["default", *READ_BY_HEADS[head]]
            for choice in [name for name in choices if name in read] if "choice" in names else ["default"]:
                row = [{"family": family, "head": head, "choice": choice}[name] for name in names]
                rows.append(pytest.param(*row, id="-".join([family.name, *row[1:]])))
    metafunc.parametrize(names, rows)


@pytest.fixture(autouse=True)
def _shared_models_are_left_as_they_were() -> Iterator[None]:
    yield
    changed = [key for key, (model, before) in SHARED.items() if fingerprint(model) != before]
    SHARED.clear()
    if changed:
        built_once.cache_clear()
    assert changed == [], "this test changed models that others read: it needs `family.build`"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "choices(*names): run over the default and these choices of a family alone")
    # The marks of transformers' own tests, see test_transformers_mixins.py.
    for mark in ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: of transformers' mixins")
