"""What the documents say of the recorded trainings: tables and figures in words are those of the committed records."""

import importlib
import itertools
import json
import shutil
import statistics
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from hf_vit.training import find_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = "benchmarks/README.md"
PEERS = {"S/16": "transformers", "B/16": "transformers", "R26+S/32": "timm", "R50+B/16": "timm"}
# In a cell of inference: dtype and batch.
HALVES = ("float32", "bfloat16")
CELLS = list(itertools.product(HALVES, (1, 8)))


def words(document: str) -> str:
    """A document in one line, without the marks of bold type."""
    return " ".join((ROOT / document).read_text().replace("**", "").split())


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def rows(record: str) -> list[dict]:
    return json.loads((RESULTS / record).read_text())["rows"]


def with_quartiles(ratio: dict[str, float]) -> str:
    return "{median:.2f} ({lower:.2f} to {upper:.2f})".format(**ratio)


def medians(ratios: Iterable[dict[str, float]]) -> str:
    """As cells of a table."""
    return " | ".join(f"{ratio['median']:.2f}" for ratio in ratios)


def ratios_of(*records: str) -> dict[tuple[str, str, int, str], dict[str, dict[str, float]]]:
    """(record, dtype, batch, contestant) -> its ratios to the others."""
    return {
        (record, row["cell"]["dtype"], row["cell"]["batch"], name): outcome["ratios"]
        for record in records
        for row in rows(f"{record}.json")
        for name, outcome in row["outcomes"].items()
    }


def by_variant(*records: str) -> dict[tuple[str, str, int, str], dict[str, dict[str, float]]]:
    """(variant, dtype, batch, contestant) -> its ratios to the others."""
    return {
        (row["cell"]["shape"]["variant"], row["cell"]["dtype"], row["cell"]["batch"], name): outcome["ratios"]
        for record in records
        for row in rows(f"{record}.json")
        for name, outcome in row["outcomes"].items()
    }


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("shape_texture_long", README),
        ("compare_families_long", README),
        ("pretraining", README),
        ("distillation", "docs/distillation.md"),
        ("self_training", "docs/self_training.md"),
        ("dense", "docs/dense.md"),
    ],
)
def test_tables_are_those_of_the_records(script, name, document, tmp_path, capsys):
    (record,) = RESULTS.glob(f"{name}.json*")
    copy = Path(shutil.copy(record, tmp_path))
    module = script(name.removesuffix("_long"))
    if hasattr(module, "summary"):
        print(module.summary(copy))
    else:
        module.summarise(copy)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in shown if line.startswith("| ") and any(letter.isdigit() for letter in line)]
    document = words(document)
    if name == "self_training":  # whose document writes the ways out
        rows = [row.split("|", 2)[2] for row in rows]
    assert len(rows) > 5
    assert not [row for row in rows if row not in document]


def test_students_trained_to_the_end_are_told_as_recorded(script):
    page = words("docs/distillation.md")
    rows = script("distillation").summary(RESULTS / "distillation.jsonl", 160, True).splitlines()[3:]
    assert len(rows) == 5
    assert not [row for row in rows if row not in page]


def test_students_come_after_their_teacher_and_once(script, monkeypatch, tmp_path):
    """With and without variation are other runs; the teacher's weights may be lost, its record is not repeated."""
    module, teacher, asked = script("distillation"), tmp_path / "teacher", []

    def learn(config, data, output, *, distillation, seed, **settings):
        assert distillation is None or Path(distillation.teacher).is_dir()
        asked.append((distillation and distillation.kind, settings.get("epochs"), settings.get("zoom")))
        Path(output).mkdir()
        test = types.SimpleNamespace(top1=0.5 + seed / 100, loss=1.0, ece=0.1)
        return types.SimpleNamespace(test=test, model=torch.nn.Linear(2, 2))

    monkeypatch.setattr(module, "finetune", learn)
    records = module.Records(tmp_path / "r.jsonl")
    for epochs, varied in ((2, False), (2, True), (2, True)):
        module.work(records, list(module.jobs(epochs, varied)), teacher)
    kinds = [None, None, "logit", "soft", "hard"] * 3
    assert asked == [(None, None, None), *((k, 2, 0.0) for k in kinds), *((k, 2, None) for k in kinds)]
    assert "| hard | 3 | 51.0 ± 1.0 | 1.000 ± 0.000 | 10.0 ± 0.0 |" in module.summary(records.path, 2, True)
    shutil.rmtree(teacher)
    module.work(records, list(module.jobs(3, True))[:1], teacher)
    assert asked[-2:] == [(None, None, None), (None, 3, None)]
    assert sum(line["way"] == "teacher" for line in map(json.loads, records.path.read_text().splitlines())) == 1


FAMILIES = ("vit", "hybrid", "axial")
SIZES = (50, 100, 200, 400, 1257)


def digits(family: str, examples: int, record: str = "inductive_bias_long") -> list[float]:
    """Test accuracies of all seeds, in %."""
    runs = [run for run in records(f"{record}.jsonl") if run["kind"] == "data"]
    return [100 * run["test_accuracy"] for run in runs if (run["family"], run["examples"]) == (family, examples)]


def leads(family: str, record: str = "inductive_bias_long") -> list[float]:
    """By how many points a family is ahead of the plain ViT, at each size."""
    ours, plain = ([statistics.mean(digits(name, examples, record)) for examples in SIZES] for name in (family, "vit"))
    return [lead - base for lead, base in zip(ours, plain, strict=True)]


