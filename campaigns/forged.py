"""Forged and damaged checkpoints of every reader and origin: refused in one line, or exactly the same model.

What a file becomes is asked of the three doors that read it: `convert`, the command line and `from_hub`. Whatever it
is, no pickle of it has run, the folder that an earlier conversion wrote is whole, nothing else was left. The peak of
resident memory (the kernel's VmHWM, set back before each case) lay at most three times the file, or 64 MiB, above what
it was; of a model that was written in float32 from half precision, three times the model. The heavy cases run in a
process of their own, whose memory nothing else has used.
"""

import contextlib
import ctypes
import functools
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from originals.cases import CASES, FORMATS, converted, files_of_model
from originals.google import make_checkpoint

import hf_vit
from campaigns import forgeries
from campaigns.engine import Campaign, forget_peak, resident_memory
from campaigns.forgeries import TRACE, Bench, Forge, Forgery
from campaigns.formats import Arrays
from hf_vit.conversion import readers
from hf_vit.conversion.origins.registry import ORIGINS
from hf_vit.errors import UserError
from hf_vit_cli.main import main

SEED = 0
LONGEST = 1200  # characters of a refusal: eight keys of some length are named
FREE_MEMORY = 64 * 2**20
EARLIER_FACTS = b'[{"kind": "conversion", "command": "hf-vit convert", "date": "2031-02-03T00:00:00Z"}]'
EARLIER = {"facts.json": EARLIER_FACTS, "model.safetensors": b"an earlier model"}
Outcome = Mapping[str, bytes] | str


@functools.cache
def bench_of(name: str, form: str) -> Bench:
    arrays = CASES[name].make(make_checkpoint)
    bench = Bench(name, form, arrays, FORMATS[form].dump(arrays), {})
    with TemporaryDirectory() as folder:
        model = put_and_convert(bench, bench.forged(bench.data), Path(folder), convert)
    assert not isinstance(model, str), model
    return replace(bench, model=model)


def convert(bench: Bench, source: Path, output: Path) -> Mapping[str, bytes]:
    return bench.case.run(source, output, **bench.case.options)


def command(bench: Bench, source: Path, output: Path) -> Mapping[str, bytes]:
    """`hf-vit convert`, which says one line on standard error where it refuses."""
    texts = {key: "x".join(map(str, one)) if isinstance(one, tuple) else one for key, one in bench.case.options.items()}
    options = [str(word) for key, text in texts.items() for word in (f"--{key.replace('_', '-')}", text)]
    said, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            main(["convert", str(source), str(output), "--force", *options])
    except SystemExit as stop:
        if not stop.code:
            return files_of_model(output)
        (line,) = errors.getvalue().splitlines()
        assert line.startswith("hf-vit: "), line
        raise UserError(line.removeprefix("hf-vit: ")) from None
    raise AssertionError("the command did not end")


def from_hub(bench: Bench, source: Path, output: Path) -> Mapping[str, bytes]:
    model, processor = hf_vit.from_hub(source, **bench.case.options), hf_vit.image_processor_from_hub(source)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return files_of_model(Path(folder))


DOORS = {"convert": convert, "command": command, "from_hub": from_hub}


def put_and_convert(bench: Bench, forgery: Forgery, place: Path, door: Callable[..., Mapping[str, bytes]]) -> Outcome:
    """What the files become, or the refusal; an earlier output is replaced or untouched, and nothing else is left."""
    for name, content in forgery.files.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content) if isinstance(content, bytes) else file.symlink_to(content)
    output = place / forgery.output
    output.mkdir()
    for name, content in EARLIER.items():
        (output / name).write_bytes(content)
    before = sorted(path.name for path in place.iterdir())
    size = sum(len(content) for content in forgery.files.values())
    try:
        with peak_below(lambda: max(FREE_MEMORY, 3 * size, 3 * sum(map(len, outcome.values())))):
            outcome: Mapping[str, bytes] = {}
            outcome = door(bench, place / forgery.source, output)
    except UserError as error:
        outcome = str(error)
    if isinstance(outcome, str) or door is from_hub or bench.case.run is not converted:
        assert {path.name: path.read_bytes() for path in output.iterdir()} == EARLIER, "the earlier output was touched"
    assert sorted(path.name for path in place.iterdir()) == before, "something was left"
    return outcome


@contextlib.contextmanager
def peak_below(limit: Callable[[], int]) -> Iterator[None]:
    """The peak of resident memory meanwhile is at most so many bytes above what it was, refused or not."""
    if not Path("/proc/self/status").exists():
        yield  # only Linux tells
        return
    ctypes.CDLL(None).malloc_trim(0)  # what was free before is not to hide what is taken now
    forget_peak()
    before = resident_memory("RSS")
    try:
        yield
    finally:
        above = resident_memory("HWM") - before
        assert above <= limit(), f"took {above / 2**20:.0f} MiB, {limit() / 2**20:.0f} are allowed"


