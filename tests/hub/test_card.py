"""The model card: valid metadata, only measured numbers, nothing where nothing is known, and examples that run."""

import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from dense_heads import build
from evaluation.tiny import NAMES, make_classifier, make_processor
from hub.conftest import save_model, training_record
from huggingface_hub import ModelCard, parse_eval_result_entries
from loopback.client import Client, Loopback
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    TorchAoConfig,
    ViTMSNConfig,
    ViTMSNModel,
    pipeline,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_vit import (
    HfAxialResNetConfig,
    HfAxialResNetModel,
    HfViTForImageClassification,
    HfViTModel,
    push_to_hub,
    variant_config,
)
from hf_vit.audit.results import select_records
from hf_vit.data import load_data, to_rgb
from hf_vit.errors import UserError
from hf_vit.evaluation import predict
from hf_vit.hub import card
from hf_vit.hub.card import record_power, refresh_card, render_card, write_card
from hf_vit.hub.card_metadata import (
    find_common_license,
    find_license,
    find_metadata_errors,
    record_base_license,
    require_license,
)
from hf_vit.hub.contents import collect, list_missing_facts, list_plots
from hf_vit.hub.example import make_example
from hf_vit.hub.model_folder import count_parameters, read_config
from hf_vit.hub.published_results import RESULTS_FILE, make_results_file
from hf_vit.loading.model import load_model
from hf_vit.results.facts import DataFact, Facts, Record, append_record
from hf_vit.training.recipes.registry import find_recipe
from hf_vit.writing import write_atomically

Command = Callable[..., tuple[int, str, str]]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def folder(model_folder: Path) -> Path:
    """A saved classifier of ours, without any facts."""
    for name in ("facts.json", "README.md", "learning_curve.png"):
        (model_folder / name).unlink()
    return model_folder


def record(kind: str, values: dict[str, Any], **fields: Any) -> Record:
    unknown = {"command": f"hf-vit {kind}", "seed": None, "data": None}
    return training_record(kind=kind, values=values, **unknown | fields)


def data(split: str, size: int, name: str = "digits") -> DataFact:
    return DataFact(name=name, fingerprint="f" * 16, split=split, size=size)


TRAINING = {
    "recipe": {"learning_rate": 0.00125, "augmentation": {"shift_px": 1}, "ema": True},
    "steps": 4321,
    "validation_accuracy": 0.97531,
}
EVALUATION = {
    "top1": 0.98765, "top5": 0.99912, "ece": 0.01234, "loss": 0.0543219,
    "per_class": {"ant": 0.9111, "bee": 1.0}, "pictures": ["confusion_matrix.png", "wrong_images.png"],
}  # fmt: skip


@pytest.fixture
def told(folder: Path) -> Path:
    """The same, trained and evaluated."""
    hardware = {"device": "cpu", "name": "Some CPU", "cores": 2}
    versions = {"torch": "9.8.7"}
    append_record(
        folder,
        record("training", TRAINING, seed=17, data=data("train", 1257), seconds=75.44, hardware=hardware,
               versions=versions, command="hf-vit finetune --data digits"),
    )  # fmt: skip
    append_record(folder, record("evaluation", EVALUATION, seed=0, data=data("test", 360)))
    for name in ("learning_curve.png", "confusion_matrix.png"):
        (folder / name).write_bytes(b"png")
    return folder


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.removeprefix("---\n").split("\n---\n")[0])


