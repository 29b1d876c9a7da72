"""What a stranger's repository may hold, and what a server may answer: tables.

A repository is the honest one with other files: name -> text or bytes; for a JSON file fields to change; None: is not
there; or a function of the honest files. "{outside}", "{elsewhere}", "{host}" and "{payload}" in any text become
those of a `Ground`.
"""

import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from evaluation.tiny import NAMES, make_images
from pyarrow import parquet

from campaigns.engine import ROOT
from campaigns.hostile_ground import Ground

Files = Mapping[str, Any]
INDEX, WEIGHTS, CARD, CONFIG = "model.safetensors.index.json", "model.safetensors", "README.md", "config.json"
PROCESSOR = "preprocessor_config.json"
# Ends a block and begins others; HTML, a link; colours, a title for the terminal, a bell; turned writing.
WORDS = "x\n```\n\n```python\nimport os\n```\n<script>x</script>[a](http://b)\x1b[31m\x1b]0;t\x07\u202egnp $$h$$ {{1}}"
ABOVE = "../" * 11 + "..{outside}/"


@dataclass(frozen=True)
class Attack:
    """A hostile repository, or server.

    Attributes:
        files: what differs from the honest repository.
        faults: (path, action, fields) of the server, see `loopback.handler`.
        settings: of the repository, see `Loopback.settings`.
    """

    files: Files = field(default_factory=dict)
    faults: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def at(self, ground: Ground, base: Mapping[str, bytes]) -> "Attack":
        files = {name: as_bytes(name, value, ground, base) for name, value in self.files.items()}
        return Attack(files, fill(self.faults, ground), self.settings)

    @property
    def large(self) -> tuple[str, ...]:
        """What lies in the Hub's storage."""
        return tuple(name for name, data in self.files.items() if data is not None and b"\0" in data)


def as_bytes(name: str, value: Any, ground: Ground, base: Mapping[str, bytes]) -> bytes | None:
    if callable(value):
        value = value(ground, base)
    if isinstance(value, dict):
        value = json.dumps(json.loads(base.get(name, b"{}")) | fill(value, ground))
    return fill(value, ground).encode() if isinstance(value, str) else value


