"""Write the tables of the docs from the records in `benchmarks/results`: `make tables`.

    python benchmarks/tables.py                          # rewrites every page that has a table of records
    python benchmarks/tables.py NAME [--record FILE]     # prints one table, also of a record elsewhere

A page marks a table by `<!-- table: NAME -->` and `<!-- end -->`; whatever is between them is written here.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
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
RECORDS: dict[Table, str] = {}


def table(record: str) -> Callable[[Table], Table]:
    """Register a function as the table of its name, with the record it reads unless it is given another."""

    def register(function: Table) -> Table:
        RECORDS[function] = record
        TABLES[function.__name__] = lambda path: function(path or RESULTS / record)
        return function

    return register


def markdown(header: str | Sequence[str], lines: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a Markdown table, a caption in italics below it."""
    header = header.split(" | ") if isinstance(header, str) else header
    rows = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    rows += [re.sub(r"  +", " ", f"| {' | '.join(cells)} |") for cells in lines]
    return "\n".join([*rows, *(["", f"*{caption}*"] if caption else [])]) + "\n"


def load(path: Path) -> Any:
    """Return a record: the object of a JSON file, or the lines of a JSONL file."""
    return _load(path, path.stat().st_mtime_ns)


@cache
def _load(path: Path, changed: int) -> Any:
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
    """Return the mean CPU seconds of runs."""
    return f"{statistics.fmean(run['cpu_seconds'] for run in runs):.0f}"


def format_margin(gaps: Sequence[float]) -> str:
    """Return the mean of paired differences ± half of its 95% interval, in points; nothing for one."""
    from scipy.stats import t

    if len(gaps) < 2:
        return ""

    half = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return f"{100 * statistics.fmean(gaps):+.1f} ± {100 * half:.1f}"


def quartiles(ratio: dict[str, float] | None) -> str:
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
    return f"`{script}`, {format_dates(runs)}, {len(runs)} runs, {seeds} seeds, {hours:.1f} CPU hours"


def format_dates(runs: Rows) -> str:
    """Return the day of runs, or the first and the last."""
    days = sorted({run["date"] for run in runs}) or ["no runs"]
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


# ---- hf-vit bench models: one file a kind of processor


def load_model_runs(kind: str) -> Rows:
    return load(RESULTS / f"models_{kind}.json")["rows"]


def find_ratio(
    kind: str, work: str, variant: str, dtype: str, batch: int, name: str, peer: str
) -> dict[str, float] | None:
    """Return how many times as fast a contestant was as a peer of the same run, in the newest run that has both."""
    for row in reversed(load_model_runs(kind)):
        cell, outcome = row["cell"], row["outcomes"].get(name, {"ratios": {}})
        case = (cell["work"], cell["shape"]["variant"], cell["dtype"], cell["batch"])
        if case == (work, variant, dtype, batch) and peer in outcome["ratios"]:
            return outcome["ratios"][peer]
    return None


def format_model_dates(*kinds: str) -> str:
    return f"`hf-vit bench models`, {format_dates([row for kind in kinds for row in load_model_runs(kind)])}"


def compare_with_peers(
    names: dict[str, str], variants: dict[str, str], suffix: str, emphasis: bool = False
) -> list[Any]:
    """Return rows of medians, a row for every processor, contestant and dtype that was measured."""
    lines = []
    for kind, processor in PROCESSORS.items():
        for name, label in names.items():
            for dtype in DTYPES:
                cells = [
                    find_ratio(
                        kind, "inference", variant, dtype, batch, name.format(peer), peer + suffix * (peer != name)
                    )
                    for variant, peer in variants.items()
                    for batch in BATCHES
                ]
                if any(cells):
                    is_behind = [emphasis and cell is not None and round(cell["median"], 2) < 0.95 for cell in cells]
                    texts = [f"**{median(c)}**" if b else median(c) for c, b in zip(cells, is_behind, strict=True)]
                    lines.append((processor, label, dtype, *texts))
    return lines


def batch_headers(variants: Iterable[str]) -> list[str]:
    return [head for variant in variants for head in (f"{variant}, batch 1", "8")]


