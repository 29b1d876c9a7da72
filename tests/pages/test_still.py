"""`hf_vit.analysis.show`: one file that needs no other, and what it refuses. In a browser: test_in_browser.py."""

import re
from pathlib import Path

import pytest
from pages.models import save_classifier
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import HfViTModel
from hf_vit.analysis import show
from hf_vit.errors import UserError

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


def test_what_has_no_page_is_refused(tmp_path: Path):
    folder = save_classifier(tmp_path / "model", "plain", "default")
    HfViTModel.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    (folder / "preprocessor_config.json").rename(tmp_path / "bare/preprocessor_config.json")
    with pytest.raises(UserError, match=r"bare cannot be shown as a page, which needs a classifier.*; use"):
        show(str(tmp_path / "bare"), Image.new("RGB", (16, 16)))


def test_broken_image_is_told(tmp_path: Path):
    folder = save_classifier(tmp_path / "model", "plain", "default")
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"broken\.png cannot be read as an image: .*; give another file"):
        show(str(folder), tmp_path / "broken.png")
