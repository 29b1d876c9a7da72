"""RGB by hand and NumPy; transforms: the saved processor's numbers exactly, variations that are what they say."""

import io
import random
import runpy
import struct
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data.conftest import picture, splitmix64, tags
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from transformers import AutoImageProcessor, ViTImageProcessor, ViTImageProcessorPil

import hf_vit
from hf_vit.data import (
    AugmentationConfig,
    eval_transform,
    image_transforms,
    load_data,
    make_processor,
    to_rgb,
    train_transform,
)
from hf_vit.data.augmentation import Augmenter, apply_affine, draw_uniforms, make_random_keys, shift
from hf_vit.data.images import map_in_threads
from hf_vit.data.transforms import fill_grid, get_input_size
from hf_vit.errors import UserError

HANDLER = runpy.run_path(str(Path(hf_vit.__file__).parent / "hub/handler.py"))
CONFIG = SimpleNamespace(image_size=24, num_channels=3, patch_size=4)


def batch_of(images: list[Image.Image]) -> dict:
    return {"image": images, "label": [index % 3 for index in range(len(images))]}


@pytest.fixture
def pictures():
    sizes = [(12, 10), (24, 24), (60, 31), (24, 50)]
    return [picture(index, size=size) for index, size in enumerate(sizes)]


# ---- evaluation


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "RGBA", "LA", "1"])
@pytest.mark.parametrize("size", [(24, 24), (16, 40)])
def test_evaluation_gives_what_the_reloaded_processor_gives(pictures, tmp_path, mode, size):
    processor = make_processor(SimpleNamespace(image_size=size, num_channels=3))
    processor.save_pretrained(tmp_path)
    images = [image.convert("RGBA").convert(mode) if mode == "LA" else image.convert(mode) for image in pictures]
    reloaded = AutoImageProcessor.from_pretrained(tmp_path)(images=images, return_tensors="pt")["pixel_values"]
    ours = eval_transform(processor)(batch_of(images))
    assert reloaded.shape == (4, 3, *size)
    torch.testing.assert_close(torch.stack(ours["pixel_values"]), reloaded, atol=1e-6, rtol=0)
    assert ours["label"] == [0, 1, 2, 0]


SQUARE = {"size": {"height": 24, "width": 24}}


