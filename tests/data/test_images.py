"""to_rgb against values computed by hand or by NumPy, never by Pillow's own conversion."""

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data import to_rgb
from hf_vit.data.images import each_in_threads
from hf_vit.errors import UserError


def reopened(image: Image.Image, kind: str, **options) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def noise(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, shape, dtype=np.uint8)


def on_white(color: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None].astype(np.float64) / 255
    return color * share + 255 * (1 - share)


def test_rgb_is_returned_as_it_is():
    image = Image.fromarray(noise(5, 7, 3))
    assert to_rgb(image) is image


def test_grayscale_is_repeated():
    values = noise(5, 7)
    np.testing.assert_array_equal(pixels(to_rgb(Image.fromarray(values))), np.repeat(values[..., None], 3, -1))


def test_one_bit_becomes_black_and_white():
    bits = noise(5, 7) > 127
    image = reopened(Image.fromarray(bits), "PNG")
    assert image.mode == "1"
    np.testing.assert_array_equal(pixels(to_rgb(image)), np.repeat(bits[..., None] * np.uint8(255), 3, -1))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_rgba_is_composited_on_white(kind):
    values = noise(6, 5, 4)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    image = reopened(Image.fromarray(values, "RGBA"), kind, **options)
    assert image.mode == "RGBA"
    expected = on_white(values[..., :3], values[..., 3])
    np.testing.assert_allclose(pixels(to_rgb(image)).astype(float), expected, atol=1)


def test_invisible_pixels_are_white_not_their_hidden_colour():
    image = Image.new("RGBA", (3, 2), (200, 10, 10, 0))
    np.testing.assert_array_equal(pixels(to_rgb(image)), 255)


def test_gray_with_alpha_is_composited_on_white():
    values = noise(6, 5, 2)
    image = reopened(Image.fromarray(values, "LA"), "PNG")
    assert image.mode == "LA"
    expected = on_white(np.repeat(values[..., :1], 3, -1), values[..., 1])
    np.testing.assert_allclose(pixels(to_rgb(image)).astype(float), expected, atol=1)


