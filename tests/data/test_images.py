"""to_rgb against values computed by hand or by NumPy, never by Pillow's own conversion."""

import io
import struct
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data import to_rgb
from hf_vit.data.images import map_in_threads
from hf_vit.errors import UserError


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
    "floats to 1": (array([[0.0, 0.5, 1.0]], np.float32), gray([[0, 128, 255]]), 0),
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
    stored, exif = Image.fromarray(noise(5, 8, 3)).convert(mode), Image.Exif()
    exif[0x0112] = orientation
    made = to_rgb(reopened(stored, "PNG", exif=exif))
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
    # In a loader's worker; of a single image; and where one object is there twice.
    for threads, items in ((1, ["a", "b"]), (4, ["a"]), (4, ["a", "b", "a"])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert map_in_threads(in_thread, items) == [(item, False) for item in items]
