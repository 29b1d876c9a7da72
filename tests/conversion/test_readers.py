"""Every format of files: read as its own library reads it; what is damaged, dangerous or something else is refused."""

import argparse
import hashlib
import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from originals.google import make_checkpoint, save_npz
from safetensors.torch import save_file

import hf_vit.conversion as conversion
from campaigns.formats import call, npy_header, pickled, safetensors_of, tensors_of, torch_file, whole
from hf_vit.conversion import readers
from hf_vit.conversion.readers import (
    Companions,
    NpzReader,
    SafetensorsReader,
    ShardedReader,
    TorchReader,
    are_finite,
    open_checkpoint,
)
from hf_vit.errors import UserError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_members(members: list[tuple[str, bytes]], path: Path) -> Path:
    """Write a zip archive of raw members, for names and contents that numpy would never write."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as reader:
        return {key: reader.read_floats(key) for key in reader.shapes}


def assert_unreadable(path: Path, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        read_all(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def assert_refused(path: Path, told: str) -> None:
    """In one line, and nothing is written."""
    output = path.parent / "model of it"
    with pytest.raises(UserError, match=told) as error:
        conversion.convert(path, output)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert not output.exists()
    assert not list(path.parent.glob(".*tmp"))


@pytest.mark.parametrize("stored", [True, False])
def test_arrays_come_back_as_numpy_reads_them(stored: bool, tmp_path: Path):
    """JAX's bfloat16 comes as two bytes of no meaning, the first ones of a float32."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 5)).astype(np.float32)
    bfloat16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    arrays = {
        "a/b": rng.normal(size=(3, 4, 5)).astype(np.float32),
        "half": rng.normal(size=7).astype(np.float16),
        "double": rng.normal(size=(2, 2)),
        "big_endian": rng.normal(size=5).astype(">f4"),
        "fortran": np.asfortranarray(values),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 3), np.float32),
        "bfloat16": bfloat16.view("V2"),
        "bfloat16 fortran": np.asfortranarray(bfloat16).view("V2"),
    } | {f"{kind} {i}": rng.normal(size=(30, 50)).astype(kind) for kind in ("f4", ">f4", "f8") for i in range(5)}
    path = save_npz(arrays, tmp_path / "model.npz", stored)
    with NpzReader(path) as reader:
        assert reader.shapes == {key: value.shape for key, value in arrays.items()}
        read = {key: reader.read_floats(key) for key in arrays}
    widened = (bfloat16.astype(np.uint32) << 16).view(np.float32)
    for key, array in np.load(path).items():  # the tensors are valid after the file is closed
        np.testing.assert_array_equal(read[key].double(), widened if "bf" in key else array)
    dtypes = {"half": torch.float16, "double": torch.float64, "bfloat16": torch.bfloat16}
    assert {key: read[key].dtype for key in dtypes} == dtypes


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_finite_as_torch_tells(dtype: torch.dtype):
    largest, nan, inf = torch.finfo(dtype).max, float("nan"), float("inf")
    cases = [
        torch.full((9,), largest, dtype=dtype),  # whose sum is not finite
        *(torch.tensor([1.0, one, -largest], dtype=dtype) for one in (0.0, nan, -nan, inf, -inf, -1.0)),
        torch.tensor([inf, -inf], dtype=dtype),
        torch.tensor(nan, dtype=dtype),
        torch.tensor(-2.0, dtype=dtype),
        torch.zeros(0, 3, dtype=dtype),
    ]
    strided = torch.ones(40, 6, dtype=dtype)
    strided[7, 3] = inf
    for values in (*cases, strided[:, ::2].T, strided[:, 1::2].T):
        assert are_finite(values) == bool(values.isfinite().all()), values


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {str(dtype): torch.randn(3, 4, dtype=torch.float64).to(dtype) for dtype in DTYPES} | {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_tensors_come_back_exactly(save: Callable, tmp_path: Path):
    path = tmp_path / "model"
    save(tensors(), path)
    with open_checkpoint(path) as reader:
        assert type(reader) is (TorchReader if save is torch.save else SafetensorsReader)
        assert reader.shapes == {key: tuple(value.shape) for key, value in tensors().items()}
        assert reader.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
        read = {key: reader.read_floats(key) for key in reader.shapes}
    for key, expected in tensors().items():  # still valid after the file is closed
        assert read[key].dtype == expected.dtype
        assert torch.equal(read[key], expected)


def test_nested_dicts_are_named_by_their_path(tmp_path: Path):
    kept, shared = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    checkpoint = {
        "model": {"a.b": kept.T, "c": torch.nn.Parameter(shared), "view": shared[1:3]},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "args": argparse.Namespace(lr=0.1, model="vit"),
        "epoch": 7,
    }
    torch.save(checkpoint, tmp_path / "model.pth")
    with open_checkpoint(tmp_path / "model.pth") as reader:
        assert reader.shapes == {"model.a.b": (3, 2), "model.c": (4,), "model.view": (2,), "optimizer.state.0.step": ()}
        assert torch.equal(reader.read_floats("model.a.b"), kept.T)
        assert torch.equal(reader.read_floats("model.view"), shared[1:3])


def test_mapped_files_never_change(tmp_path: Path):
    for save, name in ((save_file, "a.safetensors"), (torch.save, "a.pth"), (None, "a.npz")):
        path = tmp_path / name
        save({"a": torch.ones(1000)}, path) if save else save_npz({"a": np.ones(1000, np.float32)}, path)
        before = path.read_bytes()
        with open_checkpoint(path) as reader:
            reader.read_floats("a").fill_(9)
        assert path.read_bytes() == before


def save_shards(folder: Path, save: Callable = save_file, name: str = "model", ending: str = "safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "vit"}')
    files = {f"{name}-00001-of-00002.{ending}": ["a", "b"], f"{name}-00002-of-00002.{ending}": ["c"]}
    for number, (file, keys) in enumerate(files.items()):
        save({key: torch.full((2,), float(number)) for key in keys}, folder / file)
    index = folder / ("pytorch_model.bin.index.json" if save is torch.save else "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {key: file for file, keys in files.items() for key in keys}}))
    return index


@pytest.mark.parametrize(
    ("save", "name", "ending"), [(save_file, "model", "safetensors"), (torch.save, "pytorch_model", "bin")]
)
def test_folder_in_several_files(save: Callable, name: str, ending: str, tmp_path: Path):
    index = save_shards(tmp_path / "saved", save, name, ending)
    (index.parent / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    with open_checkpoint(index.parent) as reader:
        assert type(reader) is ShardedReader
        assert reader.shapes == dict.fromkeys("abc", (2,))
        assert reader.read_floats("c").tolist() == [1, 1]
        assert reader.companions == Companions({"model_type": "vit"}, {"image_mean": [0.5]})
        files = sorted(index.parent.glob(f"*.{ending}"))
        assert reader.sha256() == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_index_and_files_must_agree(tmp_path: Path):
    index = save_shards(tmp_path / "saved")
    good = json.loads(index.read_text())["weight_map"]
    first, second = good["a"], good["c"]
    for weight_map, told in (
        ({**good, "d": second}, "1 keys differ, such as 'd' in model-00002"),
        ({"a": first, "c": second}, "1 keys differ, such as 'b' in model-00001"),
        ({**good, "a": second}, "2 keys differ, such as 'a'"),
        ({**good, "c": "../model.safetensors"}, "which is no shard's name"),
        ({**good, "c": "/etc/passwd"}, "which is no shard's name"),
        ({**good, "c": 3}, "there is no file .*saved/3"),
        ({**good, "c": "model-00003.safetensors"}, "there is no file .*model-00003"),
        ({}, "has no 'weight_map'"),
        ([], "has no 'weight_map'"),
        ({**good, "a\0\nb": second}, r"such as 'a\\x00 b' in"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert_unreadable(index.parent, told)
    for text, told in (
        ('{"a": [' + "[]," * 300_000 + "1]}", "hf_vit reads at most .* 250,000 values"),
        ("[]", "holds JSON, but not an object"),
        ("{", "not valid JSON"),
        ("[" * 10**5, "not valid JSON"),
    ):
        index.write_text(text)
        assert_unreadable(index.parent, told)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_truncated(keep: float, stored: bool, tmp_path: Path):
    for path in (tmp_path / "model.npz", tmp_path / "model.safetensors", tmp_path / "model.pth"):
        if path.suffix == ".npz":
            save_npz(make_checkpoint(), path, stored)
        else:
            (save_file if path.suffix == ".safetensors" else torch.save)(tensors(), path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])
        assert_refused(path, rf"{path.name} (cannot be read as|is not) an? ")


@pytest.mark.parametrize("stored", [True, False])
def test_flipped_byte_in_an_array(stored: bool, tmp_path: Path):
    path = save_npz(make_checkpoint(), tmp_path / "model.npz", stored)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("embedding/kernel.npy")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 500 + 30] ^= 0x10
    path.write_bytes(data)
    assert_refused(path, "is damaged at 'embedding/kernel'")


def test_flipped_bytes_in_a_torch_file_are_noticed(tmp_path: Path):
    """Of every member: its checksum is verified, names and numbers alike."""
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(100)}, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        starts = [info.header_offset for info in archive.infolist() if info.file_size]
    for start in starts:
        name_size, extra_size = struct.unpack_from("<2H", data, start + 26)
        damaged = bytearray(data)
        damaged[start + 30 + name_size + extra_size] ^= 1
        path.write_bytes(damaged)
        assert_unreadable(path, "cannot be read as a PyTorch file: Bad CRC-32")


def test_what_is_no_float_is_refused(tmp_path: Path):
    for dtype in ("int32", "uint8", "bool", "complex64", "U3", "V3", [("a", "i1"), ("b", "i1")]):
        arrays = make_checkpoint() | {"head/bias": np.zeros(5, dtype)}
        told = "'head/bias' .*weights must be float16, bfloat16, float32 or float64"
        assert_refused(save_npz(arrays, tmp_path / "model.npz"), told)
    for save in (save_file, torch.save):
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
            save({"a": torch.ones(2).to(dtype)}, tmp_path / "model")
            assert_unreadable(tmp_path / "model", "'a' in model is .*, but weights must be")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(value: float, tmp_path: Path):
    arrays = make_checkpoint()
    arrays["head/kernel"][2, 1] = value
    assert_refused(save_npz(arrays, tmp_path / "model.npz"), "'head/kernel' .*1 NaN or infinite values of 40")
    for save in (save_file, torch.save):
        for dtype in DTYPES:
            save({"a": torch.tensor([[1, value]], dtype=dtype)}, tmp_path / "model")
            assert_unreadable(tmp_path / "model", "'a' in model has 1 NaN or infinite values of 2")


def test_values_beyond_float32(tmp_path: Path):
    arrays = make_checkpoint(dtype="float64")
    arrays["cls"][0, 0, 0] = 1e300
    path = save_npz(arrays, tmp_path / "model.npz")
    assert_refused(path, "'cls' holds values beyond the range of torch.float32")


def lying(descr: str, shape: str) -> list[tuple[str, bytes]]:
    """A member whose header describes other values than the 12 bytes after it."""
    return [("cls.npy", npy_header(descr, "False", shape) + bytes(12))]


ENDLESS = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{" * 5000
UNSAFE = ("../up.npy", "/root.npy", "a/../../b.npy", "C:/x.npy", "a\\b.npy", "a//b.npy", "./a.npy", "a" * 300 + ".npy")
# Members of an archive -> what the refusal says.
MEMBERS: list[tuple[list[tuple[str, bytes]], str]] = [
    ([], "without arrays|no tensors"),
    *(([(name, npy(np.ones(3)))], "unsafe name") for name in UNSAFE),
    *(([(name, npy(np.ones(3)))], "is not an array") for name in ("readme.txt", "cls", "a\x1b[2J.npy")),
    (lying("'<f4'", "(1000000, 1000000)"), "needs 4000000000000 bytes, but has 12"),
    (lying("'<f4'", "(4,)"), "needs 16 bytes, but has 12"),
    (lying("'<f4'", "(2,)"), "needs 8 bytes, but has 12"),
    (lying("'<f4'", "(-3,)"), "its shape .* is impossible"),
    (lying("'<f4'", "(2**70,)"), "is damaged at 'cls'"),
    (lying("'<f4'", "99999999999999999999999999"), "is damaged at 'cls'"),
    (lying("'|O'", "(3,)"), "Python objects"),
    (lying("'nonsense'", "(3,)"), "is damaged at 'cls'"),
    (lying("__import__('os').system('true')", "(3,)"), "is damaged at 'cls'"),
    ([("cls.npy", ENDLESS)], "is damaged at 'cls'"),
    ([("cls.npy", b"\x93NUMPY\x03\x00" + bytes(12))], "'cls.npy' .* has .npy version 3.0, but only 1.0 and 2.0"),
    ([("cls.npy", b"")], "is damaged at 'cls'"),
]


@pytest.mark.parametrize(("members", "told"), MEMBERS, ids=range(len(MEMBERS)))
def test_members_that_are_no_arrays_are_refused(members: list[tuple[str, bytes]], told: str, tmp_path: Path):
    assert_refused(save_members(members, tmp_path / "model.npz"), told)


def test_duplicated_member(tmp_path: Path):
    members = [("cls.npy", npy(np.ones(3))), ("cls.npy", npy(np.zeros(3)))]
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = save_members(members, tmp_path / "model.npz")
    assert_refused(path, "holds 'cls' twice")


def test_zip_bomb_is_refused_before_it_is_inflated(tmp_path: Path, monkeypatch):
    """Honest about its sizes, and still made to fill the machine (a smaller one here): 50 kB that grow to 10 MB."""
    assert readers.FREE_BYTES <= 2**25
    monkeypatch.setattr(readers, "FREE_BYTES", 2**23)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(10):
            file = npy_header("'<f4'", "False", "(262144,)") + bytes(2**20)
            archive.writestr(f"{number}.npy", file)
    assert path.stat().st_size < 2**17
    with pytest.raises(UserError, match="a zip bomb"):
        NpzReader(path)


def test_half_precision_counts_as_what_it_becomes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(readers, "FREE_BYTES", 2**20)
    values = np.random.default_rng(0).integers(0, 64, 2**20).astype(np.float16)  # deflate makes half of it
    with pytest.raises(UserError, match=r"would grow from .* to 4194304 bytes when unpacked, as a zip bomb"):
        NpzReader(save_npz({"a": values}, tmp_path / "model.npz", False))


def test_declared_size_that_no_compression_reaches(tmp_path: Path):
    """The directory claims gigabytes for a few bytes: refused from the claim alone."""
    path = save_members([("cls.npy", npy(np.ones(3, np.float32)))], tmp_path / "model.npz")
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, entry + 24, 2**31)
    path.write_bytes(data)
    assert_refused(path, "cannot expand to 2147483648")


def test_directory_that_ends_early(tmp_path: Path):
    """A longer comment of one member swallows those after it; what is left here would make a model without a head."""
    path = save_npz(make_checkpoint(representation=6), tmp_path / "model.npz")
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"pre_logits/kernel.npy"))
    data[entry - len("cls.npy") - 46 + 33] = 0xFF  # high byte of the comment's length of the entry before, 'cls'
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert "head/kernel.npy" not in archive.namelist()
    assert_refused(path, "its directory lists 38 of 42 members")


def test_two_archives_one_after_the_other(tmp_path: Path):
    """The second alone would be read: here a model without its head."""
    whole = save_npz(make_checkpoint(), tmp_path / "model.npz").read_bytes()
    path = save_npz(make_checkpoint(labels=None), tmp_path / "model.npz")
    path.write_bytes(whole + path.read_bytes())
    assert_refused(path, f"its first member begins after {len(whole)} unknown bytes")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, None])
