"""What forward, resizing and loading say about input that does not fit, and that they never go on with it."""

import accelerate
import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from models.families import FAMILIES, OTHERS, Family

import hf_vit

OTHER_FAMILIES = OTHERS
IMAGES = [
    ((3, 16, 16), torch.float32, r"shape \(3, 16, 16\); the model needs \[B, 3, H, W\]"),
    ((2, 16, 16, 3), torch.float32, r"shape \(2, 16, 16, 3\); the model needs \[B, 3, H, W\]"),
    ((2, 1, 16, 16), torch.float32, r"shape \(2, 1, 16, 16\); the model needs \[B, 3, H, W\]"),
    *(
        ((2, 3, 16, 16), dtype, rf"{dtype}.*normalized floats.*image processor")
        for dtype in (torch.uint8, torch.int64, torch.bool, torch.complex64)
    ),
]
MASKS = [
    *(
        (torch.ones(shape), rf"shape \({', '.join(map(str, shape))}\); it needs \[2, 4, 4\]")
        for shape in ((2, 4, 5), (2, 16), (1, 4, 4), (3, 4, 4))
    ),
    (torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]), r"image 1 is not a rectangle.*right and bottom"),
    (torch.stack([torch.ones(4, 4), torch.eye(4)]), r"image 1 is not a rectangle.*right and bottom"),
    (torch.stack([torch.ones(4, 4).triu(), torch.ones(4, 4)]), r"image 0 is not a rectangle.*right and bottom"),
    (torch.ones(2, 4, 4).index_fill(1, torch.tensor([0]), 0), r"image 0 is not a rectangle.*right and bottom"),
]