def headings(card: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", card, flags=re.MULTILINE)


def test_every_fact_is_in_the_card(told: Path) -> None:
    card = render_card(told)
    assert headings(card) == [
        "my-vit", "How to use it", "Results", "Training", "Intended use and limits", "Citation",
    ]  # fmt: skip
    assert "| digits | test | 360 | 17 | 98.77% | 99.91% | 1.23% | 0.0543 | 2031-02-03 |" in card
    assert "| ant | 91.11% |" in card
    assert "| bee | 100.00% |" in card
    for row in (
        "Data | digits, split train, 1,257 images", "Seed | 17", "Time | 75.4 s", "Machine | Some CPU, 2 CPU cores",
        "Date | 2031-02-03", "Versions | torch 9.8.7", "steps | 4321", "validation accuracy | 97.53%",
        "learning rate | 0.00125", "augmentation shift px | 1", "ema | yes",
    ):  # fmt: skip
        assert f"| {row} |" in card
    assert "```bash\nhf-vit finetune --data digits\n```" in card
    assert "1 layer, width 16, 2 attention heads, patches of 4x4 px, images of 8x12 px" in card
    assert "classifies images into 6 classes" in card
    assert f"Classes: {', '.join(NAMES)}." in card
    assert "arxiv.org/abs/2010.11929" in card
    assert "trained on digits, split train, 1,257 images" in card
    assert pictures(card) == ["confusion_matrix.png", "learning_curve.png"]
    (told / "learning_curve.png").unlink()
    (told / "wrong_images.png").write_bytes(b"png")
    assert pictures(render_card(told, share_images=True)) == ["confusion_matrix.png", "wrong_images.png"]


def pictures(card: str) -> list[str]:
    return re.findall(r"!\[.*?\]\((.*?)\)", card)


def test_without_facts_there_are_no_sections_and_no_numbers(folder: Path) -> None:
    card = render_card(folder)
    assert headings(card) == ["my-vit", "How to use it", "Citation"]
    body = card.split("---", 2)[2].split("## Citation")[0]
    prose = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    # The shape of the model, its number of classes, parameters and FLOPs (a multiply-add counts 2): all from
    # config.json and the weights; and what pipelines see (`test_what_the_card_says_of_pipelines_is_so` measures it).
    shape = ["1", "16", "2", "4", "4", "8", "12", "6", "24", "29", "16", "57", "2"]
    measured = [f"{count_parameters(folder):,}", f"{count_flops(folder) / 1e6:.4g}"]
    assert sorted(re.findall(r"\d[\d,.]*\d|\d", prose)) == sorted(shape + measured)
    assert not {"model-index", "metrics", "datasets", "base_model"} & set(metadata(card))


def count_flops(folder: Path) -> int:
    """By torch's own counter, while the model runs."""
    model = HfViTForImageClassification.from_pretrained(folder).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 8, 12))
    return counter.get_total_flops()


def test_the_metadata_is_what_the_hub_reads(told: Path) -> None:
    card = ModelCard(render_card(told))
    assert card.data.license is None
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.tags == ["image-classification", "vision", "hf_vit"]
    assert card.data.metrics == ["accuracy"]
    assert card.data.model_name == "my-vit"
    first, second = card.data.eval_results
    assert (first.task_type, first.dataset_type, first.dataset_name, first.dataset_split) == (
        "image-classification", "digits", "digits", "test",
    )  # fmt: skip
    assert (first.metric_type, first.metric_value, first.metric_name) == ("accuracy", 0.9877, "Top-1 accuracy")
    assert (second.metric_value, second.metric_name) == (0.9991, "Top-5 accuracy")
    assert card.data.datasets is None
    assert str(ModelCard(str(card))) == str(card)


def test_nobody_s_license_is_asserted(told: Path, folder: Path, tmp_path: Path) -> None:
    """It is declared or inherited; a push asks for it before the Hub is asked anything."""
    assert "license" not in metadata(render_card(told))
    with pytest.raises(UserError, match="the model's license is unknown; give one"):
        push_to_hub(told, "alice/my-vit")
    append_record(told, record("training", {"base_model": "a/b", "base_license": "cc-by-4.0"}, data=data("train", 9)))
    assert metadata(render_card(told))["license"] == "cc-by-4.0"
    assert metadata(render_card(told, license="mit"))["license"] == "mit"
    named = {"license": "other", "license_name": "dinov3-license", "license_link": "https://example.org/license"}
    base = {f"base_{name}": text for name, text in named.items()}
    append_record(told, record("training", {"base_model": "a/b"} | base, data=data("train", 9)))
    write_card(told)
    for text in (write_card(told).read_text(), render_card(told, license="other")):
        assert {name: metadata(text).get(name) for name in named} == named
    assert record_base_license(find_license(str(told))) == base
    assert find_common_license([str(told), str(told)]) == named
    write_card(told, license="mit")
    assert "license_name" not in metadata(render_card(told))
    assert list(map(find_license, (str(told), "S/16", str(tmp_path)))) == [{"license": "mit"}, {}, {}]
    assert find_common_license([str(told), str(told)]) == {"license": "mit"}
    assert find_common_license([str(told), "S/16"]) == {}
    with pytest.raises(UserError, match=r"'Apache 2' is not a license id of the Hub; give one such as apache-2\.0"):
        require_license("Apache 2", None)
    require_license(None, str(told))
    with pytest.raises(UserError, match="the model's license is unknown"):
        require_license(None, "S/16")


