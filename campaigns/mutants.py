"""Measure how many small faults the test suite notices: change the source in one place, run the tests that reach it.

    cover   run every test file once with recorders: which tests reach which mutant, and their CPU time
    run     run the mutants, each on its fastest tests
    record  write benchmarks/results/mutants.json from what has been run, list what survived and what is gone

`cover` and `run` resume; `record` may come at any time. A new state of the suite is a new --round. What has been run
is in build/mutants/ROUND.

The list names a mutant by function, statement and expression, so that it is found again when code moves between files.
Where one is gone, give its new form as "now": {"function", "statement", "expression", "ordinal", "replacement"}; one
that changes nothing gets "struck": the reason. Tests run in forks of a process that has the libraries imported, on a
private copy of the repository, which is what the mutants change.
"""

import argparse
import ast
import builtins
import copy
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST, RECORD = ROOT / "campaigns/mutants.json", ROOT / "benchmarks/results/mutants.json"
SECONDS = 60  # CPU seconds of tests a mutant
DEAD = {"killed", "timed out"}

# Tests are covered in this order, then the rest of tests/.
ORDER = ("models", "conversion", "data", "results", "hub", "training", "evaluation", "axial", "hybrid")

# Arguments without influence on results, and calls that only tell.
KEYWORDS = {"strict", "stacklevel", "exist_ok", "parents", "indent", "ensure_ascii", "copy", "timeout", "repr", "slots"}
MESSAGES = {"print", "warn", "warning", "warning_once", "info", "debug", "echo", "note", "UserError"}


class Site(NamedTuple):
    """A node that can be replaced; a recorder goes before a statement, or around the node."""

    function: str
    statement: str
    node: Any
    field: str
    before: ast.stmt | None


def header(node: ast.AST) -> str:
    """Return a node's normalized source, without the statements inside a statement."""
    if isinstance(node, ast.stmt):
        node = copy.copy(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if hasattr(node, name):
                setattr(node, name, [ast.Pass()] if name == "body" else [])
    return ast.unparse(ast.fix_missing_locations(node))


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def iterate_sites(node: Any, names: tuple[str, ...] = (), text: str = "", field: str = "") -> Iterator[Site]:
    """Iterate over the statements and expressions of all functions; messages and annotations are left out."""
    match node:
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.arguments() | ast.pattern():
            return
        case ast.Call() if called(node) in MESSAGES:
            return
        case ast.keyword(arg=name) if name in KEYWORDS:
            return
        case ast.Module() | ast.ClassDef():
            inner = names if isinstance(node, ast.Module) else (*names, node.name)
            for child in node.body:
                if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                    yield from iterate_sites(child, inner)
            return
        case ast.FunctionDef(args=given, body=[first, *_]):
            names, positional = (*names, node.name), [*given.posonlyargs, *given.args]
            late = positional[len(positional) - len(given.defaults) :]
            pairs = zip([*late, *given.kwonlyargs], [*given.defaults, *given.kw_defaults], strict=True)
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else first
            for argument, default in pairs if first.lineno > node.lineno else ():
                if default is not None:
                    yield Site(".".join(names), f"default of {argument.arg}", default, "", first)
            for child in node.body:
                yield from iterate_sites(child, names)
            return
        case ast.stmt():
            text = header(node)
            yield Site(".".join(names), text, node, field, node)
        case ast.expr():
            yield Site(".".join(names), text, node, field, None)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "type"):
                yield from iterate_sites(child, names, text, name)


def sources() -> Iterator[tuple[str, list[Site]]]:
    """Iterate over (file, its sites)."""
    places = ("src/hf_vit", "src/hf_vit_settings", "conversion")
    paths = [path for place in places for path in ROOT.glob(f"{place}/**/*.py")]
    for file in sorted(str(path.relative_to(ROOT)) for path in paths if not path.parent.is_symlink()):
        yield file, [*iterate_sites(ast.parse((ROOT / file).read_text()))]


def load_mutants() -> list[dict[str, Any]]:
    return [mutant for mutant in json.loads(LIST.read_text())["mutants"] if "struck" not in mutant]


