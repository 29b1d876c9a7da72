"""A user's own class, derived from one of the package's: what is saved is that class, for whoever loads it."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from dense_heads import batch_for
from dense_heads import build as build_dense
from hub import jobs
from hub.conftest import training_record
from loopback.client import Client, Loopback
from models.families import FAMILIES, HEADS, OTHERS, TINY
from models.jobs import dense_answers, outputs_of
from safetensors.torch import save_file

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, UserError, from_hub, push_to_hub
from hf_vit.families import DENSE_HEADS
from hf_vit.results.facts import Facts

MODELS = Path(hf_vit.__file__).parent / "models"
AUTO = "AutoModelForImageClassification"
OWN = """
from {module} import {name}
from .half_of_own import half

class Own({name}):
    def forward(self, pixel_values, **kwargs):
        return super().forward(half(pixel_values), **kwargs)
"""
CONFIG = """
from hf_vit import HfViTConfig, HfViTForImageClassification

class OwnConfig(HfViTConfig):
    factor: float = 3.0

class Own(HfViTForImageClassification):
    config_class = OwnConfig

    def forward(self, pixel_values, **kwargs):
        return super().forward(pixel_values * self.config.factor, **kwargs)
"""
Write = Callable[..., ModuleType]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module of a user's package and import it; `vendored`, the package's own code lies beside it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(name: str, text: str, vendored: bool = False) -> ModuleType:
        folder = tmp_path / ("user_vendored" if vendored else "user_code")
        if not folder.exists():
            shutil.copytree(MODELS, folder) if vendored else folder.mkdir()
            for loaded in [each for each in sys.modules if each.partition(".")[0] == folder.name]:
                del sys.modules[loaded]
            (folder / "half_of_own.py").write_text("def half(pixels):\n    return pixels / 2\n")
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(f"{folder.name}.{name}")

    return write_module


def derive(write: Write, base: type, name: str = "own", vendored: bool = False) -> Any:
    module = f".{base.__module__.rpartition('.')[2]}" if vendored else base.__module__
    return write(name, OWN.format(module=module, name=base.__name__), vendored).Own


def tiny_config(config_class: Any = HfViTConfig, **fields: Any) -> Any:
    return config_class(**TINY, patch_size=4, **fields)


def fill(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save_with_processor(model: Any, folder: Path) -> torch.Tensor:
    """Save; return what the model answers to the image of `hub.jobs`."""
    model.save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(folder)
    return model(**processor(images=jobs.make_image(), return_tensors="pt")).logits[0]


def logits_by(auto_class: str, folder: Path, images: torch.Tensor) -> torch.Tensor:
    return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)(images).logits


@pytest.mark.parametrize("vendored", [True, False], ids=["without the package", "with it"])
def test_every_class_of_every_family(
    vendored: bool, write: Write, stranger: Client, xet_client: Client, tmp_path: Path
) -> None:
    """It answers for its Auto class, and again from what is saved of that; the family's other classes stay."""
    cases, wanted = [], []
    for family in (FAMILIES | OTHERS).values():
        few = {"plain": [*family.classes], "mixer": ["classification"]}.get(family.name, [])
        for head in few if vendored else [name for name in family.classes if name != "backbone"]:
            folder, auto_class = tmp_path / f"{family.name}-{head}", HEADS[head].auto_class
            base = family.build(head)
            own_class = derive(write, type(base), f"own_{family.name}_{head}", vendored)
            own_class.register_for_auto_class(auto_class)
            own = own_class(base.config).eval()
            own.load_state_dict(base.state_dict())
            own.save_pretrained(folder)
            images = family.images(base.config)
            answers = {str(index): value.clone() for index, value in enumerate(outputs_of(own, images))}
            torch.testing.assert_close(answers["0"], outputs_of(base, images / 2)[0], rtol=0, atol=0)
            save_file({"images": images, **answers}, folder / "answers.safetensors")
            named = json.loads((folder / "config.json").read_text())["auto_map"]
            assert named == {**family.config_class.auto_classes, auto_class: f"own_{family.name}_{head}.Own"}
            paths = {"source": str(folder), "answers": f"{folder}/answers.safetensors", "target": f"{folder}-again"}
            cases.append({"auto_class": auto_class, "others": [], **paths})
            found = ["transformers_modules", "Own", True]
            wanted.append({"config": family.config_class.__name__, auto_class: found, "again": found})
    assert (stranger if vendored else xet_client).run("models.jobs:journeys", cases=cases) == wanted


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_every_head_of_dense_prediction(head: str, write: Write, tmp_path: Path) -> None:
    """They are registered from the start; with the package, and again from what is saved of that."""
    base, _ = build_dense("plain", head)
    own = derive(write, type(base))(base.config).eval()
    own.load_state_dict(base.state_dict())
    images = batch_for(head)["pixel_values"]
    wanted = dense_answers(own, images)
    for folder in (tmp_path / "saved", tmp_path / "again"):
        own.save_pretrained(folder)
        auto_class = getattr(transformers, DENSE_HEADS[head].auto_class)
        own = auto_class.from_pretrained(folder, trust_remote_code=True)
        answers = dense_answers(own, images)
        assert type(own).__name__ == "Own"
        assert all(torch.allclose(answers[name], value, atol=1e-4) for name, value in wanted.items())
        with pytest.warns(UserWarning, match=r"saved by own.Own but is loaded as Hf\w+, whose outputs may differ"):
            auto_class.from_pretrained(folder)
        with pytest.raises(UserError, match=r"names the class own\.Own, which is not part of hf_vit"):
            from_hub(folder)


