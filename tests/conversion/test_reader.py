"""Files that are damaged, dangerous or something else: one clear line each, and nothing written."""

import io
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_vit.conversion as conversion
from hf_vit.conversion.readers import npz
from hf_vit.conversion.readers.checkpoint import all_finite
from hf_vit.conversion.readers.npz import NpzReader
from hf_vit.errors import UserError


def refused(path: Path, tmp_path: Path, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        conversion.convert(path, tmp_path / "model")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.parametrize("stored", [True, False])
def test_arrays_come_back_as_numpy_reads_them(stored, write_npz):
    rng = np.random.default_rng(0)
    arrays = {
        "a/b": rng.normal(size=(3, 4, 5)).astype(np.float32),
        "half": rng.normal(size=7).astype(np.float16),
        "double": rng.normal(size=(2, 2)),
        "big_endian": rng.normal(size=5).astype(">f4"),
        "fortran": np.asfortranarray(rng.normal(size=(3, 5)).astype(np.float32)),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = write_npz(arrays, stored=stored)
    with NpzReader(path) as reader:
        assert reader.shapes == {key: value.shape for key, value in arrays.items()}
        read = {key: reader.read_floats(key) for key in arrays}
    loaded = np.load(path)
    for key, tensor in read.items():  # still valid after the file is closed
        np.testing.assert_array_equal(tensor.numpy(), loaded[key])
    assert read["half"].dtype == torch.float16
    assert read["double"].dtype == torch.float64


@pytest.mark.parametrize("stored", [True, False])
def test_bfloat16_is_read(stored, write_npz):
    """JAX's bfloat16 comes as two bytes of no meaning; every one of them is a float32 cut short."""
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    cut = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = write_npz({"a": cut.view("V2"), "fortran": np.asfortranarray(cut).view("V2")}, stored=stored)
    with NpzReader(path) as reader:
        for key in ("a", "fortran"):
            read = reader.read_floats(key)
            assert read.dtype == torch.bfloat16
            np.testing.assert_array_equal(read.float().numpy(), (cut.astype(np.uint32) << 16).view(np.float32))


def test_stored_arrays_share_the_files_mapping_and_never_change_the_file(write_npz):
    path = write_npz({"a": np.ones(4, np.float32)})
    before = path.read_bytes()
    with NpzReader(path) as reader:
        first, second = reader.read("a"), reader.read("a")
        assert first.data_ptr() == second.data_ptr()
        first.fill_(9)
        assert float(second[0]) == 9
    assert path.read_bytes() == before


@pytest.mark.parametrize("stored", [True, False])
def test_mapped_arrays_are_read_ones(stored, write_npz):
    rng = np.random.default_rng(0)
    arrays = {f"{kind} {i}": rng.normal(size=(3, 5)).astype(kind) for kind in ("f4", ">f4", "f8") for i in range(3)}
    path = write_npz(arrays, stored=stored)
    with NpzReader(path) as reader:
        mapped = {key: reader.map_floats(key) for key in arrays}
        reader.confirm()
        assert all(torch.equal(mapped[key], reader.read_floats(key)) for key in arrays)
    assert torch.equal(mapped["f4 0"], torch.from_numpy(arrays["f4 0"]))  # still valid after the file is closed


def map_all(path: Path) -> None:
    with NpzReader(path) as reader:
        for key in reader.shapes:
            reader.map_floats(key)


@pytest.mark.parametrize(("value", "told"), [(-1.0, "damaged at 'b' .bad checksum"), (np.nan, "'b' .* holds NaN")])
def test_spoilt_mapped_array_does_not_stay_unnoticed(value, told, write_npz):
    """Neither by who asks for the checks, nor by who forgets to."""
    arrays = {name: np.arange(5000, dtype=np.float32) + i for i, name in enumerate("abc")}  # longer than a header read
    spoilt = arrays["b"].copy()
    spoilt[4000] = value
    path = write_npz(arrays | ({"b": spoilt} if np.isnan(value) else {}))
    path.write_bytes(path.read_bytes().replace(arrays["b"].tobytes(), spoilt.tobytes()))
    with NpzReader(path) as reader:
        for key in arrays:
            reader.map_floats(key)
        with pytest.raises(UserError, match=told):
            reader.confirm()
    with pytest.raises(UserError, match=told):
        map_all(path)


def test_an_error_within_is_not_hidden_by_the_checks(write_npz):
    path = write_npz({"a": np.full(5000, np.nan, np.float32)})

    def fail() -> None:
        with NpzReader(path) as reader:
            reader.map_floats("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_missing_and_empty_files(tmp_path: Path):
    refused(tmp_path / "none.npz", tmp_path, r"there is no file .*none\.npz")
    (tmp_path / "empty.npz").touch()
    refused(tmp_path / "empty.npz", tmp_path, r"empty\.npz is empty")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", tmp_path, "is a folder without config.json")


def test_archive_without_arrays(write_members, tmp_path: Path):
    refused(write_members([]), tmp_path, "without any array")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("stored", [True, False])
def test_truncated(keep, stored, checkpoint, write_npz, tmp_path: Path):
    path = write_npz(checkpoint(), stored=stored)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(path, tmp_path, "is no readable .npz archive")


@pytest.mark.parametrize("stored", [True, False])
def test_flipped_byte_in_an_array(stored, checkpoint, write_npz, tmp_path: Path):
    path = write_npz(checkpoint(), stored=stored)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("embedding/kernel.npy")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 500 + 30] ^= 0x10
    path.write_bytes(data)
    refused(path, tmp_path, "is damaged at 'embedding/kernel'")


def test_pickled_array_is_never_loaded(checkpoint, tmp_path: Path):
    path = tmp_path / "model.npz"
    np.savez(path, **checkpoint(), extra=np.array([{"a": 1}], dtype=object))
    refused(path, tmp_path, "'extra' .*pickled Python objects, which are never loaded")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "U3", "V3", [("a", "i1"), ("b", "i1")]])