@pytest.mark.parametrize(
    "settings",
    [
        SQUARE,
        {"size": {"height": 16, "width": 40}, "resample": Image.Resampling.BICUBIC, "image_std": [0.2, 0.3, 0.4]},
        # What the direct route leaves to the processor itself.
        SQUARE | {"do_normalize": False},
        SQUARE | {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}},
    ],
    ids=["square", "rectangle", "not_normalised", "cropped"],
)
def test_evaluation_equals_the_pillow_processor(pictures, settings):
    processor = ViTImageProcessorPil(do_convert_rgb=True, **settings)
    images = [image.convert(mode) for image, mode in zip(pictures, ("RGB", "L", "P", "RGBA"), strict=True)]
    ours = torch.stack(eval_transform(processor)(batch_of(images))["pixel_values"])
    theirs = processor(images=images, return_tensors="pt")["pixel_values"]
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"resample": 3, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {"size": {"height": 33, "width": 64}, "rescale_factor": 1 / 127.5},
        # What the direct route leaves to the processor itself.
        {"resample": 1},
        {"do_rescale": False},
    ],
    ids=["default", "bicubic", "rectangle", "lanczos", "not_rescaled"],
)
@pytest.mark.parametrize("exported", [True, False], ids=["exported", "copied"])
def test_evaluation_is_the_torchvision_processor_to_the_bit(settings, exported, monkeypatch):
    """Where Pillow exports its memory and where not: versions before 11.2, and images of several blocks of memory."""
    if not exported:
        monkeypatch.delattr(Image.Image, "__arrow_c_array__", raising=False)
    processor, random = ViTImageProcessor(do_convert_rgb=True, **settings), np.random.default_rng(0)
    for size in ((224, 224), (300, 400), (33, 64), (31, 900), (1, 1), (224, 225), (2100, 2200)):
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        ours = eval_transform(processor).prepare([image])[0]
        assert (np.asarray(image) == pixels).all()
        theirs = processor(images=[image], return_tensors="pt")["pixel_values"][0]
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize(
    ("kwargs", "size"),
    [
        ({}, (24, 24)),
        ({"resample": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.1]}, (24, 24)),
        ({"do_normalize": False}, (24, 24)),
        ({"do_rescale": False, "image_mean": [99, 98, 97], "image_std": [90, 80, 70]}, (24, 24)),
        ({"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}, (24, 24)),
        ({"size": {"height": 30, "width": 34}, "do_center_crop": True, "crop_size": (20, 24)}, (20, 24)),
    ],
    ids=str,
)
def test_training_without_variation_is_evaluation(pictures, kwargs, size):
    processor = make_processor(CONFIG, **kwargs)
    train, evaluate = image_transforms(processor)
    train.set_epoch(3)
    ours, exact = (torch.stack(transform(batch_of(pictures))["pixel_values"]) for transform in (train, evaluate))
    assert exact.shape == (4, 3, *size) == (4, 3, *get_input_size(processor))
    torch.testing.assert_close(ours, exact, atol=1e-6, rtol=0)


def test_both_work_through_with_transform():
    data = load_data("digits")
    train, evaluate = image_transforms(make_processor(CONFIG), AugmentationConfig(shift_px=2))
    table = data.splits["test"].with_transform(evaluate)
    again = make_processor(CONFIG)(images=to_rgb(data.splits["test"][7]["image"]), return_tensors="pt")
    torch.testing.assert_close(table[7]["pixel_values"], again["pixel_values"][0], atol=1e-6, rtol=0)
    torch.manual_seed(5)
    first = data.splits["test"].with_transform(train)[:4]["pixel_values"]
    torch.manual_seed(5)
    again, other = (data.splits["test"].with_transform(train)[:4]["pixel_values"] for _ in range(2))
    assert torch.equal(torch.stack(first), torch.stack(again)), "without an epoch, torch's own generator decides"
    assert not torch.equal(torch.stack(first), torch.stack(other))


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("kind", [ViTImageProcessor, ViTImageProcessorPil])
def test_files_opened_lazily_are_prepared_in_threads_as_without(pictures, tmp_path, monkeypatch, kind, repeated):
    """JPEG files that nobody has decoded yet; the same one may stand in a batch several times."""
    for number in range(24):
        pictures[number % 4].resize((80 + number, 120)).save(tmp_path / f"{number}.jpg")
    transform = eval_transform(kind(size={"height": 24, "width": 24}, do_convert_rgb=True))

    def opened(threads: int) -> list[Image.Image]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        images = [Image.open(tmp_path / f"{number}.jpg") for number in range(24)]
        return images * 3 if repeated else images

    wanted = torch.stack(transform.prepare(opened(1)))
    assert torch.equal(torch.stack(transform.prepare(opened(4))), wanted)
    with torch.inference_mode():  # as where a model is asked
        assert torch.equal(transform.batch(opened(4)), wanted)


def test_processor_needs_rgb_and_a_size():
    with pytest.raises(UserError, match="the model takes images with num_channels=1"):
        make_processor(SimpleNamespace(image_size=8, num_channels=1))
    with pytest.raises(UserError, match="but height and width are needed"):
        get_input_size(make_processor(CONFIG, size={"shortest_edge": 24}))


# ---- variations


def numbered(height: int = 6, width: int = 7) -> torch.Tensor:
    """[2, 3, h, w] whose values name their place."""
    return torch.arange(1, 1 + 2 * 3 * height * width, dtype=torch.uint8).reshape(2, 3, height, width)


def test_shift_moves_every_image_on_its_own():
    pixels = numbered()
    moved = shift(pixels, right=[2, -1], down=[-1, 3])
    expected = np.zeros_like(pixels.numpy())
    expected[0, :, 0:5, 2:7] = pixels.numpy()[0, :, 1:6, 0:5]
    expected[1, :, 3:6, 0:6] = pixels.numpy()[1, :, 0:3, 1:7]
    np.testing.assert_array_equal(moved.numpy(), expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dict(degrees=17.0), dict(angle=-17.0)),
        (dict(scale=1.3), dict(scale=1.3)),
        (dict(shear_degrees=20.0), dict(shear=[20.0, 0.0])),
        (dict(right=3.0, down=-2.0), dict(translate=[3, -2])),
        (dict(degrees=10.0, scale=0.8, right=-2.0, down=1.0), dict(angle=-10.0, scale=0.8, translate=[-2, 1])),
        (dict(degrees=10.0, shear_degrees=15.0), dict(angle=-10.0, shear=[15.0, 0.0])),
    ],
)
def test_affine_is_torchvisions(ours, theirs):
    pixels = torch.randint(0, 256, (2, 3, 20, 31), dtype=torch.uint8)
    settings = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], **theirs}
    expected = functional.affine(pixels, interpolation=v2.InterpolationMode.BILINEAR, **settings)
    assert (apply_affine(pixels, **ours).int() - expected.int()).abs().max() <= 1


