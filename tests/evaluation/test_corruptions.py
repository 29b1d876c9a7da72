"""Every corruption beside its definition, and accuracy under them beside a plain loop."""

import io
import itertools

import numpy as np
import pytest
import torch
from evaluation.tiny import examine, make_classifier, make_data, make_images, make_processor
from PIL import Image

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.corrupted_accuracy import corrupt_batch, corruptions
from hf_vit.evaluation.protocols.corruptions import CORRUPTIONS, corrupt, disk_kernel, motion_kernel
from hf_vit.evaluation.protocols.top1 import top1


def photo(side=64):
    """A smooth picture with an edge, in steps of 1/255."""
    rows, columns = np.mgrid[:side, :side] / side
    channels = [0.5 + 0.3 * np.sin(6 * rows), 0.2 + 0.5 * columns, np.where(rows > columns, 0.8, 0.3)]
    return np.rint(np.stack(channels, axis=-1) * 255) / 255


def seeded():
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severities_grow_and_stay_pictures(name):
    picture = photo()
    distances = []
    for severity in range(1, 6):
        found = corrupt(picture, name, severity, seeded())
        assert found.shape == picture.shape
        assert (found == corrupt(picture, name, severity, seeded())).all()
        np.testing.assert_allclose(found * 255, np.rint(found * 255), atol=1e-9)
        assert found.min() >= 0
        assert found.max() <= 1
        distances.append(float(np.abs(found - picture).mean()))
    assert distances[0] > 0
    assert all(later > earlier for earlier, later in itertools.pairwise(distances)), distances


def test_the_statistics_of_noise():
    gray = np.full((200, 200, 3), 102 / 255)
    normal = corrupt(gray, "gaussian_noise", 1, seeded()) - gray
    assert normal.std() == pytest.approx(0.08, rel=0.02)
    shot = corrupt(gray, "shot_noise", 1, seeded())
    assert shot.mean() == pytest.approx(0.4, abs=0.002)
    assert shot.var() == pytest.approx(0.4 / 60, rel=0.02)
    impulse = corrupt(gray, "impulse_noise", 3, seeded())
    assert (impulse == 1).mean() == pytest.approx(0.045, rel=0.05)
    assert (impulse == 0).mean() == pytest.approx(0.045, rel=0.05)
    assert ((impulse == 0) | (impulse == 1) | (impulse == gray)).all()


def test_kernels_of_blurs():
    for radius in (0.3, 0.9, 4.0, 7.5):
        kernel = disk_kernel(radius)
        assert kernel.sum() == pytest.approx(1)
        assert (kernel == kernel[::-1]).all()
        assert (kernel == kernel.T).all()
    inside = disk_kernel(7.5)[8, 8]
    assert inside == pytest.approx(1 / (np.pi * 7.5**2), rel=0.01), "a whole pixel weighs one over the disk's area"
    straight = motion_kernel(3.0, 2.0, 0.0)
    middle = len(straight) // 2
    assert straight.sum() == pytest.approx(1)
    assert straight[middle].sum() == pytest.approx(1), "along a row nothing leaves it"
    assert straight[middle, :middle].sum() == 0, "it smears to one side"
    weights = straight[middle, middle : middle + 7]
    assert (np.diff(weights[1:]) < 0).all()
    turned = motion_kernel(3.0, 2.0, np.pi / 4)
    assert np.trace(turned) > 0.4
    assert np.tril(turned, -2).sum() == np.triu(turned, 2).sum() == 0


@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur", "zoom_blur", "contrast", "pixelate"])
def test_a_picture_of_one_colour_stays(name):
    flat = np.full((40, 56, 3), (51 / 255, 102 / 255, 1))
    np.testing.assert_allclose(corrupt(flat, name, 5, seeded()), flat, atol=1e-9)


def test_blurs_follow_the_size_of_the_image():
    """The same edge, four times as large, is blurred over four times as many pixels."""
    widths = []
    for side in (56, 224):
        picture = np.zeros((side, side, 3))
        picture[:, side // 2 :] = 1
        found = corrupt(picture, "defocus_blur", 5, seeded())[side // 2, :, 0]
        widths.append(int(((found > 0.01) & (found < 0.99)).sum()))
    assert widths[1] == pytest.approx(4 * widths[0], abs=3)


def test_those_with_a_formula():
    picture = photo()
    mean = picture.mean(axis=(0, 1))
    np.testing.assert_allclose(
        corrupt(picture, "contrast", 2, seeded()), (picture - mean) * 0.3 + mean, atol=0.5 / 255 + 1e-9
    )
    gray = np.full((4, 4, 3), 0.2)
    np.testing.assert_allclose(corrupt(gray, "brightness", 3, seeded()), 0.5, atol=0.5 / 255)
    blocks = corrupt(photo(64), "pixelate", 5, seeded())
    small = photo(64).reshape(16, 4, 16, 4, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(blocks, small.repeat(4, axis=0).repeat(4, axis=1), atol=0.5 / 255 + 1e-9)
    content = io.BytesIO()
    Image.fromarray((picture * 255).round().astype(np.uint8)).save(content, "JPEG", quality=7)
    assert (corrupt(picture, "jpeg_compression", 5, seeded()) * 255 == np.asarray(Image.open(content))).all()


def test_randomness_belongs_to_the_image():
    images = [np.asarray(image) / 255 for image in make_images(4, side=16)]
    pixels = torch.tensor(np.stack(images)).permute(0, 3, 1, 2)
    for name in ("gaussian_noise", "motion_blur"):
        found = corrupt_batch(pixels, name, 3, seed=1)
        assert torch.equal(corrupt_batch(pixels.flip(0), name, 3, seed=1).flip(0), found)
        assert torch.equal(corrupt_batch(pixels[2:3], name, 3, seed=1)[0], found[2])
        assert not torch.equal(corrupt_batch(pixels, name, 3, seed=2), found)


def test_accuracy_equals_a_plain_loop():
    data, model = make_data(), make_classifier()
    result = corruptions(examine(model, data, batch_size=8, seed=4), kinds=["contrast", "shot_noise"])
    assert list(result.accuracy) == ["shot_noise", "contrast"]
    whole = top1(examine(model, data))
    assert result.clean == whole.top1
    labels = torch.tensor(data.splits["test"]["label"])
    values = make_processor()(images=list(data.splits["test"]["image"]), return_tensors="pt")["pixel_values"]
    for name, found in result.accuracy.items():
        for severity in (1, 5):
            pixels = corrupt_batch(values / 2 + 0.5, name, severity, seed=4)
            with torch.no_grad():
                answers = model(pixels * 2 - 1).logits.argmax(1)
            assert found[severity - 1] == pytest.approx(float((answers == labels).double().mean()))
    assert result.mean_error == pytest.approx(1 - np.mean(list(result.accuracy.values())))
    assert result.values()["error_above_clean"] == pytest.approx(result.mean_error - (1 - result.clean))


def test_unknown_corruptions_are_named():
    with pytest.raises(UserError, match="there is no corruption fog; there are gaussian_noise, shot_noise"):
        corruptions(examine(), kinds=["fog", "contrast"])
