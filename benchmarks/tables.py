"""Write the tables of the docs from the records in `benchmarks/results`: `make tables`.

    python benchmarks/tables.py                          # rewrites every page that has a table of records
    python benchmarks/tables.py NAME [--record FILE]     # prints one table, also of a record elsewhere

A page marks a table by `<!-- table: NAME -->` and `<!-- end -->`; whatever is between them is written here.
"""

import argparse
import itertools
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
PROCESSORS = {
    "amx": "Intel Xeon, AMX", "avx512_bf16": "AMD EPYC, AVX-512 bf16", "zen4": "AMD EPYC, Zen 4",
    "zen3": "AMD EPYC, Zen 3, AVX2", "avx2": "AMD EPYC, Zen 1, AVX2", "avx512": "Intel Xeon, AVX-512",
}  # fmt: skip
PEERS = {"S/16": "transformers", "B/16": "transformers", "R26+S/32": "timm", "R50+B/16": "timm"}
INT8_FORMS = {
    "torch": ("float32", "bfloat16", "int8"), "onnxruntime": ("float32", "int8 dynamic", "int8 static"),
    "openvino": ("float32", "bfloat16", "int8 static"),
}  # fmt: skip
DTYPES, BATCHES = ("float32", "bfloat16"), (1, 8)
FORMS = {
    "hf_vit": "hf_vit as loaded",
    "hf_vit tanh": "hf_vit as loaded, tanh GELU",
    "hf_vit eager": "hf_vit as loaded, explicit attention",
    "hf_vit optimized": "hf_vit optimized by torch",
    "hf_vit optimized, compiled": "hf_vit optimized, compiled",
    "hf_vit optimized, openvino": "hf_vit optimized by OpenVINO",
}
Table = Callable[[Path | None], str]
Rows = list[dict[str, Any]]
TABLES: dict[str, Table] = {}