def test_fractional_shift_zoom_and_shear_stay_within_their_reach():
    # A bright dot far from the centre: its brightness-weighted place tells how it was moved.
    pixels = torch.zeros(3, 21, 21, dtype=torch.uint8)
    pixels[:, 5:8, 10] = 255

    def places(**fields):
        varied = spread(AugmentationConfig(**fields), pixels)[:, 0].double()
        grid = torch.arange(21.0, dtype=torch.float64)
        total = varied.sum(dim=(1, 2))
        return (varied.sum(2) @ grid / total - 6).numpy(), (varied.sum(1) @ grid / total - 10).numpy()

    down, right = places(shift_px=1.5)
    assert all(1.4 < np.abs(moved).max() <= 1.51 for moved in (down, right))
    assert np.abs(down - np.round(down)).max() > 0.4
    down, right = places(zoom=0.25)  # the dot is 4 px above the centre
    assert 0.9 < np.abs(down).max() <= 1.02
    assert np.abs(right).max() < 0.02
    down, right = places(shear_degrees=20.0)
    assert np.abs(down).max() < 0.05
    assert 1.3 < np.abs(right).max() <= 4 * np.tan(np.deg2rad(20)) + 0.05


def spread(config: AugmentationConfig, pixels: torch.Tensor, count: int = 400) -> torch.Tensor:
    """One image varied `count` times: [count, 3, H, W]."""
    keys = make_random_keys(0, 0, np.arange(count, dtype=np.uint64))
    augment = Augmenter(config, tuple(pixels.shape[-2:]), v2.InterpolationMode.BILINEAR)
    return augment(list(pixels.expand(count, -1, -1, -1)), keys)