def test_registered_as_a_bare_model(write: Write, tmp_path: Path) -> None:
    """By the default of `register_for_auto_class`: the class answers there, and in the place that it comes from."""
    own_class = derive(write, HfViTForImageClassification)
    own_class.register_for_auto_class()
    own, images = fill(own_class(tiny_config())), torch.rand(2, 3, 16, 16)
    own.save_pretrained(tmp_path / "saved")
    for auto_class in ("AutoModel", AUTO):
        assert torch.equal(logits_by(auto_class, tmp_path / "saved", images), own(images).logits)


def test_what_an_own_class_loads_and_adds(tmp_path: Path) -> None:
    """Its initialization leaves loaded weights alone, however it writes; layers that it adds begin small."""

    class Own(HfViTForImageClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.added = torch.nn.ModuleList(
                [torch.nn.Embedding(50, 32), torch.nn.ConvTranspose2d(32, 8, 2, 2), torch.nn.Conv1d(32, 8, 3)]
            )
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            super()._init_weights(module)
            if isinstance(module, torch.nn.Linear):
                module.weight.data.normal_()

    wanted = fill(HfViTForImageClassification(tiny_config()))
    wanted.save_pretrained(tmp_path / "plain")
    own = Own.from_pretrained(tmp_path / "plain").state_dict()
    deviations = [own.pop(f"added.{i}.weight").std().item() for i in range(3)]
    assert deviations == pytest.approx([0.02, 32**-0.5, 0.02], rel=0.1)
    assert not any(own.pop(f"added.{i}.bias").any() for i in (1, 2))
    torch.testing.assert_close(own, wanted.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("case", ["not registered", "of the same name", "in __main__"])
def test_class_whose_code_is_not_saved(case: str, write: Write, stranger: Client, tmp_path: Path, monkeypatch):
    """Saving says so; without the package nothing takes its place, with it a warning says what does."""
    own_class = derive(write, HfViTForImageClassification)
    if case == "of the same name":
        own_class.__name__ = "HfViTForImageClassification"
    if case == "in __main__":
        own_class.register_for_auto_class(AUTO)
        monkeypatch.setattr(own_class, "__module__", "__main__")
    with pytest.warns(UserWarning, match=rf"the code of \w+ is not saved, so {AUTO} cannot load it; .* before saving"):
        save_with_processor(fill(own_class(tiny_config())), tmp_path / "saved")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    config.save_pretrained(tmp_path / "saved")  # people change labels so
    assert AUTO not in json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    found = stranger.run("hub.jobs:logits", repo_id=str(tmp_path / "saved"), trust_remote_code=True)
    assert "ValueError: Unrecognized configuration class" in found
    if case != "of the same name":
        with pytest.warns(UserWarning, match=r"was saved by Own but is loaded as HfViTForImageClassification"):
            transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("is_registered", [True, False])
def test_own_configuration(is_registered: bool, write: Write, xet_client: Client, tmp_path: Path) -> None:
    """With the model's module it is saved, registered or not; the family's files come from the package."""
    own = write("own", CONFIG)
    own.Own.register_for_auto_class(AUTO)
    if is_registered:
        own.OwnConfig.register_for_auto_class()
    model = fill(own.Own(tiny_config(own.OwnConfig, factor=5.0)))
    wanted = save_with_processor(model, tmp_path / "saved")
    named = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert named == {"AutoConfig": "own.OwnConfig", AUTO: "own.Own"}
    assert (tmp_path / "saved" / "modeling_hf_vit.py").read_text() == (MODELS / "modeling_hf_vit.py").read_text()
    found = xet_client.run("hub.jobs:logits", repo_id=str(tmp_path / "saved"), trust_remote_code=True)
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)


def test_own_configuration_for_the_package_s_model(write: Write, stranger: Client, tmp_path: Path) -> None:
    """Its fields travel; without its code it is the family's."""
    own_class = write("own", CONFIG).OwnConfig
    model = fill(HfViTForImageClassification(tiny_config(own_class)))
    with pytest.warns(UserWarning, match="OwnConfig is not registered for AutoConfig, so .* loads as HfViTConfig"):
        wanted = save_with_processor(model, tmp_path / "saved")
    found = stranger.run("hub.jobs:logits", repo_id=str(tmp_path / "saved"), trust_remote_code=True)
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)
    own_class.register_for_auto_class()
    with pytest.warns(UserWarning, match="has no model class for OwnConfig, so AutoModel cannot load it"):
        model.save_pretrained(tmp_path / "registered")