def test_wrong_images_and_masks(family: Family, head: str, subtests: pytest.Subtests):
    """In the same words for all; what they take by size is their own."""
    model, is_vit = family.shared(head), family.name in FAMILIES
    small = ((2, 3, 0, 16), torch.float32, r"image 0x16 px is smaller than a patch of \d+x\d+ px; resize or pad")
    for shape, dtype, message in [*IMAGES, *([small] if is_vit else [])]:
        with subtests.test(shape=shape, dtype=dtype), pytest.raises(ValueError, match=message) as error:
            model(torch.zeros(shape, dtype=dtype))
        assert "\n" not in str(error.value)
    for images in (None, np.zeros((2, 3, 16, 16), np.float32), [[0.0]]):
        message = f"pixel_values have the type {type(images).__name__}; .* image processor"
        with subtests.test(images=type(images)), pytest.raises(ValueError, match=message):
            model(images)
    images = family.images(model.config)
    for index, (mask, message) in enumerate(MASKS):
        with (
            subtests.test(index=index),
            pytest.raises(ValueError, match=message if is_vit else "does not take patch_attention_mask"),
        ):
            model(images, patch_attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_no_images_at_all(other: Family):
    """Of transformers' attention functions sdpa takes none; BiT has no dense layers for int8."""
    model = other.build("classification")
    nothing = other.images(model.config)[:0]
    assert model(nothing).logits.shape == (0, 3)
    for quantize in (None, "int8") if other.name == "mixer" else (None,):
        fast = hf_vit.optimize_for_inference(other.build("classification"), engine="torch", quantize=quantize)
        assert fast(nothing).logits.shape == (0, 3)


LABELS = [
    (torch.tensor([[0.0], [1.0]]), None, r"shape \(2, 1\).*logits \(2, 3\).*indices \[B\].*probabilities.*\[B, K\]"),
    (torch.rand(2, 4), None, r"shape \(2, 4\).*logits \(2, 3\)"),
    (torch.rand(2), None, r"shape \(2,\) and torch.float32.*indices \[B\]"),
    (torch.tensor([0, 1, 2]), None, r"shape \(3,\).*logits \(2, 3\)"),
    (torch.tensor([0, 1]), "multi_label_classification", r"shape \(2,\).*multi_label_classification.*\[B, K\]"),
    (torch.rand(2), "regression", r"shape \(2,\).*logits \(2, 3\) and problem_type=regression"),
    (torch.tensor([[1.0, 0, 1], [0, 1, 0]]), None, r"rows that sum to 1 ... 2.*multi_label_classification"),
    (torch.tensor([[0.0, 0, 0], [0, 1, 0]]), None, r"rows that sum to 0 ... 1.*multi_label_classification"),
    (torch.tensor([0, 3]), None, r"labels contain 3; a model with 3 classes needs 0 to 2"),
    (torch.tensor([[0], [3]], dtype=torch.uint16), None, "labels contain 3"),
    (torch.tensor([-1, 0]), None, r"labels contain -1; a model with 3 classes"),
    ([0, 1], None, r"labels have the type list; give a tensor"),
]


def test_wrong_labels(family: Family, subtests: pytest.Subtests):
    for index, (labels, problem_type, message) in enumerate(LABELS):
        model = family.build("classification", problem_type=problem_type)
        with subtests.test(index=index), pytest.raises(ValueError, match=f"(?s){message}"):
            model(family.images(model.config), labels=labels)
    with pytest.raises(ValueError, match=r"a head, but num_labels=0"):
        family.build("classification", num_labels=0)(family.images(model.config), labels=torch.tensor([0, 1]))


def test_labels_of_any_integer_type(family: Family):
    model = family.build("classification")
    images, labels = family.images(model.config), torch.tensor([0, 2])
    wanted = model(images, labels=labels).loss
    for dtype in (torch.int32, torch.uint8, torch.uint16):
        assert model(images, labels=labels.to(dtype)).loss == wanted, dtype
    assert model(images, labels=labels[:, None]).loss == wanted, "a column, as transformers takes it"


@pytest.mark.parametrize("name", ["plain", "axial", "local"])  # a SAME-padded stem makes a patch of every size
def test_a_size_that_does_not_fit_leaves_the_model_as_it_was(name: str, tmp_path):
    model = FAMILIES[name].build("classification")
    images = FAMILIES[name].images(model.config)
    before = model(images).logits
    with pytest.raises(StrictDataclassError, match="image_size=3 does not fit patch_size=4"):
        model.resize_to(image_size=3)
    assert model.config.image_size == 16
    torch.testing.assert_close(model(images).logits, before, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="image_size=3 does not fit patch_size=4"):
        type(model).from_pretrained(tmp_path, image_size=3)
    stem = FAMILIES["hybrid"].build("classification")
    with pytest.raises(ValueError, match="patch_size=8 does not fit a HfHybridViTForImageClassification, whose stem"):
        stem.resize_to(patch_size=8)


def test_weights_without_values_are_refused(family: Family):
    """A part that was never loaded stays on the meta device; torch takes memory's garbage for its kernels."""
    options = {"use_feature_pyramid": True} if family.name == "plain" else {}
    names = [name for name, _ in family.build("backbone", **options).named_parameters()]
    for part in {name.rpartition(".")[0] for name in names}:
        model = family.build("backbone", **options)
        model.get_submodule(part).to("meta")
        if "layernorm" not in part or family.name in FAMILIES:  # the last norm is not read by the others' maps
            with pytest.raises((ValueError, RuntimeError), match="meta"):
                model(family.images(model.config))


def test_weights_without_values_beside_offloaded_ones():
    for family in FAMILIES.values():
        model = family.build("classification")
        accelerate.cpu_offload(model.vit.layers, torch.device("cpu"))
        model.vit.embeddings.patch_embeddings.to("meta")
        with pytest.raises(ValueError, match="on the meta device, without values; load all"):
            model(family.images(model.config))


@pytest.mark.parametrize(
    ("choice", "part"),
    [("no_qkv_bias", "k_proj"), ("relative", "relative_position"), ("relative_bias", "relative_position")],
)
def test_products_without_bias_and_values(choice: str, part: str):
    model = FAMILIES["plain"].build("classification", choice)
    model.vit.layers[1].attention.get_submodule(part).to("meta")
    with pytest.raises(ValueError, match="on the meta device, without values; load all"):
        model(FAMILIES["plain"].images(model.config))
