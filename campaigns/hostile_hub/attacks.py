"""What a stranger's repository may hold, and what a server may answer: each attack is a change of an honest one."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

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
        faults: (path, action, fields) of the server, see `loopback.faults`.
        settings: of the repository, see `Loopback.settings`.
        links: name -> where it leads; in a folder alone.
        trusted: given with --trust-remote-code.
    """

    files: Files = field(default_factory=dict)
    large: tuple[str, ...] = ()
    faults: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


Make = Callable[[Ground, dict[str, bytes]], Attack]


class Run:
    """Unpickled, it runs code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def changed(base: dict[str, bytes], name: str = "config.json", **fields: Any) -> Files:
    """A JSON file with other fields."""
    return {name: json.dumps(json.loads(base[name]) | fields).encode()}


def code(ground: Ground) -> Files:
    names = ("modeling_evil", "configuration_evil", "processing_evil", "__init__", "sitecustomize", "usercustomize",
             "conftest", "setup", "hubconf", "transformers", "hf_vit", "safetensors", "torch", "PIL")  # fmt: skip
    module = f"{ground.payload}class Evil: pass\nclass EvilConfig: pass\n"
    return {f"{name}.py": module.encode() for name in names}


def with_code(**fields: Any) -> Make:
    """Code, and fields of the config that ask for it."""
    return lambda ground, base: Attack({**code(ground), **changed(base, **fields)})


def with_config(make: Callable[[Ground], dict[str, Any]], name: str = "config.json") -> Make:
    return lambda ground, base: Attack(changed(base, name, **make(ground)))


def whole(name: str, content: Any) -> Make:
    """Another file in place of one."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda ground, base: Attack({name: data})


def indexed(name: Callable[[Ground], str]) -> Make:
    """A weight index that names a file."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        keys = json.loads(base[WEIGHTS][8 : 8 + int.from_bytes(base[WEIGHTS][:8], "little")])
        index = {"metadata": {}, "weight_map": {key: name(ground) for key in keys if key != "__metadata__"}}
        return Attack({WEIGHTS: None, INDEX: json.dumps(index).encode()})

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


def linked(name: str, place: Callable[[Ground], str]) -> Make:
    return lambda ground, base: Attack({name: None}, links={name: place(ground)})


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


def architecture(**fields: Any) -> Make:
    """A model of timm, whose config says how it is built."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        places = {
            key: value.format(outside=ground.outside, elsewhere=ground.elsewhere) for key, value in fields.items()
        }
        config = {"architecture": "vit_tiny_patch16_224", "num_classes": 6, "pretrained_cfg": {"architecture": "x"}}
        if "architecture" in places:
            config["architecture"] = places.pop("architecture")
        model_args = {"img_size": 32, "depth": 1, "num_heads": 1, "embed_dim": 16, **places}
        return Attack({"config.json": json.dumps(config | {"model_args": model_args}).encode()})

    return make