def test_shifts_are_uniform_over_the_square():
    pixels = torch.zeros(3, 9, 9, dtype=torch.uint8)
    pixels[:, 4, 4] = 255
    places = spread(AugmentationConfig(shift_px=1), pixels, 1800)[:, 0].flatten(1).argmax(1)
    counts = Counter((place // 9 - 4, place % 9 - 4) for place in places.tolist())
    assert set(counts) == {(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)}
    # Binomial(1800, 1/9): mean 200, standard deviation 13.
    assert all(abs(count - 200) < 60 for count in counts.values())


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flip_mirrors_with_its_probability(probability):
    pixels = numbered()[0]
    varied = spread(AugmentationConfig(horizontal_flip=probability), pixels, 1000)
    mirrored = (varied == pixels.flip(-1)).flatten(1).all(1)
    assert ((varied == pixels).flatten(1).all(1) | mirrored).all()
    assert abs(mirrored.float().mean().item() - probability) < 0.06


def test_rotation_stays_within_its_degrees():
    pixels = torch.zeros(3, 41, 41, dtype=torch.uint8)
    pixels[:, 20, 38:41] = 255  # a mark 19 px right of the centre
    varied = spread(AugmentationConfig(rotation_degrees=15), pixels)[:, 0].double()
    rows = (varied.sum(2) * torch.arange(41)).sum(1) / varied.sum((1, 2))
    angles = torch.rad2deg(torch.atan2(20 - rows, torch.tensor(19.0)))
    assert -15.7 < angles.min() < -13
    assert 13 < angles.max() < 15.7


def test_random_crops_show_parts_of_the_asked_share():
    across = torch.arange(64).repeat(64, 1) * 4
    ramp = torch.stack([across, across.T, torch.zeros(64, 64)]).to(torch.uint8)
    varied = spread(AugmentationConfig(random_resized_crop=(0.25, 0.5)), ramp, 100).double()
    # The slopes of the ramps tell width and height of the crop; 0.93: the rim is flattened by antialiasing.
    across = (varied[:, 0, :, -8].mean(1) - varied[:, 0, :, 8].mean(1)) / 4 / (48 / 64)
    down = (varied[:, 1, -8].mean(1) - varied[:, 1, 8].mean(1)) / 4 / (48 / 64)
    share, ratio = across * down / 64**2, across / down
    assert 0.2 < share.min() < share.max() - 0.15 < 0.4
    assert 0.68 < ratio.min() < ratio.max() < 1.45


@pytest.mark.parametrize(
    ("config", "theirs", "salt"),
    [
        (dict(randaugment=(2, 15)), lambda: v2.RandAugment(2, 15), 1),
        (dict(color_jitter=0.3), lambda: v2.ColorJitter(0.3, 0.3, 0.3), 5),
    ],
)
def test_what_is_torchvisions_is_so_under_the_images_own_seed(config, theirs, salt):
    pixels = torch.randint(0, 256, (5, 3, 20, 20), dtype=torch.uint8)
    keys, state = make_random_keys(1, 2, np.arange(5, dtype=np.uint64)), torch.get_rng_state()
    ours = Augmenter(AugmentationConfig(**config), (20, 20), None)(list(pixels), keys)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is left as it was"
    for image, varied, key in zip(pixels, ours, keys.tolist(), strict=True):
        torch.manual_seed((key ^ salt) & 0x7FFF_FFFF_FFFF_FFFF)
        assert torch.equal(theirs()(image), varied)
    assert not torch.equal(ours, pixels)


def test_a_policy_is_timms_under_the_images_own_seed():
    from timm.data import auto_augment

    pixels = torch.randint(0, 256, (6, 3, 20, 24), dtype=torch.uint8)
    keys = make_random_keys(1, 2, np.arange(6, dtype=np.uint64))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    policy, color = "rand-m9-mstd0.5-inc1", (10, 20, 30)
    ours = Augmenter(AugmentationConfig(auto_augment=policy), (20, 24), None, color)(list(pixels), keys)
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[2], torch.get_rng_state())
    # 0.45 of the shorter side is 9 px.
    theirs = auto_augment.rand_augment_transform(policy, {"translate_const": 9, "img_mean": color})
    for image, varied, key in zip(pixels, ours, keys.tolist(), strict=True):
        random.seed(key ^ 4)
        np.random.seed((key ^ 4) & 0xFFFFFFFF)
        expected = np.asarray(theirs(Image.fromarray(image.permute(1, 2, 0).numpy())))
        assert np.array_equal(varied.permute(1, 2, 0).numpy(), expected)
    random.setstate(states[0])
    assert not torch.equal(ours, pixels)


@pytest.mark.parametrize("policy", ["rand-m10-n3-p1-inc1", "rand-m0-n3-p1-mmax20", "original"])
def test_a_posterisation_to_no_bits_is_black(policy):
    """What timm asks for at its strongest level, and Pillow refuses."""
    pixels = torch.full((3, 8, 8), 77, dtype=torch.uint8)
    varied = spread(AugmentationConfig(auto_augment=policy), pixels, 200)
    black = (varied == 0).flatten(1).all(1)
    assert black.any() or policy == "original"
    assert not black.all()


def test_three_augment_greys_solarises_or_blurs():
    """arXiv 2204.07118, section 3: each image gets one of the three, with equal probability."""
    pixels = torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    varied = spread(AugmentationConfig(auto_augment="3a"), pixels, 300)
    solarised = torch.where(pixels < 128, pixels, 255 - pixels)
    grey = (varied == varied[:, :1]).flatten(1).all(1)
    turned = (varied == solarised).flatten(1).all(1)
    contrast = varied.float().flatten(1).std(1) / pixels.float().std()
    blurred = ~grey & ~turned & (contrast <= 1.001)
    assert (grey.int() + turned.int() + blurred.int() == 1).all()
    # Of 300 a third each: standard deviation 8.
    assert all(abs(int(kind.sum()) - 100) < 35 for kind in (grey, turned, blurred))


def test_simple_random_crops_show_the_image_moved_by_at_most_its_reflected_edge():
    wide = Image.fromarray(np.arange(12 * 24 * 3, dtype=np.uint8).reshape(12, 24, 3))
    transform = train_transform(make_processor(CONFIG), AugmentationConfig(random_crop=4))
    transform.set_epoch(0)
    (prepared,) = transform.prepare([wide])
    assert prepared.shape == (3, 24, 48), "the shorter side has the model's 24 px, the longer its ratio"
    padded = np.pad(prepared.numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
    crops = {(y, x): padded[:, y : y + 24, x : x + 24] for y in range(9) for x in range(33)}
    places = set()
    for values in transform.finish([prepared] * 40, np.arange(40, dtype=np.uint64)):
        shown = ((values + 1) * 127.5).round().numpy()
        places |= {place for place, crop in crops.items() if np.array_equal(crop, shown)}
    assert len(places) > 20
    assert max(y for y, _ in places) > 4 > min(y for y, _ in places)
    with pytest.raises(UserError, match=r"random_crop=24 is too large .*; choose less than 24"):
        train_transform(make_processor(CONFIG), AugmentationConfig(random_crop=24))


def test_erasing_puts_noise_into_a_rectangle_of_its_share_of_images():
    grey = Image.new("RGB", (24, 24), (128, 128, 128))
    transform = train_transform(make_processor(CONFIG), AugmentationConfig(random_erasing=0.25))
    transform.set_epoch(0)
    prepared = transform.prepare([grey] * 600)
    values = torch.stack(list(transform.finish(prepared, np.arange(600, dtype=np.uint64))))
    erased = (values != values.flatten()[0]).any(1)
    hit = erased.flatten(1).any(1)
    # Deviation of a share of 600: 0.018.
    assert abs(hit.double().mean() - 0.25) < 0.06
    for mask in erased[hit]:
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == rows * columns  # one rectangle
        assert 0.01 < rows * columns / 24**2 < 0.36
    noise = values[erased.unsqueeze(1).expand_as(values)]
    assert max(abs(noise.mean()), abs(noise.std() - 1)) < 0.05


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("random_resized_crop", (0.0, 1.0)), ("random_resized_crop", (0.5, 0.2)), ("horizontal_flip", 1.5),
        ("randaugment", (2, 40)), ("random_erasing", 1.5), ("random_crop", -1), ("auto_augment", "nothing"),
        ("auto_augment", "rand-m9-mstd.5"),
        ("color_jitter", 1.5), ("mixup_alpha", -1.0), ("cutmix_alpha", -0.1), ("shift_px", -1),
        ("rotation_degrees", 200.0), ("shear_degrees", 90.0), ("zoom", 1.0),
    ],
)  # fmt: skip
def test_impossible_augmentations_are_refused(field, value):
    with pytest.raises(UserError, match=f"the augmentation {field} is .*, but it "):
        AugmentationConfig(**{field: value})


