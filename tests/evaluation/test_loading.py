"""`load_model`: what loads as an image classifier, and one clear line for everything that does not."""

import json
import shutil

import pytest
import torch
from evaluation.tiny import NAMES, make_classifier, make_processor
from transformers import BertConfig, BertForSequenceClassification, ViTModel

from hf_vit import HfViTForImageClassification, variant_config
from hf_vit.errors import UserError
from hf_vit.loading.model import load_model


def open_classifier(source, device=None):
    return load_model(source, device, as_classifier=True)


def test_a_transformers_classifier_loads(save_classifier):
    folder = save_classifier()
    loaded = open_classifier(folder, "cpu")
    assert type(loaded.model).__name__ == "ViTForImageClassification"
    assert loaded.label_sets == [list(NAMES)]
    assert loaded.folder == folder
    assert loaded.image_size == (8, 8)
    assert not loaded.model.training
    pixel_values = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded.model(pixel_values).logits, make_classifier()(pixel_values).logits)


def test_our_classifier_loads(tmp_path):
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = variant_config("Ti/4", image_size=(8, 12), id2label=dict(enumerate(NAMES)), **fields)
    model = HfViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    make_processor().save_pretrained(tmp_path)
    loaded = open_classifier(str(tmp_path), "cpu")
    assert isinstance(loaded.model, HfViTForImageClassification)
    assert loaded.image_size == (8, 12)
    assert loaded.label_sets == [list(NAMES)]


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit_config(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def _black(folder):
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"image_std": [0.5, 0.0, 0.5]}))


def _bad_patch(folder):
    (folder / "config.json").write_text('{"model_type": "hf_vit", "image_size": 8, "patch_size": 9}')


def _headless(folder):
    ViTModel(make_classifier().config).save_pretrained(folder)


def _bert(folder):
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    BertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: shutil.rmtree(folder),
            "there is no folder .* and no such file; give a path, or owner/name of a model on the Hub",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json in it; give the folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json of .* is damaged"),
        (lambda folder: (folder / "config.json").write_text("{}"), "cannot be read as a model"),
        (_edit_config(model_type="perceptron"), "cannot be read as a model: .*perceptron"),
        (_bad_patch, "not valid: image_size=8 does not fit patch_size=9"),
        (_edit_config(hidden_size=32), r"do not fit its config\.json: their shapes differ"),
        (_edit_config(num_channels=1), "num_channels=1"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no weights: model\.safetensors"),
        (_truncate, "weights of .* are damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "weights of .* are damaged"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), r"no readable image processor"),
        (lambda folder: (folder / "preprocessor_config.json").write_text("{"), r"no readable image processor"),
        (_black, r"makes pixels that are not finite .* see image_mean, image_std"),
        (_headless, r"not a trained image classifier: its weights lack classifier\.bias, classifier\.weight"),
        (_bert, r"holds a bert model \(BertForSequenceClassification\), which is not an image classifier"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_load_is_told(save_classifier, damage, message, capfd):
    folder = save_classifier()
    damage(folder)
    capfd.readouterr()
    with pytest.raises(UserError, match=message) as caught:
        open_classifier(folder, "cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "loading is quiet"


def test_other_sources_and_devices_are_told(save_classifier):
    folder = save_classifier()
    for source, device, said in (
        (folder.parent, None, f"did you mean {folder}"),
        (folder / "model.safetensors", None, r"or give the folder with the config\.json"),
        ("nobody/nothing", None, r"no folder nobody/nothing, .* the Hub cannot be reached"),
        ("one/two/three", None, "no folder one/two/three and no such file"),
        *((folder, name, r"cannot be used here .*try --device cpu") for name in ("gpu", "cuda:99", "meta?")),
    ):
        with pytest.raises(UserError, match=said):
            open_classifier(source, device)


def test_a_processor_of_another_model_is_told(save_classifier, tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessor

    from hf_vit.evaluation import embed, predict_images

    folder = save_classifier()
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    told = r"takes no images of 24x24 px, which its image processor makes \(Input image"
    with pytest.raises(UserError, match=told):
        predict_images(open_classifier(folder, "cpu"), [tmp_path / "image.png"])
    for level in range(6):
        wide = tmp_path / "data" / "ab"[level % 2] / f"{level}.png"
        wide.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 8), (level, 0, 0)).save(wide)
    with pytest.raises(UserError, match=told):
        embed(str(folder), str(tmp_path / "data"), tmp_path / "out")
    ViTImageProcessor(do_resize=False).save_pretrained(folder)
    with pytest.raises(UserError, match=r"processor makes no batch of these images \(.*\); have it resize or crop all"):
        predict_images(open_classifier(folder, "cpu"), [tmp_path / "image.png", wide])
