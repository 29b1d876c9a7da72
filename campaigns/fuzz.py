"""Coverage-guided bytes for every reader: a refusal of one line or a good answer, and nothing else.

Needs atheris (`pip install atheris`), which is no dependency of the package. Corpora and findings stay in
`build/campaigns/fuzz/READER`, so that a stopped run resumes; executions, CPU seconds and what was found are kept in
`campaigns/results/fuzz.json`. A finding is an exception for which the program has no line, a line of more than 1,200
characters, more than 10 CPU seconds, or a peak of memory above three times the input and 64 MiB.
"""

import argparse
import hashlib
import io
import json
import os
import random
import re
import shutil
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.engine import RESULTS, SCRATCH, forget_peak, resident_memory

SECONDS, FREE_MEMORY, LONGEST, SLICE = 10, 64 * 2**20, 1200, 60
# Readers of one file of a model's folder.
FILES = {"config": "config.json", "processor": "preprocessor_config.json", "facts": "facts.json", "card": "README.md"}
READERS = (*FILES, "npz", "pth", "safetensors", "index", "csv", "jsonl", "coco", "dense")


class Ground:
    """A folder with a small model, shards, a list, masks and objects, of which each target replaces one file."""

    def __init__(self, root: Path) -> None:
        import torch
        from PIL import Image
        from safetensors.torch import save_file

        from campaigns.commands import save_classifier
        from hf_vit.results.facts import append_record, make_record

        self.root, self.model = root, root / "model"
        save_classifier(self.model, ("cat", "dog"), hidden_size=8, num_hidden_layers=1)
        values = {"top1": 0.5, "metrics": {"accuracy": 0.5}, "protocol": "top1", "settings": {"epochs": 1}}
        for kind in ("training", "evaluation"):
            append_record(self.model, make_record(kind, values=values, command="hf-vit finetune"))
        card = "---\nlicense: mit\ntags: [a]\nmodel-index:\n- name: a\n  results: []\n---\n# a\n"
        (self.model / "README.md").write_text(card)
        self.images = [Image.new("RGB", (8, 8), (20 * number, 9, 80)) for number in range(8)]
        for number, image in enumerate(self.images):
            for place in ("list", "coco", "dense/images"):
                (root / place).mkdir(parents=True, exist_ok=True)
                image.save(root / place / f"{number}.png")
            (root / "dense/annotations").mkdir(exist_ok=True)
            Image.new("L", (8, 8), number % 4).save(root / f"dense/annotations/{number}.png")
        (root / "shards").mkdir()
        shutil.copy(self.model / "config.json", root / "shards")
        self.tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2)}
        for number, (key, tensor) in enumerate(self.tensors.items()):
            save_file({key: tensor}, root / f"shards/model-{number}.safetensors")


def seeds_of(reader: str, ground: Ground) -> list[bytes]:
    """Return good inputs, from which mutations begin; a first byte 1 stands for the inside of an archive."""
    import numpy as np
    import torch
    from safetensors.torch import save

    file = io.BytesIO()
    if reader == "npz":
        np.savez(file, **{key: tensor.numpy() for key, tensor in ground.tensors.items()})  # pyright: ignore
    elif reader == "pth":
        torch.save({"state_dict": ground.tensors, "epoch": 1}, file)
    if archive := file.getvalue():
        members = zipfile.ZipFile(file)
        inside = next(name for name in members.namelist() if name.endswith(("bias.npy", "data.pkl")))
        return [b"\0" + archive, b"\1" + members.read(inside)]
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 1, 3, 3], "area": 9, "iscrowd": 0}
    masks = [[[1, 1, 4, 1, 4, 4]], {"size": [8, 8], "counts": [9, 3, 52]}]
    coco = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": 8, "width": 8} for n in range(8)],
        "annotations": [{**box, "image_id": n, "id": n, "segmentation": masks[n % 2]} for n in range(8)],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    rows = [{"image": f"{n}.png", "label": ("cat", "dog")[n % 2], "split": "train"} for n in range(8)]
    lines = [list(rows[0]), *(row.values() for row in rows)]
    index = {"weight_map": {key: f"model-{number}.safetensors" for number, key in enumerate(ground.tensors)}}
    given = {
        "safetensors": [b"\0" + save(ground.tensors), b"\1" + save(ground.tensors)[8:]],
        "index": [json.dumps(index).encode()],
        "csv": ["\n".join(map(",".join, lines)).encode()],
        "jsonl": ["\n".join(map(json.dumps, rows)).encode()],
        "coco": [json.dumps(coco).encode(), json.dumps({**coco, "annotations": [box]}).encode()],
        "dense": [
            b"\0" + (ground.root / "dense/annotations/0.png").read_bytes(),
            b'\1{"0": "a", "1": "b", "2": "c", "3": "d"}',
            b"\2Idx\tRatio\n1\t0.1\tcat\n2\t0.2\tdog\n3\t0.2\tcow",
        ],
    }
    return given[reader] if reader in given else [(ground.model / FILES[reader]).read_bytes()]