@table("models_zen4.json")
def engines(_: Path | None) -> str:
    names = {name: FORMS[name] for name in list(FORMS)[3:]}
    names["{}, compiled and frozen"] = "the peer's, compiled and frozen"
    lines = compare_with_peers(names, PEERS, ", openvino", emphasis=True)
    caption = (
        f"Times OpenVINO of the peer's model (hybrids: timm's); bold: below 0.95. {format_model_dates(*PROCESSORS)}."
    )
    return markdown(["processor", "contestant", "dtype", *batch_headers(PEERS)], lines, caption)


@table("models_zen4.json")
def engines_summary(_: Path | None) -> str:
    """Return one row per processor and dtype with median and range over models and batches."""
    forms = ("hf_vit optimized, openvino", "hf_vit optimized", "hf_vit optimized, compiled")
    lines = []
    for kind, dtype in ((kind, dtype) for kind in PROCESSORS for dtype in DTYPES):
        cells = []
        for name in forms:
            cases = [(variant, dtype, batch) for variant in PEERS for batch in BATCHES]
            ratios = [find_ratio(kind, "inference", *place, name, f"{PEERS[place[0]]}, openvino") for place in cases]
            values = sorted(cell["median"] for cell in ratios if cell)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})" if values else "")
        if any(cells):
            lines.append((PROCESSORS[kind], dtype, *cells))
    caption = "Median and range over S/16, B/16, R26+S/32 and R50+B/16, batches of 1 and 8. "
    caption += f"{format_model_dates(*PROCESSORS)}."
    return markdown("processor | dtype | by OpenVINO | by torch | by torch, compiled", lines, caption)


@table("models_zen4.json")
def axial_engines(_: Path | None) -> str:
    lines = []
    for kind, processor in PROCESSORS.items():
        cases = [("inference", "Axial-B/16", dtype, batch) for dtype in DTYPES for batch in BATCHES]
        cells = [find_ratio(kind, *case, "hf_vit optimized, openvino", "hf_vit optimized") for case in cases]
        if any(cells):
            lines.append((processor, *map(median, cells)))
    return markdown(
        ["Axial-B/16, OpenVINO beside torch", *batch_headers(DTYPES)],
        lines,
        "Both optimized; `hf-vit bench models Axial-B/16`.",
    )


@table("models_zen4.json")
def other_engines(_: Path | None) -> str:
    """Return rows for ONNX Runtime, timm with OpenVINO, int8 without VNNI, and the products alone."""
    ours = "hf_vit optimized, openvino"
    pairs = [
        *((kind, ours, "timm, openvino") for kind in PROCESSORS),
        *(("avx512_bf16", "hf_vit optimized, onnxruntime", p) for p in ("transformers, onnxruntime", ours)),
        ("avx2", "hf_vit optimized, int8", "hf_vit optimized"),
        ("avx512_bf16", "products alone, packed by oneDNN", "transformers, openvino"),
        ("avx512_bf16", "products alone, openvino", "transformers, openvino"),
    ]  # fmt: skip
    lines = []
    for (kind, name, peer), dtype in ((pair, dtype) for pair in pairs for dtype in DTYPES):
        cells = [find_ratio(kind, "inference", v, dtype, b, name, peer) for v in ("S/16", "B/16") for b in BATCHES]
        if any(cells):
            lines.append((PROCESSORS[kind], name, peer, dtype, *map(median, cells)))
    return markdown(["processor", "contestant", "beside", "dtype", *batch_headers(["S/16", "B/16"])], lines)


@table("models_zen4.json")
def as_loaded(_: Path | None) -> str:
    names = FORMS | {"timm": "timm", "vit-pytorch": "vit-pytorch", "torch encoder": "torch encoder"}
    names |= {
        "transformers eager": "transformers, explicit attention",
        "{}, compiled and frozen": "the peer's, compiled and frozen",
    }
    names |= {"{}, openvino": "the peer's by OpenVINO", "products alone": "products alone"}
    caption = "Times the peer's model as loaded (S/16, B/16: transformers with sdpa; hybrids: timm). "
    caption += f"{format_model_dates(*PROCESSORS)}."
    return markdown(
        ["processor", "contestant", "dtype", *batch_headers(PEERS)], compare_with_peers(names, PEERS, ""), caption
    )