def fill(value: Any, ground: Ground) -> Any:
    """Return the value with the places of a ground in all its texts."""
    if isinstance(value, dict):
        return {name: fill(each, ground) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(fill(each, ground) for each in value)
    places = {
        "{outside}": ground.outside, "{elsewhere}": ground.elsewhere, "{host}": ground.elsewhere.partition("//")[2],
        "{payload}": ground.payload,
    }  # fmt: skip
    for name, place in places.items() if isinstance(value, str) else ():
        value = value.replace(name, str(place))
    return value


class Run:
    """Unpickled, it runs code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def old_pickle(ground: Ground, base: Any = None) -> bytes:
    return pickle.dumps({"classifier.weight": Run(ground.payload)})


def new_pickle(ground: Ground, base: Any = None) -> bytes:
    """Return a pickle that runs code, as torch writes files."""
    content = io.BytesIO()
    torch.save({"classifier.weight": Run(ground.payload)}, content)
    return content.getvalue()


def of_card(text: str) -> Callable[..., bytes]:
    return lambda ground, base: base[CARD] + fill(f"\n{text}\n", ground).encode()


def index_of(name: str) -> Callable[..., bytes]:
    """A weight index that names a file."""

    def make(ground: Ground, base: Mapping[str, bytes]) -> bytes:
        keys = json.loads(base[WEIGHTS][8 : 8 + int.from_bytes(base[WEIGHTS][:8], "little")])
        weight_map = {key: fill(name, ground) for key in keys if key != "__metadata__"}
        return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()

    return make


def facts(**fields: Any) -> Files:
    """Records with hostile words wherever one can stand."""
    record = {
        "kind": "training", "command": WORDS, "date": "2031-02-03T00:00:00Z", "seed": 0,
        "data": {"name": WORDS, "split": WORDS, "size": 3}, "versions": {WORDS: WORDS},
        "hardware": {"name": WORDS, "device": WORDS}, "seconds": 1.0,
        "values": {"recipe": {WORDS: WORDS, "batch_size": 1}, "steps": 1, "base_model": WORDS, WORDS: WORDS,
                   "pictures": {"../outside/private.png": WORDS, "../../x.png": "x"}},
    }  # fmt: skip
    return {"facts.json": json.dumps([record | fields])}


def of_timm(wrapped: bool = False, architecture: str = "vit_tiny_patch16_224", **fields: Any) -> Files:
    """A model of timm, whose config says how it is built; or the same as transformers knows it."""
    args = {"img_size": 32, "depth": 1, "num_heads": 1, "embed_dim": 16, **fields}
    config = {"architecture": architecture, "num_classes": 6, "pretrained_cfg": {"architecture": "x"}}
    config |= {"model_args": args}
    if wrapped:
        config |= {"model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"]}
    return {CONFIG: json.dumps(config)}


def zip_bomb(ground: Ground, base: Any) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", bytes(50_000_000))
        archive.writestr("../../escaped", "x")
    return content.getvalue()


_MODULES = ("modeling_evil", "configuration_evil", "processing_evil", "__init__", "sitecustomize", "usercustomize",
            "conftest", "setup", "hubconf", "transformers", "hf_vit", "safetensors", "torch", "PIL")  # fmt: skip
CODE = dict.fromkeys((f"{name}.py" for name in _MODULES), "{payload}class Evil: pass\nclass EvilConfig: pass\n")
ADAPTER = {**CODE, "adapter_config.json": {
    "peft_type": "LORA", "base_model_name_or_path": "{outside}", "r": 2, "target_modules": ["q_proj"],
    "auto_mapping": {"base_model_class": "Evil", "parent_library": "modeling_evil"}}}  # fmt: skip
_EVERYTHING = {
    "AutoConfig": "configuration_evil.EvilConfig", "AutoModel": "modeling_evil.Evil",
    "AutoModelForImageClassification": "modeling_evil.Evil", "AutoModelForMaskedImageModeling": "modeling_evil.Evil",
    "AutoBackbone": "modeling_evil.Evil", "AutoImageProcessor": "processing_evil.Evil",
    "AutoProcessor": "processing_evil.Evil",
}  # fmt: skip
WRONG = {"null": None, "number": 3, "text": "x", "list": [], "nested": [[[]]], "object": {"a": {}}, "words": WORDS}
OURS = sorted(file.name for file in (ROOT / "src/hf_vit/models").glob("*_hf_*.py"))
_FIELDS = ("hidden_size", "patch_size", "image_size", "id2label", "architectures", "model_type", "num_channels",
           "num_hidden_layers", "dtype", "quantization_config", "auto_map", "pooling")  # fmt: skip
_PROCESSOR_FIELDS = ("size", "image_mean", "resample", "image_processor_type", "do_resize")


def kinds(word: str, make: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an attack of each kind, "word: kind"."""
    return {f"{word}: {kind}": make(value) for kind, value in values.items()}


MODEL_ATTACKS: dict[str, Files] = {
    "honest": {},
    **kinds("code", lambda fields: {**CODE, CONFIG: fields}, {
        "auto_map": {"auto_map": _EVERYTHING},
        "auto_map of a new type": {"auto_map": _EVERYTHING, "model_type": "evil", "architectures": ["Evil"]},
        "auto_map of no type": {"auto_map": _EVERYTHING, "model_type": "", "architectures": None},
        "auto_map of another repository": {"model_type": "evil",
            "auto_map": {key: f"mallory/code--{value}" for key, value in _EVERYTHING.items()}},
        "auto_map as text": {"auto_map": "modeling_evil.Evil"},
        "auto_map with lists": {"auto_map": {key: [value, value] for key, value in _EVERYTHING.items()}},
        "auto_map with nothing": {"auto_map": dict.fromkeys(_EVERYTHING), "model_type": "evil"},
        "trust_remote_code in the config": {"auto_map": _EVERYTHING, "model_type": "evil", "code_revision": "main",
            "trust_remote_code": True},
        "attention from the Hub": dict.fromkeys(("attn_implementation", "_attn_implementation"), "mallory/kernel"),
    }),
    "code: syntax error": {"modeling_evil.py": "def (", CONFIG: {"auto_map": _EVERYTHING, "model_type": "evil"}},
    "code: of the processor": {**CODE, PROCESSOR: {"auto_map": _EVERYTHING, "image_processor_type": "Evil",
        "trust_remote_code": True}},
    "code: of the known processor": {**CODE, PROCESSOR: {"auto_map": _EVERYTHING}},
    "code: processor_config.json": {**CODE, PROCESSOR: None, "processor_config.json": {"auto_map": _EVERYTHING,
        "processor_class": "Evil", "image_processor": {"auto_map": _EVERYTHING}}},
    "code: in place of ours": {**CODE, **dict.fromkeys(OURS, "{payload}")},
    "code: custom generation": {**CODE, "custom_generate/generate.py": "{payload}", "generation_config.json": "{}"},
    # Pickles
    **{
        f"pickle: {name}{', old' * (write is old_pickle)}": {WEIGHTS: None, name: write}
        for name in ("pytorch_model.bin", "model.pth", "training_args.bin", "model.ckpt", "weights.pkl")
        for write in (new_pickle, old_pickle)
    },
    "pickle: in place of safetensors": {WEIGHTS: old_pickle},
    "pickle: indexed": {WEIGHTS: None, "part.bin": old_pickle,
        "pytorch_model.bin.index.json": {"metadata": {}, "weight_map": {"classifier.weight": "part.bin"}}},
    "pickle: a bomb": {WEIGHTS: None, "pytorch_model.bin": zip_bomb},
    "pickle: adapter_model.bin": {**ADAPTER, "adapter_model.bin": old_pickle},
    # Other places
    "place: adapter": {**ADAPTER, CONFIG: None, WEIGHTS: None},
    "place: adapter beside a model": ADAPTER,
    "place: timm pretrained_cfg": of_timm(pretrained_cfg="{outside}/model.safetensors"),
    **kinds("place", lambda fields: {CONFIG: fields}, {
        "transformers_weights": {"transformers_weights": "{outside}/model.safetensors"},
        "transformers_weights above": {"transformers_weights": "../../../x.safetensors"},
        "_name_or_path": {"_name_or_path": "{outside}", "name_or_path": "/etc"},
        "backbone": {"backbone": "{outside}", "use_pretrained_backbone": True, "use_timm_backbone": False},
        "a detector's backbone": {"model_type": "detr", "backbone": "local-dir:{outside}",
            "use_timm_backbone": True, "backbone_config": None, "architectures": ["DetrForObjectDetection"]},
    }),
    **{
        f"place: {'wrapped' if wrapped else 'timm'} {kind}": of_timm(wrapped, **fields)
        for wrapped in (False, True)
        for kind, fields in {
            "checkpoint_path": {"checkpoint_path": "{outside}/model.safetensors"},
            "cache_dir": {"cache_dir": "{outside}/cache"},
            "architecture": {"architecture": "local-dir:{outside}"},
            "of another repository": {"architecture": "hf-hub:mallory/code"},
        }.items()
    },
    # Indexes
    **kinds("index", lambda name: {WEIGHTS: None, INDEX: index_of(name)}, {
        "absolute": "{outside}/model.safetensors", "above": f"{ABOVE}model.safetensors",
        "address": "{elsewhere}/model.safetensors", "file address": "file://{outside}/model.safetensors",
        "of another repository": "../../../models--alice--private/snapshots/main/model.safetensors",
        "itself": INDEX, "the config": CONFIG, "control characters": "a\n\x1b[31m\0b.safetensors",
        "nothing": "", "very long": "a" * 5000 + ".safetensors",
    }),
    "index: beside the single file": {INDEX: index_of("{outside}/model.safetensors")},
    **kinds("index", lambda text: {WEIGHTS: None, INDEX: text}, {
        "a list": "[]", "no map": "{}", "a map of lists": '{"weight_map": {"a": []}, "metadata": {}}',
        "a map of nothing": '{"metadata": null, "weight_map": null}',
    }),
    # Configs and processors of wrong types
    **{
        f"{word}: {name} {kind}": {file: {name: value}}
        for word, file, names in (("config", CONFIG, _FIELDS), ("processor", PROCESSOR, _PROCESSOR_FIELDS))
        for name in names
        for kind, value in WRONG.items()
    },
    **{
        f"{name}: {kind}": {f"{name}.json": content}
        for name in ("config", "preprocessor_config", "facts")
        for kind, content in {
            "a list": "[]", "a number": "1", "nothing": "", "cut": '{"a": ', "bytes": bytes(range(256)),
            "deep": "[" * 100_000, "NaN": '{"hidden_size": NaN}',
            "huge numbers": '{"hidden_size": 1' + "0" * 5000 + "}",
        }.items()
    },
    "config: huge": {CONFIG: {"num_hidden_layers": 10**9}},
    "config: wide": {CONFIG: {"hidden_size": 10**9, "intermediate_size": 10**9}},
    "config: labels with words": {CONFIG: {"id2label": {str(i): f"{WORDS}{i}" for i in range(6)}}},
    "facts: words": facts(),
    "facts: a picture above": facts(kind="analysis"),
    "facts: an evaluation": facts(kind="evaluation"),
    "facts: a conversion": facts(kind="conversion"),
    "card: pictures outside": {CARD: of_card("![x]({outside}/private.png) ![y](../x.png)")},
    **kinds("card", lambda text: {CARD: text}, {
        "words": f"---\nlicense: mit\n---\n{WORDS}\n",
        "YAML that runs": "---\nlicense: !!python/object/apply:os.system ['true']\n---\n",
        "a bomb": "---\na: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nlicense: *c\n---\n",
        "includes": "---\nlicense: mit\n---\n{% include '/etc/passwd' %}{{ self.__init__ }}\n",
    }),
    # Names, which the card shows
    **kinds("name", lambda name: {name: "{payload}", CARD: of_card(f"![x]({name})")}, {
        "above": "../evil.py", "far above": "../../../../../../../../evil.py", "absolute": "/tmp/hf_vit_evil",
        "control characters": "a\x1b[31m\nb.txt", "bidi": "a\u202egnp.exe", "very long": "a" * 300,
        "very deep": "d/" * 200 + "x", "case": "CONFIG.JSON", "reserved": "aux.json", "drive": "C:\\evil.py",
        "backslash": "..\\evil.py", "dots": "...", "git": ".git/config", "space": " ",
        "percent": "%2e%2e%2fevil.py", "home": "~/evil.py", "dash": "--trust-remote-code",
    }),
}  # fmt: skip


# Data sets

Rows = list[dict[str, Any]]


def png(number: int) -> bytes:
    content = io.BytesIO()
    make_images(6)[number % 6].save(content, "png")
    return content.getvalue()


def table(rows: Rows, names: list[str] | None = None) -> bytes:
    """Return a parquet file of images ({"bytes", "path"}) and labels."""
    label = {"names": names or list(NAMES), "_type": "ClassLabel"}
    features = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("label", pa.int64())], metadata={"huggingface": json.dumps(features)})
    images, content = [{name: row.get(name) for name in ("bytes", "path")} for row in rows], io.BytesIO()
    parquet.write_table(pa.table({"image": images, "label": [row["label"] for row in rows]}, schema=schema), content)
    return content.getvalue()