def targets(ground: Ground) -> dict[str, Callable[[bytes], object]]:
    from hf_vit.conversion.loading import open_model
    from hf_vit.conversion.readers import open_checkpoint
    from hf_vit.data import load_data
    from hf_vit.hub.card import render_card
    from hf_vit.hub.card_metadata import find_metadata_errors, read_license
    from hf_vit.loading.model import load_model
    from hf_vit_cli.main import format_error

    root, model = ground.root, ground.model
    good = {name: (model / name).read_bytes() for name in FILES.values()}

    def checkpoint(name: str, data: bytes, wrap: Callable[[bytes], bytes] = bytes) -> None:
        (root / name).write_bytes(wrap(data[1:]) if data[:1] == b"\1" else data[1:])
        with open_checkpoint((root / name).parent if name.endswith(".json") else root / name) as reader:
            for key in list(reader.shapes):
                reader.read_floats(key)

    def with_length(inner: bytes) -> bytes:
        return max(0, len(inner) - 32).to_bytes(8, "little") + inner

    def zipped(member: str, data: bytes) -> bytes:
        file = io.BytesIO()
        others = {"a/data/0": bytes(24), "a/data/1": bytes(8), "a/version": b"3", "a/byteorder": b"little"}
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in {member: data, **(others if member.endswith("pkl") else {})}.items():
                archive.writestr(name, content)
        return file.getvalue()

    def predict() -> None:
        loaded = load_model(model)
        loaded.model(loaded.pixel_values(ground.images[:2]))

    def card() -> None:
        read_license(model)
        cards = (model / "README.md").read_text("utf-8", "replace"), render_card(model)
        lines = [line for each in cards for line in find_metadata_errors(each)]
        assert all(len(line) < LONGEST for line in lines), "a long line"

    def replace(name: str, data: bytes) -> None:
        """Try every door to a model; the worst error counts."""
        (model / name).write_bytes(data)
        errors: list[Exception] = []
        for door in (card, predict, lambda: open_model(model))[: 1 if name in ("facts.json", "README.md") else 3]:
            try:
                door()
            except Exception as error:
                errors.append(error)
        (model / name).write_bytes(good[name])
        for error in sorted(errors, key=lambda error: format_error(error) is not None):
            raise error

    def table(place: str, name: str, data: bytes, target: Any = "label") -> None:
        (root / place / name).write_bytes(data)
        load_data(str(root / place if target == "mask" else root / place / name), multi_label=True, target=target)

    def dense(data: bytes) -> None:
        names = ["annotations/0.png", "id2label.json", "objectInfo.txt"]
        for name in names[1:]:
            (root / "dense" / name).unlink(missing_ok=True)
        table("dense", names[data[0] % 3 if data else 0], data[1:], "mask")

    return {
        "npz": lambda data: checkpoint("a.npz", data, lambda inner: zipped("a.npy", inner)),
        "pth": lambda data: checkpoint("a.pth", data, lambda inner: zipped("a/data.pkl", inner)),
        "safetensors": lambda data: checkpoint("a.safetensors", data, with_length),
        "index": lambda data: checkpoint("shards/model.safetensors.index.json", b"\0" + data),
        "csv": lambda data: table("list", "a.csv", data),
        "jsonl": lambda data: table("list", "a.jsonl", data),
        "coco": lambda data: table("coco", "a.json", data, "objects"),
        "dense": dense,
        **{reader: lambda data, name=name: replace(name, data) for reader, name in FILES.items()},
    }


