"""The card's code, `hf-vit predict` and training see the same pixels of files of every kind; `pipeline` of most."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from evaluation.tiny import NAMES, make_classifier, make_processor
from PIL import Image
from transformers import pipeline

from hf_vit import HfViTForImageClassification, variant_config
from hf_vit.data import load_data, to_rgb
from hf_vit.evaluation import predict_images
from hf_vit.hub.card import render_card
from hf_vit.hub.example import example
from hf_vit.hub.model_folder import read_config
from hf_vit.subjects.subject import open_subject

SIDE = 32


def rotated(image: Image.Image, path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(path, "PNG", exif=exif)


def sixteen_bits(image: Image.Image, path: Path) -> None:
    gray = np.asarray(image.convert("L")).astype(np.uint16)
    Image.fromarray(gray * 257).save(path, "PNG")


def half_transparent(image: Image.Image, path: Path) -> None:
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(path, "PNG")


def palette(image: Image.Image, path: Path) -> None:
    image.quantize(64).save(path, "PNG")


def palette_with_a_hole(image: Image.Image, path: Path) -> None:
    image.quantize(64).save(path, "PNG", transparency=0)


def gray_with_alpha(image: Image.Image, path: Path) -> None:
    half_transparent(image.convert("LA"), path)


KINDS = {
    "plain": lambda image, path: image.save(path, "PNG"),
    "rotated": rotated,
    "16 bits": sixteen_bits,
    "alpha": half_transparent,
    "gray and alpha": gray_with_alpha,
    "CMYK": lambda image, path: image.convert("CMYK").save(path, "JPEG"),
    "palette": palette,
    "palette with a hole": palette_with_a_hole,
}


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    """24 of 32 px, of all eight photographs."""
    table = load_data("photos", image_size=(SIDE, SIDE)).splits["validation"]
    return [to_rgb(table[row]["image"]) for row in range(0, 24 * 6, 6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for every way in which a card loads a model."""
    root = tmp_path_factory.mktemp("models")
    config = variant_config(
        "Ti/4", image_size=8, id2label=dict(enumerate(NAMES)), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    ours = HfViTForImageClassification(config)
    ours.classifier.weight.data.normal_(generator=None)
    for name, model in (("hf_vit", ours), ("transformers", make_classifier())):
        model.save_pretrained(root / name)
        make_processor().save_pretrained(root / name)
    return {"hf_vit": root / "hf_vit", "transformers": root / "transformers", "travelling": root / "hf_vit"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["hf_vit", "transformers", "travelling"])
def test_the_cards_code_is_predict(architecture, kind, models, photographs, tmp_path, monkeypatch) -> None:
    code = example(read_config(models[architecture]), str(models[architecture]), architecture)
    KINDS[kind](photographs[0].copy(), tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names, printed = {}, io.StringIO()
    with redirect_stdout(printed):
        exec(code, names)
    subject = open_subject(models[architecture], "cpu")
    (prediction,) = predict_images(subject, ["image.png"], top=1)
    assert printed.getvalue().strip() == prediction.scores[0][0]
    preparing = code[code.index("image =") : code.index("outputs =")]
    for photograph in photographs:
        KINDS[kind](photograph.copy(), tmp_path / "image.png")
        exec(preparing, names)
        with Image.open("image.png") as opened:
            np.testing.assert_array_equal(np.asarray(names["image"]), np.asarray(to_rgb(opened)))


def test_what_the_card_says_of_pipelines_is_so(models, photographs, tmp_path) -> None:
    """How far its pixels are off, of all from black to white, on average over 24 photographs."""
    classify = pipeline("image-classification", model=str(models["transformers"]), device="cpu")
    subject = open_subject(models["transformers"], "cpu")
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
    card = render_card(models["hf_vit"])
    said = re.search(r"by (\d+)% of the way from black to white\), and clips 16-bit images \(by (\d+)%\)", card)
    assert said is not None
    assert [int(said[1]), int(said[2])] == [round(100 * off[kind]) for kind in ("alpha", "16 bits")]