# ---- chance

EVERYTHING = AugmentationConfig(
    random_resized_crop=(0.5, 1.0), horizontal_flip=0.5, randaugment=(2, 10), auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=0.3, random_erasing=0.5, shift_px=2, rotation_degrees=10, shear_degrees=5, zoom=0.1,
)  # fmt: skip


def test_variation_depends_on_seed_epoch_and_image_alone(pictures):
    def varied(seed: int, epoch: int, order: list[int]) -> dict[int, torch.Tensor]:
        transform = train_transform(make_processor(CONFIG), EVERYTHING, seed)
        transform.set_epoch(epoch)
        torch.rand(seed + epoch + len(order))  # whatever else draws numbers
        values = transform(batch_of([pictures[index] for index in order]))["pixel_values"]
        return dict(zip(order, values, strict=True))

    first = varied(0, 0, [0, 1, 2, 3])
    for order in ([3, 1, 2, 0], [2], [1, 3]):
        for index, values in varied(0, 0, order).items():
            assert torch.equal(values, first[index])
    for other in (varied(1, 0, [0, 1, 2, 3]), varied(0, 1, [0, 1, 2, 3])):
        assert not any(torch.equal(other[index], first[index]) for index in first)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (2**40, 99), (-1, 3)])
def test_random_keys_are_splitmix64_of_splitmix64(seed, epoch):
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF, "the generator's well-known first number"
    base = splitmix64(splitmix64(0, seed % 2**64), epoch)
    keys = make_random_keys(seed, epoch, np.asarray([0, 1, 2**63], dtype=np.uint64))
    assert keys.tolist() == [splitmix64(base, image) for image in (0, 1, 2**63)]
    expected = [[(splitmix64(key, draw) >> 11) / 2**53 for draw in range(2)] for key in keys.tolist()]
    assert draw_uniforms(keys, 2).tolist() == expected