@table("models_zen4.json")
def training(_: Path | None) -> str:
    names = dict.fromkeys(
        name
        for kind in PROCESSORS
        for row in load_model_runs(kind)
        if row["cell"]["work"] == "training"
        for name in row["outcomes"]
    )
    lines = []
    for kind, dtype, name in ((kind, dtype, name) for kind in PROCESSORS for dtype in DTYPES for name in names):
        cells = [find_ratio(kind, "training", variant, dtype, 8, name, "transformers") for variant in ("S/16", "B/16")]
        if any(cells):
            lines.append((PROCESSORS[kind], dtype, name, *map(quartiles, cells)))
    caption = f"Times transformers' sdpa, batches of 8; bfloat16 under autocast. {format_model_dates(*PROCESSORS)}."
    return markdown("processor | dtype | contestant | S/16 | B/16", lines, caption)


# ---- README and index: the measurements of the first page


@table("parity.json")
def measured(path: Path | None) -> str:
    rows = {row["case"]: row for row in load(path or RESULTS / "parity.json")["rows"]}
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
    return (
        ""
        if value is None
        else "0"
        if not value
        else f"{value:.2f}"
        if value > 0.1
        else f"{value:.1e}".replace("e-0", "e-")
    )


@table("parity.json")
def parity(path: Path) -> str:
    record, names = load(path), ("hf_vit", "transformers", "timm", "hf_vit, float64")
    lines = [(row["case"], *(format_difference(row[name]) for name in names)) for row in record["rows"]]
    return markdown(["case of tests/golden", *names], lines, f"`parity.py`, {record['date']}.")


@table("departures.json")
def departures(path: Path) -> str:
    record, names = load(path), ("hf_vit", "timm", "transformers")
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


@table("demo.json")
def demo(path: Path) -> str:
    record = load(path)
    wrong = [round(seed["images"] * (1 - seed["test_accuracy"])) for seed in record["seeds"]]
    lines = [
        ("the demo's model", f"{len(wrong)} seeds", f"{min(wrong)} to {max(wrong)}", f"{statistics.fmean(wrong):.1f}")
    ]
    lines += [(name, "", str(count), f"{count:.1f}") for name, count in record["wrong_of_360"].items()]
    date = record["seeds"][0]["date"]
    return markdown(" |  | wrong of 360 | mean", lines, f"`hf-vit demo --seeds 10`, then `demo.py`, {date}.")


# ---- speed and memory: tables whose rows are the rows of a record


def format_cell(value: Any) -> str:
    """Return a value as a cell: quartiles, three digits of a number, nothing for nothing."""
    if value is None or isinstance(value, str | bool):
        return {None: "", True: "yes", False: "no"}.get(value, value)
    if isinstance(value, dict):
        return quartiles(value)
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value + 0:.3g}"


def load_by_processor(script: str, form: str = "json") -> dict[str, Any]:
    """Return the records of a script by kind of processor."""
    paths = {kind: RESULTS / f"{script}_{kind}.{form}" for kind in PROCESSORS}
    return {kind: load(path) for kind, path in paths.items() if path.exists()}


def make_row_table(script: str, names: str, values: str, *caption: str) -> Table:
    """Return a table with a row for each row of a record, or of the records of every kind of processor."""
    columns = dict(zip(names.split(" | "), values.split(" | "), strict=True))

    def write(path: Path | None) -> str:
        single = path or RESULTS / f"{script}.json"
        records = {"": load(single)} if single.exists() else load_by_processor(script)
        first = [] if "" in records else ["processor"]
        lines = [
            [*[PROCESSORS[kind] for _ in first], *(format_cell(row.get(name)) for name in columns.values())]
            for kind, record in records.items()
            for row in record["rows"]
        ]
        return markdown(
            [*first, *columns], lines, " ".join([*caption, *(f"{describe_source(r)}." for r in records.values())])
        )

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
    "step_overhead": (
        "a step by | times a plain loop | ms a step",
        "contestant | time_of_a_plain_loop | milliseconds",
        "CPU time of a training step of a tiny model.",
    ),
    "scaling_out": (
        "`embed` by two workers | share of the model alone",
        "contestant | share_of_model_alone",
        "Recorded to two decimals.",
    ),
    "growth": (
        "family | against | exponent of time | theory | exponent of memory | its theory",
        "family | axis | seconds_exponent | seconds_theory | bytes_exponent | bytes_theory",
    ),
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
    ),
    "embed_memory": ("runner | images | MiB held at most", "runner | images | mib"),
}
TABLES |= {{"page": "page_waits"}.get(name, name): make_row_table(name, *texts) for name, texts in ROWS.items()}


