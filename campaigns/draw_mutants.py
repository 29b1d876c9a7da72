"""Draw the list of mutants, campaigns/mutants.json: `python campaigns/draw_mutants.py [SEED]`.

Drawing anew makes earlier rounds incomparable and forgets what was struck.
"""

import ast
import copy
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from mutants import LIST, MESSAGES, Site, called, header, sources

# Package: number of mutants, and the files they are drawn from.
PACKAGES = {
    "models": (75, r"src/hf_vit/models/"),
    "conversion": (75, r"conversion/"),
    "data": (35, r"src/hf_vit/data/(labels|splits|fingerprints|copies|checks|dense/annotations)\.py"),
    "training": (
        50,
        r"src/hf_vit/training/(trainer/(losses|sampling|sam|averaging|streaming|batch_norm)|run/(resuming|checkpoints)"
        r"|tasks/(classification|distillation|masking|momentum_contrast|contrast|patch_prediction|meta_pseudo_labels))\.py",
    ),
    "evaluation": (40, r"src/hf_vit/evaluation/(metrics|protocols/.*)\.py"),
    "results": (25, r"src/hf_vit/(results/(facts|figures|measurements|report)|hub/card\w*)\.py"),
}

SWAPS: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
SWAPS |= {new: old for old, new in SWAPS.items()} | {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div}
SWAPS |= {ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
# Functions whose results are for the eye; calls that cannot run with their arguments swapped.
COSMETIC = re.compile(r"draw|plot|diagram|progress|curves|pictures|_tell")
TYPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "partial", "field", "match", "fullmatch"}
TEXT = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
# Endings of text and paths, whose sums and quotients are no arithmetic.
ENDS = ("/", '"', "'", "name", "NAME", "FILE", "FOLDER", "PROCESSOR", "keys()")


def replacements(site: Site) -> Iterator[tuple[str, str]]:
    """Iterate over (operator, source of the replacement) of a node."""
    node, number = site.node, "default" if site.before else "off by one"

    def changed(**fields: Any) -> str:
        new = copy.copy(node)
        vars(new).update(fields)
        return ast.unparse(new)

    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield "comparison", changed(ops=[SWAPS[type(op)]()])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS and not isinstance(left, TEXT):
            if not any(ast.unparse(side).endswith(ENDS) for side in (left, right)):
                yield "arithmetic", changed(op=SWAPS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in SWAPS and not isinstance(node.value, TEXT):
            yield "arithmetic", changed(op=SWAPS[type(op)]())
        case ast.Constant(value=bool(value)):
            yield "default" if site.before else "constant", repr(not value)
        case ast.Constant(value=int(value)):
            yield from [(number, repr(value + 1)), (number, repr(value - 1))][: 1 + (value > 1)]
        case ast.Constant(value=float(value)):
            new = value * 10 if 0 < value < 1e-3 else value * 2 or 1.0
            yield "default" if site.before else "constant", repr(new)
        case ast.BoolOp(op=op):
            yield "and/or", changed(op=ast.And() if isinstance(op, ast.Or) else ast.Or())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", ast.unparse(operand)
        case ast.Call(args=[first, second, *rest]) if called(node) not in TYPED:
            pair = [ast.unparse(first), ast.unparse(second)]
            if pair[0] != pair[1] and "'" not in "".join(pair) and not {ast.Starred} & set(map(type, node.args)):
                yield "swapped arguments", changed(args=[second, first, *rest])
        case ast.Expr(value=ast.Call()) if called(node.value) not in (*MESSAGES, "__init__"):
            yield "removed call", "pass"
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) != "None":
            yield "return value", "return None"
        case ast.Continue() | ast.Break():
            yield "break/continue", "continue" if isinstance(node, ast.Break) else "break"
    if site.field in ("test", "ifs") and not isinstance(node, (ast.Compare, ast.UnaryOp)):
        yield "negated condition", f"not ({ast.unparse(node)})"


def draw(seed: int) -> None:
    """Write the list: operators take turns, a function has two mutants at most."""
    pools: dict[str, dict[str, list[dict[str, Any]]]] = {name: defaultdict(list) for name in PACKAGES}
    for file, sites in sources():
        package = next((name for name, (_, pattern) in PACKAGES.items() if re.match(pattern, file)), None)
        places: Counter[Any] = Counter()
        for site in sites if package else ():
            place = {"function": site.function, "statement": site.statement, "expression": header(site.node)}
            for operator, new in () if COSMETIC.search(site.function) else replacements(site):
                ordinal = places[tuple(place.values())]
                line = {"package": package, "file": file, **place, "ordinal": ordinal, "replacement": new}
                pools[package or ""][operator].append(line | {"operator": operator})
            places[tuple(place.values())] += 1
    mutants: list[dict[str, Any]] = []
    for package, (number, _) in PACKAGES.items():
        chance, functions, drawn = random.Random(f"{seed} {package}"), Counter[Any](), []
        for pool in pools[package].values():
            chance.shuffle(pool)
        while len(drawn) < number and any(pools[package].values()):
            for _, pool in sorted(pools[package].items()):
                while pool and functions[pool[-1]["file"], pool[-1]["function"]] == 2:
                    pool.pop()
                if pool and len(drawn) < number:
                    drawn.append(pool.pop())
                    functions[drawn[-1]["file"], drawn[-1]["function"]] += 1
        mutants += sorted(drawn, key=lambda each: (each["file"], each["function"]))
    lines = ",\n".join(json.dumps({"id": number, **each}) for number, each in enumerate(mutants, start=1))
    LIST.write_text(f'{{"seed": {seed}, "mutants": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    draw(int((sys.argv[1:] or ["0"])[0]))
