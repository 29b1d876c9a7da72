import re
import runpy
import sys
from pathlib import Path

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
