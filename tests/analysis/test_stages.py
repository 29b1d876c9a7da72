"""`analyze` of a run's checkpoints: one report a stage, and the numbers of all over the steps."""

import pytest
from models.families import FAMILIES

from hf_vit.analysis import ANALYSES, AnalysisSettings, StagesDocument, analyze, analyze_stages, stage_folders
from hf_vit.data import make_processor
from hf_vit.errors import UserError
from hf_vit_cli.main import main

SETTINGS = AnalysisSettings(num_images=4, batch_size=4)
ONLY = ["attention_entropy", "cka"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Three checkpoints; the order of their steps is not that of their names."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for seed, step in enumerate((5, 20, 100)):
        model = FAMILIES["plain"].build("classification", seed=seed)
        model.save_pretrained(folder / f"checkpoint-{step}")
        make_processor(model.config).save_pretrained(folder / f"checkpoint-{step}")
    (folder / "checkpoint-200").mkdir()  # half-written
    (folder / "logs").mkdir()
    return folder


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_numbers_are_those_of_every_checkpoint(checkpoints, pictures, tmp_path, monkeypatch):
    before = files(checkpoints)
    out = tmp_path / "out"
    found = analyze_stages(checkpoints, pictures, out, only=ONLY, settings=SETTINGS, device="cpu")
    assert [(stage.name, stage.step) for stage in found.stages] == [(f"checkpoint-{n}", n) for n in (5, 20, 100)]
    assert set(found.numbers) == {"attention_entropy"}  # of CKA facts keep none
    for place, stage in enumerate(found.stages):
        alone = analyze(checkpoints / stage.name, pictures, only=ONLY, settings=SETTINGS, device="cpu")
        assert stage.fingerprint == alone.subject.fingerprint
        for analysis, numbers in found.numbers.items():
            assert {name: values[place] for name, values in numbers.items()} == alone.summaries[analysis]
    assert len({str(one) for one in found.numbers["attention_entropy"]["entropy_nats_by_layer"]}) == 3
    assert StagesDocument.model_validate_json((out / "stages.json").read_bytes()) == found
    assert files(checkpoints) == before
    written = files(out)
    assert {"stages_attention_entropy.png", "checkpoint-20/report.html", "report.html"} <= set(written)
    page = written["report.html"].decode()
    assert page.count('src="data:image/png;base64,') == 1
    assert 'href="checkpoint-100/report.html"' in page
    # Again: everything is kept, nothing changes.
    for name in ONLY:
        monkeypatch.setattr(ANALYSES[name], "measure", None)
    assert analyze_stages(checkpoints, pictures, out, only=ONLY, settings=SETTINGS, device="cpu") == found
    assert files(out) == written


def test_folders_of_checkpoints(checkpoints, tmp_path):
    names = ["checkpoint-5", "checkpoint-20", "checkpoint-100"]
    assert [path.name for path in stage_folders(checkpoints)] == names
    assert [path.name for path in stage_folders(checkpoints.parent)] == names
    assert stage_folders(checkpoints / "checkpoint-5") == stage_folders("google/vit") == stage_folders(tmp_path) == []
    with pytest.raises(UserError, match="holds no checkpoint-<step> folders with weights"):
        analyze_stages(tmp_path, None, tmp_path / "out")


def test_the_command(checkpoints, pictures, tmp_path, capsys):
    typed = ["analyze", checkpoints, "--images", pictures, "--output", tmp_path / "out", "--num-images", 2]
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in (*typed, "--only", "attention_entropy", "--device", "cpu")])
    assert not end.value.code
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.endswith(":")] == [
        f"checkpoint-{step}:" for step in (5, 20, 100)
    ]
    assert (tmp_path / "out" / "stages_attention_entropy.png").is_file()
    assert not (checkpoints / "checkpoint-5" / "facts.json").exists()
