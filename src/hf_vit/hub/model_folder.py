"""Read a model folder for sharing. Its author is not trusted: no name in it may lead to a file outside."""

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hf_vit.errors import UserError
from hf_vit.families import DenseHead, find_family, find_head_type, find_own_class, get_problem_type
from hf_vit.repositories.reading import check_file_name, check_references, list_shards, read_json_object, refuse_huge
from hf_vit.results.facts import describe_invalid_field

CARD_NAME = "README.md"
PROCESSOR = "preprocessor_config.json"
WHOLE_PROCESSOR = "processor_config.json"  # with tokenizer and others; transformers prefers the image processor in it
PAGE_NAME = "page.json"  # marks the folder of a page instead of a model
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Size = int | tuple[int, int]
# Stored values that are no parameters: the statistics of batch norms, and the class weights of Mask2Former's loss.
_BUFFER = re.compile(r"(.*\.)?(running_mean|running_var|num_batches_tracked|empty_weight)")


class ModelConfig(BaseModel):
    """The fields of config.json that sharing needs; other fields are kept as extra fields."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True, protected_namespaces=())

    model_type: str = ""
    architectures: list[str] | None = None
    auto_map: dict[str, str | list[str | None]] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    quantization_config: object = None
    num_hidden_layers: object = None
    hidden_size: object = None
    num_attention_heads: object = None
    patch_size: Size | None = None
    image_size: Size | None = None

    @property
    def architecture(self) -> str:
        """Return the name of the saved class; "" if the file does not state it."""
        return (self.architectures or [""])[0]

    @property
    def is_classifier(self) -> bool:
        """Return whether the model classifies images."""
        return "ForImageClassification" in self.architecture

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several classes."""
        return get_problem_type(self) == "multi_label_classification"

    @property
    def is_regression(self) -> bool:
        """Return whether the model's head predicts values instead of classes."""
        return self.is_classifier and get_problem_type(self) == "regression"

    @property
    def dense_head(self) -> DenseHead | None:
        """Return the segmentation or detection head; None for other models."""
        return find_head_type(self.model_type)

    @property
    def backbone(self) -> "ModelConfig":
        """Return the configuration of the vision model: a dense head's backbone, or this configuration itself."""
        fields = (self.model_extra or {}).get("backbone_config")
        return ModelConfig.model_validate(fields) if self.dense_head and isinstance(fields, dict) else self

    @property
    def is_ours(self) -> bool:
        """Return whether hf_vit contains the architecture."""
        return find_family(self.model_type) is not None or self.dense_head is not None

    @property
    def own_class(self) -> str | None:
        """Return the saved class if it is defined outside hf_vit, else None; see `families.own_class`."""
        return find_own_class(self.model_dump())

    @property
    def code_targets(self) -> list[str]:
        """Return the entries of `auto_map`: "module.Class", or "repository--module.Class" of code elsewhere."""
        values = (self.auto_map or {}).values()
        return [name for value in values for name in (value if isinstance(value, list) else [value]) if name]


def read_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder; raise a UserError if the file is missing or damaged."""
    if not (folder / "config.json").is_file():
        if (folder / PAGE_NAME).is_file():
            raise UserError(f"{folder} holds a page, not a model; share it with hf-vit push DIR REPO --space")
        check_references(folder, str(folder))  # tells of peft's adapters
        raise UserError(f"{folder} holds no model, because config.json is missing; give a folder with a saved model")
    content = read_json_object(folder / "config.json", str(folder))
    refuse_huge(content, str(folder))
    return _parse_config(content, folder / "config.json")


def _parse_config(content: dict[str, Any], path: Path) -> ModelConfig:
    """Return the fields that a file holds; raise a UserError if one has a wrong type."""
    try:
        return ModelConfig.model_validate(content)
    except ValidationError as error:
        reason = describe_invalid_field(error)
        raise UserError(f"{path.name} of {path.parent} is damaged: {reason}; save the model again") from error


def keeps_shapes(folder: Path) -> bool:
    """Return whether the image processor of a model folder keeps the shape of images."""
    try:
        return json.loads((folder / PROCESSOR).read_text(encoding="utf-8")).get("max_num_patches") is not None
    except (OSError, ValueError, AttributeError, RecursionError):  # other checks tell
        return False


def check_inside(folder: Path, path: Path) -> None:
    """Raise a UserError if a path is a link out of the folder; in the Hub's cache, links into `blobs` are allowed."""
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    is_cached = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    allowed_folders = [root, blobs] if is_cached and not blobs.is_symlink() else [root]
    if not any(path.resolve().is_relative_to(root_folder) for root_folder in allowed_folders):
        raise UserError(f"{path} is a link to a file outside {folder}; replace it with the file itself, or remove it")


