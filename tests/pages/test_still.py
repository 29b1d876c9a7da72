"""`hf_vit.analysis.show`: one file that needs no other, and what it refuses. In a browser: test_in_browser.py."""

import base64
import io
import re
import shutil
from pathlib import Path

import pytest
from pages.models import save_classifier
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from hf_vit import HfViTModel
from hf_vit.analysis import show
from hf_vit.errors import UserError

TINY = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HOSTILE = ("<script>alert(1)</script>", "</script><b>", '"><img src=x>')


def test_page_is_one_file_whose_words_are_data(tmp_path: Path):
    model = save_classifier(tmp_path / "model", "plain", "default", HOSTILE)
    shown = show(str(model), Image.effect_noise((20, 30), 80))
    shown.save(tmp_path / "shown.html")
    page = (tmp_path / "shown.html").read_text()
    assert re.findall(r"(?:src|href)=.(?!data:)", page.partition("<style>")[0]) == []
    assert page.count("<script") == page.count("</script>") == 2
    assert r"\u003cscript>alert(1)" in page
    assert shown._repr_html_().count("<") == 2  # a frame, which holds all else as text


def test_attention_implementation_stays(tmp_path: Path):
    folder = save_classifier(tmp_path / "model", "plain", "default")
    model = AutoModelForImageClassification.from_pretrained(folder, attn_implementation="sdpa").eval()
    show((model, AutoImageProcessor.from_pretrained(folder)), Image.new("RGB", (16, 16)))
    assert model.config._attn_implementation == "sdpa"


def _pictures_of(page: str) -> list[Image.Image]:
    assert "<script" not in page
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(each))) for each in found]


def test_what_has_no_page_is_shown_in_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No classifier, one of transformers, one that is too large, and a processor that the page cannot follow."""
    folder = save_classifier(tmp_path / "<b>model", "plain", "default")
    HfViTModel.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    shutil.copy(folder / "preprocessor_config.json", tmp_path / "bare")
    image = Image.effect_noise((20, 30), 80)
    nearest = AutoImageProcessor.from_pretrained(folder, resample=0)
    theirs = Dinov2ForImageClassification(Dinov2Config(**TINY)).eval()
    shown = [show(str(tmp_path / "bare"), image), show((theirs, AutoImageProcessor.from_pretrained(folder)), image)]
    shown.append(show((AutoModelForImageClassification.from_pretrained(folder).eval(), nearest), image))
    monkeypatch.setattr("hf_vit.analysis.showing._MAX_BYTES", 10)
    shown.append(show(str(folder), image))
    for each in shown:
        pictures = _pictures_of(each.page)
        assert len(pictures) >= 2
        assert all(len(picture.convert("L").getcolors(256) or []) > 10 for picture in pictures)
    assert "<b>" not in shown[-1].page


def test_what_has_neither_page_nor_attention_is_refused(tmp_path: Path):
    model = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    with pytest.raises(
        UserError, match=r"cannot be shown \(only classifiers .*\), and its attention cannot be drawn \("
    ):
        show((model, processor), Image.new("RGB", (16, 16)))


def test_broken_image_is_told(tmp_path: Path):
    folder = save_classifier(tmp_path / "model", "plain", "default")
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"broken\.png cannot be read as an image: .*; give another file"):
        show(str(folder), tmp_path / "broken.png")
