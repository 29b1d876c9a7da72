"""PyTorch's formats: .safetensors, .pth, and folders in one file or several; the bad ones refused in one line."""

import argparse
import hashlib
import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from campaigns.forgeries.pickles import Call, pickled, tensors_of, torch_file
from hf_vit.conversion.readers.checkpoint import Companions
from hf_vit.conversion.readers.opening import open_checkpoint
from hf_vit.conversion.readers.safetensors import SafetensorsReader
from hf_vit.conversion.readers.shards import ShardedReader
from hf_vit.conversion.readers.torch import TorchReader
from hf_vit.errors import UserError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {str(dtype): torch.randn(3, 4, dtype=torch.float64).to(dtype) for dtype in DTYPES} | {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as reader:
        return {key: reader.read_floats(key) for key in reader.shapes}


def refused(path: Path, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        read_all(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


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
        assert reader.shapes == {
            "model.a.b": (3, 2),
            "model.c": (4,),
            "model.view": (2,),
            "optimizer.state.0.step": (),
        }
        assert torch.equal(reader.read_floats("model.a.b"), kept.T)
        assert torch.equal(reader.read_floats("model.view"), shared[1:3])


def test_mapped_files_never_change(tmp_path: Path):
    for save, name in ((save_file, "a.safetensors"), (torch.save, "a.pth")):
        save({"a": torch.ones(1000)}, tmp_path / name)
        before = (tmp_path / name).read_bytes()
        with open_checkpoint(tmp_path / name) as reader:
            reader.read_floats("a").fill_(9)
        assert (tmp_path / name).read_bytes() == before


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
        ({**good, "d": second}, "disagree about 1 keys, such as 'd' in model-00002"),
        ({"a": first, "c": second}, "disagree about 1 keys, such as 'b' in model-00001"),
        ({**good, "a": second}, "disagree about 2 keys, such as 'a'"),
        ({**good, "c": "../model.safetensors"}, "names files that no library writes"),
        ({**good, "c": "/etc/passwd"}, "names files that no library writes"),
        ({**good, "c": 3}, "there is no file .*saved/3"),
        ({**good, "c": "model-00003.safetensors"}, "there is no file .*model-00003"),
        ({}, "has no 'weight_map'"),
        ([], "has no 'weight_map'"),
        ({**good, "a\0\nb": second}, r"such as 'a\\x00 b' in"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(index.parent, told)
    for text, told in (
        ('{"a": [' + "[]," * 300_000 + "1]}", "more than 250000 values"),
        ("[]", "holds no JSON object"),
        ("{", "no readable JSON"),
        ("[" * 10**5, "no readable JSON"),
    ):
        index.write_text(text)
        refused(index.parent, told)


def test_folder_must_be_a_saved_model(tmp_path: Path):
    folder = tmp_path / "saved"
    folder.mkdir()
    refused(folder, "is a folder without config.json")
    (folder / "config.json").write_bytes(b"\xff\xfe")
    refused(folder, "config.json is no readable JSON")
    (folder / "config.json").write_text('"vit"')
    refused(folder, "config.json holds no JSON object")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_what_is_no_float_is_refused(dtype: torch.dtype, tmp_path: Path):
    for save in (save_file, torch.save):
        save({"a": torch.ones(2).to(dtype)}, tmp_path / "model")
        refused(tmp_path / "model", "'a' in model holds .*; weights need")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(value: float, tmp_path: Path):
    for save in (save_file, torch.save):
        for dtype in DTYPES:
            save({"a": torch.tensor([[1, value]], dtype=dtype)}, tmp_path / "model")
            refused(tmp_path / "model", "'a' in model holds NaN or infinite values, 1 of 2")


def safetensors_bytes(header: bytes | dict, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        safetensors_bytes({"a": F32}, bytes(4)),
        safetensors_bytes({"a": F32}, bytes(12)),
        safetensors_bytes({"a": {**F32, "shape": [3]}}, bytes(8)),
        safetensors_bytes({"a": {**F32, "shape": [-2]}}, bytes(8)),
        safetensors_bytes({"a": {**F32, "shape": [2**62, 2**62]}}, bytes(8)),
        safetensors_bytes({"a": {**F32, "dtype": "Q4"}}, bytes(8)),
        safetensors_bytes({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        safetensors_bytes({"a": F32, "b": F32}, bytes(8)),
        safetensors_bytes(b'{"a": {', bytes(8)),
        safetensors_bytes(b'{"\xff": 1}', bytes(8)),
        safetensors_bytes(b"{" * 30, bytes(300)),
    ],
)
def test_safetensors_that_lies(data: bytes, tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    refused(path, "is no readable .safetensors file")


def test_safetensors_without_arrays_or_with_bad_names(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({}))
    refused(path, "without any array")
    for name in ("a\nb", "a\x1b[2J", "x" * 300, ""):
        path.write_bytes(safetensors_bytes({name: F32}, bytes(8)))
        refused(path, "unsafe name")
    path.write_bytes(safetensors_bytes(json.dumps({"a": F32}).encode() + b" " * 2**21, bytes(8)))
    refused(path, "has a header of 2097213 bytes; a checkpoint has less than 2097152")
    path.write_bytes(safetensors_bytes({"a": F32}, bytes(8), size=2**40))
    refused(path, "no .npz archive, .safetensors or PyTorch file")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_truncated(keep: float, tmp_path: Path):
    for save, name in ((save_file, "model.safetensors"), (torch.save, "model.pth")):
        save(tensors(), tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: int(len(data) * keep)])
        refused(tmp_path / name, "model.* is no ")


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
        refused(path, "is no readable PyTorch file .Bad CRC-32")


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


def test_pickled_objects_are_never_loaded(tmp_path: Path):
    path, trace = tmp_path / "model.pth", tmp_path / "trace"
    torch.save({"model": {"a": torch.ones(2)}, "trap": Trap(trace)}, path)
    refused(path, "holds pickled Python objects .*never loaded")
    torch.save(torch.nn.Linear(2, 2), path)
    refused(path, "holds pickled Python objects .torch.nn.modules.linear.Linear., which are never loaded")
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    refused(path, "Python pickle .*never loaded")
    assert not trace.exists()


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
            ({"epoch": 3}, "holds no tensor at all"),
            (loop, "nests deeper than any checkpoint does"),
            (bomb, "more than 1000000 values"),
            ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, "holds 'a.b' twice"),
            ({"a": torch.ones(1).expand(10**12)}, r"damaged at 'a' .shape \[1000000000000\] does not fit the 4 bytes"),
            (overlapping, "'a' in model.pth has places that share memory"),
            ({"a": torch.eye(3).to_sparse()}, "'a' in model.pth is no plain tensor"),
            ({"a": quantized}, "'a' in model.pth is no plain tensor"),
            ({"a": torch.ones(2, device="meta")}, "'a' in model.pth is no plain tensor"),
            ({"a\nb": torch.ones(2)}, "unsafe name"),
        ):
            torch.save(held, path)
            refused(path, told)


def test_tensors_that_share_their_bytes(tmp_path: Path):
    """Are read apart, as no library saves a model that shares; by the hundred they would fill the memory."""
    path, shared = tmp_path / "model.pth", torch.arange(100.0)
    torch.save({"a": shared, "b": shared}, path)
    first, second = read_all(path).values()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    torch.save({str(number): shared for number in range(300)}, path)
    refused(path, "would grow from .* bytes, as its tensors share theirs")


def test_dict_with_attributes_of_the_files_choice(tmp_path: Path):
    tensors = tensors_of({"a": np.ones(2, np.float32)})
    (tmp_path / "model.pth").write_bytes(torch_file(tensors, state={"items": 5}))
    assert read_all(tmp_path / "model.pth")["a"].tolist() == [1, 1]


def test_pickle_of_countless_objects(tmp_path: Path):
    """A byte of it makes an object of a hundred."""
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(2), "b": [[] for _ in range(300_000)]}, path)
    refused(path, "its pickle has more than 250000 opcodes")
    big = b"](" + b"N" * 1000 + b"eq\1"  # a list to be copied again and again
    for opcodes, told in (
        (pickled(Call("builtins bytearray", (2**30,))), "its pickle calls bytearray"),
        (pickled(Call("_codecs encode", ("x" * 9999, "utf-32"))), "its pickle calls encode"),
        (big + b"cbuiltins\nset\nq\2(h\1tR", "its pickle copies into set"),
        (big + b"0cbuiltins\nset\nq\0020h\2h\1\x85R", "its pickle copies into set"),
        (pickled([Call("collections OrderedDict", (), {}) for _ in range(20)]), "its pickle calls BUILD"),
    ):
        path.write_bytes(torch_file(opcodes=b"\x80\2" + opcodes + b"."))
        refused(path, told)


def test_torch_file_whose_pickle_claims_other_bytes(tmp_path: Path):
    """Checksums are right, but the names' pickle says that the first tensor is larger than its member."""
    path = tmp_path / "model.pth"
    torch.save({"a": torch.ones(100), "b": torch.zeros(100)}, path)
    members = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            members[info.filename] = archive.read(info)
    (name,) = (name for name in members if name.endswith("data.pkl"))
    assert members[name].count(b"Kd") >= 2  # 100 in a pickle
    members[name] = members[name].replace(b"Kd", b"Kf")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    path.write_bytes(file.getvalue())
    refused(path, "is damaged at 'a'|no readable PyTorch file")


def test_torch_file_whose_storages_have_changed_places(tmp_path: Path):
    """The sizes are all there, but not where the pickle says: the longer one would read on behind its member."""
    good, forged = tmp_path / "good.pth", tmp_path / "forged.pth"
    torch.save({"a": torch.ones(64), "b": torch.ones(32, 4)}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(forged, "w") as target:
        other = {"0": "1", "1": "0"}
        for info in source.infolist():
            folder, _, name = info.filename.rpartition("/")
            read = f"{folder}/{other[name]}" if folder.endswith("/data") else info.filename
            target.writestr(info.filename, source.read(read))
    read_all(good)
    refused(forged, r"forged.pth is damaged at 'a' \(shape \[64\] does not fit the 512 bytes that are there\)")


def test_compressed_torch_archive(tmp_path: Path):
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", bytes(1000))
    refused(path, "'model/data.pkl' is compressed or encrypted")


def test_missing_and_empty_files(tmp_path: Path):
    for reader in (SafetensorsReader, TorchReader):
        with pytest.raises(UserError, match="is no file"):
            reader(tmp_path / "none")
        (tmp_path / "empty").touch()
        with pytest.raises(UserError, match="is empty"):
            reader(tmp_path / "empty")