def list_weights(folder: Path) -> list[str]:
    """Return the names of the safetensors files: the single one, or the index's shards; possibly none."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    return [name for name in list_shards(folder, str(folder)) if name.endswith(".safetensors")]


def count_parameters(folder: Path) -> int | None:
    """Return the number of stored parameters according to the safetensors headers; None if a file is missing."""
    from safetensors import SafetensorError, safe_open

    files = [folder / name for name in list_weights(folder)]
    if not files or not all(file.is_file() for file in files):
        return None
    total = 0
    try:
        for file in files:
            with safe_open(str(file), framework="numpy") as tensors:
                names = [name for name in tensors.keys() if not _BUFFER.fullmatch(name)]  # noqa: SIM118
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    except SafetensorError as error:
        raise UserError(f"the weights in {folder} are damaged ({error}); save the model again") from error
    return total


def list_examples(folder: Path) -> list[str]:
    """Return the paths of the images in `folder/examples`, which the model's Hub page offers as examples."""
    paths = [path for path in (folder / "examples").glob("[!.]*") if path.suffix.lower() in (".png", ".jpg", ".jpeg")]
    for path in paths:
        if not path.name.isprintable():  # as names are that are not UTF-8
            raise UserError(f"the file name {path.name!a} in {folder / 'examples'} cannot be shared; rename the file")
    return sorted(f"examples/{path.name}" for path in paths if path.is_file())


def list_code(folder: Path, config: ModelConfig) -> set[str]:
    """Return the code files that `auto_map` of model and image processor names, and the sibling modules they import."""
    if config.is_ours:
        _refuse_missing_targets(folder, config)
    targets = config.code_targets
    if (folder / PROCESSOR).is_file():
        processor_map = read_json_object(folder / PROCESSOR, str(folder)).get("auto_map")
        targets += _parse_config({"auto_map": processor_map}, folder / PROCESSOR).code_targets
    unread_modules = [target.rpartition(".")[0] for target in targets]
    files = set[str]()
    while unread_modules:
        name = check_file_name(f"{unread_modules.pop()}.py", "auto_map in config.json")
        if name not in files:
            files.add(name)
            unread_modules += _list_imports(folder, name)
    return files


def _refuse_missing_targets(folder: Path, config: ModelConfig) -> None:
    """Raise a UserError if `auto_map` of a model of hf_vit lacks a class without which it cannot be loaded."""
    own_class = config.own_class
    missing: list[str] = []
    if not own_class:  # a user's class need not be the one that Auto classes load
        auto_class = "AutoModel" if config.dense_head is None else config.dense_head.auto_class
        missing = [name for name in ("AutoConfig", auto_class) if name not in (config.auto_map or {})]
    if config.architecture not in {target.rpartition(".")[2] for target in config.code_targets}:
        missing.append(config.architecture)
    if missing:
        registration = f"call {own_class}.register_for_auto_class and " if own_class in missing else ""
        problem = f"auto_map in the config.json of {folder} lacks {', '.join(missing)}"
        raise UserError(f"{problem}; {registration}save the model again")


def _list_imports(folder: Path, name: str) -> list[str]:
    """Return the sibling modules that a code file imports."""
    path = folder / name
    if not path.is_file():
        remedy = "copy it there, save the model again, or remove auto_map if transformers has the model"
        raise UserError(f"{folder} lacks {name}, the model's code, which auto_map names; {remedy}")
    check_inside(folder, path)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{name} of {folder} is not valid Python code ({error}); save it again") from error
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return [node.module for node in imports if node.level == 1 and node.module]
