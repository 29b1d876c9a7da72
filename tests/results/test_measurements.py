"""The dated file of a benchmark: complete after every row, with what was typed but no secret."""

import json
from pathlib import Path

import pytest

from hf_vit.errors import UserError
from hf_vit.results.measurements import Measurements


def test_the_file_is_whole_after_every_row(tmp_path: Path) -> None:
    typed = ["/home/ann/benchmarks/jpeg.py", "--hub_token", "abc", "--output", "/home/ann/out.json"]
    measurements = Measurements(tmp_path / "out.json", typed, "cpu", packages=("torch", "no-such-package"), turns=3)
    for number in (1, 2):
        measurements.add({"name": f"row {number}", "seconds": {"median": number / 3}}, quiet=number == 2)
        written = json.loads((tmp_path / "out.json").read_text())
        assert [row["name"] for row in written["rows"]] == [f"row {place}" for place in range(1, number + 1)]
        assert written["quiet"] is (number == 2)
    assert written["rows"][1]["seconds"] == {"median": 0.6667}
    assert written["command"] == "python jpeg.py --hub_token REDACTED --output out.json"
    assert written["turns"] == 3
    assert "torch" in written["versions"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_without_a_folder_nothing_begins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere for the results"):
        Measurements(tmp_path / "nowhere" / "out.json", "hf-vit bench models", "cpu")