def reopened(image: Image.Image, kind: str, **options) -> Image.Image:
    """The image as a file of this kind holds it, in the same mode."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    again = Image.open(io.BytesIO(buffer.getvalue()))
    assert again.mode.partition(";")[0] == image.mode.partition(";")[0]
    return again


def noise(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, shape, dtype=np.uint8)


def on_white(color: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None].astype(np.float64) / 255
    return color * share + 255 * (1 - share)


def in_palette(kind: str, alphas: list[int], **options):
    indices = np.random.RandomState(1).randint(0, 4, (6, 5), dtype=np.uint8)
    colors = np.asarray([[255, 0, 0], [0, 255, 0], [10, 20, 30], [90, 80, 70]], dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(colors.tobytes())
    return reopened(image, kind, **options), on_white(colors, np.asarray(alphas))[indices]


def gray(values) -> np.ndarray:
    return np.repeat(np.asarray(values)[..., None], 3, -1)


def array(values, kind) -> Image.Image:
    return Image.fromarray(np.asarray(values, dtype=kind))


def in_one_color():
    """An RGB image of which one color is transparent."""
    values = noise(6, 5, 3)
    values[2, 3] = (1, 2, 3)
    expected = values.copy()
    expected[2, 3] = 255
    return reopened(Image.fromarray(values), "PNG", transparency=(1, 2, 3)), expected


def tiff(values: Image.Image, tag: int, value: int, pixels: bytes = b"") -> Image.Image:
    """An image of one channel as TIFF, with another value of this tag (SHORT), and other bytes for its last pixels."""
    buffer = io.BytesIO()
    values.save(buffer, "TIFF")
    content = buffer.getvalue()
    (old,) = struct.unpack_from("<H", content, content.index(struct.pack("<HHI", tag, 3, 1)) + 8)
    content = content.replace(struct.pack("<HHIH", tag, 3, 1, old), struct.pack("<HHIH", tag, 3, 1, value))
    return Image.open(io.BytesIO(content[: len(content) - len(pixels)] + pixels))


BITS, FOUR, TWO = noise(5, 7) > 127, noise(6, 5, 4), noise(6, 5, 2)
SIXTEEN, WIDE = np.asarray([[0, 256], [770, 65535]]), np.asarray([[0, 128, 129], [257, 32768, 65535]])
EVERY = np.arange(65536).reshape(256, 256)
INK = 255 - FOUR.astype(np.float64)
FRAMES = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 0, 255))]
ALPHAS, EXACT = [0, 64, 128, 255], {"lossless": True, "exact": True}
# What the image is -> the image, the RGB it stands for, by how much a level may be off.
MODES = {
    "grayscale": (Image.fromarray(noise(5, 7)), gray(noise(5, 7)), 0),
    "one bit": (reopened(Image.fromarray(BITS), "PNG"), gray(BITS * 255), 0),
    **{f"alpha in {kind}": (reopened(Image.fromarray(FOUR, "RGBA"), kind, **options),
                            on_white(FOUR[..., :3], FOUR[..., 3]), 1)
       for kind, options in (("PNG", {}), ("WEBP", EXACT), ("TIFF", {}))},
    "invisible": (Image.new("RGBA", (3, 2), (200, 10, 10, 0)), np.full((2, 3, 3), 255), 0),
    "gray with alpha": (reopened(Image.fromarray(TWO, "LA"), "PNG"), on_white(gray(TWO[..., 0]), TWO[..., 1]), 1),
    **{f"palette in {kind}": (*in_palette(kind, [255] * 4), 0) for kind in ("PNG", "GIF", "BMP")},
    "transparent entry": (*in_palette("PNG", [255, 255, 0, 255], transparency=2), 0),
    "alpha of every entry": (*in_palette("PNG", ALPHAS, transparency=bytes(ALPHAS)), 1),
    "transparent color": (*in_one_color(), 0),
    "ink on white": (reopened(Image.fromarray(FOUR, "CMYK"), "TIFF"), INK[..., :3] * INK[..., 3:] / 255, 1),
    # Pure cyan: no red, full green and blue; JPEG stores CMYK inverted, a classic way to get a negative.
    "ink in JPEG": (reopened(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG"),
                    np.tile([0, 255, 255], (16, 16, 1)), 2),
    **{mode: (Image.frombytes(mode, (2, 2), SIXTEEN.astype(order).tobytes()), gray(np.rint(SIXTEEN / 257)), 0)
       for mode, order in (("I;16B", ">u2"), ("I;16L", "<u2"))},
    **{f"sixteen bits in {kind}": (reopened(array(WIDE, np.uint16), kind), gray(np.rint(WIDE / 65535 * 255)), 0)
       for kind in ("PNG", "TIFF")},
    "every value of sixteen bits": (array(EVERY, np.uint16), gray(np.rint(EVERY / 257)), 0),
    # Of X-rays and scans, which count from white: Pillow inverts those of 8 bits alone.
    **{f"{kind} from white": (tiff(array(full * WIDE / 65535, kind), 262, 0), gray(255 - WIDE / 257), 1)
       for kind, full in (("uint8", 255), ("uint16", 65535), ("float32", 1))},
    "twelve bits": (tiff(array([[0, 0, 0, 0]], np.uint16), 258, 12, b"\x00\x08\x00\xff\xf0\x11\0\0"),
                    gray(np.rint(np.asarray([[0, 2048, 4095, 17]]) / 4095 * 255)), 0),
    "I": (array([[0, 257], [514, 65535]], np.int32), gray([[0, 1], [2, 255]]), 0),
    **{f"floats to {most}": (array([[0.0, 0.5, most]], np.float32), gray([[0, 128, 255]]), 0)
       for most in (1, 1.0000002)},
    "floats to 255": (array([[0.0, 1.4, 255.0]], np.float32), gray([[0, 1, 255]]), 0),
    "animation": (reopened(FRAMES[0].convert("P"), "GIF", save_all=True, append_images=FRAMES[1:]),
                  np.asarray(FRAMES[0]), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_the_rgb_it_stands_for(name):
    image, expected, tolerance = MODES[name]
    made = to_rgb(image)
    assert made.mode == "RGB"
    np.testing.assert_allclose(np.asarray(made).astype(float), expected, atol=tolerance, rtol=0)
    assert to_rgb(made) is made
    if image.mode != "F":
        assert np.array_equal(HANDLER["_to_rgb"](image), made)


def test_the_handler_fills_the_same_grid():
    """It stands alone, so it has a copy of the function."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        size, patch = generator.integers(1, 5000, 2).tolist(), generator.integers(1, 33, 2).tolist()
        arguments = size, patch, int(generator.integers(1, 2000))
        assert HANDLER["_fill_grid"](*arguments) == fill_grid(*arguments)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        *((array([[0, value]], np.int32), "values from 0 to 65535") for value in (-1, 65536)),
        *((array([v], np.float32), "floating-point image") for v in ([-0.5, 1.0], [0.0, 256.0], [float("nan"), 1.0])),
        (Image.new("LAB", (4, 4)), "mode LAB cannot be converted"),
    ],
)
def test_what_has_no_way_to_rgb_is_refused(image, message):
    with pytest.raises(UserError, match=message):
        to_rgb(image)