def honest_rows(count: int = 36) -> Rows:
    return [{"bytes": png(number), "path": f"{number}.png", "label": number % 6} for number in range(count)]


def pointing(path: str) -> Files:
    """Rows without images, that say where these lie."""

    def make(ground: Ground, base: Any) -> bytes:
        return table(honest_rows() + [{"path": fill(path, ground), "label": number} for number in range(6)])

    return {"data/train.parquet": make}


def described(configuration: str) -> str:
    return f"---\nconfigs:\n{configuration}\n---\n"


def listed(file_name: str) -> Files:
    """Images in folders, and a table that says which file is what."""
    lines = [f"{number}.png,{NAMES[number % 6]}" for number in range(18)]
    images = {f"train/{number}.png": png(number) for number in range(18)}
    return {**images, "train/metadata.csv": "\n".join(["file_name,label", *lines, f"{file_name},ant"])}


def tarred(suffix: str = "", link: str = "") -> Files:
    """Images in a tar file, beside a pickle; or links in the place of images."""

    def make(ground: Ground, base: Any) -> bytes:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for number in range(36):
                pickles = {f"{number}.{suffix}": pickle.dumps(Run(ground.payload))} if suffix else {}
                files = {f"{number}.png": png(number), f"{number}.cls": str(number % 6).encode(), **pickles}
                for name, held in files.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(held)
                    if link and name.endswith(".png"):
                        info.size, info.type, info.linkname = 0, tarfile.SYMTYPE, fill(link, ground)
                    archive.addfile(info, io.BytesIO(held))
        return data.getvalue()

    return {"train.tar": make}


