"""Tables of the docs are those that `benchmarks/tables.py` writes from the records."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)
PAGES = {str(path.relative_to(ROOT)): path for path in tables.pages()}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_the_records(page: str):
    text = PAGES[page].read_text(encoding="utf-8")
    assert text == tables.rewrite(text), "run `make tables`"
    assert text.count("<!-- end -->") == len(tables.MARKED.findall(text)), "a marker is broken"


def test_every_table_and_every_record_is_used():
    shown = {name for path in PAGES.values() for _, name, _ in tables.MARKED.findall(path.read_text(encoding="utf-8"))}
    assert shown == set(tables.TABLES)
    source = (ROOT / "benchmarks" / "tables.py").read_text(encoding="utf-8")
    for path in tables.RESULTS.glob("*.json*"):
        script = re.sub(rf"_({'|'.join(tables.PROCESSORS)})$", "", path.stem)
        assert re.search(rf'"{script}[_."]', source) or script in ("compat", "models"), f"no table reads {path.name}"
