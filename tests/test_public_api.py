"""What is public stays: names and signatures of `hf_vit` and of its rooms that name what they offer (`__all__`).

What was meant is written down anew: `python tests/test_public_api.py`.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).with_name("public_api.txt")
# The package, and those of its rooms whose names are shown in the reference (tests/test_docs.py holds it to that).
MODULES = ("", ".analysis", ".comparison", ".conversion", ".cost", ".data", ".evaluation", ".training")


def lines() -> Iterator[str]:
    """A line a name: functions and classes with their parameters and defaults, methods and properties below."""
    for suffix in MODULES:
        module = importlib.import_module(f"hf_vit{suffix}")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield f"{module.__name__}.{name}{_signature(value)}"
            if inspect.isclass(value):
                yield from (f"    .{line}" for line in _members(value))


def _members(cls: type) -> Iterator[str]:
    """What our own classes define; what a class of another library brings along is that library's."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("hf_vit")]
    members = {name: value for base in reversed(ours) for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in sorted(members.items()):
        if isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
            yield f"{name}{_signature(getattr(cls, name))}"
        elif isinstance(inspect.getattr_static(cls, name), property | functools.cached_property):
            yield name


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


def test_the_public_api_is_what_was_written_down() -> None:
    frozen, now = FROZEN.read_text(encoding="utf-8").splitlines(), list(lines())
    gone, new = [line for line in frozen if line not in now], [line for line in now if line not in frozen]
    assert frozen == now, (
        f"gone or changed: {gone}; new: {new}. What is public stays for one version more, with a FutureWarning that "
        "names what replaces it (CONTRIBUTING.md, Versions). Then write the list anew: python tests/test_public_api.py"
    )


if __name__ == "__main__":
    FROZEN.write_text("\n".join(lines()) + "\n", encoding="utf-8")