def table(file: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Register a function as the table of its name; it gets the record in this file, unless another is given."""

    def register(function: Callable[[Any], str]) -> Callable[[Any], str]:
        TABLES[function.__name__] = lambda path: function(load(path or RESULTS / file))
        return function

    return register


def markdown(header: str | Sequence[str], lines: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a Markdown table, a caption in italics below it; of no lines a sentence that says so."""
    header = header.split(" | ") if isinstance(header, str) else header
    rows = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    rows += [re.sub(r"  +", " ", f"| {' | '.join(cells)} |") for cells in lines]
    if not rows[2:]:
        return "*Not run yet.*\n"
    return "\n".join([*rows, *(["", f"*{caption}*"] if caption else [])]) + "\n"


@cache
def load(path: Path) -> Any:
    """Return a record: the object of a JSON file, or the lines of a JSONL file."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def filter_runs(runs: Rows, **values: Any) -> Rows:
    return [run for run in runs if all(run.get(key) == value for key, value in values.items())]


def format_mean(values: Iterable[float], scale: float = 100, digits: int = 1) -> str:
    """Return mean ± standard deviation, in % by default; nothing for no values."""
    values = [scale * value for value in values]
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}" if values else ""


def format_seconds(runs: Rows) -> str:
    return f"{statistics.fmean(run['cpu_seconds'] for run in runs):.0f}"


def format_interval(values: Sequence[float], sign: str = "") -> str:
    """Return the mean of shares ± half of its 95% interval, in %; of one value itself, of none nothing."""
    from scipy.stats import t

    if not values:
        return ""
    center = f"{100 * statistics.fmean(values):{sign}.1f}"
    if len(values) == 1:
        return center
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{center} ± {100 * float(t.ppf(0.975, len(values) - 1)) * error:.1f}"


def format_margin(gaps: Sequence[float]) -> str:
    """Return the mean of paired differences ± half of its 95% interval, in points; nothing for one."""
    return format_interval(gaps, "+") if len(gaps) > 1 else ""


def compute_quartiles(ratio: dict[str, float] | None) -> str:
    return "{median:.2f} ({lower:.2f} to {upper:.2f})".format(**ratio) if ratio else ""


def median(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.2f}" if ratio else ""


def describe_source(record: Any) -> str:
    """Return where a record comes from: command, date, processor, and whether the machine was busy."""
    hardware = record["hardware"]
    command = record["command"].split(" --output ")[0].replace("python benchmarks/", "").replace("python ", "")
    busy = "" if record.get("quiet", True) else ", other processes running"
    return f"`{command}`, {record['date'][:10]}, {hardware.get('name') or hardware.get('cpu')}{busy}"


def describe_runs(runs: Rows, script: str) -> str:
    """Return where resumable runs come from: script, dates, number and CPU time."""
    hours = sum(run.get("cpu_seconds", 0) for run in runs) / 3600
    seeds = len({run["seed"] for run in runs if "seed" in run})
    spread = "1 seed" if seeds == 1 else f"{seeds} seeds"
    return f"`{script}`, {format_dates(runs)}, {len(runs)} runs, {spread}, {hours:.1f} CPU hours"


def format_dates(runs: Rows) -> str:
    days = sorted({run["date"] for run in runs}) or ["no runs"]
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


# ---- hf-vit bench models: one file a kind of processor


def load_model_runs(kind: str) -> Rows:
    return load(RESULTS / f"models_{kind}.json")["rows"]


def find_ratio(
    kind: str, work: str, variant: str, dtype: str, batch: int, name: str, peer: str, image_size: int = 224
) -> dict[str, float] | None:
    """Return how many times as fast a contestant was as a peer of the same run, in the newest run that has both."""
    for row in reversed(load_model_runs(kind)):
        cell, outcome = row["cell"], row["outcomes"].get(name, {"ratios": {}})
        case = (cell["work"], *cell["shape"].values(), cell["dtype"], cell["batch"])
        if case == (work, variant, image_size, dtype, batch) and peer in outcome["ratios"]:
            return outcome["ratios"][peer]
    return None


def format_model_dates(*kinds: str) -> str:
    return f"`hf-vit bench models`, {format_dates([row for kind in kinds for row in load_model_runs(kind)])}"


def compare(
    rows: Iterable[tuple[Sequence[str], Iterable[tuple[Any, ...]]]], show: Callable[[Any], str] = median
) -> list[Any]:
    """Return a line for every label of whose ratios (the arguments of `find_ratio`) any was measured."""
    rows_of_ratios = ((label, [find_ratio(*case) for case in cases]) for label, cases in rows)
    return [(*label, *map(show, ratios)) for label, ratios in rows_of_ratios if any(ratios)]


def compare_with_peers(names: dict[str, str], suffix: str, show: Callable[[Any], str] = median) -> list[Any]:
    """Return a line for every processor, contestant and dtype that was measured."""
    columns = list(itertools.product(PEERS.items(), BATCHES))
    rows = (
        ((PROCESSORS[kind], names[name], dtype),
         [(kind, "inference", variant, dtype, batch, name.format(peer), peer + suffix)
          for (variant, peer), batch in columns])
        for kind, name, dtype in itertools.product(PROCESSORS, names, DTYPES)
    )  # fmt: skip
    return compare(rows, show)


def mark_behind(ratio: dict[str, float] | None) -> str:
    return f"**{median(ratio)}**" if ratio and round(ratio["median"], 2) < 0.95 else median(ratio)


def batch_headers(variants: Iterable[str]) -> list[str]:
    return [head for variant in variants for head in (f"{variant}, batch 1", "8")]


@table("models_zen4.json")
def engines(_: Any) -> str:
    names = {name: FORMS[name] for name in list(FORMS)[3:]}
    names["{}, compiled and frozen"] = "the peer's, compiled and frozen"
    lines = compare_with_peers(names, ", openvino", mark_behind)
    caption = "Times OpenVINO of the peer's model (hybrids: timm's); bold: below 0.95. "
    header = ["processor", "contestant", "dtype", *batch_headers(PEERS)]
    return markdown(header, lines, f"{caption}{format_model_dates(*PROCESSORS)}.")


@table("models_zen4.json")
def engines_summary(_: Any) -> str:
    """Return one row per processor and dtype with median and range over models and batches."""
    forms = ("hf_vit optimized, openvino", "hf_vit optimized", "hf_vit optimized, compiled")
    lines = []
    for kind, dtype in itertools.product(PROCESSORS, DTYPES):
        cells = []
        for name in forms:
            cases = [(variant, dtype, batch) for variant in PEERS for batch in BATCHES]
            ratios = [find_ratio(kind, "inference", *case, name, f"{PEERS[case[0]]}, openvino") for case in cases]
            values = sorted(cell["median"] for cell in ratios if cell)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})" if values else "")
        lines += [(PROCESSORS[kind], dtype, *cells)] if any(cells) else []
    caption = "Median and range over S/16, B/16, R26+S/32 and R50+B/16, batches of 1 and 8. "
    caption += f"{format_model_dates(*PROCESSORS)}."
    return markdown("processor | dtype | by OpenVINO | by torch | by torch, compiled", lines, caption)


@table("models_zen4.json")
def axial_engines(_: Any) -> str:
    pair, cases = ("hf_vit optimized, openvino", "hf_vit optimized"), [*itertools.product(DTYPES, BATCHES)]
    rows = (
        ((PROCESSORS[kind],), [(kind, "inference", "Axial-B/16", *each, *pair) for each in cases])
        for kind in PROCESSORS
    )
    header = ["Axial-B/16, OpenVINO beside torch", *batch_headers(DTYPES)]
    return markdown(header, compare(rows), "Both optimized; `hf-vit bench models Axial-B/16`.")


@table("models_zen4.json")
def other_engines(_: Any) -> str:
    """Return rows for ONNX Runtime, timm with OpenVINO, int8 without VNNI, and the products alone."""
    ours, variants = "hf_vit optimized, openvino", ("S/16", "B/16")
    pairs = [
        *((kind, ours, "timm, openvino") for kind in PROCESSORS),
        *(("avx512_bf16", "hf_vit optimized, onnxruntime", p) for p in ("transformers, onnxruntime", ours)),
        ("avx2", "hf_vit optimized, int8", "hf_vit optimized"),
        ("avx512_bf16", "products alone, packed by oneDNN", "transformers, openvino"),
        ("avx512_bf16", "products alone, openvino", "transformers, openvino"),
    ]  # fmt: skip
    rows = (
        ((PROCESSORS[kind], *pair, dtype), [(kind, "inference", v, dtype, b, *pair) for v in variants for b in BATCHES])
        for (kind, *pair), dtype in itertools.product(pairs, DTYPES)
    )
    return markdown(["processor", "contestant", "beside", "dtype", *batch_headers(variants)], compare(rows))


@table("models_zen4.json")
def as_loaded(_: Any) -> str:
    names = FORMS | {name: name for name in ("timm", "vit-pytorch", "torch encoder")}
    names |= {
        "transformers eager": "transformers, explicit attention",
        "{}, compiled and frozen": "the peer's, compiled and frozen",
        "{}, openvino": "the peer's by OpenVINO",
        "products alone": "products alone",
    }
    caption = "Times the peer's model as loaded (S/16, B/16: transformers with sdpa; hybrids: timm). "
    header = ["processor", "contestant", "dtype", *batch_headers(PEERS)]
    return markdown(header, compare_with_peers(names, ""), f"{caption}{format_model_dates(*PROCESSORS)}.")


@table("models_zen4.json")
def rotation(_: Any) -> str:
    """Return rows for DINOv3-B/16 beside itself without rotation, and beside its peers."""
    names = ("hf_vit", "hf_vit optimized")
    pairs = [*((name, f"{name} unrotated") for name in names), *((name, "transformers") for name in (*names, "timm"))]
    rows = (
        ((processor, *pair, dtype),
         [(kind, "inference", "DINOv3-B/16", dtype, batch, *pair, size) for size in (224, 512) for batch in BATCHES])
        for (kind, processor), pair, dtype in itertools.product(PROCESSORS.items(), pairs, DTYPES)
    )  # fmt: skip
    header = ["processor", "contestant", "beside", "dtype", *batch_headers(("224 px", "512 px"))]
    return markdown(header, compare(rows), "DINOv3-B/16 with random weights; `hf-vit bench models DINOv3-B/16`.")


@table("models_zen4.json")
def training(_: Any) -> str:
    runs = [row for kind in PROCESSORS for row in load_model_runs(kind) if row["cell"]["work"] == "training"]
    names = dict.fromkeys(name for row in runs for name in row["outcomes"])
    rows = (
        ((processor, dtype, name), [(kind, "training", v, dtype, 8, name, "transformers") for v in ("S/16", "B/16")])
        for kind, processor in PROCESSORS.items()
        for dtype, name in itertools.product(DTYPES, names)
    )
    caption = f"Times transformers' sdpa, batches of 8; bfloat16 under autocast. {format_model_dates(*PROCESSORS)}."
    return markdown("processor | dtype | contestant | S/16 | B/16", compare(rows, compute_quartiles), caption)


def format_loadgen(run: dict[str, float]) -> str:
    """Return the latency of single images in ms, or images/s."""
    tail = ", ".join(f"{run[name]:.1f}" for name in ("p90_ms", "p99_ms") if name in run)
    return f"{run['p50_ms']:.1f} ({tail})" if tail else f"{run['images_per_second']:.1f}"


@table("mlperf.jsonl")
def mlperf(runs: Rows) -> str:
    """Return a row for every cell that LoadGen measured, with the ratios of hf_vit and the faster peer."""
    ours, peers, engines = "hf_vit optimized", ("transformers", "timm"), (", openvino", "")
    names = [f"{name}{engine}" for engine in engines for name in (ours, *peers)] + [f"{ours}, onnxruntime"]
    pairs = [([f"{ours}{engine}"], [f"{peer}{engine}" for peer in peers]) for engine in engines]
    pairs.append(([name for name in names if ours in name], [name for name in names if ours not in name]))
    lines, best = list[list[str]](), list[float]()
    for run in runs:
        results = run["contestants"]
        speeds = {
            name: 1000 / each["p50_ms"] if "p50_ms" in each else each["images_per_second"]
            for name, each in results.items()
        }
        sides = [[max(speeds[name] for name in side if name in speeds) for side in pair] for pair in pairs]
        ratios = [mine / theirs for mine, theirs in sides]
        best.append(ratios[-1])
        texts = [format_loadgen(results[name]) if name in results else "" for name in names]
        lines.append([run["variant"], run["dtype"], run["scenario"], *texts, *(f"{ratio:.2f}" for ratio in ratios)])
    labels = [name.replace("openvino", "OpenVINO").replace("onnxruntime", "ONNX Runtime") for name in names]
    header = ["model", "dtype", "scenario", *labels, "hf_vit's times the faster peer's: OpenVINO", "torch", "best"]
    caption = (
        "SingleStream: ms, median (90th percentile, 99th of at least 1,000 queries). Offline: images/s, batches of 8. "
        f"Best of all: {statistics.median(best):.2f} in the median, at least level in "
        f"{sum(ratio >= 0.995 for ratio in best)} of {len(best)} cells. "
        f"`mlperf.py`, {format_dates(runs)}, {runs[0]['hardware']['name']}, one thread of two; "
        f"other processes used up to {max(run['others_load'] for run in runs):.1f} cores."
    )
    return markdown(header, lines, caption)


# ---- README and index: the measurements of the first page


@table("parity.json")
def measured(record: Any) -> str:
    rows = {row["case"]: row for row in record["rows"]}
    seeds = load(RESULTS / "demo.json")["seeds"]
    cases = {
        "distance from the original code's logits": "vit_tok",
        "the same, small tokens (LayerNorm's epsilon shows)": "vit_lneps",
        "the same, positions resampled from 64 to 96 px": "vit_tok at 96 px",
    }
    contestants = ("hf_vit", "transformers", "timm")
    lines = [(label, *(format_difference(rows[case][name]) for name in contestants)) for label, case in cases.items()]
    lines.append(("the same in float64", format_difference(rows["vit_tok"]["hf_vit, float64"]), "", ""))
    scores = [seed["test_accuracy"] for seed in seeds]
    label = f"{statistics.fmean(scores):.2%} ({min(scores):.2%} to {max(scores):.2%}, {len(scores)} seeds)"
    lines.append(("digits, test accuracy of the demo's model, 360 images", label, "", ""))

    speed = "speed, B/16, float32, one image and eight, times transformers"
    as_loaded = [format_batches("avx512_bf16", name) for name in ("hf_vit", "hf_vit tanh", "timm")]
    lines.append((f"{speed}: as loaded, the peers' GELU", as_loaded[0], "1", as_loaded[2]))
    lines.append(("as loaded, the original's tanh GELU", as_loaded[1], "", ""))
    for kind in ("avx512_bf16", "zen4", "avx2", "amx"):
        frozen = [format_batches(kind, f"{name}, compiled and frozen") for name in contestants[1:]]
        label = f"`optimize_for_inference`; peers compiled with frozen weights ({PROCESSORS[kind]})"
        lines.append((label, format_batches(kind, "hf_vit optimized"), *frozen))
    caption = (
        "Distances: `benchmarks/parity.py`, largest absolute difference of a logit on recorded results of "
        "Google's JAX code. "
        f"Speed: {format_model_dates('avx512_bf16', 'zen4', 'avx2', 'amx')}; as loaded on {PROCESSORS['avx512_bf16']}."
    )
    return markdown(["measured", *contestants], lines, caption)


def format_batches(kind: str, name: str) -> str:
    """Return both batches of B/16 in float32, beside transformers."""
    ratios = [find_ratio(kind, "inference", "B/16", "float32", batch, name, "transformers") for batch in BATCHES]
    return ", ".join(map(median, ratios)) if all(ratios) else ""


def format_difference(value: float | None) -> str:
    if not value:
        return "" if value is None else "0"
    return f"{value:.2f}" if value > 0.1 else f"{value:.1e}".replace("e-0", "e-")


@table("parity.json")
def parity(record: Any) -> str:
    names = ("hf_vit", "transformers", "timm", "hf_vit, float64")
    lines = [(row["case"], *(format_difference(row[name]) for name in names)) for row in record["rows"]]
    return markdown(["case of tests/golden", *names], lines, f"`parity.py`, {record['date']}.")


@table("departures.json")
def departures(record: Any) -> str:
    names = ("hf_vit", "timm", "transformers")
    lines: list[tuple[str, ...]] = []
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        first, *others = filter_runs(record["rows"], case=case)
        cells: list[str] = []
        for name in names:
            largest = max((row[name] for row in others if row[name] is not None), default=None)
            cells.append(", ".join(filter(None, map(format_difference, (first[name], largest)))))
        lines.append((case, *cells))
    caption = (
        f"`departures.py`, {record['date']}: largest difference from the originals' outputs, random weights, at the "
        "nominal size and at others; peers with the settings of their own classes. Nothing: the library has none."
    )
    return markdown(["original", *names], lines, caption)


@table("features.json")
def features(record: Any) -> str:
    names = ("original", "timm", "transformers")
    lines: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(row["kind"] for row in record["rows"]):
        rows = {row["library"]: row for row in filter_runs(record["rows"], kind=kind)}
        lines.append((kind, ", ".join(rows["hf_vit"]["sizes"]), *(format_cells(rows[name]["cells"]) for name in names)))
    total = sum(sum(row["cells"].values()) for row in record["rows"])
    unexplained = sum(row["cells"].get("unexplained", 0) for row in record["rows"])
    defaults = {row["library"]: row["default"] for row in record["rows"] if row["default"]}
    caption = (
        f"`features.py`, {record['date']}: {unexplained} of {total:,} cells unexplained. Cells are "
        "{class token, patch tokens, intermediate layers} x {norm, no norm} x three sizes x "
        "{float32, float64, bfloat16}: equal; equal to "
        "hf_vit with the named setting; equal in float32, as a step of float64 stays float32; or not there. Empty: the "
        "library has no such model. Patch tokens by default: "
        f"{', '.join(f'{library} {default}' for library, default in defaults.items())}."
    )
    return markdown(["model", "px", *names], lines, caption)


def format_cells(cells: dict[str, int]) -> str:
    """Return how many cells have which verdict; a float32 step beside a setting counts with the setting."""
    counts: dict[str, int] = {}
    for verdict, count in cells.items():
        name = verdict.removesuffix(", float32 inside").replace("position_interpolation=", "")
        name = f"`{name}`" if "_" in name else name
        counts[name] = counts.get(name, 0) + count
    return ", ".join(f"{count} {name}" for name, count in counts.items())


@table("demo.json")
def demo(record: Any) -> str:
    wrong = [round(seed["images"] * (1 - seed["test_accuracy"])) for seed in record["seeds"]]
    spread = (f"{len(wrong)} seeds", f"{min(wrong)} to {max(wrong)}", f"{statistics.fmean(wrong):.1f}")
    lines = [("the demo's model", *spread)]
    lines += [(name, "", str(count), f"{count:.1f}") for name, count in record["wrong_of_360"].items()]
    date = record["seeds"][0]["date"]
    return markdown(" |  | wrong of 360 | mean", lines, f"`hf-vit demo --seeds 10`, then `demo.py`, {date}.")


@table("doors.json")
def doors(record: Any) -> str:
    lines = [
        (door["name"], door["version"], f"{door['equal_labels']:,}", f"{door['largest_difference']:.1e}")
        for door in record["doors"]
    ]
    caption = (
        f"`hf-vit verify FOLDER --doors` on a {record['model']['kind']} and {record['data']['size']:,} images; at most "
        f"{record['bound']:.0e} is allowed."
    )
    return markdown("door | what ran | labels equal | largest difference of a probability", lines, caption)


@table("doors.json")
def served(record: Any) -> str:
    rows = record["load"]
    lines = [
        (row["server"], *(f"{row['statuses'].get(status, 0):,}" for status in ("200", "400")),
         f"{sum(count for status, count in row['statuses'].items() if 'wrong' in status):,}",
         ", ".join(str(size) for _, size in row["mib"][:: len(row["mib"]) // 5]), f"{row['growth_mib'] + 0:+.1f}")
        for row in rows
    ]  # fmt: skip
    caption = (
        f"{rows[0]['clients']} clients ask for {rows[0]['seconds']:.0f} s, one request in five bad; hf_vit can be "
        "imported. Growth: mean of the last third minus that of the one before. The servers shared one core with other "
        "work, so these are no speeds. By `python benchmarks/doors.py`."
    )
    return markdown("server | answered | refused by 400 | others | MiB over time | growth, MiB", lines, caption)


# ---- speed and memory: tables whose rows are the rows of a record


def format_cell(value: Any) -> str:
    """Return a value as a cell: quartiles, three digits of a number, nothing for nothing."""
    if value is None or isinstance(value, str | bool):
        return {None: "", True: "yes", False: "no"}.get(value, value)
    if isinstance(value, dict):
        return compute_quartiles(value)
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value + 0:.3g}"


def load_by_processor(script: str, form: str = "json") -> dict[str, Any]:
    paths = {kind: RESULTS / f"{script}_{kind}.{form}" for kind in PROCESSORS}
    return {kind: load(path) for kind, path in paths.items() if path.exists()}


def make_row_table(script: str, names: str, values: str, *caption: str) -> Table:
    """Return a table with a row for each row of a record, or of the records of every kind of processor."""
    columns = dict(zip(names.split(" | "), values.split(" | "), strict=True))

    def write(path: Path | None) -> str:
        single = path or RESULTS / f"{script}.json"
        record = load(single) if single.exists() else {}  # of one processor, or processor -> record
        records = {"": record} if "rows" in record else record | load_by_processor(script)
        first = [] if "" in records else ["processor"]
        lines = [
            [*[PROCESSORS[kind] for _ in first], *(format_cell(row.get(name)) for name in columns.values())]
            for kind, record in records.items()
            for row in record["rows"]
        ]
        sources = (f"{describe_source(each)}." for each in records.values())
        return markdown([*first, *columns], lines, " ".join([*caption, *sources]))

    return write


# Record -> header, name of the value in each column, caption.
ROWS = {
    "jpeg": (
        "their processor on | workers | whole batches | one by one | in threads | our images/s | ours with draft",
        "processor | workers | times_as_fast_as_transformers | times_as_fast_as_one_by_one"
        " | times_as_fast_as_in_threads | images_per_second | draft_times_as_fast",
        "Times transformers' processor (0 workers: in one process); last column: times ours without draft.",
    ),
    "axial": (
        "dtype | tokens a side | two full-attention blocks of ours | two of transformers | the block without attention",
        "dtype | side | times_as_fast_as_full | times_as_fast_as_transformers | share_of_speed_without_attention",
        "Speed of an axial block as a multiple.",
    ),
    "local": (
        "pattern | threads | tokens a side | block | attention alone | local block beyond weights, MB",
        "contestant | threads | side | block_times_as_fast_as_full | attention_alone_times_as_fast_as_full"
        " | peak_memory_MB",
        "Times full attention under sdpa, D 384, float32.",
    ),
    "conversion": (
        "B/16 .npz | read | whole conversion, s | peak, MB",
        "form | reading_time_of_numpys | conversion_seconds | peak_megabytes",
        "Time as a share of plain `np.load` (below 1 is faster).",
    ),
    "loading": (
        "B/16 | time | memory, times the weights",
        "what | time_of_transformers | peak",
        "Time as a share of transformers' (below 1 is faster).",
    ),
    "import_time": (" | CPU seconds", "what | cpu_seconds"),
    "mixed_sizes": (
        "`without_padding` | times the padded batch | times one by one | places with a patch | largest difference",
        "model | times_as_fast_as_padded | times_as_fast_as_one_by_one | patches_of_padded_batch | largest_difference",
    ),
    "page": (
        "page of | s to the first answer and all maps | least | most | later images | MB | load",
        "model | median_s | least_s | most_s | said | page_mb | load",
        "Headless Chromium, empty cache, one thread of WebAssembly.",
    ),
    "draft": (
        "model, px | decoded at, px | times as many files/s | pixels differ by | validation | with draft | test"
        " | test with draft | test answers changed | of",
        "px | decoded_px | times_as_fast | mean_difference | validation_accuracy | validation_accuracy_draft"
        " | test_accuracy | test_accuracy_draft | test_answers_changed | test_images",
        "Files of 384 px.",
    ),
    "freed_memory": (
        "model | images | work | times as fast | peak memory",
        "variant | batch | work | times_as_fast | memory",
        "As multiples of the same without.",
    ),
    "token_merging": (
        "model | merged tokens a layer | times as fast | validation accuracy | test accuracy",
        "model | merge_tokens | times_as_fast | validation_accuracy | test_accuracy",
    ),
    "data_loading": (
        "layout | loader | images/s, first epoch | later | hf_vit's times its, first | later epochs | s to open",
        "layout | contestant | first_images_per_second | later_images_per_second | hf_vit_first | hf_vit_later"
        " | open_seconds",
        "The AMD EPYC was measured before decoded images of any size were kept.",
    ),
    "embed_memory": ("runner | images | MiB held at most", "runner | images | mib"),
    "embed_throughput": (
        "images | runner | ms an image | times the model's speed | CPU ms | by CPU time",
        "stored | runner | wall_ms | share_of_model_wall | cpu_ms | share_of_model_cpu",
        "S/16, two processes of one thread; decoded images of 224 px, JPEG of 512 px.",
    ),
}
TABLES |= {{"page": "page_waits"}.get(name, name): make_row_table(name, *texts) for name, texts in ROWS.items()}


@table("cost.json")
def growth(record: Any) -> str:
    names = ("family", "time", "time_theory", "memory", "memory_theory", "worse")
    lines = [[format_cell(row[name]) for name in names] for row in filter_runs(record["rows"], part="growth")]
    header = "family | exponent of time | theory | exponent of memory | its theory | more than a tenth above"
    return markdown(header, lines, f"Against the number of tokens. {describe_source(record)}.")


@table("first_step.json")
def first_step(record: Any) -> str:
    names = ("seconds", "mb", "images_per_second", "later_images_per_second")
    works = dict.fromkeys(row["work"] for row in record["rows"])
    lines: list[list[str]] = []
    for work in works:
        rows = filter_runs(record["rows"], work=work)
        values = [[row[name] for row in rows if name in row] for name in names]
        lines.append([work, *(format_cell(round(statistics.median(each), 1)) if each else "" for each in values)])
    header = "work | s until the first step | MB beyond the imports | images/s | in later epochs"
    caption = "70,000 images of Fashion-MNIST; photographs of 12 megapixels."
    return markdown(header, lines, f"{caption} {describe_source(record)}.")


@table("cost.json")
def gelu(record: Any) -> str:
    names = [f"{way}_{value}" for way in ("forward", "backward") for value in ("ms", "error")]
    cells: dict[str, list[str]] = {}
    for row in filter_runs(record["rows"], part="gelu"):
        cells.setdefault(row["gelu"], []).extend(format_cell(row.get(name)) for name in names)
    columns = ("ms forward", "error", "ms backward", "error of gradients")
    header = ["GELU", *(f"{dtype}, {column}" for dtype in DTYPES for column in columns)]
    caption = "[8, 197, 1536], one thread; mean errors as multiples of those of torch's kernel."
    return markdown(header, [(name, *texts) for name, texts in cells.items()], f"{caption} {describe_source(record)}.")


@table("int8_avx512_bf16.jsonl")
def int8_speed(record: Rows) -> str:
    cells = {(run["runtime"], run["variant"], run["batch"]): run for run in filter_runs(record, part="speed")}
    cases, lines = [(variant, batch) for variant in ("S/16", "B/16") for batch in BATCHES], []
    for engine, form in ((engine, form) for engine, forms in INT8_FORMS.items() for form in forms):
        runs = [cells[engine, *case][form] for case in cases]
        texts = [f"{cell['images_per_second']:.1f} ({cell['times_float32']['median']:.2f})" for cell in runs]
        lines.append((engine, form, *texts, f"{runs[2]['memory_megabytes']:.0f} MB"))
    header = ["engine", "", *batch_headers(["S/16", "B/16"]), "memory, B/16, batch 1"]
    caption = f"Images/s (times the engine's float32). `int8.py speed --threads 2`, {PROCESSORS['avx512_bf16']}."
    return markdown(header, lines, caption)


@table("int8_avx512_bf16.jsonl")
def int8_agreement(_: Any) -> str:
    lines = []
    for kind, record in load_by_processor("int8", "jsonl").items():
        shares: dict[tuple[str, str], list[str]] = {}
        for run in filter_runs(record, part="agreement"):
            cell = f"{run['agreement']:.2%}" if "agreement" in run else "refused"
            shares.setdefault((run["images"].removeprefix("mirrored "), run["by"]), []).append(cell)
        lines += [(PROCESSORS[kind], data, engine, *cells) for (data, engine), cells in shares.items()]
    header = "processor | images | int8 by | plain | hybrid | axial"
    caption = "Share of held-out images answered as in float32; exports below 99.5% are refused. `int8.py agreement`."
    return markdown(header, lines, caption)


@table("real_weights.jsonl")
def real_weights(record: Rows) -> str:
    runs = {run["form"]: run for run in record}
    conversion, speeds = runs.pop("conversion"), runs.pop("speed", {})
    lines: list[tuple[str, ...]] = []
    for form, run in runs.items():
        if "refused" in run:
            lines.append((form, "export refused: below 99%", "", "", "", ""))
            continue
        intervals = ((run[name], *run[f"{name}_interval"]) for name in ("agreement", "accuracy"))
        shares = [f"{share:.2%} ({low:.2%} to {high:.2%})" for share, low, high in intervals]
        ratios = (speeds.get(side, {}).get(form) for side in ("112 px", "224 px"))
        texts = ["" if ratio is None else f"{ratio['median']:.2f}" for ratio in ratios]
        name = form if run["images"] == 10_000 else f"{form} ({run['images']} images)"
        lines.append((name, *shares, f"{run['relative_error']:.1e}", *texts))
    caption = (
        "DINOv2-S/14 with a linear probe, 10,000 test images of Fashion-MNIST at 112 px, 95% intervals; speed as a "
        f"multiple of float32 as loaded, batches of 8. Each of {conversion['stages']} layers, converted, differs from "
        f"ONNX Runtime's by at most {conversion['largest_difference']:.1e}. `real_weights.py`, {conversion['date']}, "
        f"{conversion['hardware']['name']}."
    )
    header = "form of the model | answers of float32 | accuracy | error of logits | speed, 112 px | 224 px"
    return markdown(header, lines, caption)


@table("int8_avx512_bf16.jsonl")
def billion(record: Rows) -> str:
    (cells,) = filter_runs(record, runtime="openvino", variant="B/16", batch=8)
    rows = filter_runs(load(RESULTS / "jpeg_zen4.json")["rows"], workers=2, processor="Pillow")
    rates = {
        "B/16 in float32 (OpenVINO)": cells["float32"]["images_per_second"],
        "B/16 in int8 (OpenVINO)": cells["int8 static"]["images_per_second"],
        "JPEG of 512 px decoded and resized (Zen 4)": rows[0]["images_per_second"],
    }
    lines = [(name, f"{rate:.1f}", f"{1e9 / rate / 3600:,.0f}") for name, rate in rates.items()]
    header = "for 1,000,000,000 images | images/s on two cores | hours of two cores"
    return markdown(header, lines, "Divided, not run. From the records of `int8.py` and `jpeg.py`.")


# ---- trainings


def group(runs: Rows, *names: str) -> dict[Any, Rows]:
    """Return the values of these fields (of one field: its value) -> runs, as they come."""
    groups: dict[Any, Rows] = {}
    for run in runs:
        values = tuple(run.get(name) for name in names)
        groups.setdefault(values if names[1:] else values[0], []).append(run)
    return groups


def mean(runs: Rows, name: str, *form: int) -> str:
    return format_mean((run[name] for run in runs), *form)


@table("data_scale.jsonl")
def data_scale(records: Rows) -> str:
    runs = filter_runs(records, kind="run")
    sizes, names = sorted({run["images"] for run in runs}), list(group(records, "model"))
    readings = ("digits, 25 a class", "digits, fine-tuned", "photos, 25 a class", "photos, fine-tuned")
    values = ("test_accuracy", *readings)

    def scores(kind: str, name: str, value: str, size: int) -> list[float]:
        matching_runs = sorted(filter_runs(records, kind=kind, model=name, images=size), key=lambda run: run["seed"])
        return [run[value] for run in matching_runs if value in run]

    lines: list[Any] = [
        (f"{'fractals' if value == 'test_accuracy' else value}: {name}",
         *(format_mean(scores("run", name, value, size)) for size in sizes))
        for value in values for name in names if any(value in run for run in runs)
    ]  # fmt: skip
    lines += list_gaps(runs, names, sizes, format_margin)
    for name in names:
        plateaus = [format_mean(scores("plateau", name, values[0], size)) for size in sizes]
        lines += [(f"constant rate: {name}", *plateaus)] if any(plateaus) else []
        for law in filter_runs(records, kind="prediction", model=name):
            predicted = f"{100 * law['predicted_accuracy']:.1f}" if law["law"] else "no law"
            lines.append((f"foreseen by the first seed's law: {name}", *[""] * (len(sizes) - 1), predicted))
    header = ["accuracy, %, by training images", *(f"{size:,}" for size in sizes)]
    caption = f"{describe_runs(records, 'data_scale.py')}; ± of differences is half of a 95% interval."
    return markdown(header, lines, caption)


def list_gaps(runs: Rows, names: Sequence[str], sizes: Sequence[int], form: Callable[..., str]) -> list[list[str]]:
    """Return lines of the first model's lead over each other one by training images, seeds compared with themselves."""
    accuracies = {(run["model"], run["images"], run["seed"]): run["test_accuracy"] for run in runs}
    seeds, lines = sorted({run["seed"] for run in runs}), list[list[str]]()
    for name in names[1:]:
        gaps = {
            (size, seed): accuracies[names[0], size, seed] - accuracies[name, size, seed]
            for size, seed in itertools.product(sizes, seeds)
            if (names[0], size, seed) in accuracies and (name, size, seed) in accuracies
        }
        by_seed = [[gap for (_, own), gap in gaps.items() if own == seed] for seed in seeds]
        crossed = sum(min(own) < 0 < max(own) for own in by_seed if own)
        cells = (form([gap for (own, _), gap in gaps.items() if own == size]) for size in sizes)
        lines.append([f"{names[0]} - {name}, points ({crossed} of {len(seeds)} seeds cross)", *cells])
    return lines


def mark_missing(cells: Iterable[str]) -> list[str]:
    return [cell or "not run" for cell in cells]


@table("real_images.jsonl")
def real_images_scale(records: Rows) -> str:
    records = filter_runs(records, part="scale")
    runs = filter_runs(records, kind="run")
    sizes, names = (100, 300, 1_000, 3_000, 10_000, 55_000), ("ViT", "Hybrid", "Axial", "BiT")
    lines: list[Any] = []
    given_up = [key for key in group(runs, "model", "optimizer") if key[1] != "muon"]
    for name, optimizer in [*((name, "muon") for name in names), *given_up]:
        own = filter_runs(runs, model=name, optimizer=optimizer)
        cells = ([run["test_accuracy"] for run in filter_runs(own, images=size)] for size in sizes)
        lines.append((f"{name}, {optimizer}", *mark_missing(map(format_interval, cells))))
    gaps = list_gaps(filter_runs(runs, optimizer="muon"), names, sizes, partial(format_interval, sign="+"))
    lines += [(label, *mark_missing(cells)) for label, *cells in gaps]
    for law in filter_runs(records, kind="prediction"):
        predicted = f"{100 * law['predicted_accuracy']:.1f}" if law["law"] else "no law"
        lines.append((f"predicted beforehand: {law['model']}", *[""] * (len(sizes) - 1), predicted))
    lengths = {f"{run['steps']:,} steps of {run['batch_size']} images" for run in runs} or {"no steps"}
    caption = f"Test accuracy, %, after {' or '.join(sorted(lengths))}; ± is half of a 95% interval over seeds."
    header = ["training images", *(f"{size:,}" for size in sizes)]
    return markdown(header, lines, f"{caption} {describe_real_images(records)}")


def describe_real_images(runs: Rows) -> str:
    return f"{describe_runs(runs, 'real_images.py')}."


@table("real_images.jsonl")
def real_images_rates(records: Rows) -> str:
    trials = filter_runs(records, part="scale", kind="trial")
    rates = sorted({trial["learning_rate"] for trial in trials})
    lines = [
        (f"{model}, {optimizer}, {images:,} images",
         *mark_missing(mean(filter_runs(own, learning_rate=rate), "validation_accuracy") for rate in rates))
        for (model, optimizer, images), own in group(trials, "model", "optimizer", "images").items()
    ]  # fmt: skip
    caption = f"Validation accuracy, %, of the trials that chose the rates. {describe_real_images(trials)}"
    return markdown(["learning rate", *(f"{rate:g}" for rate in rates)], lines, caption)


@table("real_images.jsonl")
def real_images_scratch(records: Rows) -> str:
    records = filter_runs(records, part="scratch")
    lines = [
        (candidate + (", try" if kind == "trial" else ""), f"{runs[0]['parameters']:,}", f"{runs[0]['steps']:,}",
         format_seconds(runs), format_interval([run["validation_accuracy"] for run in runs]),
         format_interval([run["test_accuracy"] for run in runs if "test_accuracy" in run]) or "not looked at")
        for (candidate, kind), runs in group(records, "candidate", "kind").items()
    ]  # fmt: skip
    header = "model and settings | parameters | steps of 128 images | CPU s | validation, % | test, %"
    return markdown(header, lines, f"± is half of a 95% interval. {describe_real_images(records)}")


@table("real_images.jsonl")
def real_images_pretraining(records: Rows) -> str:
    records = filter_runs(records, part="pretraining")
    runs, encoders = (filter_runs(records, kind=kind) for kind in ("run", "encoder"))
    labels = sorted({run["images"] for run in runs})
    scratch = {(run["images"], run["seed"]): run["test_accuracy"] for run in filter_runs(runs, start="scratch")}
    lines: list[Any] = []
    for start, own in group(runs, "start").items():
        cells = [{run["seed"]: run["test_accuracy"] for run in filter_runs(own, images=count)} for count in labels]
        gains = [
            [accuracy - scratch[count, seed] for seed, accuracy in cell.items() if (count, seed) in scratch]
            for count, cell in zip(labels, cells, strict=True)
        ]
        before = filter_runs(encoders, start=start)
        accuracies = mark_missing(format_interval(list(cell.values())) for cell in cells)
        shown = [""] * len(labels) if start == "scratch" else mark_missing(map(format_margin, gains))
        lines.append((start, format_seconds(before) if before else "0", *accuracies, *shown))
    columns = [f"{count // 10:,} a class" for count in labels]
    header = ["start", "CPU s before", *columns, *(f"gain, {name}" for name in columns)]
    caption = "Test accuracy, %, and points above scratch, seeds compared with themselves; ± is half of a 95% interval."
    return markdown(header, lines, f"{caption} {describe_real_images(records)}")


@table("real_images.jsonl")
def real_images_few(records: Rows) -> str:
    return tabulate_few([run for run in filter_runs(records, part="few") if "data" not in run], classes=10)


@table("real_images.jsonl")
def real_images_photos(records: Rows) -> str:
    return tabulate_few(filter_runs(records, part="few", data="photos"), classes=8)


def tabulate_few(records: Rows, classes: int) -> str:
    runs = filter_runs(records, kind="run")
    counts = sorted({run["images"] for run in runs}) or [classes, 10 * classes, 100 * classes]
    lines = [
        (method, *mark_missing(format_interval([run["test_accuracy"] for run in cell]) for cell in cells),
         format_seconds(own))
        for method, own in sorted(group(runs, "method").items(), key=lambda each: float(format_seconds(each[1])))
        for cells in [[filter_runs(own, images=count) for count in counts]]
    ]  # fmt: skip
    sizes = " and ".join(f"{size} px" for size in sorted({run["image_size"] for run in runs})) or "no size"
    caption = f"Test accuracy, %, at {sizes}; ± is half of a 95% interval. {describe_real_images(records)}"
    return markdown(["method", *(f"{count // classes:,} a class" for count in counts), "CPU s a run"], lines, caption)


@table("scaling_law.jsonl")
def scaling_law(runs: Rows) -> str:
    lines, notes = [], []
    laws = filter_runs(runs, kind="prediction")
    for size, members in sorted(group(filter_runs(runs, kind="run"), "images").items()):
        losses = [run["loss"] for run in members]
        loss = f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        predicted = [f"{law['loss']:.3f}" for law in laws if law["images"] == size]
        lines.append((f"{size:,}", f"{members[0]['teraflops']:.2f}", loss, *(predicted or [""])))
    for law in laws:
        intervals = ", ".join(f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in law["intervals"].items())
        sentence = f"For {law['images']:,} images, recorded before they were looked at"
        notes.append(f"{sentence}: {law['law']} (95%: {intervals})")
    caption = f"{'. '.join(notes)}. {describe_runs(runs, 'scaling_law.py')}."
    return markdown("images | TFLOPs | loss, mean (range) | foreseen", lines, caption)


@table("compare_families.jsonl")
def compare_families(record: Rows) -> str:
    lines = []
    comparisons = filter_runs(record, kind="comparison")
    trainings = [run for run in record if run["kind"] != "comparison"]
    for models in zip(*(comparison["models"] for comparison in comparisons), strict=True):
        name, attacked = models[0]["inputs"]["model"]["name"], [model["fgsm"] for model in models if model["fgsm"]]
        rate = max(filter_runs(record, kind="trial", family=name), key=lambda run: run["validation"])["rate"]
        cells = [f"{rate:g}", f"{models[0]['parameters']:,}", f"{models[0]['flops'] / 1e6:.1f}"]
        cells += [mean([model["top1"] for model in models], "value"), mean(models, "ece")]
        cells += [format_mean(statistics.mean(model["corruptions"].values()) for model in models)]
        cells += [mean(attacked, size) for size in ("1", "4")]
        lines.append((name, *cells, format_seconds(filter_runs(trainings, family=name))))
    header = "model | rate | parameters | MFLOPs | top-1, % | ECE, % | corrupted, % | FGSM 1, % | FGSM 4, % | CPU s"
    steps = f"{comparisons[0]['date']}, {len(trainings)} trainings, {len(comparisons)} seeds"
    return markdown(header, lines, f"`compare_families.py`, {steps}.")


@table("shape_texture.jsonl")
def shape_texture(record: Rows) -> str:
    lines = []
    for names, runs in sorted(group(record, "family", "variation").items()):
        other = format_mean(run["decisions"]["other"] / sum(run["decisions"].values()) for run in runs)
        cells = [mean(runs, name) for name in ("accuracy", "shape_alone", "texture_alone")]
        lines.append((*names, mean(runs, "shape_bias"), other, *cells))
    header = "family | varied by | shape bias, % | neither, % | accuracy, % | shape alone, % | texture alone, %"
    return markdown(header, lines, f"{describe_runs(record, 'shape_texture.py')}.")


@table("distillation.jsonl")
def distillation(runs: Rows) -> str:
    lines = []
    for (epochs, varied, method), members in group(runs, "epochs", "varied", "way").items():
        training = f"{epochs}, {'augmented' if varied else 'as they are'}" if epochs else ""
        scores = (mean(members, "accuracy"), mean(members, "loss", 1, 3), mean(members, "ece"))
        lines.append((training, method, str(len(members)), *scores))
    header = "epochs, images | | runs | test accuracy, % | test loss, nats | calibration error, %"
    caption = f"`distillation.py` and `distillation.py --epochs 160 --varied`, {format_dates(runs)}."
    return markdown(header, lines, caption)


@table("self_training.jsonl")
def self_training(record: Rows) -> str:
    runs, lines = filter_runs(record, final=True), []
    names = {"": "supervised, rate 1.5e-3 (chosen)", "fast": "supervised, rate 5e-3"}
    steps = {"noisy-1": "noisy student of it", "noisy-2": "noisy student of that"}
    steps |= {"meta": "meta pseudo labels", "meta-labels": "the same, fine-tuned on the labels"}
    for first, title in names.items():
        ways = {first or "supervised": title} | {f"{first}-{way}".strip("-"): text for way, text in steps.items()}
        for way, text in ways.items():
            members = filter_runs(runs, way=way)
            tests = [run["test"] for run in members]
            accuracies = ", ".join(f"{100 * test['accuracy']:.1f}" for test in tests)
            cells = (mean(tests, "accuracy"), accuracies, mean(tests, "loss", 1, 2).partition(" ")[0])
            lines += [(text, *cells, format_seconds(members))] if members else []
    header = " | test accuracy, % | of each seed | test loss, nats | CPU s a run"
    return markdown(header, lines, f"{describe_runs(runs, 'self_training.py')}.")


@table("dense.jsonl")
def dense(record: Rows) -> str:
    runs, lines = filter_runs(record, final=True), []
    order = ("goals", "clutter", "families", "hours")
    pairs = group(sorted(runs, key=lambda run: run["seed"]), "pair")
    for pair in sorted(pairs, key=lambda pair: (order.index(pair.split()[0]), pair)):
        members, (part, task, head, backbone) = pairs[pair], pair.split()
        measure = "mean IoU" if task == "segmentation" else "box AP50"
        headlines = [run["headline"] for run in members]
        scores = [mean(headlines, measure), mean([each for each in headlines if "box AP" in each], "box AP")]
        settings = (f"{members[0]['parameters']:,}", f"{members[0]['rate']:g}", measure)
        lines.append((part, head, backbone, *settings, *scores, str(len(members)), format_seconds(members)))
    header = "part | head | backbone | parameters | rate | measure | on test, % | box AP, % | seeds | CPU s"
    return markdown(header, lines, f"{describe_runs(runs, 'dense.py')}.")


@table("small_data.jsonl")
def small_data(runs: Rows) -> str:
    data = list(group(runs, "data"))
    lines = [
        (name, *(mean(filter_runs(members, data=each), "validation_accuracy") for each in data))
        for name, members in group(runs, "candidate").items()
    ]
    return markdown(["candidate", *data], lines, f"Validation accuracy, %. {describe_runs(runs, 'small_data.py')}.")


@table("small_data_compare.jsonl")
def small_data_compare(records: Rows) -> str:
    runs = filter_runs(records, kind="run")
    counts = sorted({run["images"] for run in runs}, key=lambda images: images or float("inf"))
    cases = [*itertools.product(group(runs, "data"), counts)]
    starts = ("ViT", "ResNet", "ViT, fractals", "ResNet, fractals", "ViT, masked", "ViT, contrast")

    def scores(start: str, data: str, images: int, split: str = "test") -> list[float]:
        matching_runs = sorted(filter_runs(runs, start=start, data=data, images=images), key=lambda run: run["seed"])
        return [run[f"{split}_accuracy"] for run in matching_runs]

    def best(architecture: str, case: tuple[str, int]) -> list[float]:
        candidates = [start for start in starts if start.split(",")[0] == architecture]
        return scores(max(candidates, key=lambda start: statistics.fmean(scores(start, *case, "validation"))), *case)

    def lead(case: tuple[str, int]) -> str:
        pairs = zip(best("ViT", case), best("ResNet", case), strict=True)
        return format_margin([ours - theirs for ours, theirs in pairs])

    lines = [(start, *(format_mean(scores(start, *case)) for case in cases)) for start in starts]
    lines.append(("best ViT - best ResNet, points", *map(lead, cases)))
    header = ["", *(f"{data.split(':')[0]}, {images or 'all'}" for data, images in cases)]
    caption = f"Test accuracy, %; last ±: half of a 95% interval. {describe_runs(records, 'small_data_compare.py')}."
    return markdown(header, lines, caption)


@table("mutants.json")
def mutants(record: Any) -> str:
    name, last = list(record.items())[-1]
    kinds = ("killed", "timed out", "survived", "no test", "gone", "struck", "not run")
    packages = {**last["packages"], "all": last}
    lines = [(package, *(str(counts.get(kind, 0)) for kind in kinds)) for package, counts in packages.items()]
    caption = f"Round `{name}`, {last['date']}, commit {last['commit'][:7]}, {last['cpu_hours']} CPU hours. "
    caption += f"Survived: of the tests in the {last['test_files_covered']} test files looked at so far."
    return markdown(["package", *kinds], lines, caption)


def colab(_: Path | None) -> str:
    """Return a badge that opens the notebook in Colab; nothing while pyproject.toml names no repository of GitHub."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "").removesuffix("/")
    if not address.startswith("https://github.com/"):
        return ""
    notebook = address.removeprefix("https://") + "/blob/main/examples/first_model.ipynb"
    link = f"https://colab.research.google.com/{notebook.replace('github.com', 'github', 1)}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})\n"


TABLES["colab"] = colab


def rewrite(text: str) -> str:
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]](None)}\n{match[3]}", text)


def pages() -> list[Path]:
    paths = [ROOT / "README.md", *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [path for path in sorted(paths) if MARKED.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("name", nargs="?", choices=sorted(TABLES), help="print this table instead of writing pages")
    options.add_argument("--record", type=Path, help="read this file instead of the committed record")
    arguments = options.parse_args()
    if arguments.name:
        print(TABLES[arguments.name](arguments.record))
        return
    for path in pages():
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