HONEST = {"data/train-00000-of-00001.parquet": table(honest_rows())}
PICKLED = {"train.pkl": lambda ground, base: pickle.dumps(Run(ground.payload))}
_PLACES = {
    "a file": "{outside}/private.png", "a file address": "file://{outside}/private.png", "above": f"{ABOVE}private.png",
}  # fmt: skip
DATA_ATTACKS: dict[str, Files] = {
    "honest": HONEST,
    "code: a script": {"hostile.py": "{payload}", "data.py": "{payload}"},
    "code: a script beside data": {**HONEST, "hostile.py": "{payload}"},
    "pickle: a table": PICKLED,
    "pickle: declared": {**PICKLED,
        CARD: described("- config_name: default\n  data_files: train.pkl\n  builder_name: pandas")},
    **{
        f"pickle: in a tar, {suffix}": tarred(suffix)
        for suffix in ("pkl", "pyd", "pickle", "pth", "pt", "npy", "npz", "ten", "cbor", "mp")
    },
    **kinds("place", lambda files: {**HONEST, CARD: described(f'- config_name: default\n  data_files: "{files}"')}, {
        **_PLACES, "files": "{outside}/*", "elsewhere": "{elsewhere}/train.parquet",
        "another repository": "hf://datasets/alice/private/data/train.parquet",
        "chained": "zip://*::{outside}/private.txt", "home": "~/.ssh/id_rsa",
    }),
    **kinds("row", lambda path: pointing(path), {
        **_PLACES, "elsewhere": "{elsewhere}/x.png", "another repository": "hf://datasets/alice/private/x.png",
        "chained": "zip://x.png::{outside}/private.txt",
    }),
    "list: a file": listed("{outside}/private.png"),
    "list: above": listed(f"{ABOVE}private.png"),
    "list: elsewhere": listed("{elsewhere}/x.png"),
    "link: in a tar": tarred(link="{outside}/private.png"),
    "words: labels": {"data/train.parquet": table(honest_rows(), [f"{WORDS}{number}" for number in range(6)])},
    "words: names of images": pointing(WORDS),
    "card: words": {**HONEST, CARD: described(f"- {json.dumps(WORDS)}")},
    "card: features": {**HONEST,
        CARD: "---\ndataset_info:\n  features:\n  - name: image\n    dtype: !!python/name:os.system\n---\n"},
    "infos: words": {**HONEST, "dataset_infos.json": {"default": WORDS}},
    "damaged": {"data/train.parquet": b"PAR1\0\0\0\0PAR1"},
    "nothing": {},
}  # fmt: skip