def test_how_it_was_made_of_others_is_told(folder: Path) -> None:
    append_record(folder, record("training", {"base_model": "a/b@v1"}, data=data("train", 9)))
    found = metadata(render_card(folder))
    assert (found["base_model"], found["base_model_relation"]) == ("a/b", "finetune")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "torchao"}}))
    assert metadata(render_card(folder))["base_model_relation"] == "quantized"
    soup = {"recipe": {"soup": "uniform", "ingredients": "a/b@v1, local, hf://c/d"}}
    append_record(folder, record("training", soup, data=data("validation", 9)))
    assert "trained on" not in render_card(folder), "its data chose among models"
    found = metadata(render_card(folder))
    assert (found["base_model"], found["base_model_relation"]) == (["a/b", "c/d"], "merge")
    append_record(folder, record("training", {"base_model": "local"}, data=data("train", 9)))
    append_record(folder, record("training", {"recipe": {"soup": "uniform", "ingredients": "x, y"}}))
    assert not {"base_model", "base_model_relation"} & set(metadata(render_card(folder)))


def test_a_quantized_model_is_served_with_its_library_and_goes_no_further(
    tmp_path: Path, model_folder: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    original = shutil.copytree(model_folder, tmp_path / "original")
    assert "parameters" in render_card(original)
    options = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    AutoModelForImageClassification.from_pretrained(model_folder, **options).save_pretrained(model_folder)
    config = model_folder / "config.json"
    saved = config.read_text()
    for library in ("bitsandbytes", "torchao"):
        config.write_text(saved.replace('"quant_method": "torchao"', f'"quant_method": "{library}"'))
        contents = collect(model_folder, "alice/my-vit", scratch=tmp_path / library, license="mit")
        assert f"\n{library}\n".encode() in b"\n" + contents.files["requirements.txt"].source
    assert "parameters" not in render_card(model_folder), "its files hold scales, too"
    code, out, _ = command("diff", original, model_folder)
    assert (code, "relative norm of the difference" in out) == (0, True)
    to = ("--output", tmp_path / "out")
    for use, words in (
        ("exported", ("export", model_folder, tmp_path / "out", "--to", "onnx")),
        ("shown", ("page", model_folder, *to)),
        ("tried in float32", ("verify", model_folder, "--doors")),
        ("trained", ("finetune", "--model", model_folder, "--data", "digits", "--steps", "1", *to)),
    ):
        code, _, err = command(*words)
        assert (code, f"is quantized, so it cannot be {use}; give the model from before" in err) == (1, True), err


def test_settings_that_were_off_are_not_told(folder: Path) -> None:
    """The defaults of every recipe: of what is off there is no row, and of what is on there is."""

    def rows(settings: dict[str, Any]) -> dict[str, str]:
        append_record(folder, record("training", {"recipe": settings}, data=data("train", 9)))
        card = render_card(folder).split("| Recipe | |")[1]
        return dict(line.strip("| ").split(" | ") for line in card.split("\n\n")[0].splitlines()[2:])

    recipe = find_recipe("default-small")
    shown = rows(recipe.override(learning_rate=0.5, mixup_alpha=0.2, weight_decay=0.0).settings())
    assert (shown["learning rate"], shown["mixup alpha"], shown["weight decay"]) == ("0.5", "0.2", "0")
    assert {"momentum", "lora rank", "lora alpha", "bce threshold", "sam rho", "sam micro batches"}.isdisjoint(shown)
    used = recipe.override(optimizer="sgd", tune="lora", loss="bce", bce_threshold=0.1, average_decay=None)
    shown = rows(used.settings())
    assert {"momentum", "lora rank", "lora alpha", "bce threshold"} <= set(shown)
    assert {"beta1", "beta2"}.isdisjoint(shown)
    assert rows({"sam_rho": 0.1, "sam_micro_batches": False}) == {"sam rho": "0.1", "sam micro batches": "no"}


def test_examples_to_try_are_those_that_somebody_put_there(told: Path, tmp_path: Path) -> None:
    write_card(told, license="mit")
    (told / "examples").mkdir()
    for name in ("a cat.png", "dog.JPG", "._dog.JPG", "notes.txt"):
        (told / "examples" / name).write_bytes(b"x")
    address = "https://huggingface.co/me/mine/resolve/main/examples"
    assert metadata(render_card(told, repo_id="me/mine"))["widget"] == [
        {"src": f"{address}/a%20cat.png", "example_title": "a cat"},
        {"src": f"{address}/dog.JPG", "example_title": "dog"},
    ]
    assert "widget" not in metadata(render_card(told)), "a folder has no page"
    append_record(told, record("training", {}, data=data("train", 9)))
    (tmp_path / "scratch").mkdir()
    shared = collect(told, "me/mine", scratch=tmp_path / "scratch").files
    assert {name for name in shared if name.startswith("examples/")} == {"examples/a cat.png", "examples/dog.JPG"}
    (told / "examples" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"x")
    with pytest.raises(UserError, match=r"'caf.udce9\.png' in .*examples cannot be shared; rename the file"):
        collect(told, "me/mine", scratch=tmp_path / "scratch")
    (told / "examples" / os.fsdecode(b"caf\xe9.png")).unlink()
    (told / "examples" / "secret.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "secret.png").write_bytes(b"private")
    with pytest.raises(UserError, match=r"secret\.png is a link to a file outside"):
        collect(told, "me/mine", scratch=tmp_path / "scratch")


def test_data_and_models_of_the_hub_are_linked_and_numbers_have_commands(folder: Path) -> None:
    images = DataFact(name="uoft-cs/cifar10:plain", fingerprint="f" * 16, split="train", size=9, revision="c" * 40)
    append_record(folder, record("training", {"base_model": "out"}, data=data("train", 9, "holiday pictures")))
    append_record(folder, record("training", {"base_model": "google/vit-base-patch16-224"}, data=images))
    found = metadata(render_card(folder))
    assert (found["datasets"], found["base_model"]) == (["uoft-cs/cifar10"], "google/vit-base-patch16-224")
    append_record(folder, record("evaluation", {"top1": 0.5}, data=data("test", 4), command="hf-vit evaluate x"))
    card = render_card(folder, repo_id="me/mine")
    assert "9 images ([on the Hub](https://huggingface.co/datasets/uoft-cs/cifar10)) |" in card
    assert "- It was fine-tuned on uoft-cs/cifar10" in card
    assert f"| Fingerprint of the images | {'f' * 16} |" in card
    assert f"| Revision of the data | {'c' * 40} |" in card
    assert "Measured by\n\n```bash\nhf-vit evaluate x\n```\n\n`hf-vit verify me/mine --results` evaluates" in card


def test_results_of_replaced_weights_are_not_shown(told: Path) -> None:
    """The same tensors in other files are no other weights; a user's own program records nothing."""
    model = AutoModelForImageClassification.from_pretrained(told)
    append_record(told, record("evaluation", {"thresholds": {"ant": 0.4}}, data=data("test", 4)))
    (told / "model.safetensors").unlink()
    model.save_pretrained(told, max_shard_size="2KB")
    assert len(list(told.glob("*.safetensors"))) > 1
    card = render_card(told)
    assert "98.77%" in card
    assert "The weights were replaced" not in card
    assert Facts.load(told).find_thresholds() == {"ant": 0.4}
    torch.nn.init.ones_(model.classifier.weight)
    model.save_pretrained(told)
    card = render_card(told)
    assert "98.77%" not in card
    assert "The weights were replaced" in card
    assert Facts.load(told).find_thresholds() == {}
    append_record(told, record("evaluation", {"top1": 0.75}, data=data("test", 4)))
    assert "| 75.00% |" in render_card(told), "measured after it"


def test_an_evaluation_of_older_weights_is_not_shown(told: Path) -> None:
    append_record(told, record("training", {"steps": 1}, seed=18, data=data("train", 1257)))
    card = render_card(told)
    assert "98.77%" not in card
    assert "no accuracy is known" in card
    assert pictures(card) == ["learning_curve.png"]
    append_record(told, record("evaluation", {"top1": 1.0}, data=data("train", 1257)))
    append_record(told, record("evaluation", {"top1": 0.25}, data=data("test", 360)))
    append_record(told, record("evaluation", {"top1": 0.75}, data=data("test", 360)))
    append_record(told, record("evaluation", {"top1": 0.5}, data=data("validation", 180)))
    rows = [line for line in render_card(told).splitlines() if line.startswith("| digits |")]
    assert pictures(render_card(told)) == ["learning_curve.png"]
    assert rows == [
        "| digits | test | 360 | 18 | 75.00% | - | - | - | 2031-02-03 |",
        "| digits | validation | 180 | 18 | 50.00% | - | - | - | 2031-02-03 |",
    ]


def test_thresholds_are_those_of_predict(folder: Path) -> None:
    """No evaluation has fitted any."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    append_record(folder, record("training", TRAINING, data=data("train", 9)))
    limits = " ".join(render_card(folder).split("## Intended use and limits")[1].split())
    assert "reaches a threshold: the one in facts.json, else 0.5, which the example above takes for all." in limits


def test_a_conversion_is_told(folder: Path) -> None:
    values = {"source": "B_16.npz", "verification": {"float32": {"largest_difference": 1.5e-6}}}
    append_record(folder, record("conversion", values, command="hf-vit convert B_16.npz out"))
    card = render_card(folder)
    assert "## Conversion" in card
    assert "hf-vit convert B_16.npz out" in card
    assert r"| source | B\_16.npz |" in card
    assert "### Parity with the original" in card
    assert "| float32 largest difference | 1.5e-06 |" in card.split("### Parity with the original")[1]


def test_names_cannot_break_the_page(folder: Path) -> None:
    name = "a|b *c* <d> `e` [f]\n---"
    values = {"top1": 0.5, "per_class": {name: 0.5}}
    append_record(folder, record("evaluation", values, data=data("test", 4, name)))
    append_record(folder, record("analysis", {"pictures": {"analysis_cka.png": "CKA"}}, data=data("test", 4, name)))
    (folder / "analysis_cka.png").write_bytes(b"png")
    card = render_card(folder)
    assert list_plots(folder, card) == {"analysis_cka.png"}, "it is shared"
    assert metadata(card)["model-index"][0]["results"][0]["dataset"]["name"] == name.replace("\n", " ")
    row = next(line for line in card.splitlines() if "| test |" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 10
    assert r"a\|b \*c\* \<d\> \`e\` \[f\] ---" in row
    assert str(ModelCard(card)) == card.rstrip("\n") + "\n"


def test_name_license_and_words_of_others_are_kept(told: Path) -> None:
    """But not the name of the folder before it was renamed, where another model may be by now."""
    write_card(told)
    told = told.rename(told.with_name("renamed"))
    assert headings(write_card(told).read_text())[0] == "renamed"
    written = write_card(told, repo_id="user/best-vit", license="cc-by-4.0")
    written.write_bytes(written.read_bytes() + b"saved by another program: \xe8")
    card = write_card(told).read_text()
    assert 'repo = "user/best-vit"' in card
    assert headings(card)[0] == "best-vit"
    assert metadata(card)["license"] == "cc-by-4.0"
    assert refresh_card(told) == told / "README.md"
    for words in ("my words", "---\nlicense: [\n---\nbroken metadata", "---\nlicense: mit\n---\nmine"):
        (told / "README.md").write_text(words)
        assert refresh_card(told) is None
        assert (told / "README.md").read_text() == words
    assert metadata(render_card(told))["license"] == "mit"
    (told / "scratch").mkdir()
    with pytest.raises(UserError, match=r"states the license mit, but --license cc-by-4\.0 was given; correct"):
        collect(told, "me/mine", scratch=told / "scratch", license="cc-by-4.0")


def test_of_two_at_once_the_card_of_the_latest_facts_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command records and refreshes while this one, which has read the facts, is about to write."""
    write, others = write_atomically, list[threading.Thread]()

    def meet(path: Path, content: str) -> None:
        monkeypatch.undo()
        others.append(threading.Thread(target=record_and_refresh))
        others[0].start()
        others[0].join(1)  # it waits for its turn; without one it is done by now
        write(path, content)

    def record_and_refresh() -> None:
        append_record(folder, record("evaluation", EVALUATION, data=data("test", 300)))
        refresh_card(folder)

    monkeypatch.setattr(card, "write_atomically", meet)
    refresh_card(folder)
    others[0].join()
    assert (folder / "README.md").read_text() == render_card(folder)
    assert "98.77%" in render_card(folder)


def test_parameters_are_counted_in_the_files(folder: Path, tmp_path: Path) -> None:
    model = HfViTForImageClassification.from_pretrained(folder)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(folder) == expected
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="4KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert count_parameters(sharded) == expected
    next(sharded.glob("*.safetensors")).unlink()
    assert count_parameters(sharded) is None
    assert "parameters." not in render_card(sharded)
    resnet = HfAxialResNetModel(HfAxialResNetConfig(image_size=8, stage_depths=(1,), stem_width=8))
    for name, other in (("norms", resnet), ("loss", build("plain", "mask2former")[0])):
        other.save_pretrained(tmp_path / name)
        assert count_parameters(tmp_path / name) == other.num_parameters(), "without what is no parameter"


def test_a_model_without_a_head_and_a_folder_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HfViTModel(variant_config("Ti/4", image_size=8, **SMALL)).save_pretrained(tmp_path / "trunk")
    card = render_card(tmp_path / "trunk")
    assert metadata(card)["pipeline_tag"] == "image-feature-extraction"
    assert "AutoModel.from_pretrained" in card
    assert "classes" not in card
    ViTMSNModel(ViTMSNConfig(**SMALL, image_size=8, patch_size=4)).save_pretrained(tmp_path / "theirs")
    make_processor().save_pretrained(tmp_path / "theirs")
    Image.new("RGB", (9, 9)).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    with redirect_stdout(io.StringIO()) as printed:
        exec(make_example(read_config(tmp_path / "theirs"), "theirs", "transformers"), {})
    assert printed.getvalue() == "torch.Size([1, 5, 16])\n", "it returns no pooled features"
    with pytest.raises(UserError, match=r"config\.json is missing"):
        render_card(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        render_card(tmp_path)


def test_the_command_writes_the_card(told: Path, command: Command, fails: Callable[..., str]) -> None:
    code, out, _ = command("card", told, "--repo", "me/mine", "--license", "mit")
    assert (code, str(told / "README.md") in out) == (0, True)
    assert (told / "README.md").read_text() == render_card(told, repo_id="me/mine", license="mit")
    card = (told / "README.md").read_text()
    (told / "README.md").write_text("my words")
    assert "was not written by hf-vit, and its text would be lost" in fails(("card", told))
    assert (told / "README.md").read_text() == "my words"
    (told / "README.md").write_text(card)
    (told / "facts.json").write_text("[{]")
    for wrong in (told, told / "nowhere"):
        fails(("card", wrong))
    assert "98.77%" in (told / "README.md").read_text()


def test_carbon_is_told_where_power_is_stated(folder: Path, command: Command, fails: Callable[..., str]) -> None:
    """Half an hour at 400 W is 0.2 kWh; at 500 g/kWh 100 g."""
    record = training_record(seconds=1800.0, hardware={"name": "A GPU"}, values={"base_model": "google/vit"})
    append_record(folder, training_record())
    with pytest.raises(UserError, match="has no training record with a measured time"):
        record_power(folder, 100)
    append_record(folder, training_record(seconds=7.0))
    append_record(folder, record)
    assert "co2_eq_emissions" not in metadata(render_card(folder))
    record_power(folder, 400)
    card = render_card(folder)
    assert "co2_eq_emissions" not in metadata(card)
    assert "| energy kwh | 0.2 |" in card
    assert command("card", folder, "--power", 400, "--carbon-intensity", 500)[0] == 0
    assert metadata((folder / "README.md").read_text())["co2_eq_emissions"] == {
        "emissions": 100.0,
        "source": "1800 s measured by hf-vit x 400.0 W x 500.0 g/kWh, which the author states",
        "training_type": "fine-tuning",
        "hardware_used": "A GPU",
    }
    assert [each.values.get("energy") is None for each in Facts.load(folder).records] == [True, True, False]
    facts = (folder / "facts.json").read_bytes()
    for wrong in (["--power", "0"], ["--carbon-intensity", "5"], ["--power", "1", "--carbon-intensity", "-1"]):
        fails(("card", folder, *wrong))
    fails(("card", folder, "--carbon-intensity", "5", "--space", "alice/page"))
    assert (folder / "facts.json").read_bytes() == facts


REPO = "alice/my-vit"
COMMIT = "5503434ddd753f426f4b38109466949a1217c2bb"
ON_THE_HUB = DataFact(name="uoft-cs/cifar10:plain", fingerprint="a" * 16, split="test", size=10_000, revision=COMMIT)


def evaluation(data: DataFact, top1: float) -> Record:
    command = f"hf-vit evaluate my-vit --data {data.name}"
    return record("evaluation", {"top1": top1, "top5": 0.99}, command=command, data=data)


@pytest.fixture
def judged(model_folder: Path) -> Path:
    """On a data set of the Hub, one without a user whose commit is known, and one of this machine."""
    append_record(model_folder, evaluation(ON_THE_HUB, 0.912345))
    append_record(model_folder, evaluation(DataFact(name="beans", split="test", revision="b" * 40), 0.5))
    append_record(model_folder, evaluation(data("test", 360), 0.75))
    write_card(model_folder)
    return model_folder


def test_the_client_reads_both_forms(hub: Loopback, xet_client: Client, judged: Path) -> None:
    assert "error" not in xet_client.run("hub.jobs:push", folder=str(judged))
    first, second = xet_client.run("hub.jobs:eval_results", repo_id=REPO)
    source = f"{hub.endpoint}/{REPO}/blob/main/facts.json"
    assert first == {
        "dataset_id": "uoft-cs/cifar10", "task_id": "plain", "value": 0.9123, "dataset_revision": COMMIT,
        "verify_token": None, "date": "2031-02-03T00:00:00+00:00", "source_url": source, "source_name": "facts.json",
        "source_user": None, "source_org": None,
        "notes": "top-1 accuracy; split test; 10,000 images; fingerprint aaaaaaaaaaaaaaaa; "
        "hf-vit evaluate my-vit --data uoft-cs/cifar10:plain",
    }  # fmt: skip
    assert (second["dataset_id"], second["task_id"], second["value"]) == ("beans", "default", 0.5)
    entries = ModelCard(xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")).data.eval_results
    assert [entry.metric_value for entry in entries] == [0.9123, 0.99, 0.5, 0.99, 0.75, 0.99]
    assert (entries[0].dataset_type, entries[0].dataset_config, entries[0].dataset_revision) == (
        "uoft-cs/cifar10", "plain", COMMIT,
    )  # fmt: skip
    assert entries[0].dataset_args == {"fingerprint": "a" * 16, "num_images": 10_000}
    assert (entries[-1].source_url, entries[-1].source_name) == (source, "hf-vit evaluate my-vit --data digits")


def test_results_that_are_no_longer_true_go(hub: Loopback, xet_client: Client, judged: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(judged))
    assert RESULTS_FILE in hub.files(REPO)
    append_record(judged, training_record())
    write_card(judged)
    assert xet_client.run("hub.jobs:push", folder=str(judged))["deleted"] == [RESULTS_FILE]
    assert RESULTS_FILE not in hub.files(REPO)
    assert xet_client.run("hub.jobs:eval_results", repo_id=REPO) is None


def test_without_a_place_nothing_points_to_one(judged: Path) -> None:
    """A folder that was not pushed."""
    assert not any(entry.source_url for entry in ModelCard(render_card(judged)).data.eval_results)
    (entry,) = parse_eval_result_entries(yaml.safe_load(make_results_file([evaluation(ON_THE_HUB, 1)], "my-vit")))
    assert (entry.source_url, entry.value) == (None, 1.0)
    assert make_results_file([evaluation(DataFact(name="digits"), 1)], REPO) is None


# The cards in model_cards/: what their recorded facts say, and nothing else

CARDS = Path(__file__).parents[2] / "model_cards"


@pytest.mark.parametrize("family", ["vit", "hybrid_vit", "axial_vit", "local_vit"])
def test_the_card_is_what_the_facts_say(family: str, tmp_path: Path) -> None:
    """Rendered again from facts, pictures and an untrained model of the same configuration: the same text."""
    name = f"{family.partition('_')[0]}-digits"
    folder = CARDS / name
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == f"hf_{family}"
    made = AutoModelForImageClassification.from_config(CONFIG_MAPPING[f"hf_{family}"].from_dict(config))
    again = tmp_path / "model_cards" / name
    for place in (".git", "docs/page.md"):  # the card's link leads to another file of its repository
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    made.save_pretrained(again)
    assert sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".safetensors") < 150_000
    for path in folder.iterdir():
        if path.suffix in (".json", ".png"):
            shutil.copy(path, again)
    card = (folder / "README.md").read_text()
    assert render_card(again, license="apache-2.0", share_images=True) == card  # the data is public
    assert find_metadata_errors(card) == []
    assert list_missing_facts(folder) == []
    assert list_plots(folder, card) == {"learning_curve.png", "confusion_matrix.png", "wrong_images.png"}
    (accuracy,) = (record.values["top1"] for record in Facts.load(folder).filter_kind("evaluation"))
    row = next(line for line in (CARDS / "README.md").read_text().splitlines() if f"({name}/" in line)
    assert f"| {accuracy:.2%} | {count_parameters(again):,} |" in row


@pytest.mark.parametrize("name", ["vit-digits", "hybrid-digits", "axial-digits"])
def test_the_weights_are_those_that_were_measured(name: str) -> None:
    measured = next(record.values for record in Facts.load(CARDS / name).filter_kind("evaluation"))
    images = load_data("digits").split("test")
    processor = AutoImageProcessor.from_pretrained(CARDS / name)
    model = AutoModelForImageClassification.from_pretrained(CARDS / name).eval()
    with torch.no_grad():
        logits = model(**processor(images=[to_rgb(each) for each in images["image"]], return_tensors="pt")).logits
    labels = torch.tensor(images["label"])
    assert (logits.argmax(-1) == labels).double().mean() == pytest.approx(measured["top1"])
    assert cross_entropy(logits, labels).item() == pytest.approx(measured["loss"], rel=1e-4)


# The card's code, `hf-vit predict` and training see the same pixels of files of every kind; `pipeline` of most

SIDE = 32


def half_transparent(image: Image.Image, path: Path) -> None:
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(path, "PNG")


def sixteen_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


ROTATED = Image.Exif()
ROTATED[0x0112] = 6
KINDS: dict[str, Callable[[Image.Image, Path], None]] = {
    "plain": lambda image, path: image.save(path, "PNG"),
    "rotated": lambda image, path: image.save(path, "PNG", exif=ROTATED),
    "16 bits": lambda image, path: sixteen_bits(image).save(path, "PNG"),
    "alpha": half_transparent,
    "gray and alpha": lambda image, path: half_transparent(image.convert("LA"), path),
    "CMYK": lambda image, path: image.convert("CMYK").save(path, "JPEG"),
    "palette": lambda image, path: image.quantize(64).save(path, "PNG"),
    "palette with a hole": lambda image, path: image.quantize(64).save(path, "PNG", transparency=0),
}


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    """24 of 32 px, of all eight photographs."""
    table = load_data("photos", image_size=(SIDE, SIDE)).splits["validation"]
    return [to_rgb(table[row]["image"]) for row in range(0, 24 * 6, 6)]


@pytest.mark.parametrize(
    ("architecture", "own_shape"),
    [*((name, False) for name in ("hf_vit", "transformers", "remote code")), ("hf_vit", True), ("remote code", True)],
)
def test_the_cards_code_is_predict(
    architecture: str, own_shape: bool, photographs: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    if architecture == "transformers":
        make_classifier().save_pretrained(folder)
        make_processor().save_pretrained(folder)
    else:
        save_model(folder, image_size=8)
    if own_shape:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"max_num_patches": 12}))
        photographs = [photograph.crop((0, 0, 32, 12)) for photograph in photographs]
    card = render_card(folder)
    assert ("`pipeline` resizes all to one size, and it differs" in card) == own_shape
    assert ("hf-vit page" in card) == (architecture != "transformers" and not own_shape)
    code = make_example(read_config(folder), str(folder), architecture, own_shape)
    preparing = code[code.index("image =") : code.index("outputs =")]
    monkeypatch.chdir(tmp_path)
    for kind, save in KINDS.items():
        names: dict[str, Any] = {}
        for photograph in photographs[::-6]:
            save(photograph.copy(), tmp_path / "image.png")
            if not names:
                with redirect_stdout(io.StringIO()) as printed:
                    exec(code, names)
                (prediction,) = predict(str(folder), "image.png", top=1)
                if own_shape:
                    assert names["outputs"].logits.softmax(-1).max().item() == pytest.approx(prediction.scores[0][1])
                assert printed.getvalue().strip() == prediction.scores[0][0], kind
            exec(preparing, names)
            with Image.open("image.png") as opened:
                np.testing.assert_array_equal(np.asarray(names["image"]), np.asarray(to_rgb(opened)), kind)


def test_what_the_card_says_of_pipelines_is_so(photographs: list[Image.Image], folder: Path, tmp_path: Path) -> None:
    """How far its pixels are off, of all from black to white, on average over 24 photographs."""
    make_classifier().save_pretrained(tmp_path / "theirs")
    make_processor().save_pretrained(tmp_path / "theirs")
    classify = pipeline("image-classification", model=str(tmp_path / "theirs"), device="cpu")
    subject = load_model(tmp_path / "theirs", "cpu")
    off: dict[str, float] = {}
    for kind, save in KINDS.items():
        total = 0.0
        for photograph in photographs:
            save(photograph.copy(), tmp_path / "image.png")
            with Image.open(tmp_path / "image.png") as opened:
                ours = subject.prepare([to_rgb(opened)])
            theirs = classify.preprocess(str(tmp_path / "image.png"))["pixel_values"]
            total += float((ours - theirs).abs().mean()) / 2
        off[kind] = total / len(photographs)
    for kind in ("plain", "rotated", "CMYK", "palette"):
        assert off[kind] < 0.005, kind  # transformers' two ways to resize differ by less than that
    said = re.search(r"by (\d+)% of the way from .* clips 16-bit images \(by (\d+)%\)", render_card(folder))
    assert said is not None
    assert [int(said[1]), int(said[2])] == [round(100 * off[kind]) for kind in ("alpha", "16 bits")]


def test_protocols_that_were_fed_other_features_are_told_apart(folder: Path) -> None:
    name, chosen = "5-nearest-neighbour accuracy", {"features": "class", "layers": 4, "norm": True}
    for share, settings in ((0.7531, chosen), (0.5042, {})):
        values = {"protocol": "knn", "headline": {name: share}, "settings": {"neighbors": [5], **settings}}
        append_record(folder, record("evaluation", values, data=data("test", 360)))
    write_card(folder)
    lines = (folder / "README.md").read_text().splitlines()
    (fed,), (plain,) = ([line for line in lines if share in line] for share in ("75.31", "50.42"))
    assert f"{name} (features class, layers 4, norm True)" in fed
    assert name in plain
    assert "features" not in plain
    assert [found.values["settings"] for found in select_records(Facts.load(folder))] == [
        {"neighbors": [5], **chosen},
        {"neighbors": [5]},
    ]