@table("int8_avx512_bf16.jsonl")
def int8_speed(path: Path) -> str:
    cells = {(run["runtime"], run["variant"], run["batch"]): run for run in filter_runs(load(path), part="speed")}
    forms = {
        "torch": ("float32", "bfloat16", "int8"), "onnxruntime": ("float32", "int8 dynamic", "int8 static"),
        "openvino": ("float32", "bfloat16", "int8 static"),
    }  # fmt: skip
    cases, lines = [(variant, batch) for variant in ("S/16", "B/16") for batch in BATCHES], []
    for engine, form in ((engine, form) for engine, engine_forms in forms.items() for form in engine_forms):
        runs = [cells[engine, *case][form] for case in cases]
        texts = [f"{cell['images_per_second']:.1f} ({cell['times_float32']['median']:.2f})" for cell in runs]
        lines.append((engine, form, *texts, f"{runs[2]['memory_megabytes']:.0f} MB"))
    header = ["engine", "", *batch_headers(["S/16", "B/16"]), "memory, B/16, batch 1"]
    caption = f"Images/s (times the engine's float32). `int8.py speed --threads 2`, {PROCESSORS['avx512_bf16']}."
    return markdown(header, lines, caption)


@table("int8_avx512_bf16.jsonl")
def int8_agreement(_: Path | None) -> str:
    lines = []
    for kind, record in load_by_processor("int8", "jsonl").items():
        shares: dict[tuple[str, str], list[str]] = {}
        for run in filter_runs(record, part="agreement"):
            cell = f"{run['agreement']:.2%}" if "agreement" in run else "refused"
            shares.setdefault((run["images"].removeprefix("mirrored "), run["by"]), []).append(cell)
        lines += [(PROCESSORS[kind], data, engine, *cells) for (data, engine), cells in shares.items()]
    header = "processor | images | int8 by | plain | hybrid | axial"
    return markdown(
        header,
        lines,
        "Share of held-out images answered as in float32; exports below 99.5% are refused. `int8.py agreement`.",
    )


@table("int8_avx512_bf16.jsonl")
def billion(path: Path) -> str:
    (cells,) = filter_runs(load(path), runtime="openvino", variant="B/16", batch=8)
    rows = filter_runs(load(RESULTS / "jpeg_zen4.json")["rows"], workers=2, processor="Pillow")
    rates = {
        "B/16 in float32 (OpenVINO)": cells["float32"]["images_per_second"],
        "B/16 in int8 (OpenVINO)": cells["int8 static"]["images_per_second"],
        "JPEG of 512 px decoded and resized (Zen 4)": rows[0]["images_per_second"],
    }
    lines = [(name, f"{rate:.1f}", f"{1e9 / rate / 3600:,.0f}") for name, rate in rates.items()]
    return markdown(
        "for 1,000,000,000 images | images/s on two cores | hours of two cores",
        lines,
        "Divided, not run. From the records of `int8.py` and `jpeg.py`.",
    )


# ---- trainings


@table("inductive_bias.jsonl")
def inductive_bias(path: Path) -> str:
    runs = filter_runs(load(path), kind="data")
    sizes, lines = sorted({run["examples"] for run in runs}), []
    for family in dict.fromkeys(run["family"] for run in runs):
        family_runs = filter_runs(runs, family=family)
        cells = [format_mean(run["test_accuracy"] for run in filter_runs(family_runs, examples=size)) for size in sizes]
        lines.append((family, f"{family_runs[0]['parameters']:,}", *cells))
    header = ["family", "parameters", *(f"{size:,} images" for size in sizes)]
    caption = f"Test accuracy, %. {describe_runs(runs, 'inductive_bias.py')}."
    return markdown(header, lines, caption)


