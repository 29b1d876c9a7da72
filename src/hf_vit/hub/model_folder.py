"""A model folder as it is read for sharing. Whoever wrote it is not trusted: names in it reach no file outside."""

import ast
import json
import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hf_vit.errors import UserError
from hf_vit.families import DenseHead, dense_head_of, family_of, own_class, problem_type_of
from hf_vit.repositories.reading import check_name, read_object, weight_shards

CARD_NAME = "README.md"
PROCESSOR = "preprocessor_config.json"
PAGE_NAME = "page.json"  # in its place, of a page that runs models
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Size = int | tuple[int, int]


class ModelConfig(BaseModel):
    """What sharing reads of config.json; the rest is kept for the model itself."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True, protected_namespaces=())

    model_type: str = ""
    architectures: list[str] | None = None
    auto_map: dict[str, str | list[str | None]] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    num_hidden_layers: object = None
    hidden_size: object = None
    num_attention_heads: object = None
    patch_size: Size | None = None
    image_size: Size | None = None

    @property
    def architecture(self) -> str:
        """The class that was saved; empty if the file does not say."""
        return (self.architectures or [""])[0]

    @property
    def is_classifier(self) -> bool:
        """Whether the model has a head for classes of images."""
        return "ForImageClassification" in self.architecture

    @property
    def is_multi_label(self) -> bool:
        """Whether an image may have several classes."""
        return problem_type_of(self) == "multi_label_classification"

    @property
    def is_regression(self) -> bool:
        """Whether the head for images gives values."""
        return self.is_classifier and problem_type_of(self) == "regression"

    @property
    def dense_head(self) -> DenseHead | None:
        """Its head, where it predicts something for every place of an image."""
        return dense_head_of(self.model_type)

    @property
    def backbone(self) -> "ModelConfig":
        """The configuration of the vision model: of a dense head its backbone's, else this one."""
        inside = (self.model_extra or {}).get("backbone_config")
        return ModelConfig.model_validate(inside) if self.dense_head and isinstance(inside, dict) else self

    @property
    def is_ours(self) -> bool:
        """Whether the architecture is one of this package."""
        return family_of(self.model_type) is not None or self.dense_head is not None

    @property
    def own_class(self) -> str | None:
        """A class outside this package that was saved; see `families.own_class`."""
        return own_class(self.model_dump())

    @property
    def code_targets(self) -> list[str]:
        """What `auto_map` names, as "module.Class"."""
        values = (self.auto_map or {}).values()
        names = [name for value in values for name in (value if isinstance(value, list) else [value]) if name]
        return [name.rpartition("--")[2] for name in names]


def read_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder."""
    try:
        return ModelConfig.model_validate(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        if (folder / PAGE_NAME).is_file():
            raise UserError(
                f"{folder} holds a page, not a model; share it with hf-vit push DIR REPO --space"
            ) from error
        raise UserError(
            f"{folder} holds no model: there is no config.json in it; give a saved model's folder"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = f"not valid JSON: {error}"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = f"{where}: {first['msg']}" if where else "not an object with the model's fields"
        raise UserError(f"config.json of {folder} is damaged ({reason}); save the model again") from error


def check_inside(folder: Path, path: Path) -> None:
    """Refuse a link that leads out of the folder; in the Hub's cache links lead into the repository's own `blobs`."""
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    is_cached = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    inside = [root, blobs] if is_cached and not blobs.is_symlink() else [root]
    if not any(path.resolve().is_relative_to(place) for place in inside):
        raise UserError(f"{path} is a link to a file outside of {folder}; replace it by the file itself, or remove it")


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files: the single one, or those that the index names; maybe none."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    return [name for name in weight_shards(folder, str(folder)) if name.endswith(".safetensors")]


def count_parameters(folder: Path) -> int | None:
    """Return the number of stored values, from the headers of the safetensors files; None where one is missing."""
    from safetensors import SafetensorError, safe_open

    names = weight_files(folder)
    if not names or not all((folder / name).is_file() for name in names):
        return None
    total = 0
    try:
        for name in names:
            with safe_open(str(folder / name), framework="numpy") as file:
                total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"the weights in {folder} are damaged ({error}); save the model again") from error
    return total


def example_images(folder: Path) -> list[str]:
    """Return the images that somebody put into `folder/examples` for the model's page, by their paths."""
    images = (path for path in (folder / "examples").glob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    return sorted(f"examples/{path.name}" for path in images if path.is_file())


def travelling_code(folder: Path, config: ModelConfig) -> set[str]:
    """Return the files of code that `auto_map` of model and image processor name, and the siblings these import."""
    own, targets = config.own_class, config.code_targets
    if config.is_ours:
        auto_class = "AutoModel" if config.dense_head is None else config.dense_head.auto_class
        missing = [name for name in ("AutoConfig", auto_class) if name not in (config.auto_map or {}) and not own]
        if config.architecture not in {target.rpartition(".")[2] for target in targets}:
            missing.append(config.architecture)
        if missing:
            raise UserError(
                f"auto_map in the config.json of {folder} lacks {', '.join(missing)}; "
                + (f"call {own}.register_for_auto_class and " if own in missing else "")
                + "save the model again"
            )
    if (folder / PROCESSOR).is_file():
        processor = read_object(folder / PROCESSOR, str(folder)).get("auto_map")
        targets = [*targets, *ModelConfig.model_validate({"auto_map": processor}).code_targets]
    waiting, files = [target.rpartition(".")[0] for target in targets], set[str]()
    while waiting:
        name = check_name(f"{waiting.pop()}.py", "auto_map in config.json")
        if name not in files:
            files.add(name)
            waiting += _siblings(folder, name)
    return files


def _siblings(folder: Path, name: str) -> list[str]:
    """Return the modules beside a file of code that it imports."""
    path = folder / name
    if not path.is_file():
        raise UserError(f"{folder} lacks {name}, which holds code of the model; save the model again")
    check_inside(folder, path)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{name} of {folder} is not Python code ({error}); save the model again") from error
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return [node.module for node in imports if node.level == 1 and node.module]