def find() -> dict[int, tuple[str, Site, str]]:
    """Return file, site and replacement of every mutant that is in the source: in its function, or in one other."""
    where: dict[Any, Any] = defaultdict(lambda: defaultdict(list))
    wanted = {(mutant | mutant.get("now", {}))["statement"] for mutant in load_mutants()}
    for file, sites in sources():
        for site in (site for site in sites if site.statement in wanted):
            where[site.statement, header(site.node)][site.function, file].append(site)
    found: dict[int, tuple[str, Site, str]] = {}
    for mutant in load_mutants():
        form = mutant | mutant.get("now", {})
        function, file, ordinal = form["function"], form["file"], form["ordinal"]
        places = where[form["statement"], form["expression"]]
        keys = [key for key, sites in places.items() if len(sites) > ordinal]
        keys.sort(key=lambda key: (key[0] != function, key[1] != file))
        if keys and (keys[0][0] == function or len(keys) == 1):
            found[mutant["id"]] = keys[0][1], places[keys[0]][ordinal], form["replacement"]
    return found


def span(data: bytes, node: Any) -> tuple[int, int]:
    lines = data.splitlines(keepends=True)
    start, end = (sum(map(len, lines[: number - 1])) for number in (node.lineno, node.end_lineno))
    return start + node.col_offset, end + node.end_col_offset


def insert_recorders(path: Path, sites: dict[int, Site]) -> None:
    """Call `__mutant__(id)` before every statement, or with every expression, that a mutant replaces."""
    data, pieces = path.read_bytes(), []
    for number, site in sites.items():
        start, end = span(data, site.before or site.node)
        if site.before:
            pieces.append((start, 2, 0, f"__mutant__({number})\n{' ' * site.before.col_offset}"))
        else:
            pieces += [(start, 3, start - end, f"(__mutant__({number}) or "), (end, 1, start - end, ")")]
    for place, _, _, text in sorted(pieces, reverse=True):
        data = data[:place] + text.encode() + data[place:]
    path.write_bytes(data)


# In the private environment: tells which mutants the running test reaches, in its own process and those it starts.
RECORDER = """
import builtins, json, os
context, process, seen = "", 0, set()

def __mutant__(number):
    mine = os.getpid() == process
    if (key := (mine and context, number)) not in seen:
        seen.add(key)
        with open(FOLDER + "/context") as now, open(FOLDER + "/hits", "a") as hits:
            hits.write(json.dumps([context if mine else now.read(), number]) + "\\n")

builtins.__mutant__ = __mutant__
"""


def make_plugin(folder: Path) -> Any:
    """Return a pytest plugin that writes outcome and CPU seconds of every test as it ends.

    What is set up once for several tests counts for each that uses it.
    """
    recorder, pytest = importlib.import_module("mutant_recorder"), importlib.import_module("pytest")
    recorder.process = os.getpid()
    shared: dict[str, str] = {}  # name of a fixture -> its key
    spent, outcome = 0.0, ""  # CPU seconds of shared fixtures

    def switch(context: str) -> str:
        before, recorder.context = recorder.context, context
        (folder / "context").write_text(context)
        return before

    class Plugin:
        def pytest_runtest_logreport(self, report: Any) -> None:
            nonlocal outcome
            if report.failed or (report.skipped and outcome == "passed"):
                outcome = report.outcome

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            nonlocal spent, outcome
            switch(item.nodeid)
            spent, outcome, begin = 0.0, "passed", sum(os.times()[:4])
            result = yield
            used = sorted({shared[name] for name in item.fixturenames if name in shared})
            seconds = round(sum(os.times()[:4]) - begin - spent, 2)
            append(folder / "tests", test=item.nodeid, outcome=outcome, seconds=seconds, fixtures=used)
            return result

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
            nonlocal spent
            if fixturedef.scope == "function":
                return (yield)
            key = f"{fixturedef.baseid}:{fixturedef.argname}:{getattr(request, 'param_index', 0)}"
            begin, before = sum(os.times()[:4]), switch(key)
            try:
                return (yield)
            finally:
                switch(before)
                shared[fixturedef.argname], seconds = key, sum(os.times()[:4]) - begin
                spent += seconds
                append(folder / "tests", fixture=key, seconds=round(seconds, 2))

    return Plugin()