@table("data_scale.jsonl")
def data_scale(path: Path) -> str:
    records = load(path)
    runs = filter_runs(records, kind="run")
    sizes, names = sorted({run["images"] for run in runs}), list(dict.fromkeys(run["model"] for run in records))
    values = [
        "test_accuracy",
        *(f"{data}, {reading}" for data in ("digits", "photos") for reading in ("25 a class", "fine-tuned")),
    ]

    def scores(kind: str, name: str, value: str, size: int) -> list[float]:
        matching_runs = sorted(filter_runs(records, kind=kind, model=name, images=size), key=lambda run: run["seed"])
        return [run[value] for run in matching_runs if value in run]

    lines: list[Any] = [
        (f"{'fractals' if value == 'test_accuracy' else value}: {name}",
         *(format_mean(scores("run", name, value, size)) for size in sizes))
        for value in values for name in names if any(value in run for run in runs)
    ]  # fmt: skip
    for name in names[1:]:
        paired_scores = [
            zip(*(scores("run", model, values[0], size) for model in (names[0], name)), strict=True) for size in sizes
        ]
        gaps = [[first - second for first, second in pairs] for pairs in paired_scores]
        seeds = list(zip(*gaps, strict=True))
        crossed = f"{sum(min(seed_gaps) < 0 < max(seed_gaps) for seed_gaps in seeds)} of {len(seeds)} seeds cross"
        lines.append((f"{names[0]} - {name}, points ({crossed})", *map(format_margin, gaps)))
    for name in names:
        plateaus = [format_mean(scores("plateau", name, values[0], size)) for size in sizes]
        lines += [(f"constant rate: {name}", *plateaus)] if any(plateaus) else []
        for law in filter_runs(records, kind="prediction", model=name):
            predicted = f"{100 * law['predicted_accuracy']:.1f}" if law["law"] else "no law"
            lines.append((f"foreseen by the first seed's law: {name}", *[""] * (len(sizes) - 1), predicted))
    header = ["accuracy, %, by training images", *(f"{size:,}" for size in sizes)]
    return markdown(
        header, lines, f"{describe_runs(records, 'data_scale.py')}; ± of differences is half of a 95% interval."
    )


@table("scaling_law.jsonl")
def scaling_law(path: Path) -> str:
    runs = load(path)
    laws = filter_runs(runs, kind="prediction")
    sizes = sorted({run["images"] for run in filter_runs(runs, kind="run")})
    lines = []
    for size in sizes:
        size_runs = filter_runs(runs, kind="run", images=size)
        losses = [run["loss"] for run in size_runs]
        predicted = [f"{law['loss']:.3f}" for law in laws if law["images"] == size]
        lines.append(
            (
                f"{size:,}",
                f"{size_runs[0]['teraflops']:.2f}",
                f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                *predicted,
                *[""] * (1 - len(predicted)),
            )
        )
    notes = []
    for law in laws:
        intervals = ", ".join(f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in law["intervals"].items())
        notes.append(
            f"For {law['images']:,} images, recorded before they were looked at: {law['law']} (95%: {intervals})"
        )
    return markdown(
        "images | TFLOPs | loss, mean (range) | foreseen",
        lines,
        f"{'. '.join(notes)}. {describe_runs(runs, 'scaling_law.py')}.",
    )


@table("compare_families.jsonl")
def compare_families(path: Path) -> str:
    record = load(path)
    comparisons, trainings = (
        filter_runs(record, kind="comparison"),
        [run for run in record if run["kind"] != "comparison"],
    )
    lines = []
    for index, model in enumerate(comparisons[0]["models"]):
        name, seeds = model["inputs"]["model"]["name"], [comparison["models"][index] for comparison in comparisons]
        rate = max(filter_runs(record, kind="trial", family=name), key=lambda run: run["validation"])["rate"]
        cells = [f"{rate:g}", f"{model['parameters']:,}", f"{model['flops'] / 1e6:.1f}"]
        cells += [
            format_mean(seed_model["top1"]["value"] for seed_model in seeds),
            format_mean(seed_model["ece"] for seed_model in seeds),
        ]
        cells.append(format_mean(statistics.mean(seed_model["corruptions"].values()) for seed_model in seeds))
        cells += [
            format_mean(seed_model["fgsm"][size] for seed_model in seeds if seed_model["fgsm"]) for size in ("1", "4")
        ]
        lines.append((name, *cells, format_seconds(filter_runs(trainings, family=name))))
    header = "model | rate | parameters | MFLOPs | top-1, % | ECE, % | corrupted, % | FGSM 1, % | FGSM 4, % | CPU s"
    steps = f"{len(trainings)} trainings, {len(comparisons)} seeds"
    return markdown(
        header, lines, f"`compare_families.py --steps 1600 --seeds 2 --turns 0`, {comparisons[0]['date']}, {steps}."
    )