def judged(bench: Bench, forgery: Forgery, outcome: Outcome) -> str:
    if isinstance(outcome, str):
        assert outcome.isprintable(), f"no line: {outcome!r}"
        assert len(outcome) <= LONGEST, f"{len(outcome)} characters: {outcome}"
        files = {str(UserError(part)) for name in (*forgery.files, forgery.output) for part in name.split("/")}
        assert any(name in outcome for name in (*files, *bench.arrays)), f"names nothing: {outcome}"
        return "refused"
    assert not forgery.never, "accepted"
    if outcome == bench.model:
        return "same model"
    if forgery.arrays is not None:
        assert outcome == model_of(bench, forgery.arrays), "another model than its arrays make"
        return "the model of the arrays it names"
    others = [name for name in outcome if outcome[name] != bench.model[name]]
    assert forgery.declared is not None, f"another model: {others}"
    value = forgery.declared[1]
    for place, said in differences(bench.model, outcome).items():
        # Null is what the class defaults to, as are no names, and what an object does not say any more is gone.
        silent = value is None and (place.startswith("preprocessor") or "image_" in place or "id2label" in place)
        silent = silent or (value == [] and "id2label" in place)
        gone = said is None and isinstance(value, dict | list)
        assert silent or gone or said in (value, *leaves(value).values()), f"{forgery.declared}: {place}={said!r}"
    return "as declared"


def model_of(bench: Bench, arrays: Arrays) -> Outcome:
    """What these arrays become in a file of numpy's or safetensors' own writing."""
    with TemporaryDirectory() as place:
        data = FORMATS[bench.case.formats[0]].dump(arrays)
        other = bench_of(bench.name, bench.case.formats[0])
        return put_and_convert(other, other.forged(data), Path(place), convert)


def differences(model: Mapping[str, bytes], other: Mapping[str, bytes]) -> dict[str, Any]:
    """Field of the JSON files -> value in the other model, where they differ; their weights are the same."""
    assert model["model.safetensors"] == other["model.safetensors"], "other weights"
    found: dict[str, Any] = {}
    for name in ("config.json", "preprocessor_config.json"):
        one, two = leaves(json.loads(model[name])), leaves(json.loads(other[name]))
        for place in one.keys() | two.keys():
            if one.get(place) != two.get(place) and "label2id" not in place:  # which is id2label the other way round
                found[f"{name}: {place}"] = two.get(place)
    return found


def leaves(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict | list) or not content:
        return {"": content}
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    return {f"{key}/{place}": value for key, one in inner for place, value in leaves(one).items()}


class Kind(NamedTuple):
    """A kind of forgery: how many of each checkpoint, how, of which files and which reader."""

    number: int
    forge: Forge
    formats: tuple[str, ...]
    reader: type[readers.CheckpointReader] | None = None
    of_folders: bool = False
    only: tuple[str, ...] = tuple(CASES)


NPZ, TORCH = ("stored", "deflated"), ("safetensors", "pth")
KINDS = {
    "damaged bytes": Kind(55, forgeries.damage_bytes, NPZ + TORCH),
    "edited arrays": Kind(55, forgeries.edit_arrays, NPZ + TORCH),
    "archives of npz": Kind(75, forgeries.forge_archive, NPZ, readers.NpzReader),
    "archives of torch": Kind(80, forgeries.forge_archive, ("pth",), readers.TorchReader),
    "members of npz": Kind(80, forgeries.forge_npy, NPZ, readers.NpzReader),
    "headers of safetensors": Kind(105, forgeries.forge_safetensors, ("safetensors",), readers.SafetensorsReader),
    "storages": Kind(170, forgeries.forge_storages, ("pth",), readers.TorchReader),
    "pickles": Kind(115, forgeries.forge_pickle, ("pth",), readers.TorchReader),
    "shards": Kind(85, forgeries.forge_shards, TORCH, readers.ShardedReader, of_folders=True),
    "configs and processors": Kind(180, forgeries.forge_json, TORCH, of_folders=True),
    "heavy": Kind(120, forgeries.forge_heavy, ("stored", "pth"), only=("vit_jax", "timm_vit")),
    "names of files": Kind(15, forgeries.forge_names, NPZ + TORCH),
}


def cases() -> list[str]:
    return [
        f"{kind}/{name}/{form}/{number}"
        for kind, how in KINDS.items()
        for name, case in CASES.items()
        for form in case.formats
        if form in how.formats and (case.beside is not None or not how.of_folders) and name in how.only
        for number in range(how.number)
    ]


def attempt(case: str) -> str:
    kind, name, form, _ = case.split("/")
    rng, bench = random.Random(f"{SEED}/{case}"), bench_of(name, form)
    with TemporaryDirectory() as place:
        forgery = KINDS[kind].forge(bench, rng)
        doors = ["convert"] * 8 + ["command", "from_hub"] if bench.case.run is converted else ["convert"]
        try:
            outcome = put_and_convert(bench, forgery, Path(place), DOORS[rng.choice(doors)])
        except (AssertionError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        assert not TRACE.exists(), "a pickle ran"
    return judged(bench, forgery, outcome)


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    """Yield the function that tries; heavy cases run in a process whose memory nothing else has used."""
    assert {name.split()[0] for name in CASES} == {origin.name for origin in ORIGINS}, "an origin is not attacked"
    known = set(readers.CheckpointReader.__subclasses__()) - {readers.HeadedReader}  # reads two files by the others
    assert {how.reader for how in KINDS.values()} - {None} == known, "a reader, too"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        yield lambda case: alone.submit(attempt, case).result() if case.startswith("heavy/") else attempt(case)


PROMISE = (
    "a damaged or forged checkpoint becomes the same model or one line; no pickle runs, the earlier output "
    "stays whole, memory stays within three times the file or 64 MiB"
)
CAMPAIGN = Campaign("forged", PROMISE, cases, prepare, {"seed": SEED}, lambda case: not case.startswith("heavy/"))