def test_other_compression_methods_and_encryption(method: int | None, tmp_path: Path):
    path = tmp_path / "model.npz"
    with zipfile.ZipFile(path, "w", method or zipfile.ZIP_STORED) as archive:
        archive.writestr("cls.npy", npy(np.ones(300)))
    if method is None:
        data = bytearray(path.read_bytes())
        data[data.rindex(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(data)
    assert_refused(path, "compressed in a way" if method else "encrypted")


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


def test_pickled_objects_are_never_loaded(tmp_path: Path):
    path, trace = tmp_path / "model.pth", tmp_path / "trace"
    torch.save({"model": {"a": torch.ones(2)}, "trap": Trap(trace)}, path)
    assert_refused(path, "holds Python objects .*never loaded")
    torch.save(torch.nn.Linear(2, 2), path)
    assert_refused(path, "holds Python objects .torch.nn.modules.linear.Linear., which .*model.state_dict")
    torch.save({"model": {"a": torch.ones(2)}, "best": np.float64(0.5)}, path)
    assert_refused(path, r"pickles of whole models do.*; save only its tensors: .*model.state_dict")
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert_refused(path, "Python pickle .*never loaded")
    np.savez(tmp_path / "model.npz", **make_checkpoint(), extra=np.array([{"a": 1}], dtype=object))
    assert_refused(tmp_path / "model.npz", "'extra.npy' .*Python objects, which are never loaded")
    assert not trace.exists()


def test_other_files_and_folders_are_named(tmp_path: Path):
    assert_refused(tmp_path / "none.npz", r"there is no file .*none\.npz")
    for data, told in {
        b"": "file is empty",
        pickle.dumps({"a": 1}): "a Python pickle .*never loaded",
        npy(np.ones(3)): r"a single \.npy array",
        b"\x89HDF\r\n\x1a\n" + bytes(64): "an HDF5 file",
        b"\x1f\x8b" + bytes(64): "compressed by gzip",
        b"version https://git-lfs.github.com/spec/v1": "a Git LFS pointer .*git lfs pull",
        b"<!DOCTYPE html><html>Sign in": "a web page instead of the file itself",
        b"hello world": r"not an \.npz, \.safetensors or PyTorch file",
        bytes(100): r"not an \.npz",
    }.items():
        (tmp_path / "file").write_bytes(data)
        assert_refused(tmp_path / "file", told)
    (tmp_path / "saved").mkdir()
    assert_refused(tmp_path / "saved", "has no config.json")
    for config, told in {
        b"\xff\xfe": "config.json is not valid JSON",
        b'"vit"': "config.json holds JSON, but not an object",
        b"{}": "saved has a config.json, but no weights; add model.safetensors or pytorch_model.bin",
    }.items():
        (tmp_path / "saved" / "config.json").write_bytes(config)
        assert_refused(tmp_path / "saved", told)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LONG = json.dumps({"a": F32}).encode() + b" " * 2**21
# Bytes of a file -> what the refusal says.
SAFETENSORS: list[tuple[bytes, str]] = [
    *(
        (data, "cannot be read as a .safetensors file")
        for data in (
            safetensors_of({"a": F32}, bytes(4)),
            safetensors_of({"a": F32}, bytes(12)),
            safetensors_of({"a": {**F32, "shape": [3]}}, bytes(8)),
            safetensors_of({"a": {**F32, "shape": [-2]}}, bytes(8)),
            safetensors_of({"a": {**F32, "shape": [2**62, 2**62]}}, bytes(8)),
            safetensors_of({"a": {**F32, "dtype": "Q4"}}, bytes(8)),
            safetensors_of({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
            safetensors_of({"a": F32, "b": F32}, bytes(8)),
            safetensors_of(b'{"a": {', bytes(8)),
            safetensors_of(b'{"\xff": 1}', bytes(8)),
            safetensors_of(b"{" * 30, bytes(300)),
        )
    ),
    (safetensors_of({}, b""), "without arrays|no tensors"),
    *((safetensors_of({name: F32}, bytes(8)), "unsafe name") for name in ("a\nb", "a\x1b[2J", "x" * 300, "")),
    (safetensors_of(LONG, bytes(8)), "has a header of 2097213 bytes, but .* 2097152"),
    (safetensors_of({"a": F32}, bytes(8), size=2**40), "not an .npz, .safetensors or PyTorch file"),
]


@pytest.mark.parametrize(("data", "told"), SAFETENSORS, ids=range(len(SAFETENSORS)))
def test_safetensors_that_lie(data: bytes, told: str, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(data)
    assert_unreadable(tmp_path / "model.safetensors", told)


def test_torch_files_that_are_no_checkpoint(tmp_path: Path):
    path = tmp_path / "model.pth"
    loop: dict = {"a": torch.ones(2)}
    loop["self"] = loop
    bomb: list = [0.0] * 1000
    for _ in range(5):
        bomb = [bomb] * 1000
    overlapping = {"a": torch.ones(9).as_strided((3, 3), (1, 1))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        for held, told in (
            ({"epoch": 3}, "holds no tensors"),
            (loop, "nests dicts or lists too deeply"),
            (bomb, "more than 1000000 values"),
            ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, "holds 'a.b' twice"),
            ({"a": torch.ones(1).expand(10**12)}, r"damaged: 'a' has the shape \[1000000000000\], but 4 bytes"),
            (overlapping, "'a' in model.pth has elements that share memory"),
            ({"a": torch.eye(3).to_sparse()}, "'a' in model.pth is not a dense tensor"),
            ({"a": quantized}, "'a' in model.pth is not a dense tensor"),
            ({"a": torch.ones(2, device="meta")}, "'a' in model.pth is not a dense tensor"),
            ({"a\nb": torch.ones(2)}, "unsafe name"),
        ):
            torch.save(held, path)
            assert_unreadable(path, told)


def test_tensors_that_share_their_bytes(tmp_path: Path):
    """Are read apart, as no library saves a model that shares; by the hundred they would fill the memory."""
    path, shared = tmp_path / "model.pth", torch.arange(100.0)
    torch.save({"a": shared, "b": shared}, path)
    first, second = read_all(path).values()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    torch.save({str(number): shared for number in range(300)}, path)
    assert_unreadable(path, "has .* bytes, but its tensors need .*, because they share memory")


def test_pickle_of_countless_objects(tmp_path: Path):
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(2), "b": [[] for _ in range(300_000)]}, path)
    assert_unreadable(path, "a pickle of over 250000 instructions")
    big = b"](" + b"N" * 1000 + b"eq\1"  # a list to be copied again and again
    for opcodes, told in (
        (pickled(call("builtins bytearray", (2**30,))), "its pickle calls bytearray"),
        (pickled(call("_codecs encode", ("x" * 9999, "utf-32"))), "its pickle calls encode"),
        (big + b"cbuiltins\nset\nq\2(h\1tR", "a pickle that copies values into set"),
        (big + b"0cbuiltins\nset\nq\0020h\2h\1\x85R", "a pickle that copies values into set"),
        (pickled([call("collections OrderedDict", (), {}) for _ in range(20)]), "its pickle calls BUILD"),
    ):
        path.write_bytes(torch_file(pickle=whole(opcodes)))
        assert_unreadable(path, told)


def test_torch_files_that_lie(tmp_path: Path):
    """Their checksums are right, but the pickle describes other bytes, or the dict has attributes of its own."""
    path, arrays = tmp_path / "model.pth", {"a": np.ones(64, np.float32), "b": np.ones((32, 4), np.float32)}
    path.write_bytes(torch_file(tensors_of(arrays), state={"items": 5}))
    assert read_all(path)["a"].tolist() == [1] * 64
    larger, swapped = tensors_of(arrays), tensors_of(arrays)
    larger["a"].numel, larger["a"].size = 66, (66,)
    swapped["a"].member, swapped["b"].member = swapped["b"].member, swapped["a"].member
    for forged, told in (
        (larger, "is damaged: 'a'|cannot be read as a PyTorch file"),
        (swapped, r"damaged: 'a' has the shape \[64\], but 512 bytes"),
    ):
        path.write_bytes(torch_file(forged))
        assert_unreadable(path, told)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", bytes(1000))
    assert_unreadable(path, "'model/data.pkl' in model.pth is compressed or encrypted")
