"""Every text that the program shows, read from the syntax trees; and a random draw of functions and texts to rate.

python docs/texts.py                # help, notes, warnings and errors, file by file
python docs/texts.py --draw 25      # 25 functions and 25 of these texts, by the seed below
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEED = 20261207  # of the draw
# Calls whose arguments a user reads: help, messages, log lines.
CALLS = {"opt", "arg", "setting", "echo", "print", "print_safely", "report", "say"}
CALLS |= {"warn", "warning", "info", "fail", "append"}


def source_files() -> list[Path]:
    """Return the modules of the package; `src/hf_vit/conversion` is a link to `conversion`."""
    folders = [ROOT / "src/hf_vit_settings", ROOT / "src/hf_vit_cli", ROOT / "src/hf_vit", ROOT / "conversion"]
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if not path.is_symlink()]


def read_text(node: ast.AST) -> str:
    """Return a string as it is written, with {expressions}; "" where this is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(read_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp):
        return read_text(node.left) + read_text(node.right)
    return ""


def texts(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of what a module shows: summaries of commands, help, messages, other sentences."""
    tree = ast.parse(path.read_text())
    hidden = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):  # from the outside in
        if (
            isinstance(node, ast.FunctionDef)
            and path.parent.name == "hf_vit_cli"
            and "Annotated" in ast.unparse(node.args)
        ):
            yield node.lineno, "summary", ast.get_docstring(node) or ""
        annotations = [getattr(node, field, None) for field in ("annotation", "returns")]
        hidden |= {
            id(child)
            for annotation in annotations
            if isinstance(annotation, ast.Constant)
            for child in ast.walk(annotation)
        }
        kind, parts = "text", [node] if isinstance(node, ast.Constant | ast.JoinedStr) else []
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in CALLS or name.endswith(("Error", "Exception")):
                kind = "help" if name in ("opt", "arg", "setting") else name
                parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        for part in parts:
            text = " ".join(read_text(part).split())
            if id(part) not in hidden and text.count(" ") >= (2 if kind == "text" else 1):
                hidden |= {id(child) for child in ast.walk(part)}
                yield part.lineno, kind, text


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and source of every function with at least four statements."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and sum(isinstance(child, ast.stmt) for child in ast.walk(node)) > 4:
            yield node.lineno, ast.get_source_segment(source, node) or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, metavar="N", help="draw N functions and N texts to rate")
    number = parser.parse_args().draw
    texts_by_file = {path: sorted(set(texts(path))) for path in source_files()}
    if number is None:
        for path, rows in texts_by_file.items():
            if rows:
                print(f"\n## {path.relative_to(ROOT)}")
                print(*(f"{line} {kind}: {text}" for line, kind, text in rows), sep="\n")
        return
    draw = random.Random(SEED)
    bodies = [(path, *row) for path in texts_by_file for row in functions(path)]
    for path, line, source in draw.sample(bodies, number):
        print(f"\n## {path.relative_to(ROOT)}:{line}\n{source}")
    messages = [(path, *row) for path, rows in texts_by_file.items() for row in rows if row[1] != "text"]
    for path, line, kind, text in draw.sample(messages, number):
        print(f"\n## {path.relative_to(ROOT)}:{line} {kind}\n{text}")


if __name__ == "__main__":
    main()
