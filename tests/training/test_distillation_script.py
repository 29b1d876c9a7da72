"""The script of distillation: students come after their teacher, and once."""

import importlib
import json
import shutil
import types
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_students_come_after_their_teacher_and_once(monkeypatch, tmp_path):
    """With and without augmentation are other runs; the teacher's weights may be lost, its record is not repeated."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, teacher, asked = importlib.import_module("distillation"), tmp_path / "teacher", []

    def learn(config, data, output, *, distillation, seed, **settings):
        assert distillation is None or Path(distillation.teacher).is_dir()
        asked.append((distillation and distillation.kind, settings.get("epochs"), settings.get("zoom")))
        Path(output).mkdir()
        test = types.SimpleNamespace(top1=0.5 + seed / 100, loss=1.0, ece=0.1)
        return types.SimpleNamespace(test=test, model=torch.nn.Linear(2, 2))

    monkeypatch.setattr(module, "finetune", learn)
    records = module.Records(tmp_path / "r.jsonl")
    for epochs, varied in ((2, False), (2, True), (2, True)):
        module.work(records, list(module.jobs(epochs, varied)), teacher)
    kinds = [None, None, "logit", "soft", "hard"] * 3
    assert asked == [(None, None, None), *((k, 2, 0.0) for k in kinds), *((k, 2, None) for k in kinds)]
    table = module.TABLES["distillation"](records.path)
    assert "| 2, augmented | hard | 3 | 51.0 ± 1.0 | 1.000 ± 0.000 | 10.0 ± 0.0 |" in table
    shutil.rmtree(teacher)
    module.work(records, list(module.jobs(3, True))[:1], teacher)
    assert asked[-2:] == [(None, None, None), (None, 3, None)]
    assert sum(line["way"] == "teacher" for line in map(json.loads, records.path.read_text().splitlines())) == 1
