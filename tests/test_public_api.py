"""What is public stays: names, commands, fields and choices, as `public_api.txt` lists them.

`python tests/test_public_api.py --write` writes the list again. It keeps the first section, the capabilities, which is
written by hand: below each stand the tests that prove it.
"""

import difflib
import functools
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import typer.main
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).with_name("public_api.txt")
SECTIONS = ("# Capabilities, and the tests that prove them", "# Names", "# Commands", "# Choices")
# The package, and those of its rooms whose names are shown in the reference (tests/test_docs.py holds it to that).
MODULES = ("", ".analysis", ".comparison", ".conversion", ".cost", ".data", ".evaluation", ".training")
# Tables of choices; a class stands for its fields.
TABLES = {
    "variants": "variants:list_variant_names", "source formats": "conversion.origins.registry:ORIGINS",
    "model types of transformers that convert": "conversion.origins.registry:TRANSFORMERS_TYPES",
    "analyses": "analysis:ANALYSES", "corruptions": "evaluation.protocols.robustness:CORRUPTIONS",
    "tasks of VTAB": "evaluation.protocols.vtab:TASKS", "built-in data": "data.sources:BUILTIN_NAMES",
    "image files": "data.sources:IMAGE_SUFFIXES", "object stores": "repositories.stores:STORES",
    "splits": "data.splits:SPLITS", "engines of optimize_for_inference": "inference.engines:ENGINES",
    "runtimes of exported graphs": "conversion.targets.graphs.runtimes:RUNTIMES",
    "int8 quantizers of exported graphs": "conversion.targets.graphs.int8:QUANTIZERS",
    "runners": "evaluation.runners:RUNNERS", "contestants of bench models": "speed.peers:OURS",
    "peers of bench models": "speed.peers:PEERS", "results that a card publishes": "hub.published_results:PUBLISHED",
    "kinds of records in facts.json": "results.facts:KINDS", "a record in facts.json": "results.facts:Record",
    "data of a record": "results.facts:DataFact",
}  # fmt: skip


def names() -> Iterator[str]:
    """A line a name: functions and classes with their parameters and defaults; methods, properties, fields below."""
    for suffix in MODULES:
        module = importlib.import_module(f"hf_vit{suffix}")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield f"{module.__name__}.{name}{_signature(value)}"
            if inspect.isclass(value):
                yield from (f"    .{line}" for line in _members(value))
                yield from (f"    {line}" for line in _fields(value))


def commands() -> Iterator[str]:
    """A line a command, and one for each of its arguments and options."""
    from hf_vit_cli.main import build_app

    def described(name: str, command: Any) -> Iterator[str]:
        yield name
        yield from sorted(f"{name} {_parameter(each)}" for each in command.params)
        for part, below in sorted(getattr(command, "commands", {}).items()):
            yield from described(f"{name} {part}", below)

    return described("hf-vit", typer.main.get_command(build_app()))


def choices() -> Iterator[str]:
    """A line for each entry of the package's tables."""
    from hf_vit.conversion.targets.registry import TARGETS
    from hf_vit.evaluation import PROTOCOLS
    from hf_vit.families import AUTO_CLASSES, DENSE_HEADS, FAMILIES
    from hf_vit.training import RECIPES
    from hf_vit.training.api import TASKS

    for family in FAMILIES.values():
        doors = [f"{AUTO_CLASSES[door]} {model.__name__}" for door, model in family.classes.items()]
        yield "; ".join((f"family {family.name}: {family.model_type}", *doors))
    for head in DENSE_HEADS.values():
        yield f"head {head.name}: {head.task}; {head.model_type}; {head.auto_class} {head.model_class.__name__}"
        yield from (f"    {line}" for line in _fields(head.config_class))
    for target in TARGETS.values():
        yield f"export to {target.name}: {', '.join((*target.options, *['masks and boxes'] * target.takes_dense))}"
    for name, protocol in PROTOCOLS.items():
        yield f"protocol {name}{_signature(protocol)}"
    for name, task in TASKS.items():
        yield f"{'finetune' if task.has_labels else 'pretrain'} {name}: recipe {task.recipe}"
    for recipe in RECIPES.values():
        usual = {each.name: each.default for each in fields(recipe)} | {"architecture": {}}
        usual |= vars(usual["augmentation"])
        values = {name: value for name, value in recipe.settings().items() if value not in (usual[name], [])}
        shown = (f"{name}={value!r}" for name, value in values.items() if name not in ("name", "source"))
        yield f"recipe {recipe.name}: {', '.join(shown)}"
    for title, place in TABLES.items():
        yield title
        module, _, name = place.partition(":")
        table: Any = getattr(importlib.import_module(f"hf_vit.{module}"), name)
        rows = _fields(table) if inspect.isclass(table) else table() if callable(table) else table
        yield from (f"    {getattr(row, 'name', row)}" for row in rows)