def test_wrong_dtype(dtype, checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint()
    arrays["head/bias"] = np.zeros(5, dtype)
    refused(write_npz(arrays), tmp_path, "'head/bias' .*weights need float16, bfloat16, float32 or float64")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(value, checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint()
    arrays["head/kernel"][2, 1] = value
    refused(write_npz(arrays), tmp_path, "'head/kernel' .*NaN or infinite values, 1 of 40")


def test_values_beyond_float32(checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint(dtype="float64")
    arrays["cls"][0, 0, 0] = 1e300
    refused(write_npz(arrays), tmp_path, "'cls' holds values beyond the range of torch.float32")


@pytest.mark.parametrize(
    "name",
    ["../up.npy", "/root.npy", "a/../../b.npy", "C:/x.npy", "a\\b.npy", "a//b.npy", "./a.npy", "a" * 300 + ".npy"],
)
def test_unsafe_member_name(name, write_members, npy, tmp_path: Path):
    refused(write_members([(name, npy(np.ones(3)))]), tmp_path, "unsafe name")


@pytest.mark.parametrize("name", ["readme.txt", "cls", "a\x1b[2J.npy"])
def test_member_that_is_no_array(name, write_members, npy, tmp_path: Path):
    refused(write_members([(name, npy(np.ones(3)))]), tmp_path, "is no .npy array")


def test_duplicated_member(write_members, npy, tmp_path: Path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = write_members([("cls.npy", npy(np.ones(3))), ("cls.npy", npy(np.zeros(3)))])
    refused(path, tmp_path, "holds 'cls' twice")


def header(descr: str, shape: str) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("descr", "shape", "told"),
    [
        ("'<f4'", "(1000000, 1000000)", "needs 4000000000000 bytes, 12 are there"),
        ("'<f4'", "(4,)", "needs 16 bytes, 12 are there"),
        ("'<f4'", "(2,)", "needs 8 bytes, 12 are there"),
        ("'<f4'", "(-3,)", "impossible shape"),
        ("'<f4'", "(2**70,)", "is damaged at 'cls'"),
        ("'<f4'", "99999999999999999999999999", "is damaged at 'cls'"),
        ("'|O'", "(3,)", "pickled Python objects"),
        ("'nonsense'", "(3,)", "is damaged at 'cls'"),
        ("__import__('os').system('true')", "(3,)", "is damaged at 'cls'"),
    ],
)
def test_header_that_lies(descr, shape, told, write_members, tmp_path: Path):
    refused(write_members([("cls.npy", header(descr, shape) + bytes(12))]), tmp_path, told)


def test_header_without_end(write_members, tmp_path: Path):
    data = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{" * 5000
    refused(write_members([("cls.npy", data)]), tmp_path, "is damaged at 'cls'")
    refused(write_members([("cls.npy", b"")]), tmp_path, "is damaged at 'cls'")


def test_zip_bomb_is_refused_before_it_is_inflated(tmp_path: Path, monkeypatch):
    """Honest about its sizes, and still made to fill the machine (a smaller one here): 50 kB that grow to 10 MB."""
    assert npz.FREE_BYTES <= 2**25
    monkeypatch.setattr(npz, "FREE_BYTES", 2**23)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(10):
            file = header("'<f4'", "(262144,)") + bytes(2**20)
            archive.writestr(f"{number}.npy", file)
    assert path.stat().st_size < 2**17
    with pytest.raises(UserError, match="a zip bomb"):
        NpzReader(path)


def test_half_precision_counts_as_what_it_becomes(write_npz, monkeypatch):
    monkeypatch.setattr(npz, "FREE_BYTES", 2**20)
    values = np.random.default_rng(0).integers(0, 64, 2**20).astype(np.float16)  # deflate makes half of it
    with pytest.raises(UserError, match=r"would grow from .* to 4194304 bytes: a zip bomb"):
        NpzReader(write_npz({"a": values}, stored=False))


def test_declared_size_that_no_compression_reaches(write_members, npy, tmp_path: Path):
    """The directory claims gigabytes for a few bytes: refused from the claim alone."""
    path = write_members([("cls.npy", npy(np.ones(3, np.float32)))])
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, entry + 24, 2**31)
    path.write_bytes(data)
    refused(path, tmp_path, "cannot hold 2147483648")


def test_directory_that_ends_early(checkpoint, write_npz, tmp_path: Path):
    """A longer comment of one member swallows those after it; what is left here would make a model without a head."""
    path = write_npz(checkpoint(representation=6))
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"pre_logits/kernel.npy"))
    data[entry - len("cls.npy") - 46 + 33] = 0xFF  # high byte of the comment's length of the entry before, 'cls'
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert "head/kernel.npy" not in archive.namelist()
    refused(path, tmp_path, "its directory lists 38 members, 42 were written")


def test_two_archives_one_after_the_other(checkpoint, write_npz, tmp_path: Path):
    """The second alone would be read: here a model without its head."""
    whole = write_npz(checkpoint()).read_bytes()
    path = write_npz(checkpoint(labels=None))
    path.write_bytes(whole + path.read_bytes())
    refused(path, tmp_path, f"its first member begins after {len(whole)} bytes of something else")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_methods(method, npy, tmp_path: Path):
    path = tmp_path / "model.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("cls.npy", npy(np.ones(300)))
    refused(path, tmp_path, "compression method")


def test_encrypted_member(write_members, npy, tmp_path: Path):
    path = write_members([("cls.npy", npy(np.ones(3)))])
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    refused(path, tmp_path, "encrypted")


def torch_file(path: Path, keys: list[str]) -> Path:
    torch.save({key: torch.ones(2) for key in keys}, path)
    return path


def safetensors_file(path: Path, keys: list[str]) -> Path:
    from safetensors.torch import save_file

    save_file({key: torch.ones(2) for key in keys}, path)
    return path


TIMM = ["blocks.0.norm1.weight", "blocks.0.attn.qkv.weight", "pos_embed"]
TRANSFORMERS = ["vit.encoder.layer.0.attention.attention.query.weight", "vit.layernorm.weight"]


@pytest.mark.parametrize("write", [torch_file, safetensors_file])
@pytest.mark.parametrize(("keys", "family"), [(TIMM, "ViT of timm"), (TRANSFORMERS, "ViT of transformers")])
def test_pytorch_files_are_named(write, keys, family, tmp_path: Path):
    refused(write(tmp_path / "model.bin", keys), tmp_path, f"model.bin looks like part of a {family}")


def test_pytorch_file_of_another_model(tmp_path: Path):
    refused(
        torch_file(tmp_path / "model.pth", ["weight"]), tmp_path, "no checkpoint that is known here .it holds weight"
    )


def test_other_formats_are_named(tmp_path: Path):
    array = io.BytesIO()
    np.save(array, np.ones(3))
    for data, told in {
        pickle.dumps({"a": 1}): "a Python pickle .*never loaded",
        array.getvalue(): r"a single \.npy array",
        b"\x89HDF\r\n\x1a\n" + bytes(64): "an HDF5 file",
        b"\x1f\x8b" + bytes(64): "compressed by gzip",
        b"hello world": r"no \.npz archive, \.safetensors or PyTorch file",
        bytes(100): r"no \.npz archive",
    }.items():
        (tmp_path / "file").write_bytes(data)
        refused(tmp_path / "file", tmp_path, told)


def test_folder_without_weights(tmp_path: Path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text("{}")
    refused(tmp_path / "saved", tmp_path, "saved holds no weights; it needs model.safetensors or pytorch_model.bin")


def test_arrays_that_are_read_ahead_are_read_ones(write_npz):
    rng = np.random.default_rng(0)
    arrays = {f"{kind} {i}": rng.normal(size=(30, 50)).astype(kind) for kind in ("f4", "f8") for i in range(5)}
    with NpzReader(write_npz(arrays, stored=False)) as reader:
        reader.read_ahead(arrays)
        found = {key: reader.map_floats(key) for key in arrays}
        again = {key: reader.map_floats(key) for key in arrays}  # not asked for ahead
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key].numpy(), array)
        np.testing.assert_array_equal(again[key].numpy(), array)


def test_an_array_that_is_spoilt_ahead_is_refused_when_it_is_asked_for(write_npz):
    with NpzReader(write_npz({"a": np.ones(9), "b": np.full(5000, np.nan)}, stored=False)) as reader:
        reader.read_ahead(["a", "b"])
        assert reader.map_floats("a").sum() == 9
        with pytest.raises(UserError, match=r"'b' .* holds NaN"):
            reader.map_floats("b")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
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
        assert all_finite(values) == bool(values.isfinite().all()), values
