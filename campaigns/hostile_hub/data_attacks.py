"""What a stranger's data set may hold: each attack is a repository of its own."""

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from evaluation.tiny import NAMES, make_images
from pyarrow import parquet

from campaigns.hostile_hub.attacks import WORDS, Attack, Files, Make, Run
from campaigns.hostile_hub.ground import Ground

_FEATURES = {
    "info": {"features": {"image": {"_type": "Image"}, "label": {"names": list(NAMES), "_type": "ClassLabel"}}}
}
Rows = list[dict[str, Any]]


def png(number: int) -> bytes:
    content = io.BytesIO()
    make_images(6)[number % 6].save(content, "png")
    return content.getvalue()


def table(rows: Rows, names: list[str] | None = None) -> bytes:
    """A parquet file of images ({"bytes", "path"}) and labels."""
    features = json.loads(json.dumps(_FEATURES))
    features["info"]["features"]["label"]["names"] = names or list(NAMES)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("label", pa.int64())], metadata={"huggingface": json.dumps(features)})
    arrays = {
        "image": [{"bytes": row.get("bytes"), "path": row.get("path")} for row in rows],
        "label": [row["label"] for row in rows],
    }
    content = io.BytesIO()
    parquet.write_table(pa.table(arrays, schema=schema), content)
    return content.getvalue()


def honest_rows(count: int = 36) -> Rows:
    return [{"bytes": png(number), "path": f"{number}.png", "label": number % 6} for number in range(count)]


def honest(split: str = "train") -> Files:
    return {f"data/{split}-00000-of-00001.parquet": table(honest_rows())}


def holding(files: Callable[[Ground], Files]) -> Make:
    """Files; what is no text lies in the storage."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        made = files(ground)
        return Attack(made, tuple(name for name, data in made.items() if data is not None and b"\0" in data))

    return make


def described(configurations: str) -> bytes:
    """A card."""
    return f"---\nconfigs:\n{configurations}\n---\n".encode()


def declared(pattern: Callable[[Ground], str]) -> Make:
    """A card that says where the data lie."""
    return holding(
        lambda ground: {
            **honest(),
            "README.md": described(f"- config_name: default\n  data_files: {json.dumps(pattern(ground))}"),
        }
    )


def pointing(path: Callable[[Ground], str]) -> Make:
    """Rows without images, that say where these lie."""
    return holding(
        lambda ground: {
            "data/train.parquet": table(
                honest_rows() + [{"path": path(ground), "label": number} for number in range(6)]
            )
        }
    )


def listed(file_name: Callable[[Ground], str]) -> Make:
    """Images in folders, and a table that says which file is what."""

    def files(ground: Ground) -> Files:
        names = [f"{number}.png" for number in range(18)]
        lines = [f"{name},{NAMES[number % 6]}" for number, name in enumerate(names)]
        rows = "\n".join(["file_name,label", *lines, f"{file_name(ground)},ant"])
        images = {f"train/{name}": png(number) for number, name in enumerate(names)}
        return {**images, "train/metadata.csv": rows.encode()}

    return holding(files)


def tarred(name: str, content: Callable[[Ground], bytes]) -> Make:
    """Images in a tar file, beside a member of another kind."""

    def files(ground: Ground) -> Files:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for number in range(36):
                members = {f"{number}.png": png(number), f"{number}.cls": str(number % 6).encode()}
                for member, held in {**members, name.format(number): content(ground)}.items():
                    info = tarfile.TarInfo(member)
                    info.size = len(held)
                    archive.addfile(info, io.BytesIO(held))
        return {"train.tar": data.getvalue()}

    return holding(files)


def _link(ground: Ground) -> Files:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number in range(36):
            info = tarfile.TarInfo(f"{number}.png")
            info.type, info.linkname = tarfile.SYMTYPE, f"{ground.outside}/private.png"
            archive.addfile(info)
            label = tarfile.TarInfo(f"{number}.cls")
            label.size = 1
            archive.addfile(label, io.BytesIO(b"1"))
    return {"train.tar": data.getvalue()}


DATA_ATTACKS: dict[str, Make] = {
    "honest": holding(lambda ground: honest()),
    "code: a script": holding(
        lambda ground: {"hostile.py": ground.payload.encode(), "data.py": ground.payload.encode()}
    ),
    "code: a script beside data": holding(lambda ground: {**honest(), "hostile.py": ground.payload.encode()}),
    "pickle: a table": holding(lambda ground: {"train.pkl": pickle.dumps(Run(ground.payload))}),
    "pickle: declared": holding(
        lambda ground: {
            "train.pkl": pickle.dumps(Run(ground.payload)),
            "README.md": described("- config_name: default\n  data_files: train.pkl\n  builder_name: pandas"),
        }
    ),
    **{
        f"pickle: in a tar, {suffix}": tarred("{}." + suffix, lambda ground: pickle.dumps(Run(ground.payload)))
        for suffix in ("pkl", "pyd", "pickle", "pth", "pt", "npy", "npz", "ten", "cbor", "mp")
    },
    "place: a file": declared(lambda ground: f"{ground.outside}/private.png"),
    "place: files": declared(lambda ground: f"{ground.outside}/*"),
    "place: a file address": declared(lambda ground: f"file://{ground.outside}/private.png"),
    "place: above": declared(lambda ground: "../" * 12 + f"{ground.outside}/private.png".lstrip("/")),
    "place: elsewhere": declared(lambda ground: f"{ground.elsewhere}/train.parquet"),
    "place: another repository": declared(lambda ground: "hf://datasets/alice/private/data/train.parquet"),
    "place: chained": declared(lambda ground: f"zip://*::{ground.outside}/private.txt"),
    "place: home": declared(lambda ground: "~/.ssh/id_rsa"),
    "row: a file": pointing(lambda ground: f"{ground.outside}/private.png"),
    "row: a file address": pointing(lambda ground: f"file://{ground.outside}/private.png"),
    "row: above": pointing(lambda ground: "../" * 12 + f"{ground.outside}/private.png".lstrip("/")),
    "row: elsewhere": pointing(lambda ground: f"{ground.elsewhere}/x.png"),
    "row: another repository": pointing(lambda ground: "hf://datasets/alice/private/x.png"),
    "row: chained": pointing(lambda ground: f"zip://x.png::{ground.outside}/private.txt"),
    "list: a file": listed(lambda ground: f"{ground.outside}/private.png"),
    "list: above": listed(lambda ground: "../" * 12 + f"{ground.outside}/private.png".lstrip("/")),
    "list: elsewhere": listed(lambda ground: f"{ground.elsewhere}/x.png"),
    "link: in a tar": holding(_link),
    "words: labels": holding(
        lambda ground: {"data/train.parquet": table(honest_rows(), [f"{WORDS}{number}" for number in range(6)])}
    ),
    "words: names of images": pointing(lambda ground: WORDS),
    "card: words": holding(lambda ground: {**honest(), "README.md": described(f"- {json.dumps(WORDS)}")}),
    "card: features": holding(
        lambda ground: {
            **honest(),
            "README.md": b"---\ndataset_info:\n  features:\n  - name: image\n    dtype: !!python/name:os.system\n---\n",
        }
    ),
    "infos: words": holding(lambda ground: {**honest(), "dataset_infos.json": json.dumps({"default": WORDS}).encode()}),
    "damaged": holding(lambda ground: {"data/train.parquet": b"PAR1\0\0\0\0PAR1"}),
    "nothing": holding(lambda ground: {}),
}