# Servers


def served(path: str, action: str, **fields: Any) -> Attack:
    """A fault of `loopback.handler` that strikes always."""
    return Attack(faults=((path, action, {"times": -1, **fields}),))


def redirected(path: str, place: str, status: int = 302) -> Attack:
    return served(path, "status", status=status, headers={"Location": place})


def answered(path: str, body: Any, status: int = 200, **fields: Any) -> Attack:
    return served(path, "status", status=status, body=body, message="x", **fields)


def headed(path: str, **headers: Any) -> Attack:
    """Other headers; "_" stands for "-"."""
    return served(path, "headers", headers={name.replace("_", "-"): value for name, value in headers.items()})


def refused(status: int, **fields: Any) -> Attack:
    return served("mallory", "status", status=status, **fields)


_FILE, _STORED = r"/resolve/", r"^/get/|^/xorb/"
SERVER_ATTACKS: dict[str, Attack] = {
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
    **kinds("size", lambda size: headed(_FILE, X_Linked_Size=size), {
        "longer": 10**6, "shorter": 1, "nothing": 0, "huge": 10**18, "negative": -5, "no number": "x",
    }),
    "length: longer": headed(_STORED, Content_Length=10**6, Connection="close"),
    "length: shorter": headed(_STORED, Content_Length=10),
    "etag: above": headed(_FILE, ETag='"../../../../evil"', X_Linked_Etag='"../../../../evil"'),
    "etag: absolute": headed(_FILE, ETag='"{outside}/x"', X_Linked_Etag='"{outside}/x"'),
    "etag: nothing": headed(_FILE, ETag="", X_Linked_Etag=""),
    "etag: wrong": headed(_FILE, X_Linked_Etag='"' + "a" * 64 + '"'),
    "commit: above": headed(_FILE, X_Repo_Commit="../../../../evil"),
    "commit: nothing": headed(_FILE, X_Repo_Commit=""),
    "xet: another store": headed(_FILE, X_Xet_Refresh_Route="{elsewhere}/token",
        Link='<{elsewhere}/t>; rel="xet-auth"'),
    "damaged": served(_STORED, "corrupt_response"),
    "cut": served(_STORED, "cut_response", after=100),
    "gated": Attack(settings={"gated": True}),
    "private": Attack(settings={"private": True}),
    "answer: 401": refused(401, message=WORDS.replace("\u202e", "")[:40]),
    "answer: 403 with words": refused(403, message="\x1b[31mx\x07" * 9),
    "answer: 404": refused(404),
    "answer: 418 with a page": refused(418, message="<html>" * 3000),
    "answer: lists": answered("/api/", []),
    "answer: nothing": answered("/api/", {}),
    "answer: words": answered("/api/", {"sha": "../../../evil", "id": WORDS,
        "siblings": [{"rfilename": "../../evil"}], "gated": WORDS}),
}  # fmt: skip


def batch(**places: str) -> Attack:
    """Where the server wants an LFS object."""
    actions = {name: {"href": place} for name, place in places.items()}
    return answered("/info/lfs/", {"transfer": "basic", "objects": [{"oid": "a" * 64, "size": 1, "actions": actions}]})


# What a server may answer to a push.
PUSH_ATTACKS: dict[str, Attack] = {
    "honest": Attack(),
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