def mutate(reader: str, data: bytes, longest: int, seed: int) -> bytes:
    """Return other bytes: of JSON and lists half of the time with one odd value, else as libFuzzer has it."""
    import atheris

    from campaigns.forgeries import NAMES, VALUES

    draw = random.Random(seed)
    odd = draw.choice([value for value in (*VALUES, *NAMES) if len(repr(value)) < 400])
    try:
        if reader in ("config", "processor", "index", "facts", "coco") and draw.random() < 0.7:
            return json.dumps(_change(json.loads(data), odd, draw)).encode()[:longest]
        if reader == "jsonl" and draw.random() < 0.6:
            lines = data.split(b"\n")
            at = draw.randrange(len(lines))
            lines[at] = json.dumps(_change(json.loads(lines[at]), odd, draw)).encode()
            return b"\n".join(lines)[:longest]
        if reader in ("csv", "card") and draw.random() < 0.6:
            parts = re.split(rb"([,;\t\n\r\":])", data)
            parts[draw.randrange(len(parts))] = str(odd).encode("utf-8", "surrogatepass")
            return b"".join(parts)[:longest]
    except (ValueError, LookupError, OverflowError, RecursionError):
        pass
    return atheris.Mutate(data, longest)


def _change(tree: Any, odd: Any, draw: random.Random) -> Any:
    """Return a tree of JSON in which one value is odd, gone, another one's, a multiple, or under an odd name."""
    from campaigns.forgeries import places, value_at, with_value

    place, other = (draw.choice(places(tree)) for _ in range(2))
    value, way = value_at(tree, place), draw.randrange(6)
    if way == 0 or (way == 1 and isinstance(place[-1], str)):
        del value_at(tree, place[:-1])[place[-1]]
        return tree if way == 0 else with_value(tree, (*place[:-1], str(odd)), value)
    if way == 2:
        return with_value(tree, place, value_at(tree, other))
    if way == 3 and isinstance(value, int | float):
        return with_value(tree, place, value * draw.choice((-1, 0.5, 1000, 10**9, 10**20)))
    return with_value(tree, place, odd)


def judge(target: Callable[[bytes], object], data: bytes) -> tuple[str, str] | None:
    """Return what is wrong, in a word with its place, and the details; None where nothing is."""
    from hf_vit_cli.main import format_error

    forget_peak()
    before, begin, problem = resident_memory("HWM"), time.process_time(), None
    try:
        target(data)
    except Exception as error:
        message = format_error(error)
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((one for one in reversed(frames) if re.search(r"/(src|conversion)/", one.filename)), frames[-1])
        if message is None:
            place = f"{Path(frame.filename).name} {frame.name}"
            problem = f"{type(error).__name__} in {place}", traceback.format_exc()[-3000:]
        elif len(message) > LONGEST:
            problem = f"long message in {frame.name}", message[:3000]
    seconds, memory = time.process_time() - begin, resident_memory("HWM") - before
    if problem is None and seconds > SECONDS:
        problem = "slow", f"{seconds:.0f} s"
    if problem is None and memory > max(FREE_MEMORY, 3 * len(data)):
        problem = "memory", f"{memory / 2**20:.0f} MiB of {len(data)} bytes"
    return problem


def prepare() -> None:
    """Import, once, what is fuzzed, so that libFuzzer sees its branches."""
    import atheris

    os.environ["HF_HUB_OFFLINE"] = "1"
    with atheris.instrument_imports(include=["hf_vit", "json", "zipfile", "pickletools", "csv", "yaml", "numpy.lib"]):
        import logging

        from datasets import disable_progress_bars

        import campaigns.forgeries  # noqa: F401 - for the mutations

        with tempfile.TemporaryDirectory() as place:
            targets(Ground(Path(place)))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    disable_progress_bars()


