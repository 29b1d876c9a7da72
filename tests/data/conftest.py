"""Makers of tiny images, class folders and webdataset shards."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    """Noise that differs for every seed; size is (width, height) px."""
    random = np.random.RandomState(seed)
    return Image.fromarray(random.randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def tags(orientation: int = 6) -> Image.Exif:
    """EXIF data that say how an image is turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def make_folder(root: Path, counts: dict[str, int], *, seed: int = 0, suffix: str = ".png") -> Path:
    """A folder of class folders with `counts` images each."""
    for position, (label, count) in enumerate(sorted(counts.items())):
        (root / label).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            picture(seed + 1000 * position + index).save(root / label / f"{index:03d}{suffix}", "PNG")
    return root


def make_tar(path: Path, samples: list[dict[str, bytes]]) -> Path:
    """A webdataset shard: the files of sample i are named 0000i.<key>."""
    with tarfile.open(path, "w") as tar:
        for index, sample in enumerate(samples):
            for key, content in sample.items():
                info = tarfile.TarInfo(f"{index:05d}.{key}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def make_table(root: Path, *, names: list[str] | None = None, label=lambda name: name):
    """A class folder as a `datasets` table; without names in plain columns, as other programs write parquet."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    files = sorted(root.glob("*/*.png"))
    columns = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [names.index(file.parent.name) if names else label(file.parent.name) for file in files],
    }
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)}) if names else None
    return Dataset.from_dict(columns, features=features)


def write_idx(path: Path, array: np.ndarray, *, cut: int = 0) -> Path:
    """Write an array as IDX, compressed if the name says so, without its last bytes or with more."""
    array = np.asarray(array)
    kinds = {"u1": 8, "i4": 12}
    start = bytes((0, 0, kinds[array.dtype.str[1:]], array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    content = start + array.astype(array.dtype.newbyteorder(">")).tobytes()
    content = content[: len(content) - cut] if cut >= 0 else content + b"\0" * -cut
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_rooms(root: Path, masks: dict[str, np.ndarray], suffix: str = ".png") -> Path:
    """Write images of noise and their masks as ADE20K has them: {"split/name": [H, W]}."""
    for seed, (name, values) in enumerate(masks.items()):
        for folder in ("images", "annotations"):
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture(seed, values.shape[::-1]).save(root / "images" / f"{name}{suffix}")
        Image.fromarray(values).save(root / "annotations" / f"{name}.png")
    return root


def contents(data, split: str) -> set[tuple[bytes, str]]:
    """Pixels and class name of every image of a split."""
    return {(row["image"].convert("RGB").tobytes(), data.label_names[row["label"]]) for row in data.splits[split]}


def everything(data) -> set[tuple[bytes, str]]:
    return set().union(*(contents(data, split) for split in data.splits))


def load_uploaded(folder: str) -> tuple[str, bool, list[str]]:
    """Load, in a client process, a folder of images in a repository of the Hub by its address and as a stream.

    Returns the fingerprint, whether the stream has the same images, and what is said of a repository with the same
    images as parquet files, whose splits number the classes differently.
    """
    from huggingface_hub import HfApi

    from hf_vit.data import load_data
    from hf_vit.errors import UserError

    for name in ("alice/pets", "alice/tables"):
        HfApi().create_repo(name, repo_type="dataset")
    HfApi().upload_folder(repo_id="alice/pets", repo_type="dataset", folder_path=folder, path_in_repo="in/pets")
    data = load_data("hf://datasets/alice/pets/in/pets")
    streamed = load_data("alice/pets", streaming=True)
    tables = Path(folder).with_name("tables")
    for split, names in (("train", ["cat", "dog", "owl"]), ("test", ["owl", "dog", "cat"])):
        make_table(Path(folder), names=names).to_parquet(str(tables / f"{split}.parquet"))
    HfApi().upload_folder(repo_id="alice/tables", repo_type="dataset", folder_path=tables)
    refusals: list[str] = []
    for streaming in (False, True):
        try:
            load_data("alice/tables", streaming=streaming)
        except UserError as error:
            refusals.append(str(error))
    same = all(contents(streamed, split) == contents(data, split) for split in data.splits)
    return data.fingerprint, same, refusals


@pytest.fixture
def folder(tmp_path):
    """40 images of the classes cat (12), dog (20) and owl (8)."""
    return make_folder(tmp_path / "pets", {"cat": 12, "dog": 20, "owl": 8})


def splitmix64(state: int, position: int) -> int:
    """Return a number of the published generator, in plain integers."""
    value = (state + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)
