"""Who imports what: every import statement of the package, read from the syntax trees, as names with their modules.

Lazy imports and those for type checkers count as much as any other; a name that a package hands out by its stub counts
as the import of the module that defines it.
"""

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

PACKAGE, PROGRAM, SETTINGS = "hf_vit", "hf_vit_cli", "hf_vit_settings"
SOURCE = Path(__file__).parents[1] / "src"


@functools.cache
def files() -> dict[str, Path]:
    """Module -> its file, without `__init__`; `conversion` is a link, which is followed."""
    found = {}
    for folder, _, names in os.walk(SOURCE, followlinks=True):
        for name in names:
            path = Path(folder) / name
            if path.suffix == ".py":
                parts = path.relative_to(SOURCE).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a file imports; the name is empty where the module itself is imported."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*around, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


@functools.cache
def stub_of(module: str) -> dict[str, str]:
    """Name -> the module it comes from, as the stub of a package with lazy names tells."""
    path = files()[module].with_suffix(".pyi")
    return {name: origin for origin, name in imports(path, module)} if path.is_file() else {}


def target_of(module: str, name: str) -> str:
    """The module of the package that defines what is imported."""
    if f"{module}.{name}" in files():
        return f"{module}.{name}"
    origin = stub_of(module).get(name)
    return module if origin is None else target_of(origin, name)


@functools.cache
def graph() -> dict[str, dict[str, set[str]]]:
    """Module -> module of the package that it imports -> the names that tie them."""
    found: dict[str, dict[str, set[str]]] = {}
    for module, path in files().items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found[module] = {}
        for origin, name in imports(path, package):
            if origin.split(".")[0] in (PACKAGE, PROGRAM, SETTINGS):
                target = target_of(origin, name)
                if target != module:
                    found[module].setdefault(target, set()).add(name or origin)
    return found