def told(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def test_accuracy_against_images_is_told_as_recorded():
    document = words(README)
    for examples in SIZES:
        assert f"| {examples:,} | {' | '.join(told(digits(family, examples)) for family in FAMILIES)} |" in document
    runs = records("inductive_bias_long.jsonl")
    seconds = [
        [run["cpu_seconds"] for run in runs if (run["kind"], run["family"]) == ("data", name)] for name in FAMILIES
    ]
    assert f"| CPU seconds, each run | {' | '.join(f'{min(s):.1f} to {max(s):.1f}' for s in seconds)} |" in document
    minutes = sum(run["cpu_seconds"] for run in runs) / 60
    assert f"{len(runs)} runs of 1,600 steps, {minutes:.0f} CPU-minutes" in document

    hybrid, axial = leads("hybrid"), leads("axial")
    assert min(*hybrid, *axial) > 0, "the curves do not cross"
    assert (
        "above it by {:.1f} points at 50 images, {:.1f} at 100, {:.1f} at 200, {:.1f} at 400 and {:.1f} at 1,257; the "
        "axial model's by {:.1f}, {:.1f}, {:.1f}, {:.1f} and {:.1f}.".format(*hybrid, *axial)
        in document
    )
    short, plain = (
        leads("hybrid", "inductive_bias"),
        [statistics.mean(digits("vit", n, "inductive_bias")) for n in (200, 1257)],
    )
    assert (
        f"the hybrid led by {min(short):.1f} to {max(short):.1f} points, {short[0]:.1f} at 50 images and "
        f"{short[-1]:.1f} at 1,257, and the ViT gained nothing from 200 to 1,257 images ({plain[0]:.1f} and "
        f"{plain[1]:.1f}%)" in document
    )
    assert plain[1] <= plain[0]


def test_families_are_told_as_recorded():
    long, short = (
        json.loads((RESULTS / f"compare_families{name}.json").read_text())["comparisons"].values()
        for name in ("_long", "")
    )

    def mean(comparisons, value) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for model in (model for comparison in comparisons for model in comparison["models"]):
            found.setdefault(model["inputs"]["model"]["name"], []).append(value(model))
        return {name: 100 * statistics.mean(values) for name, values in found.items()}

    top1, before = (mean(found, lambda model: model["top1"]["value"]) for found in (long, short))
    corrupted = mean(long, lambda model: statistics.mean(model["corruptions"].values()))
    attacked = mean(long, lambda model: model["fgsm"]["4"] if model["fgsm"] else 0)
    document, page = words(README), words("docs/evidence.md")
    best = sorted(set(top1) - {"swin", "igpt"}, key=top1.__getitem__)
    assert len(best) == 18
    ends = f"{top1[best[0]]:.1f} to {top1[best[-1]]:.1f}%"
    assert f"eighteen of the twenty are at {ends}" in document
    assert f"eighteen are at {ends}, the plain ViT at {top1['vit']:.1f}% ({before['vit']:.1f}% after" in page
    assert max(top1["swin"], top1["igpt"]) < top1[best[0]]
    assert f"Swin ({top1['swin']:.1f}%) and ImageGPT ({top1['igpt']:.1f}%) are behind" in document
    assert f"they were at {min(before.values()):.1f} to {max(before.values()):.1f}%" in document
    vit, hybrid, resnet, local = (
        f"{before[name]:.1f}% ({top1[name]:.1f}%)" for name in ("vit", "hybrid", "resnet", "local")
    )
    assert f"ViT at {vit}, the hybrid at {hybrid}, the ResNet at {resnet}, Local-ViT at {local}" in document
    kept = f"{corrupted['bit']:.1f}"
    assert f"BiT keeps {kept}% and the hybrid, whose stem is BiT's, {corrupted['hybrid']:.1f}%" in document
    assert f"BiT and the hybrid keep {kept} and {corrupted['hybrid']:.1f}%, the ViT {corrupted['vit']:.1f}%" in page
    others = [value for name, value in corrupted.items() if name not in ("bit", "hybrid")]
    assert f"the others {min(others):.1f} to {max(others):.1f}%" in document
    weak = ("swin", "deit", "vit", "cait", "axial")
    assert sorted(set(attacked) - {"igpt"}, key=attacked.__getitem__)[:5] == list(weak)
    assert (
        "Swin {:.1f}%, DeiT {:.1f}%, ViT {:.1f}%, CaiT {:.1f}%, Axial {:.1f}%".format(
            *(attacked[name] for name in weak)
        )
        in document
    )
    networks = ("bit", "regnet", "resnet", "nfnet", "tresnet", "efficientnet", "skresnet")
    assert min(networks, key=attacked.__getitem__) == "tresnet"
    assert max(networks, key=attacked.__getitem__) == "skresnet"
    assert f"{attacked['tresnet']:.1f}% (TResNet) to {attacked['skresnet']:.1f}% (SKResNet)" in document
    assert f"the ResNet keeps {attacked['resnet']:.1f}%, the ViT {attacked['vit']:.1f}%" in page
    wrong = mean(long, lambda model: model["ece"])
    assert max(wrong, key=wrong.__getitem__) == "deit"
    assert f"No calibration error is above {wrong['deit']:.1f}% (DeiT)" in document


def test_candidates_of_the_small_recipe_are_told_as_recorded(script):
    page, found = words("docs/training.md"), {}
    for run in records("small_data.jsonl"):
        found.setdefault((run["candidate"], run["data"]), []).append(100 * run["validation_accuracy"])
    module = script("small_data")
    for candidate in module.CANDIDATES:
        assert f"| {candidate} | {' | '.join(told(found[candidate, data]) for data in module.DATA)} |" in page
    for data in module.DATA:
        best = max(module.CANDIDATES, key=lambda candidate: statistics.mean(found[candidate, data]))
        assert best == "muon 3e-3"
    assert find_recipe("small-data").learning_rate == module.CANDIDATES["muon 3e-3"]["learning_rate"]


def test_the_patch_sweep_is_told_as_recorded():
    document = words(README)
    runs = [run for run in records("inductive_bias.jsonl") if (run["family"], run["examples"]) == ("vit", 1257)]
    by_patch = {patch: [run for run in runs if run["patch"] == patch] for patch in (32, 16, 8, 4, 2)}
    for patch, of_patch in by_patch.items():
        flops, seconds = of_patch[0]["flops_forward_one_image"] / 1e6, [run["cpu_seconds"] for run in of_patch]
        accuracy = told([100 * run["test_accuracy"] for run in of_patch])
        tokens = (32 // patch) ** 2
        assert f"| {patch} | {tokens} | {flops:.2f} | {accuracy} | {statistics.mean(seconds):.0f} |" in document
    for seed in range(3):
        worst = min(by_patch, key=lambda patch: by_patch[patch][seed]["test_accuracy"])
        assert worst == (2 if seed == 0 else 8), "8 px is worst in two of three seeds, 2 px in the other"


def test_pretraining_is_told_with_the_rates_that_were_tried():
    runs, document = records("pretraining.jsonl"), words(README)
    main = [run for run in runs if (run["kind"], run["data"]) == ("main", "digits")]
    mean = {
        start: 100 * statistics.mean(run["fine_tuned"]["0"] for run in main if run["start"] == start)
        for start in ("scratch", "masked")
    }
    # One rate of pre-training; that of fine-tuning was chosen on masked digits alone. The sentence must say so.
    assert {run["start"] for run in runs if run["kind"] == "rate"} == {"scratch", "masked"}
    assert {run["data"] for run in runs if run["kind"] == "rate"} == {"digits"}
    assert "pretraining_rate" not in {name for run in runs for name in run}
    assert (
        f"at these rates, fine-tuning after masked patches ends below scratch ({mean['masked']:.0f} against "
        f"{mean['scratch']:.0f}% on all labels). Its pre-training rate was not tuned" in document
    )


def test_shape_bias_is_told_as_recorded():
    """Of the trainings to the end, and beside them what the short ones looked like."""
    document = words(README)
    runs, short = (
        {(run["family"], run["variation"], run["seed"]): run for run in records(f"shape_texture{name}.jsonl")}
        for name in ("_long", "")
    )
    assert len(runs) == len(short) == 27
    accuracies = [run["accuracy"] for run in runs.values()]
    assert f"{100 * min(accuracies):.1f} to {100 * max(accuracies):.0f}% of new images" in document
    assert all(run["shape_bias"] < 0.5 for run in (*runs.values(), *short.values()))

    def mean(of: dict, family: str, way: str, value: str) -> float:
        return 100 * statistics.mean(of[family, way, seed][value] for seed in range(3))

    ways = ("none", "crops", "blur and noise")
    biases = [mean(runs, family, way, "shape_bias") for family in ("vit", "hybrid", "axial") for way in ways]
    assert f"in {100 - max(biases):.0f} to {100 - min(biases):.0f}% of the decisions" in document
    shapes = [mean(runs, family, way, "shape_alone") for family in ("vit", "hybrid", "axial") for way in ways]
    assert f"({min(shapes):.0f} to {max(shapes):.0f}%" in document
    raised = sum(
        runs[family, way, seed]["shape_bias"] > runs[family, "none", seed]["shape_bias"]
        for family in ("vit", "hybrid", "axial")
        for way in ways[1:]
        for seed in range(3)
    )
    assert f"in {raised} of 18 pairs of runs" in document
    for family, name in (("vit", "ViT"), ("axial", "axial model")):
        told = [f"{mean(short, family, way, 'accuracy'):.0f}" for way in ways]
        assert f"the {name} was right on {told[0]}, {told[1]} and {told[2]}%" in document


@pytest.mark.parametrize(("record", "read"), [("", "but read as `from_hub` does"), ("_avx512_bf16", "read")])
def test_reading_a_checkpoint_is_told_beside_mapping_it(record: str, read: str):
    rows = json.loads((RESULTS / f"conversion{record}.json").read_text())["rows"]
    stored, compressed = ({k: v["median"] for k, v in row.items() if isinstance(v, dict)} for row in rows)
    assert (
        f"mapped in {stored['mapping_time_of_numpys']:.2f}, mapped with all checks in "
        f"{stored['checked_time_of_numpys']:.2f} of `np.load`'s time, {read} in "
        f"{stored['reading_time_of_numpys']:.2f} of it; a compressed one takes "
        f"{compressed['mapping_time_of_numpys']:.2f}, {compressed['checked_time_of_numpys']:.2f} and "
        f"{compressed['reading_time_of_numpys']:.2f}" in words(README)
    )


def test_the_memory_of_a_training_step_is_told_beside_every_peer():
    rows = json.loads((RESULTS / "models_training_bfloat16.json").read_text())["rows"]
    memory = {
        name: [round(dict(row["outcomes"])[name]["memory"] / 1e6) for row in rows]
        for name in ("hf_vit", "transformers", "timm", "vit-pytorch")
    }
    three = {name: "{}, {} and {}".format(*megabytes) for name, megabytes in memory.items()}
    assert (
        f"needs {three['hf_vit']} MB (Ti, S, B) where transformers' sdpa needs {three['transformers']}, timm "
        f"{three['timm']} and vit-pytorch {three['vit-pytorch']}: more than timm at Ti, less at S and B"
        in words(README)
    )
    ahead = [ours < theirs for ours, theirs in zip(memory["hf_vit"], memory["timm"], strict=True)]
    assert ahead == [False, True, True]


def test_the_demonstration_is_told_as_recorded():
    demo = json.loads((RESULTS / "demo.json").read_text())
    scores = [seed["test_accuracy"] for seed in demo["seeds"]]
    wrong = round(sum(360 * (1 - score) for score in scores))
    assert len(scores) == 10
    for document in ("README.md", README):
        assert f"{min(scores):.2%} to {max(scores):.2%}".replace("% to", " to") in words(document)
        assert f"{wrong} of 3,600" in words(document)
        assert f"{statistics.mean(scores):.2%}" in words(document)
    assert set(demo["wrong_of_360"].values()) == {4}


def mean_of(runs: list[dict], value, **named) -> float:
    """Mean, in %, over the runs that have these values."""
    return 100 * statistics.mean(value(run) for run in runs if all(run.get(key) == named[key] for key in named))


def test_the_page_of_evidence_tells_what_was_recorded():
    page = words("docs/evidence.md")
    gaps, short = leads("hybrid"), leads("hybrid", "inductive_bias")
    assert f"by {gaps[0]:.1f} points at 50 images and {gaps[-1]:.1f} at 1,257" in page
    assert f"After 400 steps the gap was {short[0]:.1f} points at both ends" in page
    assert f"{short[0]:.1f}" == f"{short[-1]:.1f}"
    assert f"({gaps[0]:.1f} points at 50, {gaps[-1]:.1f} at 1,257)" in words("docs/figures.md")

    small: dict[tuple[str, str], list[float]] = {}
    for run in records("small_data.jsonl"):
        small.setdefault((run["candidate"], run["data"].split(":")[0]), []).append(100 * run["validation_accuracy"])
    means = {key: f"{statistics.mean(values):.1f}%" for key, values in small.items()}
    of_digits = {name: means[name, "digits"] for name in ("default-small", "muon 3e-3")}
    assert f"{of_digits['default-small']} with `default-small`, {of_digits['muon 3e-3']} with `small-data`" in page
    assert f"({means['adamw 1e-3', 'fractals']}; Muon at three times the rate {means['muon 3e-3', 'fractals']})" in page
    demo = json.loads((RESULTS / "demo.json").read_text())
    assert f"the mean is {demo['mean_test_accuracy']:.2%}" in page

    runs, starts = records("pretraining.jsonl"), ("masked", "next patch", "contrast", "scratch")
    probe, tuned = (
        [mean_of(runs, lambda run: run[what]["0"], kind="main", data="digits", start=start) for start in starts]  # noqa: B023
        for what in ("probe", "fine_tuned")
    )
    assert (
        "reads {:.1f}% after masked patches, {:.1f}% after next patches, {:.1f}% after contrast, {:.1f}% without; "
        "fine-tuned on all labels {:.1f}, {:.1f}, {:.1f} and {:.1f}%".format(*probe, *tuned)
    ) in page

    long, short = (
        {
            way: mean_of(records("distillation.jsonl"), lambda run: run["accuracy"], way=way, epochs=epochs)
            for way in ("plain", "logit", "soft", "hard")
        }
        for epochs in (160, 40)
    )
    ranges = [
        f"{min(taught):.1f} to {max(taught):.1f}"
        for taught in ([ways[way] for way in ("logit", "soft", "hard")] for ways in (long, short))
    ]
    assert (
        f"end at {ranges[0]}%, the one without at {long['plain']:.1f}%; after 40, without varied images, at "
        f"{ranges[1]} and {short['plain']:.1f}%"
    ) in page

    runs = [run for run in records("self_training.jsonl") if run["final"]]
    ways = {way: mean_of(runs, lambda run: run["test"]["accuracy"], way=way) for way in {run["way"] for run in runs}}
    assert f"take {ways['supervised']:.1f} to {ways['noisy-2']:.1f}%" in page
    assert f"at a higher rate {ways['fast']:.1f} to" in page
    assert f"below the supervised start ({ways['meta']:.1f} and" in page
    assert ways["meta"] < ways["supervised"]

    runs = [run for run in records("dense.jsonl") if run["final"]]
    miou = {
        name: mean_of(runs, lambda run: run["headline"]["mean IoU"], pair=f"families segmentation upernet {name}")
        for name in ("plain", "hybrid", "bit", "axial")
    }
    assert (
        "the plain ViT reaches {plain:.1f}%, the hybrid {hybrid:.1f}%, BiT {bit:.1f}%, the axial model {axial:.1f}%"
    ).format(**miou) in page
    boxes = {
        name: mean_of(runs, lambda run: run["headline"]["box AP"], pair=f"families detection mask-rcnn {name}")
        for name in ("plain", "hybrid", "bit", "axial", "axial_resnet")
    }
    assert f"the plain ViT leads with {boxes['plain']:.1f}%" in page
    assert max(boxes, key=boxes.__getitem__) == "plain"

    biases = [run["shape_bias"] for run in records("shape_texture_long.jsonl")]
    assert max(biases) < 0.5, "all follow the texture"


def test_loaders_and_memory_are_told_as_recorded():
    page = words("docs/scaling_out.md")
    rows = json.loads((RESULTS / "data_loading.json").read_text())["rows"]
    found = {(row["layout"], row["contestant"]): row for row in rows}
    layouts = list(dict.fromkeys(layout for layout, _ in found))
    assert len(layouts) == 5
    for layout in layouts:
        mine = found[layout, "hf_vit"]
        first = "webdataset" if "shards" in layout else "torchvision"
        theirs = [
            ", ".join(f"{found[layout, peer][f'hf_vit_{epoch}']['median']:.2f}" for epoch in ("first", "later"))
            for peer in (first, "datasets")
        ]
        rates = ", ".join(f"{mine[f'{epoch}_images_per_second']:,.0f}" for epoch in ("first", "later"))
        assert f"| {rates} | {theirs[0]} | {theirs[1]} |" in page, layout
    spreads = [
        row[name][end] - row[name]["median"]
        for row in rows
        for name in ("hf_vit_first", "hf_vit_later")
        if name in row
        for end in ("lower", "upper")
    ]
    assert f"whose spread of up to {max(map(abs, spreads)):.2f} is" in page
    held = json.loads((RESULTS / "embed_memory.json").read_text())["rows"]
    for runner in ("ray", "local"):
        few, more, most = (row["mib"] for row in held if row["runner"] == runner)
        assert f"{few:,}, {more:,} and {most:,} MiB" in page
        assert most < 1.05 * more


def test_scaling_out_is_told_as_recorded():
    record = json.loads((RESULTS / "scaling_out.json").read_text())
    shares = [f"{row['share_of_model_alone']['median']:.2f}" for row in record["rows"]]
    told = "three turns: {} and {} of the model alone by processes of this machine, {} and {} by Ray".format(*shares)
    assert record["turns"] == 3
    assert told in words("benchmarks/README.md")


def test_accuracy_against_fractals_is_told_as_recorded(script):
    scale, told, page = script("data_scale"), (ROOT / README).read_text(), words("docs/evidence.md")
    lines, models = words(README), ("ViT", "Hybrid", "Axial", "BiT")
    kept = records("data_scale.jsonl")
    values: dict[tuple[str, str, str, int], dict[int, float]] = {}  # what each seed has
    few, tuned = ("25 a class", "fine-tuned")
    for each in kept:
        for name in ("test_accuracy", *(f"{data}, {way}" for data in ("digits", "photos") for way in (few, tuned))):
            if name in each and each["kind"] != "choice":
                place = each["kind"], name, each["model"], each["images"]
                values.setdefault(place, {})[each["seed"]] = each[name]
    assert {len(seeds) for (kind, *_), seeds in values.items() if kind in ("run", "plateau")} == {3}

    def at(model: str, size: int, name: str = "test_accuracy", kind: str = "run") -> float:
        return 100 * statistics.fmean(values[kind, name, model, size].values())

    def spread(model: str, size: int, name: str = "test_accuracy", kind: str = "run") -> str:
        deviation = 100 * statistics.stdev(values[kind, name, model, size].values())
        return f"{at(model, size, name, kind):.1f} ± {deviation:.1f}"

    for name in dict.fromkeys(name for kind, name, *_ in values if kind == "run"):
        for model in models:
            row = [f"| {model}" if name == "test_accuracy" else f"| {name}: {model}"]
            assert " | ".join(row + [spread(model, size, name) for size in scale.Plan.sizes]) + " |" in told

    def gap(other: str, size: int) -> str:
        """Points that the ViT is behind, and half of the 95% interval."""
        ours, theirs = (values["run", "test_accuracy", model, size] for model in ("ViT", other))
        behind = [100 * (theirs[seed] - ours[seed]) for seed in ours]
        margin = stats.t.ppf(0.975, len(behind) - 1) * statistics.stdev(behind) / len(behind) ** 0.5
        return f"{statistics.fmean(behind):.1f} ± {margin:.1f}"

    for size in (1_000, 30_000, 300_000):
        assert (
            "{}, {} and {} with {:,}".format(*(gap(each, size) for each in ("Hybrid", "BiT", "Axial")), size) in lines
        )
    hybrid = [gap("Hybrid", size).split()[0] for size in (1_000, 30_000, 300_000)]
    assert "is {} points behind the hybrid with 1,000 images, {} with 30,000, {} with 300,000".format(*hybrid) in page
    table = scale.rows(scale.Plan(), scale.Records(RESULTS / "data_scale.jsonl"))
    for other in models[1:]:
        assert not any(scale.crossings(table, "ViT", other)[seed] for seed in scale.Plan.seeds)
    law = {each["model"]: each for each in kept if each["kind"] == "prediction"}
    for cells in (
        *([spread(model, size, kind="plateau") for model in models] for size in (3_000, 100_000)),
        [f"{100 * law[model]['predicted_accuracy']:.1f}" for model in models],
        [f"{at(model, 300_000):.1f}" for model in models],
    ):
        assert "{}, {}, {} and {}%".format(*cells) in lines
    assert all(each["last_step"] == 300_000 // 128 for each in kept if each["kind"] == "plateau")
    assert all(low == 0 for each in law.values() if each["law"] for low, _ in each["intervals"].values())
    hours = [
        sum(each["cpu_seconds"] for each in kept if each["seed"] == seed and each["kind"] in ("run", "plateau")) / 3600
        for seed in scale.Plan.seeds
    ]
    assert "{:.1f} CPU hours with all trials of rates, of which runs and plateaus of the three seeds are ".format(
        sum(each["cpu_seconds"] for each in kept) / 3600
    ) + "{:.1f}, {:.1f} and {:.1f}.".format(*hours) in lines  # fmt: skip
    ends = [f"{at(model, size, f'photos, {few}'):.1f}" for size in (1_000, 300_000) for model in ("ViT", "Axial")]
    fine = [f"{at(model, size, f'photos, {tuned}'):.1f}" for size in (1_000, 300_000) for model in ("ViT", "Axial")]
    assert (
        "from {} and {}% after 1,000 fractals to {} and {}% after 300,000, and fine-tuned from {} and {} to {} and {}%"
    ).format(*ends, *fine) in lines
    assert f"ViT's fall from {ends[0]} to {ends[2]}%" in page

    def moved(model: str, name: str) -> list[float]:
        return [at(model, size, name) - at(model, 1_000, name) for size in scale.Plan.sizes[1:]]

    photographs, digits = (f"photos, {few}", f"photos, {tuned}"), f"digits, {few}"
    assert "BiT loses {:.1f} and {:.1f} points, the hybrid stays within {:.1f} of".format(
        *(-moved("BiT", name)[-1] for name in photographs),
        max(abs(each) for name in photographs for each in moved("Hybrid", name)),
    ) in lines  # fmt: skip
    lost = [-end(moved(model, digits)) for model in ("ViT", "BiT") for end in (max, min)]
    most = max(abs(each) for model in ("Hybrid", "Axial") for each in moved(model, digits))
    assert (
        "lose {:.1f} to {:.1f} and {:.1f} to {:.1f} points beside 1,000 fractals, hybrid and Axial at most {:.1f}."
    ).format(*lost, most) in lines


def test_what_zen_4_does_is_told_as_recorded():
    """Torch beside OpenVINO given the peer's model, and the hybrid beside timm's."""
    page = words("docs/inference.md")
    parts = ("s16", "b16", "r26", "r26_loaded", "r26_packed", "r50")
    found = {
        (record.removeprefix("models_zen4_"), *cell): ratios
        for (record, *cell), ratios in ratios_of(*(f"models_zen4_{part}" for part in parts)).items()
    }
    behind = set()
    for dtype in ("float32", "bfloat16"):
        cells = [
            found[part, dtype, batch, "hf_vit optimized"][f"{library}, openvino"]["median"]
            for part, library in (("s16", "transformers"), ("b16", "transformers"), ("r26", "timm"), ("r50", "timm"))
            for batch in (1, 8)
        ]
        assert f"| hf_vit by torch, {dtype} | {' | '.join(f'{cell:.2f}' for cell in cells)} |" in page
        behind |= {(dtype, place) for place, cell in enumerate(cells) if round(cell, 2) < 0.95}
    assert behind == {("bfloat16", 4)}, "R26+S/32 at batch 1 alone"
    told = words(README)
    for part, name, row in (
        *((part, "hf_vit", "hf_vit as loaded |") for part in ("r26", "r26_loaded")),
        *((part, "hf_vit optimized", "hf_vit optimized, by torch |") for part in ("r26", "r26_loaded")),
        ("r26_packed", "hf_vit optimized", "`results/models_zen4_r26_packed.json`) |"),
    ):
        ratios = [found[part, *cell, name]["timm"] for cell in CELLS]
        assert f"{row} {' | '.join(map(with_quartiles, ratios))} |" in told
    fp32, fp32_batch, bf16, bf16_batch = (
        found["r26_packed", *cell, "hf_vit optimized"]["timm, openvino"] for cell in CELLS
    )
    assert (
        f"at {fp32['median']:.2f} (quartiles {fp32['lower']:.2f} and {fp32['upper']:.2f}) and "
        f"{fp32_batch['median']:.2f} in float32, at {bf16['median']:.2f} ({bf16['lower']:.2f} and "
        f"{bf16['upper']:.2f}) and {bf16_batch['median']:.2f} in bfloat16"
    ) in page


def test_engines_on_zen_4_are_told_as_recorded():
    page, cells = words("docs/inference.md"), rows("models_zen4_engines.json")
    for peer in ("transformers, openvino", "timm, openvino"):
        ratios = [each["outcomes"]["hf_vit optimized, openvino"]["ratios"][peer] for each in cells]
        assert f"| apart, beside {peer} | {medians(ratios)} |" in page
        assert len([each for each in ratios if each["median"] > 1.0]) == 8


def test_compiled_models_on_zen_4_are_told_as_recorded():
    """Beside OpenVINO given the peer's model, and beside the peer's model compiled as ours."""
    page = words("docs/inference.md")
    found = by_variant("models_zen4_compiled", "models_zen4_r26_compiled", "models_zen4_r50_compiled")
    beside, compiled = [], []
    for dtype in HALVES:
        cells = [(variant, dtype, batch) for variant in PEERS for batch in (1, 8)]
        for name, row in (("", "by torch"), (", compiled", "by torch, compiled")):
            ratios = [found[*cell, f"hf_vit optimized{name}"][f"{PEERS[cell[0]]}, openvino"] for cell in cells]
            assert f"| hf_vit {row}, {dtype} | {medians(ratios)} |" in page
        beside += [round(ratio["median"], 2) for ratio in ratios]
        both = [(*cell, f"{PEERS[cell[0]]}, compiled and frozen") for cell in cells if cell[0] != "R50+B/16"]
        ratios = [found[peer][f"{PEERS[peer[0]]}, openvino"] for peer in both]
        assert f"| the peer's, compiled and frozen, {dtype} | {medians(ratios)} | | |" in page
        compiled += [found[*peer[:3], "hf_vit optimized, compiled"][peer[3]]["median"] for peer in both]
    assert [sum(ratio >= least for ratio in beside) for least in (0.95, 1.01)] == [15, 9]
    assert beside[HALVES.index("bfloat16") * 8 + 1] == min(beside) < 0.95, "S/16 at batch 8"
    assert len(compiled) == 12
    assert f"is {min(compiled):.2f} to {max(compiled):.2f} times as fast in the twelve cells" in page


def assert_told_beside_peers(
    found: dict[tuple[str, str, int, str], dict[str, dict[str, float]]], forms: dict[str, str]
) -> list[dict[str, float]]:
    """Rows of docs/inference.md in float32: these forms (what a row says -> contestant) beside OpenVINO given the
    peer's model and beside the peer's as loaded, and the peer's compiled; returns all ratios to OpenVINO.
    """
    page, told = words("docs/inference.md"), list[dict[str, float]]()
    cells = [(variant, "float32", batch) for variant in PEERS for batch in (1, 8)]
    for row, name in {**forms, "the peer's, compiled and frozen": "{}, compiled and frozen"}.items():
        beside = [found[*cell, name.format(PEERS[cell[0]])][f"{PEERS[cell[0]]}, openvino"] for cell in cells]
        assert f"| {row} | {medians(beside)} |" in page
        told += beside
    for row, name in forms.items():
        as_loaded = [found[*cell, name][PEERS[cell[0]]] for cell in cells]
        assert f"| {row}, beside the peer's as loaded | {medians(as_loaded)} |" in page
    return told


def test_avx2_alone_is_told_as_recorded():
    """Float32 beside OpenVINO given the peer's model and the peer's as loaded; int8 beside float32."""
    found = by_variant(*(f"models_avx2_{part}" for part in ("s16", "b16", "r26", "r50")))
    forms = {
        "hf_vit by OpenVINO": "hf_vit optimized, openvino",
        "hf_vit by torch": "hf_vit optimized",
        "hf_vit by torch, compiled": "hf_vit optimized, compiled",
    }
    assert_told_beside_peers(found, forms)
    int8 = [found["S/16", "float32", batch, "hf_vit optimized, int8"]["hf_vit optimized"]["median"] for batch in (1, 8)]
    told = f"S/16 in int8 by torch is {int8[0]:.2f} and {int8[1]:.2f} times as fast as in float32"
    assert told in words("docs/inference.md")


def test_gelus_after_their_products_are_told_as_recorded():
    page = words("docs/inference.md")
    found = by_variant(*(f"models_zen3_{part}" for part in ("s16", "b16", "r26", "r50")))
    forms = {"hf_vit by OpenVINO": "hf_vit optimized, openvino", "hf_vit by torch": "hf_vit optimized"}
    beside = assert_told_beside_peers(found, forms)
    apart = [abs(each[side] / each["median"] - 1) for each in beside for side in ("lower", "upper")]
    assert f"lie up to {max(apart):.0%} from the median" in page
    axial = by_variant("models_zen3_axial")
    by_openvino = [
        axial["Axial-B/16", "float32", batch, "hf_vit optimized, openvino"]["hf_vit optimized"]["median"]
        for batch in (1, 8)
    ]
    assert f"Axial-B/16 by OpenVINO is {by_openvino[0]:.2f} and {by_openvino[1]:.2f} times as fast as by torch" in page


def test_other_benchmarks_with_avx2_alone_are_told_as_recorded():
    told, step = words(README), rows("models_avx2_training.json")[0]["outcomes"]
    ours, eager, theirs = (
        with_quartiles(step[name]["ratios"]["transformers"]) for name in ("hf_vit", "hf_vit eager", "timm")
    )
    assert f"as fast as transformers' ({ours}), by explicit attention {eager}, timm's {theirs}." in told
    to_logits, _, _, peak, their_peak = rows("loading_avx2.json")
    assert (
        f"AVX2 alone {with_quartiles(to_logits['time_of_transformers'])}, peak {with_quartiles(peak['peak'])}; "
        f"transformers {their_peak['peak']['median']:.2f}" in told
    )
    stored, compressed = rows("conversion_avx2.json")
    mapped, checked, read = (
        [form[f"{way}_time_of_numpys"] for form in (stored, compressed)] for way in ("mapping", "checked", "reading")
    )
    assert (
        f"(`results/conversion_avx2.json`) {mapped[0]['median']:.2f}, {checked[0]['median']:.2f} and "
        f"{with_quartiles(read[0]).removesuffix(')')}; " in told
    )
    assert (
        f"a compressed one {mapped[1]['median']:.2f}, {checked[1]['median']:.2f} and {read[1]['median']:.2f} |" in told
    )
    trainers = (with_quartiles(row["time_of_a_plain_loop"]) for row in rows("step_overhead_avx2.json")[:2])
    assert "{} and {} on one with AVX2 alone (`results/step_overhead_avx2.json`)".format(*trainers) in told
    wide, narrow = ([row for row in rows("axial_avx2.json") if row["dtype"] == dtype] for dtype in HALVES)
    for name, row in AXIAL_ROWS.items():
        assert f"| {row}, AVX2 | {medians(each[name] for each in wide)} |" in told
    emulated = [each["times_as_fast_as_full"]["median"] for each in narrow]
    assert "block is {:.2f} and {:.2f} times as fast as two of full attention".format(*emulated) in told


# In a record of `axial.py`: what its rows are called.
AXIAL_ROWS = {
    "times_as_fast_as_full": "axial block beside two full-attention blocks of ours",
    "times_as_fast_as_transformers": "beside two of transformers",
    "share_of_speed_without_attention": "share of the speed without any attention",
}
# Records of the processor with AMX, and whose models ours are put beside there.
AMX_PEERS = {"s16": "transformers", "b16": "transformers", "r26": "timm", "r50": "timm"}
AMX_FORMS = {
    "hf_vit": "hf_vit as loaded",
    "hf_vit optimized": "hf_vit optimized, by torch",
    "hf_vit optimized, compiled": "the same, compiled",
    "hf_vit optimized, openvino": "hf_vit optimized, by OpenVINO",
    "timm, openvino": "timm, openvino",
}


def test_inference_with_amx_is_told_as_recorded():
    """Beside transformers' and timm's as loaded."""
    page, found = words(README), ratios_of(*(f"models_amx_{part}" for part in AMX_PEERS))
    for name, row in {**AMX_FORMS, "timm": "timm", "transformers, openvino": "transformers, openvino"}.items():
        ratios = [found[f"models_amx_{part}", *cell, name]["transformers"] for part in ("s16", "b16") for cell in CELLS]
        assert f"| {row} | {medians(ratios)} |" in page
    for part, size in (("r26", "R26+S/32"), ("r50", "R50+B/16")):
        for name, row in AMX_FORMS.items():
            ratios = [found[f"models_amx_{part}", *cell, name]["timm"] for cell in CELLS]
            assert f"| {size}: {row} | {' | '.join(map(with_quartiles, ratios))} |" in page


def test_engines_with_amx_are_told_as_recorded():
    page, found = (
        words("docs/inference.md"),
        ratios_of("models_amx_axial", *(f"models_amx_{part}" for part in AMX_PEERS)),
    )
    for name, row in zip(list(AMX_FORMS)[1:4], ("by torch", "by torch, compiled", "by OpenVINO"), strict=True):
        for dtype in HALVES:
            ratios = [
                found[f"models_amx_{part}", dtype, batch, name][f"{peer}, openvino"]
                for part, peer in AMX_PEERS.items() for batch in (1, 8)
            ]  # fmt: skip
            if name.endswith("openvino"):
                ratios += [found["models_amx_axial", dtype, batch, name]["hf_vit optimized"] for batch in (1, 8)]
            assert f"| hf_vit {row}, {dtype} | {medians(ratios)} |" in page
    compiled = [
        found[f"models_amx_{part}", *cell, "hf_vit optimized, compiled"][f"{peer}, openvino"]["median"]
        for part, peer in AMX_PEERS.items() for cell in CELLS
    ]  # fmt: skip
    assert [sum(round(each, 2) >= least for each in compiled) for least in (0.95, 1.01)] == [11, 7]
    for record, row, rest in (("", "beside", " not run |"), ("_bfloat16", "again beside", "")):
        for peer in ("transformers, openvino", "timm, openvino"):
            cells = rows(f"models_amx_engines{record}.json")
            ratios = [each["outcomes"]["hf_vit optimized, openvino"]["ratios"][peer] for each in cells]
            assert f"| {row} {peer} | {medians(ratios)} |{rest}" in page


def test_training_and_axial_blocks_with_amx_are_told_as_recorded():
    page = words(README)
    for record, place in (("", ", in the larger run"), ("_compiled", "")):
        small, large = (row["outcomes"] for row in rows(f"models_training_amx{record}.json"))
        for name in small.keys() - {"transformers"}:
            both = (with_quartiles(each[name]["ratios"]["transformers"]) for each in (small, large))
            assert f"| {name}{place} | {' | '.join(both)} |" in page
    for name, row in AXIAL_ROWS.items():
        for dtype in HALVES:
            ratios = [each[name] for each in rows("axial_amx.json") if each["dtype"] == dtype]
            assert f"| {f'{row}, AMX ' * (dtype == 'float32')}| {dtype} | {medians(ratios)} |" in page


def test_engines_are_told_as_recorded():
    """Every cell beside the same engine given the peer's model, and what is said of them in words."""
    page = words("docs/inference.md")
    # The last of a cell counts: what is ONNX Runtime's record comes first, for its own contestants.
    parts = ("onnxruntime", "alone", "alone_b16", "alone_r26", "alone_r50", "alone_r50_b8", "axial")
    found = {
        cell: {peer: ratio["median"] for peer, ratio in ratios.items()}
        for cell, ratios in by_variant(*(f"models_engines_{part}_avx512_bf16" for part in parts)).items()
    }
    peers = {"S/16": "transformers, openvino", "B/16": "transformers, openvino", "Axial-B/16": "hf_vit optimized"}
    ours, all_cells = "hf_vit optimized, openvino", []
    for dtype in ("float32", "bfloat16"):
        cells = [
            found[variant, dtype, batch, ours][peers.get(variant, "timm, openvino")]
            for variant in ("S/16", "B/16", "R26+S/32", "R50+B/16", "Axial-B/16")
            for batch in (1, 8)
        ]
        told = " | ".join(f"{cell:.2f}" for cell in cells)
        assert f"| hf_vit by OpenVINO, {dtype} | {told} |" in page
        all_cells += cells
        by_torch = [
            row["outcomes"]["hf_vit optimized"]["ratios"][f"{library}, openvino"]["median"]
            for part, library in (("", "transformers"), ("_b16", "transformers"), ("_r26", "timm"), ("_r50", "timm"))
            for row in rows(f"models_engines{part}_avx512_bf16.json")
            if row["cell"]["dtype"] == dtype
        ]
        assert f"| hf_vit by torch, {dtype} | {' | '.join(f'{cell:.2f}' for cell in by_torch)} | | |" in page
    assert f"The median of these twenty is {statistics.median(all_cells):.2f}." in page
    beside_timm = [
        ratios["timm, openvino"] for (variant, *_, name), ratios in found.items()
        if variant in ("S/16", "B/16") and name == ours
    ]  # fmt: skip
    assert len(beside_timm) == 8
    assert f"beside timm's S/16 and B/16 they are {min(beside_timm):.2f} to {max(beside_timm):.2f}." in page
    again = [
        row["outcomes"][ours]["ratios"]["hf_vit optimized"]["median"]
        for row in rows("models_engines_axial_float32_avx512_bf16.json")
    ]
    assert "In a second run it was at {:.2f} and {:.2f} (".format(*again) in page
    one, eight = (found["S/16", "float32", batch, "hf_vit optimized, onnxruntime"] for batch in (1, 8))
    pairs = [
        f"{one[peer]:.2f} and {eight[peer]:.2f} times"
        for peer in ("transformers, onnxruntime", "timm, onnxruntime", "hf_vit optimized, openvino")
    ]
    assert (
        f"{pairs[0]} as fast as transformers' at batch 1 and 8, {pairs[1]} as timm's, and {pairs[2]} as OpenVINO"
        in page
    )


def test_products_alone_are_told_as_recorded():
    """What no model can be faster than by the same library: training beside transformers, S/16 beside OpenVINO."""
    training = [
        {
            name: with_quartiles(outcome["ratios"]["transformers"])
            for part in ("", "_products")
            for name, outcome in rows(f"models_training{part}_avx512_bf16.json")[size]["outcomes"].items()
            if "transformers" in outcome["ratios"] and not (part and name == "hf_vit eager")
        }
        for size in range(2)
    ]
    page = words(README)
    for name, cell in training[0].items():
        place = ", in a run of their own" * (name == "products alone")
        assert f"| {name}{place} | {cell} | {training[1][name]} |" in page
    ceiling = [cells["products alone"].split()[0] for cells in training]
    assert f"is at {ceiling[0]} and {ceiling[1]} (`--turns 7`" in page

    page, cells = words("docs/inference.md"), rows("models_products_avx512_bf16.json")
    for name, told in (
        ("hf_vit optimized", "hf_vit by torch"),
        ("products alone, packed by oneDNN", "its products alone, packed as it packs them"),
        ("products alone, openvino", "products alone, openvino"),
    ):
        ratios = [cell["outcomes"][name]["ratios"]["transformers, openvino"]["median"] for cell in cells]
        assert f"| {told} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |" in page


def test_jpeg_files_are_told_as_recorded():
    page = words(README)
    (pillow, torchvision), (alone, torchvision_alone) = (
        [with_quartiles(row["times_as_fast"]) for row in rows(record)]
        for record in ("jpeg_512_avx512_bf16.json", "jpeg_512_one_process_avx512_bf16.json")
    )
    assert f"two workers | {pillow} |" in page
    assert f"`results/jpeg_512_one_process_avx512_bf16.json`) | {alone} |" in page
    assert f"two workers | {torchvision} |" in page
    assert f"in one process | {torchvision_alone} |" in page
    places = itertools.product(
        (("", "two workers"), ("_one_process", "one process")), (("zen4", ""), ("amx", ", AMX"), ("avx2", ", AVX2"))
    )
    for (record, place), (processor, suffix) in places:
        for row, their in zip(rows(f"jpeg_512{record}_{processor}.json"), ("Pillow", "torchvision"), strict=True):
            speeds = [with_quartiles(speed) for name, speed in row.items() if name.startswith("times_as_fast")]
            assert f"| {their}, {place}{suffix} | {' | '.join(speeds)} |" in page


def test_files_at_a_smaller_scale_are_told_as_recorded():
    page = words("docs/inference.md")
    for row in rows("draft.json"):
        speed = with_quartiles(row["times_as_fast"])
        both = [
            f"{row[f'{split}_accuracy']:.2%}, {row[f'{split}_accuracy_draft']:.2%}" for split in ("validation", "test")
        ]
        changed = f"{row['test_answers_changed']} of {row['test_images']}"
        cells = (f"{row['px']} px", f"{row['decoded_px']} px", speed, f"{row['mean_difference']:.2f}", *both, changed)
        assert f"| {' | '.join(cells)} |" in page
    pillow, torchvision = (row["draft_times_as_fast"]["median"] for row in rows("jpeg_512_one_process_zen4.json"))
    assert f"{pillow:.2f} times as fast by Pillow in one process and {torchvision:.2f} by torchvision" in page


def test_vit_and_resnet_on_few_images_are_told_as_recorded(script):
    module, page, evidence = script("small_data_compare"), words("docs/training.md"), words("docs/evidence.md")
    plan, records = module.Plan(), module.Records(RESULTS / "small_data_compare.jsonl")

    def at(start: str, data: str, images: int) -> list[float]:
        return module.scores(plan, records, start, data, images, "test_accuracy")

    cells = list(itertools.product(plan.data, plan.images))
    for start in plan.starts:
        assert all(len(at(start, *cell)) == len(plan.seeds) for cell in cells)
        assert f"| {start} | {' | '.join(module.told(at(start, *cell)) for cell in cells)} |" in page
    leads = [module.lead(plan, records, *cell) for cell in cells]
    assert f"| best ViT - best ResNet | {' | '.join(leads)} |" in page
    digits, photographs, fractals = leads[:3], leads[3:6], leads[6:]
    assert "by {} points with 50, {} with 200, {} with all".format(*(lead[1:] for lead in photographs)) in page
    assert "by {}, {} and {} points".format(*(lead[1:] for lead in digits)) in page
    assert "{}, {} and {} points after other fractals".format(*fractals) in page
    surely = [abs(float(gap)) > float(margin) for gap, margin in (lead.split(" ± ") for lead in leads[3:])]
    assert surely == [False, True, False] + [False] * 3, "of photographs 200 alone, of fractals none"
    assert digits[2] == f"-{100 / 360:.1f} ± 0.0", "one image of 360 in every seed"
    gained = [
        statistics.fmean(at(start, *cell)) - statistics.fmean(at("ViT", *cell))
        for start in ("ViT, masked", "ViT, contrast")
        for cell in cells
    ]
    assert max(gained) < 0.1
    scratch = [statistics.fmean(at("ResNet", *cell)) - statistics.fmean(at("ViT", *cell)) for cell in cells[6:]]
    assert "from scratch it is behind by {:.1f}, {:.1f} and {:.1f}".format(*scratch) in page
    assert (
        f"the ViT is {photographs[2][1:]} points ahead of a ResNet, with all digits {digits[2][1:]} behind, on new "
        f"classes of fractals {scratch[2]:.1f} behind from scratch and {fractals[2]} after other fractals"
    ) in evidence


def test_rates_of_pretraining_are_told_as_recorded(script):
    module, page, evidence = script("pretraining_rates"), words(README), words("docs/evidence.md")
    runs = [run for run in records("pretraining_rates.jsonl") if run["scale"] == 4.0]
    told = [row for row in module.summary(module.Records(module.OUTPUT), 4.0).splitlines() if "±" in row]
    assert len(told) == len(module.DATA) * sum(len(module.read_as(kind)) for kind in module.READINGS)
    assert not [row for row in told if row not in page]

    def at(start: str, labels: int, data: str = "digits", kind: str = "run") -> list[float]:
        place = {"start": start, "labels": labels, "data": data, "kind": kind}
        kept = {run["seed"]: 100 * run["accuracy"] for run in runs if place.items() <= run.items()}
        return [kept[seed] for seed in module.SEEDS]

    def gap(start: str, than: str, *place: Any) -> tuple[float, float]:
        """By how much it is ahead, and half of the 95% interval."""
        gaps = [ours - theirs for ours, theirs in zip(at(start, *place), at(than, *place), strict=True)]
        interval = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
        return statistics.mean(gaps), (interval.high - interval.low) / 2

    few, every = ({start: statistics.mean(at(start, labels)) for start in module.STARTS} for labels in (20, 0))
    ways = [start for start in module.STARTS if not start.startswith("scratch")]
    masked = [start for start in ways if start.startswith("masked")]
    gains = [few[start] - few["scratch"] for start in ways]
    assert f"above scratch, by {min(gains):.1f} to {max(gains):.1f} points" in page
    found = {
        (start, labels, data): gap(start, "scratch", labels, data)
        for start in ways for labels in (20, 0) for data in module.DATA
    }  # fmt: skip
    clear = [place for place, (lead, margin) in found.items() if abs(lead) > margin]
    assert (len(found), clear) == (20, [("masked, downsampled", 0, "photos")])
    assert '(all photographs after "downsampled", {:.1f} ± {:.1f} points)'.format(*found[clear[0]]) in page
    above = [[found[start, labels, "photos"][0] for start in ways if start != "contrast"] for labels in (20, 0)]
    below = [-found["contrast", labels, "photos"][0] for labels in (20, 0)]
    assert (
        "by {:.1f} to {:.1f} points on 20 labels a class and by {:.1f} to {:.1f} on all; contrast lies {:.1f} and "
        "{:.1f} below".format(*(end(of_labels) for of_labels in above for end in (min, max)), *below)
    ) in page
    within = max(abs(gap(start, "scratch, long", 0, "photos")[0]) for start in ways if start != "contrast")
    assert f"the means of all but contrast lie within {within:.1f} points of it" in page
    for labels in (20, 0):
        reached = {start: statistics.mean(at(start, labels, "photos")) for start in masked}
        assert max(reached, key=reached.__getitem__) == "masked, downsampled"
    photographs = {start: statistics.mean(at(start, 0, "photos")) for start in module.STARTS}
    reached = [photographs[start] for start in ways]
    assert (
        f"On all photographs {min(reached):.1f} to {max(reached):.1f}, scratch {photographs['scratch']:.1f} and "
        f"{photographs['scratch, long']:.1f}%"
    ) in evidence
    behind = [every["scratch, long"] - every[start] for start in ways]
    lowest, highest = (end(every[start] for start in ways) for end in (min, max))
    assert f"{every['scratch, long']:.1f}%, {min(behind):.1f} to {max(behind):.1f} points above every" in page
    of_masked = [every[start] for start in masked]
    assert f"at {min(of_masked):.1f} to {max(of_masked):.1f} beside {every['scratch']:.1f}%" in page
    assert "({:.1f} ± {:.1f} points above)".format(*gap("next patch", "scratch, long", 20)) in page
    assert (
        f"next patches {few['next patch']:.1f}, masked patches {min(few[start] for start in masked):.1f} to "
        f"{max(few[start] for start in masked):.1f}, contrast {few['contrast']:.1f}, scratch {few['scratch']:.1f} and, "
        f"for as many steps in all, {few['scratch, long']:.1f}%; on all labels {lowest:.1f} to {highest:.1f}, scratch "
        f"{every['scratch']:.1f} and {every['scratch, long']:.1f}%"
    ) in evidence

    probes = {
        (data, labels, start): gap(start, "scratch", labels, data, "probe")
        for data in module.DATA for labels in (20, 0) for start in ways
    }  # fmt: skip
    gains = [
        [lead for (data, of, _), (lead, _) in probes.items() if (data, of) == ("digits", kept)] for kept in (20, 0)
    ]
    assert (
        "by {:.1f} to {:.1f} points on 20 labels a class and {:.1f} to {:.1f} on all; all ten 95% intervals".format(
            *(end(of_labels) for of_labels in gains for end in (min, max))
        )
    ) in page
    clear = [place for place, (lead, margin) in probes.items() if abs(lead) > margin]
    assert clear == [place for place in probes if place[0] == "digits"] + [("photos", 20, "contrast")]
    lead, margin = probes["photos", 20, "contrast"]
    assert f"contrast on 20 labels a class, {-lead:.1f} ± {margin:.1f} points *below*" in page
    of_pixels = [each for labels in (20, 0) for each in probes["photos", labels, "masked, pixels"]]
    assert "Pixels are first here, {:.1f} ± {:.1f} and {:.1f} ± {:.1f} points above".format(*of_pixels) in page
    for data, labels in itertools.product(module.DATA, (20, 0)):
        first = max(ways, key=lambda start: probes[data, labels, start][0])
        assert first == {"digits": "contrast", "photos": "masked, pixels"}[data]
        best = max(masked, key=lambda start: probes[data, labels, start][0])
        assert best == "masked, pixels"
    assert all(
        statistics.mean(at("contrast", labels)) < statistics.mean(at("next patch", labels)) for labels in (20, 0)
    )
    highest = [run for run in runs if run["kind"] == "probe" and run["seed"] == 0 and run["rate"] == max(module.RATES)]
    assert len(highest) == 8, "eight of the twenty"
    reads = {
        (data, start): statistics.mean(at(start, 0, data, "probe"))
        for data in module.DATA for start in module.read_as("probe")
    }  # fmt: skip
    ends = [end(reads[data, start] for start in ways) for data in module.DATA for end in (min, max)]
    assert (
        "on all digits {:.1f} to {:.1f}%, without pre-training {:.1f}, on all photographs {:.1f} to {:.1f} and {:.1f}%"
    ).format(*ends[:2], reads["digits", "scratch"], *ends[2:], reads["photos", "scratch"]) in evidence


def test_the_scaling_law_is_told_as_recorded(script):
    law, page = script("scaling_law"), words(README)
    plan, kept = law.Plan(), law.Records(RESULTS / "scaling_law.jsonl")
    table = [row for row in law.summary(plan, kept).splitlines() if row.startswith("|")]
    assert len(table) == 2 + len(plan.sizes) + 1
    assert not [row for row in table[2:] if row not in page]
    record, runs = kept.find(plan.prediction()), [kept.find(job) for job in plan.runs()]
    assert record["law"] in page
    assert str(law.law_of(runs, shift=True)) == record["law"], "what was recorded is what the runs give"
    between = {name: f"{low:.3g} to {high:.3g}" for name, (low, high) in record["intervals"].items()}
    assert "95% of a are {a}, of b {b}, of c {c}, of d {d}".format(**between) in page
    assert [name for name, (low, _) in record["intervals"].items() if low > 0] == ["c"]
    measured = [kept.find(job)["loss"] for job in plan.held_out()]
    told = f"it said {record['loss']:.3f}; {min(measured):.3f} to {max(measured):.3f} were measured"
    assert f"For 256,000 images {told}, below the floor itself" in page
    assert max(measured) < law.law_of(runs, shift=True).c
    every = [record for job, _ in plan.jobs() if (record := kept.find(job))]
    assert f"{sum(each['cpu_seconds'] for each in every) / 60:.0f} CPU minutes" in page
    seeds = [f"{kept.find(job)['loss']:.2f}" for job in plan.choices() if job["rate"] == 1.6e-2]
    assert "whose three seeds end at {}, {} and {}".format(*sorted(seeds)) in page
    assert law.best_rate([kept.find(job) for job in plan.choices()]) == runs[0]["rate"] == 0.004


def test_the_longer_law_is_told_as_recorded(script):
    """Its intervals leave out 0, and what was recorded before is beside what was measured after."""
    law, page, evidence = script("scaling_law"), words(README), words("docs/evidence.md")
    plan = law.Plan(sizes=(32_000, 64_000, 128_000, 256_000), largest=512_000, shift=False)
    kept = law.Records(RESULTS / "scaling_law.jsonl")
    table = [row for row in law.summary(plan, kept).splitlines() if row.startswith("|")]
    assert len(table) == 2 + len(plan.sizes) + 1
    assert not [row for row in table[2:] if row not in page]
    record, runs = kept.find(plan.prediction()), [kept.find(job) for job in plan.runs()]
    fitted, measured = law.law_of(runs, shift=False), [kept.find(job)["loss"] for job in plan.held_out()]
    assert str(fitted) == record["law"], "what was recorded is what the runs give"
    assert f"{record['law']}, is determined" in page
    assert f"{record['law']}, whose three intervals leave out 0" in evidence
    assert all(low > 0 for low, _ in record["intervals"].values())
    between = {name: f"{low:.3g} to {high:.3g}" for name, (low, high) in record["intervals"].items()}
    assert "95% of a from {a}, of b {b}, of c {c}.".format(**between) in page
    assert "(b {:.2f} to {:.2f})".format(*record["intervals"]["b"]) in evidence
    low, high = fitted.interval(law.compute(plan.largest))
    assert low < min(measured)
    assert max(measured) < high
    said, mean = f"{record['loss']:.3f}", statistics.mean(measured)
    told = f"{min(measured):.3f} to {max(measured):.3f} were measured, in the mean {mean:.3f}"
    assert f"It said {said} of them (95%: {low:.3f} to {high:.3f}); {told}" in page
    assert f"(95%: {low:.3f} to {high:.3f}), and {mean:.3f} were measured" in evidence
    before = statistics.mean(run["loss"] for run in runs if run["images"] == 256_000)
    assert f"it foresaw a fall of {before - record['loss']:.3f}, and {before - mean:.3f} came" in page
    shifted = law.law_of(runs, shift=True).intervals
    assert [name for name, (low, _) in shifted.items() if low > 0] == ["c"]
    assert "(b {:.0f} to {:.1f}, c {:.2f} to {:.2f})".format(*shifted["b"], *shifted["c"]) in page
    assert f"{sum(kept.find(job)['cpu_seconds'] for job in plan.held_out()) / 60:.0f} more" in page