# Imported before the forks; hf_vit is not, as its source changes.
LIBRARIES = """torchvision.transforms.v2 transformers.trainer transformers.models.auto.modeling_auto datasets evaluate
    transformers.image_processing_utils transformers.models.vit.modeling_vit sklearn.linear_model scipy.stats
    skimage.transform matplotlib.pyplot accelerate timm typer rich.console pydantic jinja2 torch.export"""


def enter(folder: Path) -> None:
    """Go on in the Python of a private copy of the repository, with the libraries imported."""
    if os.environ.pop("HF_VIT_MUTANTS", "") != str(folder):
        shutil.rmtree(folder, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for file in listing.split("\0")[:-1]:
            with suppress(FileNotFoundError):
                (folder / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, folder / "tree" / file, follow_symlinks=False)
        (folder / "tree/.cache").symlink_to(ROOT / ".cache")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (packages,) = (folder / "env").glob("lib/python*/site-packages")
        (base,) = Path(sys.prefix).glob("lib/python*/site-packages")
        lines = (folder / "tree/src", f"import site; site.addsitedir({str(base)!r})", "import mutant_recorder")
        (packages / "a.pth").write_text("".join(f"{line}\n" for line in lines))
        (packages / "mutant_recorder.py").write_text(f"FOLDER = {str(folder)!r}\n{RECORDER}")
        place = tempfile.mkdtemp(prefix="mutants_")  # short, for the paths of sockets
        values = {"HF_VIT_MUTANTS": str(folder), "TMPDIR": place, "PYTHONPATH": "", "HF_HOME": f"{place}/home"}
        values |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        values |= {f"HF_{name}_DISABLE_PROGRESS_BARS": "1" for name in ("HUB", "DATASETS")}
        values |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "true"}
        values |= {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")}  # by content, so mutants may share it
        python = str(folder / "env/bin/python")
        os.execve(python, [python, "-W", "ignore", *sys.argv], os.environ | values)
    del os.environ["PYTHONPATH"]
    for library in LIBRARIES.split():
        with suppress(ImportError):
            importlib.import_module(library)
    config = importlib.import_module("torch._dynamo").config
    config.ignore_logging_functions.add(getattr(builtins, "__mutant__"))  # noqa: B009


def run_tests(folder: Path, arguments: list[str], limit: int) -> tuple[int | None, float, list[dict[str, Any]]]:
    """Run pytest in a fork, for so many CPU seconds and while it is not idle for five minutes.

    Returns:
        Exit code (None: it was stopped), CPU seconds, and what the plugin wrote.
    """
    for name in ("tests", "hits", "context"):
        (folder / name).write_text("")
    place, done, used, since = Path(os.environ["TMPDIR"]), 0, 0, time.monotonic()
    place.mkdir(exist_ok=True)
    if not (child := os.fork()):
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder / "tree")
        sys.path[0] = str(folder / "tree")
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = importlib.import_module("pytest").main([*options, *arguments], plugins=[make_plugin(folder)])
        sys.stdout.flush()
        os._exit(code)
    while not done:
        time.sleep(0.2)
        done, status, usage = os.wait4(child, os.WNOHANG)
        if (now := cpu_ticks(child)) != used:
            used, since = now, time.monotonic()
        if done or time.monotonic() > since + 300:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    shutil.rmtree(place, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return None if code < 0 else code, usage.ru_utime + usage.ru_stime, load(folder / "tests")


def cpu_ticks(session: int) -> int:
    """Return the CPU time of all processes of a session (Linux)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == session)
    return ticks


def load_rounds() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def load(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def cover(place: Path, end: float) -> None:
    """Run the test files that have not been run yet, each in a fork; append what they reach to coverage.jsonl."""
    enter(place / "cover")
    sites: dict[str, dict[int, Site]] = defaultdict(dict)
    for number, (file, site, _) in find().items():
        sites[file][number] = site
    for file, each in sites.items():
        insert_recorders(place / "cover/tree" / file, each)
    done = {each["file"] for each in load(place / "coverage.jsonl")}
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")} - done
    ranks = dict(zip(ORDER, range(len(ORDER)), strict=True))
    for count, file in enumerate(sorted(files, key=lambda file: (ranks.get(file.split("/")[1], 99), file)), start=1):
        if time.time() > end:
            return
        code, seconds, lines = run_tests(place / "cover", [file], 1200)
        hits: dict[str, list[int]] = defaultdict(list)
        for context, number in load(place / "cover/hits"):
            hits[context].append(number)
        append(place / "coverage.jsonl", file=file, code=code, seconds=round(seconds, 1), lines=lines, hits=hits)
        failed = [line["test"] for line in lines if line.get("outcome") == "failed"]
        print(f"{count}/{len(files)} {file}: {seconds:.0f} s, exit code {code}", *failed, sep="\n  ", flush=True)


def select_tests(place: Path) -> tuple[dict[int, list[str]], dict[int, float]]:
    """Return the passing tests that reach each mutant, fastest first, and the sum of their CPU seconds."""
    hits: dict[str, set[int]] = defaultdict(set)
    fixtures: dict[str, float] = defaultdict(float)
    tests: list[dict[str, Any]] = []
    for piece in load(place / "coverage.jsonl"):
        for context, numbers in piece["hits"].items():
            hits[context].update(numbers)
        for line in piece["lines"]:
            if "fixture" in line:
                fixtures[line["fixture"]] = max(line["seconds"], fixtures[line["fixture"]])
            elif line["outcome"] == "passed":
                tests.append(line)
    selected, paid = defaultdict[int, list[str]](list), defaultdict[int, set[str]](set)
    spent: dict[int, float] = defaultdict(float)
    for line in tests:
        line["price"] = line["seconds"] + sum(fixtures[key] for key in line["fixtures"])
    cases: Counter[str] = Counter()
    for line in sorted(tests, key=lambda line: line["price"]):
        function = line["test"].partition("[")[0]
        cases[function] += 1
        line["price"] *= cases[function]  # further cases of a test tell little more
    for line in sorted(tests, key=lambda line: line["price"]):
        for number in hits[line["test"]].union(*(hits[key] for key in line["fixtures"])):
            price = line["seconds"] + sum(fixtures[key] for key in {*line["fixtures"]} - paid[number])
            if spent[number] + price <= SECONDS:
                selected[number].append(line["test"])
                spent[number] += price
                paid[number].update(line["fixtures"])
    return selected, spent


def run(place: Path, end: float, hours: float) -> None:
    """Run what is left: mutants that no test has killed, on those of their tests that they have not passed yet."""
    enter(place / "run")
    places, outcomes, (selected, seconds_of) = find(), load(place / "outcomes.jsonl"), select_tests(place)
    sound = {test for line in outcomes for test in line["passed"]}  # they pass in such a run, too
    spent = sum(line["seconds"] for line in outcomes)
    recorded = load_rounds().get(place.name, {}).get("outcomes", {})  # where build/ is not that of the round's begin
    for mutant in load_mutants():
        number, before = mutant["id"], [line for line in outcomes if line["id"] == mutant["id"]]
        passed = {test for line in before for test in (*line["passed"], *line["unsound"])}
        tests = [test for test in selected[number] if test not in passed]
        is_dead = {recorded.get(str(number)), *(line["outcome"] for line in before)} & DEAD
        if not tests or number not in places or is_dead:
            continue
        if time.time() > end or spent > hours * 3600:
            return
        file, site, replacement = places[number]
        path = place / "run/tree" / file
        data = path.read_bytes()
        first, last = span(data, site.node)
        text = replacement if isinstance(site.node, ast.stmt) else f"({replacement})"
        write_source(path, data[:first] + text.encode() + data[last:])
        limit = 30 + 3 * int(seconds_of[number])
        code, seconds, lines = run_tests(place / "run", ["-x", *tests], limit)
        write_source(path, data)
        good = [line["test"] for line in lines if line.get("outcome") == "passed"]
        killer = next((line["test"] for line in lines if line.get("outcome") == "failed"), "collection" if code else "")
        outcome, unsound = "timed out" if code is None else "killed" if code else "survived", []
        if outcome == "killed" and killer not in sound:
            tried = tests[: len(good) + 1]
            code, more, _ = run_tests(place / "run", ["-x", *tried], limit)
            seconds += more
            if code:  # they fail without the mutant, too
                outcome, unsound = "unsound", tried if killer == "collection" else [killer]
        spent += seconds
        sound.update(good, [killer] * (outcome == "killed"))
        line = {"id": number, "outcome": outcome, "killer": killer, "passed": good, "unsound": unsound}
        append(place / "outcomes.jsonl", **line, seconds=round(seconds, 1))
        print(f"{number} {mutant['package']} {outcome}, {len(good)} passed, {seconds:.0f} s; {killer}", flush=True)


def write_source(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def record(place: Path) -> int:
    """Write the outcomes so far into the record; list what is not killed, and fail if an earlier round killed it."""
    pieces, lines = load(place / "coverage.jsonl"), load(place / "outcomes.jsonl")
    everything, places, selected = json.loads(LIST.read_text())["mutants"], find(), select_tests(place)[0]
    files = len([*ROOT.glob("tests/**/test_*.py")])
    outcomes = {str(each["id"]): "no test" if len(pieces) == files else "not run" for each in everything}
    outcomes |= {str(number): "not run" for number, tests in selected.items() if tests}
    rounds, ran = load_rounds(), {*DEAD, "survived"}
    recorded = rounds.get(place.name, {}).get("outcomes", {})
    outcomes |= {number: outcome for number, outcome in recorded.items() if outcome in ran}
    outcomes |= {str(line["id"]): line["outcome"] for line in lines if line["outcome"] != "unsound"}
    outcomes |= {str(line["id"]): line["outcome"] for line in lines if line["outcome"] in DEAD}
    for each in everything:
        if "struck" in each or each["id"] not in places:
            outcomes[str(each["id"])] = "struck" if "struck" in each else "gone"
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for each in everything:
        packages[each["package"]][outcomes[str(each["id"])]] += 1
    asked = ["git", "log", "-1", "--format=%H", "--", "src", "conversion", "tests"]  # what is measured
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result = {
        "date": date.today().isoformat(), "commit": commit.strip(), "python": sys.version.split()[0],
        "test_files_covered": f"{len(pieces)} of {files}",
        "run": sum(outcome in ran for outcome in outcomes.values()),
        **Counter(outcomes.values()),
        "cpu_hours": round(sum(line["seconds"] for line in (*pieces, *lines)) / 3600, 2), "packages": packages,
    }  # fmt: skip
    earlier = [old["outcomes"] for name, old in rounds.items() if name != place.name]
    rounds[place.name] = {**result, "outcomes": outcomes}
    RECORD.write_text(json.dumps(rounds, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    lost = [number for number in outcomes if any(old.get(number) in DEAD for old in earlier)]
    lost = [number for number in lost if outcomes[number] in ("survived", "no test", "gone")]
    for each in everything:
        if (outcome := outcomes[str(each["id"])]) in ("survived", "no test", "gone"):
            what = f"{each['file']} {each['function']}: {each['expression']} -> {each['replacement']}"
            print(f"{outcome}{', killed before' * (str(each['id']) in lost)}: {each['id']} {what}")
    return min(len(lost), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("cover", "run", "record"))
    parser.add_argument("--round", default="first", help="name of the state of the suite (default: first)")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing new after so many minutes")
    parser.add_argument("--hours", type=float, default=6, help="run: CPU hours of a round (default: 6)")
    options = parser.parse_args()
    place, end = ROOT / "build/mutants" / options.round, time.time() + 60 * options.minutes
    place.mkdir(parents=True, exist_ok=True)
    if options.command == "record":
        return record(place)
    cover(place, end) if options.command == "cover" else run(place, end, options.hours)
    return 0


if __name__ == "__main__":
    sys.exit(main())