def test_the_package_s_class_saves_itself(write: Write, tmp_path: Path) -> None:
    """From a folder of an own class: neither its code nor its name goes along."""
    own_class = derive(write, HfViTForImageClassification)
    own_class.register_for_auto_class(AUTO)
    fill(own_class(tiny_config())).save_pretrained(tmp_path / "own")
    HfViTForImageClassification.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["auto_map"] == HfViTConfig.auto_classes
    assert not (tmp_path / "ours" / "own.py").exists()


def test_trainer_and_hub(write: Write, hub: Loopback, xet_client: Client, stranger: Client, tmp_path: Path) -> None:
    """What the Trainer saves, and what is pushed, is the own class, code, siblings and image processor included."""
    own_class = derive(write, HfViTForImageClassification, vendored=True)
    own_class.register_for_auto_class(AUTO)
    folder = tmp_path / "trained"
    save_with_processor(model := fill(own_class(tiny_config())), folder)
    processors = write("own_pixels", PROCESSOR)
    processors.OwnProcessor.register_for_auto_class()
    processor = processors.OwnProcessor(size={"height": 16, "width": 16})
    arguments = transformers.TrainingArguments(str(folder), report_to="none")
    transformers.Trainer(model, arguments, processing_class=processor).save_model()
    wanted = model(**processor(images=jobs.make_image(), return_tensors="pt")).logits[0].tolist()
    Facts(records=[training_record()]).save(folder)
    done = xet_client.run("hub.jobs:push", folder=str(folder), license="apache-2.0")
    assert "error" not in done, done
    assert "trust_remote_code=True" in xet_client.run("hub.jobs:read", repo_id="alice/my-vit", name="README.md")
    for client, repo in ((stranger, str(folder)), (stranger, "alice/my-vit"), (xet_client, "alice/my-vit")):
        found = client.run("hub.jobs:logits", repo_id=repo, trust_remote_code=True)
        assert found == pytest.approx(wanted, abs=1e-5), repo
    own_class._auto_class = None
    with pytest.warns(UserWarning, match="is not saved"):
        model.save_pretrained(tmp_path / "unregistered")
    shutil.copy(folder / "preprocessor_config.json", tmp_path / "unregistered")
    with pytest.raises(UserError, match=r"auto_map in the config.json of .* lacks Own; .*register_for_auto_class"):
        push_to_hub(tmp_path / "unregistered", "alice/other")


@pytest.mark.parametrize("name", ["predict", "evaluate", "export", "finetune"])
def test_commands_refuse_it(name: str, write: Write, tmp_path: Path, command: Any) -> None:
    """They run no code of a checkpoint, and the package's class would give other numbers."""
    own_class = derive(write, HfViTForImageClassification)
    own_class.register_for_auto_class(AUTO)
    save_with_processor(fill(own_class(tiny_config())), folder := tmp_path / "own")
    jobs.make_image().save(tmp_path / "image.png")
    arguments = {
        "predict": [str(folder), str(tmp_path / "image.png")],
        "evaluate": [str(folder), "--data", "digits"],
        "export": [str(folder), str(tmp_path / "out"), "--to", "timm"],
        "finetune": ["--model", str(folder), "--data", "digits", "--output", str(tmp_path / "out")],
    }
    code, _, err = command(name, *arguments[name])
    assert (code, "names the class own.Own, which is not part" in err.splitlines()[-1]) == (1, True)


PROCESSOR = """
from transformers import ViTImageProcessor

class OwnProcessor(ViTImageProcessor):
    def preprocess(self, *args, **kwargs):
        found = super().preprocess(*args, **kwargs)
        found["pixel_values"] = found["pixel_values"] * 2
        return found
"""