# EXIF 2.3, tag 0x0112: where row 0 and column 0 of the stored pixels are; what turns them upright.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda stored: np.rot90(stored, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_exif_orientation_is_applied_once(orientation, mode):
    stored = Image.fromarray(noise(5, 8, 3)).convert(mode)
    made = to_rgb(reopened(stored, "PNG", exif=tags(orientation)))
    expected = UPRIGHT[orientation](np.asarray(stored) if mode == "RGB" else gray(stored))
    np.testing.assert_array_equal(np.asarray(made), expected)
    np.testing.assert_array_equal(np.asarray(to_rgb(made)), expected)


def test_as_many_at_once_as_torch_has_threads(monkeypatch):
    """Three wait for each other, which two threads would not outlive; results and the first failure are in order."""
    meeting = threading.Barrier(3, timeout=20)

    def in_thread(item: str) -> tuple[str, bool]:
        return item, threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    met = map_in_threads(lambda item: (meeting.wait(), in_thread(item))[1], list("abcdef"))
    assert met == [(item, True) for item in "abcdef"]
    with pytest.raises(ValueError, match="'b'"):
        map_in_threads(int, ["1", "b", "c"])
    assert map_in_threads(int, []) == []
    # In a loader's worker; of a single image; and where one object is there twice, also as the image of two items.
    twice = [SimpleNamespace(image=meeting), SimpleNamespace(image=meeting)]  # as `predict` holds open images
    for threads, items in ((1, ["a", "b"]), (4, ["a"]), (4, ["a", "b", "a"]), (4, twice)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert map_in_threads(in_thread, items) == [(item, False) for item in items]