def palette_image() -> tuple[Image.Image, np.ndarray, np.ndarray]:
    indices = np.random.RandomState(1).randint(0, 4, (6, 5), dtype=np.uint8)
    colors = np.asarray([[255, 0, 0], [0, 255, 0], [10, 20, 30], [90, 80, 70]], dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(colors.tobytes())
    assert image.mode == "P"
    return image, indices, colors


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP"])
def test_palette_is_looked_up(kind):
    image, indices, colors = palette_image()
    again = reopened(image, kind)
    assert again.mode == "P"
    np.testing.assert_array_equal(pixels(to_rgb(again)), colors[indices])


def test_transparent_palette_entry_becomes_white():
    image, indices, colors = palette_image()
    again = reopened(image, "PNG", transparency=2)
    expected = colors.copy()
    expected[2] = 255
    np.testing.assert_array_equal(pixels(to_rgb(again)), expected[indices])


def test_palette_with_an_alpha_for_every_entry():
    image, indices, colors = palette_image()
    alphas = np.asarray([0, 64, 128, 255], dtype=np.uint8)
    again = reopened(image, "PNG", transparency=alphas.tobytes())
    np.testing.assert_allclose(pixels(to_rgb(again)).astype(float), on_white(colors, alphas)[indices], atol=1)


def test_transparent_colour_of_an_rgb_png_becomes_white():
    values = noise(6, 5, 3)
    values[2, 3] = (1, 2, 3)
    expected = values.copy()
    expected[2, 3] = 255
    again = reopened(Image.fromarray(values), "PNG", transparency=(1, 2, 3))
    assert again.mode == "RGB"
    np.testing.assert_array_equal(pixels(to_rgb(again)), expected)


def test_cmyk_is_ink_on_white():
    values = noise(6, 5, 4)
    image = reopened(Image.fromarray(values, "CMYK"), "TIFF")
    assert image.mode == "CMYK"
    light = 255 - values.astype(np.float64)
    expected = light[..., :3] * light[..., 3:] / 255
    np.testing.assert_allclose(pixels(to_rgb(image)).astype(float), expected, atol=1)


def test_cmyk_jpeg_keeps_its_colour():
    # Pure cyan ink: no red, full green and blue; JPEG stores CMYK inverted, a classic way to get a negative.
    image = reopened(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG")
    assert image.mode == "CMYK"
    np.testing.assert_allclose(pixels(to_rgb(image))[8, 8], (0, 255, 255), atol=3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    values = np.asarray([[0, 128, 129], [257, 32768, 65535]], dtype=np.uint16)
    image = reopened(Image.fromarray(values), kind)
    assert image.mode.startswith("I")
    expected = np.rint(values.astype(np.float64) / 65535 * 255)
    assert expected.max() == 255
    np.testing.assert_array_equal(pixels(to_rgb(image)), np.repeat(expected[..., None], 3, -1))


def test_every_sixteen_bit_value_is_rounded_to_nearest():
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.rint(values.astype(np.float64) / 257)
    np.testing.assert_array_equal(pixels(to_rgb(Image.fromarray(values)))[..., 0], expected)


@pytest.mark.parametrize("mode", ["I;16B", "I;16L"])
def test_sixteen_bits_of_either_byte_order(mode):
    values = np.asarray([[0, 256], [770, 65535]], dtype=">u2" if mode.endswith("B") else "<u2")
    image = Image.frombytes(mode, (2, 2), values.tobytes())
    expected = np.rint(values.astype(np.float64) / 257)
    np.testing.assert_array_equal(pixels(to_rgb(image))[..., 1], expected)


def test_mode_i_counts_as_sixteen_bits():
    values = np.asarray([[0, 257], [514, 65535]], dtype=np.int32)
    image = Image.fromarray(values)
    assert image.mode == "I"
    np.testing.assert_array_equal(pixels(to_rgb(image))[..., 0], [[0, 1], [2, 255]])


@pytest.mark.parametrize("value", [-1, 65536])
def test_mode_i_outside_sixteen_bits_is_refused(value):
    image = Image.fromarray(np.asarray([[0, value]], dtype=np.int32))
    with pytest.raises(UserError, match=r"65535 is needed"):
        to_rgb(image)


@pytest.mark.parametrize(("values", "expected"), [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 1.4, 255.0], [0, 1, 255])])
def test_floats_of_zero_to_one_or_to_255(values, expected):
    image = Image.fromarray(np.asarray([values], dtype=np.float32))
    assert image.mode == "F"
    np.testing.assert_array_equal(pixels(to_rgb(image))[0, :, 0], expected)


@pytest.mark.parametrize("values", [[-0.5, 1.0], [0.0, 256.0], [float("nan"), 1.0]])
def test_other_floats_are_refused(values):
    with pytest.raises(UserError, match="floating-point image"):
        to_rgb(Image.fromarray(np.asarray([values], dtype=np.float32)))


def test_a_mode_without_a_way_to_rgb_is_refused():
    with pytest.raises(UserError, match="mode LAB cannot be converted"):
        to_rgb(Image.new("LAB", (4, 4)))


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
def test_exif_orientation_is_applied(orientation, mode):
    stored = Image.fromarray(noise(5, 8, 3)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = reopened(stored, "PNG", exif=exif)
    before = np.asarray(stored) if mode == "RGB" else np.repeat(np.asarray(stored)[..., None], 3, -1)
    np.testing.assert_array_equal(pixels(to_rgb(image)), UPRIGHT[orientation](before))
    # Applied once only: the converted image does not carry the tag on.
    np.testing.assert_array_equal(pixels(to_rgb(to_rgb(image))), UPRIGHT[orientation](before))


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 0, 255))]
    image = reopened(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(pixels(to_rgb(image)), np.asarray(frames[0]))


# ---- several at once


def test_as_many_at_once_as_torch_has_threads(monkeypatch):
    """Three wait for each other, which two threads would not outlive; results and the first failure are in order."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    meeting = threading.Barrier(3, timeout=20)

    def met(item: str) -> tuple[str, bool]:
        meeting.wait()
        return item, threading.current_thread() is threading.main_thread()

    assert each_in_threads(met, list("abcdef")) == [(item, False) for item in "abcdef"]
    with pytest.raises(ValueError, match="'b'"):
        each_in_threads(int, ["1", "b", "c"])
    assert each_in_threads(int, []) == []


@pytest.mark.parametrize(("threads", "items"), [(1, ["a", "b"]), (4, ["a"]), (4, ["a", "b", "a"])])
def test_one_after_the_other(monkeypatch, threads: int, items: list[str]):
    """In a loader's worker; of a single image; and where one object is there twice."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ran = each_in_threads(lambda item: (item, threading.current_thread() is threading.main_thread()), items)
    assert ran == [(item, True) for item in items]