@table("shape_texture.jsonl")
def shape_texture(path: Path) -> str:
    runs = load(path)
    lines = []
    for family, variation in dict.fromkeys((run["family"], run["variation"]) for run in runs):
        case_runs = filter_runs(runs, family=family, variation=variation)
        other_shares = [run["decisions"]["other"] / sum(run["decisions"].values()) for run in case_runs]
        cells = [
            format_mean(run[name] for run in case_runs)
            for name in ("shape_bias", "accuracy", "shape_alone", "texture_alone")
        ]
        lines.append((family, variation, cells[0], format_mean(other_shares), *cells[1:]))
    lines.sort()
    header = "family | varied by | shape bias, % | neither, % | accuracy, % | shape alone, % | texture alone, %"
    return markdown(header, lines, f"{describe_runs(runs, 'shape_texture.py --steps 3200')}.")


@table("pretraining.jsonl")
def pretraining(path: Path) -> str:
    runs, lines = load(path), []
    readings = {"run": "fine-tuned", "probe": "linear probe"}
    starts = list(dict.fromkeys(run["start"] for run in runs))
    for data, kind, start in (
        (data, kind, start) for data in ("digits", "photos") for kind in readings for start in starts
    ):
        cells = []
        for labels in (20, 0):
            case_runs = filter_runs(runs, kind=kind, data=data, start=start, labels=labels)
            scratch = {
                run["seed"]: run["accuracy"]
                for run in filter_runs(runs, kind=kind, data=data, start="scratch", labels=labels)
            }
            rates = (
                [f"{case_runs[0][name]:g}" for name in ("rate", "tuning_rate") if name in case_runs[0]]
                if case_runs
                else []
            )
            gaps = [run["accuracy"] - scratch[run["seed"]] for run in case_runs]
            cells += [
                format_mean(run["accuracy"] for run in case_runs),
                format_margin(gaps) if gaps and start != "scratch" else "",
                ", ".join(rates),
            ]
        if any(cells):
            lines.append((data, readings[kind], start, *cells))
    header = "data |  | start | 20 a class | above scratch | rates | all | above scratch | rates"
    caption = "Test accuracy, %; rates chosen on validation images; ± of differences: half of a 95% interval."
    return markdown(header, lines, f"{caption} {describe_runs(runs, 'pretraining.py --scale 4')}.")


@table("distillation.jsonl")
def distillation(path: Path) -> str:
    runs, lines = load(path), []
    for epochs, varied, method in dict.fromkeys((run.get("epochs"), run.get("varied"), run["way"]) for run in runs):
        case_runs = filter_runs(runs, way=method, epochs=epochs, varied=varied)
        cells = [
            format_mean((run[name] for run in case_runs), *form)
            for name, form in {"accuracy": (), "loss": (1, 3), "ece": ()}.items()
        ]
        training = f"{epochs}, {'augmented' if varied else 'as they are'}" if epochs else ""
        lines.append((training, method, str(len(case_runs)), *cells))
    header = "epochs, images | | runs | test accuracy, % | test loss, nats | calibration error, %"
    return markdown(
        header, lines, f"`distillation.py` and `distillation.py --epochs 160 --varied`, {format_dates(runs)}."
    )


@table("self_training.jsonl")
def self_training(path: Path) -> str:
    runs, lines = [run for run in load(path) if run["final"]], []
    names = {"": "supervised, rate 1.5e-3 (chosen)", "fast": "supervised, rate 5e-3"}
    steps = {"noisy-1": "noisy student of it", "noisy-2": "noisy student of that"}
    steps |= {"meta": "meta pseudo labels", "meta-labels": "the same, fine-tuned on the labels"}
    for first, title in names.items():
        titles = {first or "supervised": title} | {
            f"{first}-{method}".strip("-"): title for method, title in steps.items()
        }
        for method, name in titles.items():
            method_runs = filter_runs(runs, way=method)
            if not method_runs:
                continue
            accuracies = ", ".join(f"{100 * run['test']['accuracy']:.1f}" for run in method_runs)
            loss = statistics.fmean(run["test"]["loss"] for run in method_runs)
            accuracy = format_mean(run["test"]["accuracy"] for run in method_runs)
            lines.append((name, accuracy, accuracies, f"{loss:.2f}", format_seconds(method_runs)))
    header = " | test accuracy, % | of each seed | test loss, nats | CPU s a run"
    return markdown(header, lines, f"{describe_runs(runs, 'self_training.py')}.")


