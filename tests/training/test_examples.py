import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoModelForImageClassification

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_stock_trainer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stock_trainer.py", "--steps", "120", "--output", str(tmp_path / "out")])
    runpy.run_path(str(EXAMPLES / "stock_trainer.py"), run_name="__main__")
    accuracy = float(re.search(r"validation accuracy ([\d.]+)%", capsys.readouterr().out)[1])
    # Chance is 10%.
    assert accuracy > 50
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.label2id["7"] == 7
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size.height == 8


@pytest.mark.slow
def test_digits_families(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["digits_families.py", str(tmp_path / "digits"), "--epochs", "2"])
    runpy.run_path(str(EXAMPLES / "digits_families.py"), run_name="__main__")
    for name in ("vit-digits", "hybrid-digits", "axial-digits", "local-digits"):
        card = (tmp_path / "digits" / name / "README.md").read_text()
        assert "python digits_families.py digits --epochs 2" in card