def _parameter(parameter: Any) -> str:
    """Of an option its flags, type, range and default; of an argument its name in capitals."""
    flags = "/".join([*parameter.opts, *parameter.secondary_opts])
    name = flags if parameter.param_type_name == "option" else flags.upper()
    limits = [f"{end} {limit}" for end, limit in (("min", parameter.min), ("max", parameter.max)) if limit is not None]
    default = "required" if parameter.required else f"default {parameter.default!r}"
    return ", ".join((f"{name}: {_type(parameter.type_descriptor.annotation)}", *limits, default))


def _members(cls: type) -> Iterator[str]:
    """What our own classes define; what a class of another library brings along is that library's."""
    members = {name: value for base in _ours(cls) for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in sorted(members.items()):
        if isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
            yield f"{name}{_signature(getattr(cls, name))}"
        elif isinstance(inspect.getattr_static(cls, name), property | functools.cached_property):
            yield name


def _fields(cls: type) -> Iterator[str]:
    """Type and default of each field of a configuration, a data class or a pydantic model, those of our own classes."""
    declared: Any = {each.name: each for each in fields(cls)} if is_dataclass(cls) else getattr(cls, "model_fields", {})
    for name in sorted({name for base in _ours(cls) for name in vars(base).get("__annotations__", {})} & set(declared)):
        each = declared[name]
        factory = each.default_factory if callable(each.default_factory) else lambda: MISSING
        default = factory() if each.default in (MISSING, PydanticUndefined) else each.default
        if not name.startswith("_"):
            shown = "" if default is MISSING else f" = {default!r}"
            yield f"{name}: {_type(each.annotation if hasattr(each, 'annotation') else each.type)}{shown}"


def _ours(cls: type) -> list[type]:
    return [base for base in reversed(cls.__mro__) if base.__module__.startswith("hf_vit")]


def _type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)  # names of modules


def _signature(value: Any) -> str:
    """Parameters and defaults; of a class without those that another library's base has as well."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    foreign = set[str]()
    if inspect.isclass(value):
        bases = [base for base in value.__mro__[1:] if base.__module__.partition(".")[0] == "transformers"]
        foreign = {name for base in bases for name in inspect.signature(base).parameters} - {"config", "kwargs"}
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in signature.parameters.items()
        if name not in foreign
    ]
    plain = signature.replace(parameters=kept, return_annotation=inspect.Signature.empty)
    return re.sub(r" at 0x[0-9a-f]+", "", str(plain))


def capabilities() -> list[str]:
    """The lines written by hand."""
    text = FROZEN.read_text(encoding="utf-8").partition(SECTIONS[1])[0]
    return text.removeprefix(SECTIONS[0]).strip().splitlines()


def written() -> list[str]:
    """The whole file, its first section as it is."""
    parts = zip(SECTIONS, (capabilities(), names(), commands(), choices()), strict=True)
    return [line for title, lines in parts for line in (title, "", *lines, "")][:-1]


def test_public_api_is_what_was_written_down() -> None:
    before, now = FROZEN.read_text(encoding="utf-8").splitlines(), written()
    difference = "\n".join(
        difflib.unified_diff(before, now, "tests/public_api.txt", "the package now", lineterm="", n=1)
    )
    assert not difference, (
        f"{difference}\nWhat is public stays for one version more, with a FutureWarning that names what replaces it "
        "(CONTRIBUTING.md, Versions). Then write the list again: python tests/test_public_api.py --write"
    )


def test_capabilities_name_tests_that_exist() -> None:
    lines = capabilities()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(" "):
            path, _, name = line.strip().partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"^\s*def {name}\(", text, re.MULTILINE), f"{path} has no {name}"
        else:
            assert following.startswith("    tests/"), f"no test proves: {line}"


if __name__ == "__main__" and "--write" in sys.argv:
    FROZEN.write_text("\n".join(written()) + "\n", encoding="utf-8")