@table("dense.jsonl")
def dense(path: Path) -> str:
    runs, lines = [run for run in load(path) if run["final"]], []
    order = {part: index for index, part in enumerate(("goals", "clutter", "families", "hours"))}
    for pair in sorted({run["pair"] for run in runs}, key=lambda pair: (order[pair.split()[0]], pair)):
        pair_runs = sorted(filter_runs(runs, pair=pair), key=lambda run: run["seed"])
        part, task, head, backbone = pair.split()
        measure = "mean IoU" if task == "segmentation" else "box AP50"
        scores = [run["headline"][measure] for run in pair_runs]
        strict = format_mean(run["headline"]["box AP"] for run in pair_runs if "box AP" in run["headline"])
        lines.append(
            (
                part,
                head,
                backbone,
                f"{pair_runs[0]['parameters']:,}",
                f"{pair_runs[0]['rate']:g}",
                measure,
                format_mean(scores),
                strict,
                str(len(pair_runs)),
                format_seconds(pair_runs),
            )
        )
    header = "part | head | backbone | parameters | rate | measure | on test, % | box AP, % | seeds | CPU s"
    return markdown(header, lines, f"{describe_runs(runs, 'dense.py')}.")


@table("small_data.jsonl")
def small_data(path: Path) -> str:
    runs = load(path)
    data = list(dict.fromkeys(run["data"] for run in runs))
    lines = [
        (
            name,
            *(
                format_mean(run["validation_accuracy"] for run in filter_runs(runs, candidate=name, data=data_name))
                for data_name in data
            ),
        )
        for name in dict.fromkeys(run["candidate"] for run in runs)
    ]  # fmt: skip
    return markdown(["candidate", *data], lines, f"Validation accuracy, %. {describe_runs(runs, 'small_data.py')}.")


@table("small_data_compare.jsonl")
def small_data_compare(path: Path) -> str:
    records = load(path)
    runs = filter_runs(records, kind="run")
    counts = sorted({run["images"] for run in runs}, key=lambda images: images or float("inf"))
    cases = [(data, images) for data in dict.fromkeys(run["data"] for run in runs) for images in counts]
    starts = ("ViT", "ResNet", "ViT, fractals", "ResNet, fractals", "ViT, masked", "ViT, contrast")

    def scores(start: str, data: str, images: int, split: str = "test") -> list[float]:
        matching_runs = sorted(filter_runs(runs, start=start, data=data, images=images), key=lambda run: run["seed"])
        return [run[f"{split}_accuracy"] for run in matching_runs]

    lines: list[Any] = [(start, *(format_mean(scores(start, *case)) for case in cases)) for start in starts]
    leads = []
    for case in cases:
        best = []
        for architecture in ("ViT", "ResNet"):
            matching_runs = [start for start in starts if start.split(",")[0] == architecture]
            best.append(
                scores(
                    max(matching_runs, key=lambda start: statistics.fmean(scores(start, *case, "validation"))), *case
                )
            )
        leads.append(format_margin([ours - theirs for ours, theirs in zip(*best, strict=True)]))
    lines.append(("best ViT - best ResNet, points", *leads))
    header = ["", *(f"{data.split(':')[0]}, {images or 'all'}" for data, images in cases)]
    return markdown(
        header,
        lines,
        f"Test accuracy, %; last ±: half of a 95% interval. {describe_runs(records, 'small_data_compare.py')}.",
    )


@table("mutants.json")
def mutants(path: Path) -> str:
    """Return one line a package of the newest round."""
    name, last = list(load(path).items())[-1]
    kinds = ("killed", "timed out", "survived", "no test", "gone", "struck", "not run")
    packages = {**last["packages"], "all": last}
    lines = [(package, *(str(counts.get(kind, 0)) for kind in kinds)) for package, counts in packages.items()]
    caption = f"Round `{name}`, {last['date']}, commit {last['commit'][:7]}, {last['cpu_hours']} CPU hours. "
    caption += f"Survived: of the tests in the {last['test_files_covered']} test files looked at so far."
    return markdown(["package", *kinds], lines, caption)


def rewrite(text: str) -> str:
    """Return a page with every marked table as the records have it."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]](None)}\n{match[3]}", text)


def pages() -> list[Path]:
    """Return the pages that have tables of records."""
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