def wrapped(attack: Make) -> Make:
    """The same as transformers knows models of timm."""

    def make(ground: Ground, base: dict[str, bytes]) -> Attack:
        files = attack(ground, base).files
        config = json.loads(files["config.json"] or b"") | {"model_type": "timm_wrapper"}
        config["architectures"] = ["TimmWrapperForImageClassification"]
        return Attack({"config.json": json.dumps(config).encode()})

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
    "AutoConfig": "configuration_evil.EvilConfig",
    "AutoModel": "modeling_evil.Evil",
    "AutoModelForImageClassification": "modeling_evil.Evil",
    "AutoModelForMaskedImageModeling": "modeling_evil.Evil",
    "AutoBackbone": "modeling_evil.Evil",
    "AutoImageProcessor": "processing_evil.Evil",
    "AutoProcessor": "processing_evil.Evil",
}
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
    "code: auto_map of another repository": with_code(
        auto_map={key: f"mallory/code--{value}" for key, value in _EVERYTHING.items()}, model_type="evil"
    ),
    "code: auto_map as text": with_code(auto_map="modeling_evil.Evil"),
    "code: auto_map with lists": with_code(auto_map={key: [value, value] for key, value in _EVERYTHING.items()}),
    "code: auto_map with nothing": with_code(auto_map=dict.fromkeys(_EVERYTHING), model_type="evil"),
    "code: trust_remote_code in the config": with_code(
        auto_map=_EVERYTHING, model_type="evil", trust_remote_code=True, code_revision="main"
    ),
    "code: syntax error": lambda ground, base: Attack(
        {"modeling_evil.py": b"def (", **changed(base, auto_map=_EVERYTHING, model_type="evil")}
    ),
    "code: of the processor": lambda ground, base: Attack(
        {
            **code(ground),
            **changed(
                base,
                "preprocessor_config.json",
                auto_map=_EVERYTHING,
                image_processor_type="Evil",
                trust_remote_code=True,
            ),
        }
    ),
    "code: of the known processor": lambda ground, base: Attack(
        {**code(ground), **changed(base, "preprocessor_config.json", auto_map=_EVERYTHING)}
    ),
    "code: processor_config.json": lambda ground, base: Attack(
        {
            **code(ground),
            "preprocessor_config.json": None,
            "processor_config.json": json.dumps(
                {"auto_map": _EVERYTHING, "processor_class": "Evil", "image_processor": {"auto_map": _EVERYTHING}}
            ).encode(),
        }
    ),
    "code: in place of ours": lambda ground, base: Attack(
        {name: f"{ground.payload}".encode() for name in base if name.endswith(".py")} | code(ground)
    ),
    "code: attention from the Hub": with_code(
        attn_implementation="mallory/kernel", _attn_implementation="mallory/kernel"
    ),
    "code: custom generation": lambda ground, base: Attack(
        {"custom_generate/generate.py": ground.payload.encode(), "generation_config.json": b"{}", **code(ground)}
    ),
    # Pickles
    **{
        f"pickle: {name}{', old' * old}": pickled(name, old)
        for name in ("pytorch_model.bin", "model.pth", "training_args.bin", "model.ckpt", "weights.pkl")
        for old in (False, True)
    },
    "pickle: in place of safetensors": lambda ground, base: Attack(
        {WEIGHTS: pickle.dumps(Run(ground.payload))}, (WEIGHTS,)
    ),
    "pickle: indexed": lambda ground, base: Attack(
        {
            **pickled("part.bin", True)(ground, base).files,
            "pytorch_model.bin.index.json": b'{"metadata": {}, "weight_map": {"classifier.weight": "part.bin"}}',
        }
    ),
    "pickle: a bomb": lambda ground, base: Attack(
        {WEIGHTS: None, "pytorch_model.bin": zip_bomb()}, ("pytorch_model.bin",)
    ),
    "pickle: adapter_model.bin": lambda ground, base: Attack(
        {**adapter(ground, base, True).files, "adapter_model.bin": pickle.dumps(Run(ground.payload))}
    ),
    # Other places
    "place: adapter": lambda ground, base: adapter(ground, base, False),
    "place: adapter beside a model": lambda ground, base: adapter(ground, base, True),
    "place: transformers_weights": with_config(
        lambda ground: {"transformers_weights": f"{ground.outside}/model.safetensors"}
    ),
    "place: transformers_weights above": with_config(lambda ground: {"transformers_weights": "../../../x.safetensors"}),
    "place: _name_or_path": with_config(lambda ground: {"_name_or_path": str(ground.outside), "name_or_path": "/etc"}),
    "place: backbone": with_config(
        lambda ground: {"backbone": str(ground.outside), "use_pretrained_backbone": True, "use_timm_backbone": False}
    ),
    "place: a detector's backbone": with_config(
        lambda ground: {
            "model_type": "detr",
            "backbone": f"local-dir:{ground.outside}",
            "use_timm_backbone": True,
            "backbone_config": None,
            "architectures": ["DetrForObjectDetection"],
        }
    ),
    "place: timm checkpoint_path": architecture(checkpoint_path="{outside}/model.safetensors"),
    "place: timm cache_dir": architecture(cache_dir="{outside}/cache"),
    "place: timm pretrained_cfg": architecture(pretrained_cfg="{outside}/model.safetensors"),
    "place: timm architecture": architecture(architecture="local-dir:{outside}"),
    "place: timm's of another repository": architecture(architecture="hf-hub:mallory/code"),
    "place: wrapped checkpoint_path": wrapped(architecture(checkpoint_path="{outside}/model.safetensors")),
    "place: wrapped cache_dir": wrapped(architecture(cache_dir="{outside}/cache")),
    "place: wrapped architecture": wrapped(architecture(architecture="local-dir:{outside}")),
    "place: wrapped of another repository": wrapped(architecture(architecture="hf-hub:mallory/code")),
    # Indexes
    "index: absolute": indexed(lambda ground: f"{ground.outside}/model.safetensors"),
    "index: above": indexed(lambda ground: "../" * 12 + f"{ground.outside}/model.safetensors".lstrip("/")),
    "index: address": indexed(lambda ground: f"{ground.elsewhere}/model.safetensors"),
    "index: file address": indexed(lambda ground: f"file://{ground.outside}/model.safetensors"),
    "index: of another repository": indexed(
        lambda ground: "../../../models--alice--private/snapshots/main/model.safetensors"
    ),
    "index: itself": indexed(lambda ground: INDEX),
    "index: the config": indexed(lambda ground: "config.json"),
    "index: control characters": indexed(lambda ground: "a\n\x1b[31m\0b.safetensors"),
    "index: nothing": indexed(lambda ground: ""),
    "index: very long": indexed(lambda ground: "a" * 5000 + ".safetensors"),
    "index: beside the single file": lambda ground, base: Attack(
        {INDEX: indexed(lambda ground: f"{ground.outside}/model.safetensors")(ground, base).files[INDEX]}
    ),
    **{
        f"index: {kind}": lambda ground, base, value=value: Attack({WEIGHTS: None, INDEX: json.dumps(value).encode()})
        for kind, value in {
            "a list": [],
            "no map": {},
            "a map of lists": {"weight_map": {"a": []}, "metadata": {}},
            "a map of nothing": {"metadata": None, "weight_map": None},
        }.items()
    },
    # Configs and processors of wrong types
    **{
        f"config: {name} {kind}": with_config(lambda ground, name=name, value=value: {name: value})
        for name in _FIELDS
        for kind, value in WRONG.items()
    },
    **{
        f"processor: {name} {kind}": with_config(
            lambda ground, name=name, value=value: {name: value}, "preprocessor_config.json"
        )
        for name in _PROCESSOR_FIELDS
        for kind, value in WRONG.items()
    },
    **{
        f"{name}: {kind}": whole(f"{name}.json", value)
        for name in ("config", "preprocessor_config", "facts")
        for kind, value in {
            "a list": [],
            "a number": 1,
            "nothing": b"",
            "cut": b'{"a": ',
            "bytes": bytes(range(256)),
            "deep": b"[" * 100_000,
            "NaN": b'{"hidden_size": NaN}',
            "huge numbers": b'{"hidden_size": 1' + b"0" * 5000 + b"}",
        }.items()
    },
    "config: huge": with_config(lambda ground: {"num_hidden_layers": 10**9}),
    "config: wide": with_config(lambda ground: {"hidden_size": 10**9, "intermediate_size": 10**9}),
    "config: labels with words": with_config(lambda ground: {"id2label": {str(i): f"{WORDS}{i}" for i in range(6)}}),
    "facts: words": facts(),
    "facts: a picture above": facts(kind="analysis"),
    "facts: an evaluation": facts(kind="evaluation"),
    "facts: a conversion": facts(kind="conversion"),
    "card: words": whole("README.md", f"---\nlicense: mit\n---\n{WORDS}\n".encode()),
    "card: YAML that runs": whole("README.md", b"---\nlicense: !!python/object/apply:os.system ['true']\n---\n"),
    "card: a bomb": whole("README.md", b"---\na: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nlicense: *c\n---\n"),
    "card: pictures outside": lambda ground, base: Attack(
        {"README.md": base["README.md"] + f"![x]({ground.outside}/private.png) ![y](../x.png)".encode()}
    ),
    "card: includes": whole("README.md", b"---\nlicense: mit\n---\n{% include '/etc/passwd' %}{{ self.__init__ }}\n"),
    # Names
    **{
        f"name: {kind}": named(name)
        for kind, name in {
            "above": "../evil.py",
            "far above": "../../../../../../../../evil.py",
            "absolute": "/tmp/hf_vit_evil",
            "control characters": "a\x1b[31m\nb.txt",
            "bidi": "a\u202egnp.exe",
            "very long": "a" * 300,
            "very deep": "d/" * 200 + "x",
            "case": "CONFIG.JSON",
            "reserved": "aux.json",
            "drive": "C:\\evil.py",
            "backslash": "..\\evil.py",
            "dots": "...",
            "git": ".git/config",
            "space": " ",
            "percent": "%2e%2e%2fevil.py",
            "home": "~/evil.py",
            "dash": "--trust-remote-code",
        }.items()
    },
    # Links in a folder
    "link: weights": linked(WEIGHTS, lambda ground: f"{ground.outside}/model.safetensors"),
    "link: config": linked("config.json", lambda ground: f"{ground.outside}/config.json"),
    "link: card": linked("README.md", lambda ground: f"{ground.outside}/private.txt"),
    "link: facts": linked("facts.json", lambda ground: f"{ground.outside}/private.txt"),
    "link: picture": linked("learning_curve.png", lambda ground: f"{ground.outside}/private.png"),
    "link: license": linked("LICENSE", lambda ground: f"{ground.outside}/private.txt"),
}