def folder_of(reader: str, kind: str) -> Path:
    place = SCRATCH / "fuzz" / reader / kind
    place.mkdir(parents=True, exist_ok=True)
    return place


def fuzz(reader: str, seconds: float, counter: Path) -> None:
    """Fuzz one reader for so many CPU seconds, then end the process."""
    import atheris

    corpus, found = folder_of(reader, "corpus"), folder_of(reader, "findings")
    ground = Ground(Path(tempfile.mkdtemp(prefix="fuzz-")))
    target, count = targets(ground)[reader], 0
    for data in seeds_of(reader, ground):
        (corpus / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
        target(data)
    begin = time.process_time()

    def try_one(data: bytes) -> None:
        nonlocal count
        problem, count = judge(target, data), count + 1
        path = found / f"{hashlib.sha256(str(problem and problem[0]).encode()).hexdigest()[:12]}.bin"
        if problem is not None and not (path.exists() and path.stat().st_size <= len(data)):
            path.write_bytes(data)
            path.with_suffix(".txt").write_text("\n".join(problem))
        if count % 20 == 0 or time.process_time() - begin > seconds:
            counter.write_text(f"{count} {time.process_time() - begin}")
        if time.process_time() - begin > seconds:
            shutil.rmtree(ground.root)
            os._exit(0)

    arguments = ["fuzz", "-timeout=3000", "-rss_limit_mb=6000", "-max_len=16384", "-verbosity=0"]
    arguments += [f"-artifact_prefix={found}/", str(corpus)]
    atheris.Setup(arguments, try_one, custom_mutator=partial(mutate, reader))
    atheris.Fuzz()


def run(reader: str, seconds: float) -> None:
    """Run one slice in a copy of this process and add what it did to the record."""
    counter = Path(tempfile.mkdtemp()) / "count"
    counter.write_text("0 0")
    if (child := os.fork()) == 0:
        try:
            fuzz(reader, seconds, counter)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.waitpid(child, 0)
    count, spent = counter.read_text().split()
    path, found = RESULTS / "fuzz.json", folder_of(reader, "findings")
    record = json.loads(path.read_text()) if path.exists() else {"readers": {}}
    row = record["readers"].setdefault(reader, {"executions": 0, "cpu_seconds": 0, "findings": []})
    row["executions"] += int(count)
    row["cpu_seconds"] = round(row["cpu_seconds"] + float(spent))
    texts = {each.read_text().partition("\n")[0] for each in found.glob("*.txt")}
    texts |= {each.name.partition("-")[0] for each in found.glob("*-*")}  # libFuzzer's: a crash, a hang
    row["findings"] = sorted({*row["findings"], *texts})
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(reader, row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.fuzz", description=__doc__)
    parser.add_argument("--reader", choices=READERS, action="append", help="by default all, in turn")
    parser.add_argument("--seconds", type=int, default=7200, help="of CPU for every reader, over all runs")
    parser.add_argument("--replay", action="store_true", help="try all findings again")
    arguments = parser.parse_args()
    readers, path = arguments.reader or READERS, RESULTS / "fuzz.json"
    prepare()
    if arguments.replay:
        ground = Ground(Path(tempfile.mkdtemp(prefix="fuzz-")))
        for reader in readers:
            for file in sorted(folder_of(reader, "findings").iterdir()):
                if file.suffix != ".txt":
                    print(reader, file.name, judge(targets(ground)[reader], file.read_bytes()) or "good", flush=True)
        return
    while True:
        rows = json.loads(path.read_text())["readers"] if path.exists() else {}
        spent = {each: rows.get(each, {}).get("cpu_seconds", 0) for each in readers}
        reader = min(spent, key=lambda each: spent[each])
        if spent[reader] >= arguments.seconds:
            return
        run(reader, SLICE)


if __name__ == "__main__":
    main()
