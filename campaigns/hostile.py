"""Every command that takes a repository, against hostile ones: nothing of a stranger runs, reads, writes or learns.

In every cell: the payload leaves no mark, the kernel sees nobody in the folder outside, nothing is written but the
Hub's cache and the command's output, no secret is printed, written or sent to another server than the Hub, and what is
refused is refused in one line without colours, warnings or tracebacks.
"""

import hashlib
import itertools
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
from evaluation.tiny import NAMES, make_classifier, make_images, make_processor
from hub.conftest import save_model
from loopback.client import Client, Loopback, Outcome
from loopback.elsewhere import Elsewhere
from pages.small_runtime import save_runtime

from campaigns.engine import Campaign
from campaigns.hostile_attacks import DATA_ATTACKS, HONEST, MODEL_ATTACKS, PUSH_ATTACKS, SERVER_ATTACKS, WRONG, Attack
from campaigns.hostile_ground import SECRETS, Ground
from hf_vit_cli.main import build_app

TOKEN = "hf_alice_write"
GOOD, THEIRS, HOSTILE = "alice/good", "alice/theirs", "mallory/hostile"
LONGEST_LINE = 1000
# What stands for a repository in a parameter's help: a model, data or an image of the Hub, or a model's folder.
_TAKES = re.compile(
    r"Hub id|hf://|on the Hub|Hub users|[Ff]older of a saved|teacher|fine-tuned from|second model|as (in )?--data", re.I
)
# What takes no stranger's repository though its help speaks of one: where it goes, and data and trainings of one's own.
NOT_A_STRANGERS = {"push repo", "push dry_run", "finetune push", "finetune license", "embed output", "verify data"}
_LEARN = "--output {out} --steps 1 --batch-size 6 --evaluations 1"
_COMPARE = "compare --output {out} --no-robustness --speed-turns 0"
_ANALYZE = "analyze --output {out} --only patch_filters --num-images 4"
# "command parameter" -> what is typed; {repo} is the stranger's, {place} all that lies beside it, {good} a model;
# {data}, {image} and {runtime} are one's own, {new} is the name of a repository that is not there.
MODELS = {
    "predict model": "predict {repo} {image}",
    "evaluate model": "evaluate {repo} --data {data}",
    "embed model": "embed {repo} --data {data} --output {out}",
    "analyze model": f"{_ANALYZE} {{repo}} --images {{data}}",
    "analyze against": f"{_ANALYZE} {{good}} --images {{data}} --against {{repo}}",
    "compare models": f"{_COMPARE} {{good}} {{repo}} --data {{data}}",
    "diff model": "diff {repo} {good}",
    "diff other": "diff {good} {repo} --data {data}",
    "soup models": "soup {good} {repo} --output {out}",
    "finetune model": f"finetune {{repo}} --data {{data}} {_LEARN}",
    "finetune teacher": f"finetune {{good}} --data {{data}} {_LEARN} --teacher {{repo}}",
    "pretrain model": f"pretrain {{repo}} --data {{data}} {_LEARN}",
    "bench saved models": "bench saved {good} {repo} --turns 1 --batch 1",
    "bench data model": "bench data {repo} --data {data} --seconds 0.05",
    "convert model": "convert {hf} {out}",
    "export model": "export {repo} {out} --to transformers",
    "page models": "page {repo} --output {out} --runtime {runtime}",
    "verify repo": "verify {repo}",
    "models places": "models {place}",
}
# The same of a folder alone.
FOLDERS = {
    "card model": "card {repo}",
    "push model": "push {repo} alice/{new} --license mit",
    "cost model": "cost {repo}",
}
DATA = {
    "data source": "data {repo}",
    "evaluate data": "evaluate {good} --data {repo}",
    "embed data": "embed {good} --data {repo} --output {out}",
    "embed data --streaming": "embed {good} --data {repo} --output {out} --streaming",
    "analyze images": f"{_ANALYZE} {{good}} --images {{repo}}",
    "compare data": f"{_COMPARE} {{good}} {{good}} --data {{repo}}",
    "diff data": "diff {good} {good} --data {repo}",
    "page images": "page {good} --images {repo} --output {out} --runtime {runtime}",
    "soup data": "soup {good} {good} --output {out} --data {repo}",
    "finetune data": f"finetune {{good}} --data {{repo}} {_LEARN}",
    "finetune data --streaming": f"finetune {{good}} --data {{repo}} {_LEARN} --streaming",
    "finetune unlabeled": f"finetune {{good}} --data {{data}} {_LEARN} --teacher {{good}} --unlabeled {{repo}} "
    "--confidence 0",
    "pretrain data": f"pretrain {{good}} --data {{repo}} {_LEARN}",
    "bench data data": "bench data {good} --data {repo} --seconds 0.05",
}
# Functions of the package that do.
PYTHON = {"python from_hub": "from_hub", "python image_processor_from_hub": "image_processor_from_hub"}
OF_TRANSFORMERS = ("predict model of transformers", "export model of transformers")
# What half of the commands import when they have been given what they take.
HEAVY = ("evaluate", "hf_vit.training.api", "matplotlib.pyplot", "sklearn.linear_model",
         "torchdata.stateful_dataloader")  # fmt: skip
# Each loads in its own way; the other commands load as one of these.
DOORS = {"predict model", "finetune model", "convert model", "python from_hub", "push model",
         "evaluate data", "embed data --streaming"}  # fmt: skip
# Into a model's own folder facts, card and pictures of what was measured.
_MAY_WRITE = re.compile(
    r"(good|clone)/(.*/)?(facts\.json|README\.md|confusion_matrix\.png|wrong_images\.png|analysis_[^/]*)"
)
# What belongs into the folder of a run: what it printed, its answer, its output, its home and temporary files.
_OF_THE_RUN = {"stdout", "stderr", "answer.json", "out", "home", "tmp"}


def takers(command: Any = None, path: str = "") -> Iterator[str]:
    """Yield "command parameter" of everything in the program that may be given a repository."""
    command = command or typer.main.get_command(build_app())
    for name, inner in getattr(command, "commands", {}).items():
        yield from takers(inner, f"{path}{name} ")
    for parameter in [] if hasattr(command, "commands") else command.params:
        if _TAKES.search(f"{getattr(parameter, 'help', '')} {parameter.metavar or ''}"):
            yield f"{path}{parameter.name}"


class Field:
    """A Hub with honest repositories, a client, and what a cell needs around them."""

    def __init__(self, root: Path, hub: Loopback, client_of: Callable[..., Client], elsewhere: Elsewhere) -> None:
        self.root, self.hub, self.client_of, self.elsewhere = root, hub, client_of, elsewhere
        self.data = root / "data"
        for label, name in enumerate(NAMES):
            (self.data / name).mkdir(parents=True)
            for number, image in enumerate(make_images(8, seed=label)):
                image.save(self.data / name / f"{number}.png")
        self.good, self.runtime = save_model(root / "good", image_size=8), save_runtime(root / "runtime")
        theirs = root / "theirs"
        make_classifier().save_pretrained(theirs)
        make_processor().save_pretrained(theirs)
        shutil.copy(self.good / "README.md", theirs)
        self.ground = Ground(root, self.good, self.data / NAMES[0] / "0.png", elsewhere.address)
        self.bases: dict[str, Mapping[str, bytes]] = {}
        hub.reset()
        client = client_of("xet")
        for repo_id, folder in ((GOOD, self.good), (THEIRS, theirs)):
            self.bases[repo_id] = {path.name: path.read_bytes() for path in folder.iterdir()}
            client.run("campaigns.hostile_ground:upload", repo_id=repo_id, folder=str(folder))
        hub.plant("mallory/code", {"modeling_evil.py": self.ground.payload.encode()}, like=GOOD)
        for repo_id in ("alice/private", HOSTILE):
            hub.plant(repo_id, {}, like=GOOD)

    def attempt(self, case: str) -> str:
        command, name, place = case.split("/")  # the name of an attack holds no slash
        like = THEIRS if command.startswith("convert") or command.endswith("of transformers") else GOOD
        if command == "push":
            return self._cell("push model", str(self.good), "", PUSH_ATTACKS[name].at(self.ground, {}), place)
        served = SERVER_ATTACKS.get(name, Attack())  # an honest repository, and a server that is not
        files = DATA_ATTACKS.get(name, HONEST) if command in DATA else MODEL_ATTACKS.get(name, {})
        base = {} if command in DATA else self.bases[like]
        attack = Attack(files, served.faults, served.settings).at(self.ground, base)
        if place == "folder":
            folder = self._folder(attack, base)
            return self._cell(command, str(folder), str(folder), Attack(), "xet")
        self.hub.plant(HOSTILE, attack.files, None if command in DATA else like, attack.large)
        return self._cell(command, HOSTILE, "" if command in DATA else f"hf://{HOSTILE}", attack, place)

    def _folder(self, attack: Attack, base: Mapping[str, bytes]) -> Path:
        folder = self.root / "clone"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in {**base, **attack.files}.items():
            path = folder / name
            is_inside = Path(os.path.normpath(path)).is_relative_to(folder) and path.name not in ("", "...", "..")
            if data is not None and is_inside:
                with suppress(OSError, ValueError):  # a name that no file can have
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
        return folder

    def _cell(self, command: str, repo: str, address: str, attack: Attack, transport: str) -> str:
        client = self.client_of(transport)
        self.hub.clear_faults()
        self.hub.settings(HOSTILE, **{"gated": False, "private": False, **attack.settings})
        for path, action, fields in attack.faults:
            self.hub.fault(path, action, **fields)
        self.ground.watch.seen()
        self.elsewhere.requests.clear()
        before = listing(self.root)
        place = repo.partition("/")[0] if repo == HOSTILE else repo
        words = {"repo": repo, "hf": address, "good": self.good, "data": self.data, "image": self.ground.picture}
        words |= {"runtime": self.runtime, "place": place}
        outcome, folder = self._run(client, command, words)
        self.hub.clear_faults()
        self._check(outcome, folder, client.home, before)
        return "done" if outcome.code == 0 else "refused"

    def _run(self, client: Client, command: str, words: dict[str, object]) -> tuple[Outcome, Path]:
        if command in PYTHON:
            arguments = {"name": PYTHON[command], "source": words["repo"]}
            job = client.start("campaigns.hostile_ground:python", secrets=SECRETS, **arguments)
        else:
            typed = {**MODELS, **FOLDERS, **DATA}[command.removesuffix(" of transformers")].split()
            arguments = [part.format(out="out", new=f"shared-{client.jobs}", **words) for part in typed]
            job = client.start("campaigns.hostile_ground:command", secrets=SECRETS, arguments=arguments)
        try:
            return job.wait(90), job.folder
        except TimeoutError as error:
            raise AssertionError(f"never ends: {str(error)[-300:]}") from None

    def _check(self, outcome: Outcome, folder: Path, home: Path, before: dict[str, int]) -> None:
        assert not self.ground.mark.exists(), f"a payload ran {self.ground.mark.unlink() or ''}"
        touched = self.ground.watch.seen()
        assert not touched, f"outside, {sorted(set(touched))} was touched"
        changed = {path for path, state in listing(self.root).items() if before.get(path) != state}
        strange = [path for path in changed if not _MAY_WRITE.fullmatch(path)]
        assert not strange, f"written: {strange[:3]}"
        assert not {path.name for path in folder.iterdir()} - _OF_THE_RUN, "written into the working folder"
        assert {path.name for path in home.parent.iterdir() if not path.name.startswith("job-")} == {"home"}
        left = [*(folder / "home").rglob("*"), *(folder / "tmp").rglob("*")]
        left = [path for path in left if path.is_file() and "matplotlib" not in path.parts]  # its cache of fonts
        assert not left, f"left: {left[:3]}"
        for place in self._places(outcome, folder, home):
            told = [name for name, secret in {**SECRETS, "HF_TOKEN": TOKEN}.items() if secret.encode() in place[1]]
            assert not told, f"{place[0]} tells {told}"
        check_words(outcome)

    def _places(self, outcome: Outcome, folder: Path, home: Path) -> Iterator[tuple[str, bytes]]:
        """Where a secret must not be: in what was printed, written, sent elsewhere, pushed."""
        yield "the output", (outcome.out + outcome.err).encode()
        yield "a request elsewhere", "".join(self.elsewhere.requests).encode()
        for root in (folder, home):
            for path in root.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    yield str(path.relative_to(root)), path.read_bytes()
        for path in (self.hub.store / "blobs").rglob("*"):
            if path.is_file():
                yield "a blob on the Hub", path.read_bytes()


def listing(root: Path) -> dict[str, int]:
    inside = [root, *(path for path in root.iterdir() if path.is_dir() and path.name != "outside")]
    files = [path for place in inside for path in (place.iterdir() if place == root else place.rglob("*"))]
    return {str(path.relative_to(root)): path.lstat().st_mtime_ns for path in files if not path.is_dir()}


def check_words(outcome: Outcome) -> None:
    """Nothing for a terminal but words; of a refusal one line."""
    for stream in (outcome.out, outcome.err):
        strange = [sign for sign in stream if unicodedata.category(sign) in ("Cc", "Cf") and sign not in "\n\t"]
        assert not strange, f"control characters {strange[:5]}: {stream[-300:]!r}"
    assert "Traceback" not in outcome.err, outcome.err[-400:]
    lines, ours = outcome.err.splitlines(), ("hf-vit: ", "note: ", "assumed, ", "left out", "step ", "warning: ")
    foreign = [line for line in lines if not line.startswith(ours)]
    assert not foreign, f"foreign words: {foreign[-3:]}"
    refusals = [line for line in lines if line.startswith("hf-vit: ")]
    assert len(refusals) == (outcome.code != 0), f"exit {outcome.code} with {lines[-3:]}"
    assert all(20 < len(line) < LONGEST_LINE for line in refusals), refusals


def lot(case: str, number: int) -> int:
    """Return a number below `number`, drawn by a hash of the case."""
    return int(hashlib.sha256(case.encode()).hexdigest(), 16) % number


def every_case() -> list[str]:
    """Every attack on every door, and on what stands behind the same door every eighth; each at one place of three."""
    ours, served = [*MODELS, *PYTHON, *OF_TRANSFORMERS], [*SERVER_ATTACKS]
    pairs = [*itertools.product(ours, (*MODEL_ATTACKS, *served)), *itertools.product(FOLDERS, MODEL_ATTACKS)]
    pairs += itertools.product(DATA, (*DATA_ATTACKS, *(name for name in served if name not in DATA_ATTACKS)))
    cases: list[str] = []
    for command, name in pairs:
        places = ["lfs", "xet", "folder"]
        if command in DATA or name in SERVER_ATTACKS or command == "verify repo":
            places = ["lfs", "xet"]
        elif command in FOLDERS:
            places = ["folder"]
        # Of the many wrong values of a field every command meets about one; the readers have a campaign of their own.
        is_value = command not in DATA and name.startswith(("config: ", "processor: ")) and name.endswith(tuple(WRONG))
        if (command in DOORS or lot(f"{command}{name}", 8) == 0) and not (is_value and lot(command + name, 8)):
            cases.append(f"{command}/{name}/{places[lot(name + command, len(places))]}")
    return cases + [f"push/{name}/{transport}" for name in PUSH_ATTACKS for transport in ("lfs", "xet")]


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    """Yield the function that tries a case against a loopback Hub, and look through that Hub's log in the end."""
    tried = {name.removesuffix(" --streaming") for name in (*MODELS, *FOLDERS, *DATA)}
    assert set(takers()) == tried | NOT_A_STRANGERS, "a command that takes a repository is not attacked"
    with ExitStack() as stack:
        hub, elsewhere = stack.enter_context(Loopback(folder / "hub")), stack.enter_context(Elsewhere())

        @cache
        def client() -> Client:
            made = Client(hub, folder / "client")
            stack.callback(made.close)
            made.warm.ask("warm_up", names=HEAVY)  # once for all cases, many of which need them
            return made

        def client_of(transport: str) -> Client:
            client().transport = transport
            client().clear()
            return client()

        field = Field(folder / "field", hub, client_of, elsewhere)
        yield field.attempt
        log = hub.log()
        assert not [entry for entry in log if entry["origin"] == "storage" and entry["hub_token"]]
        assert not [entry for entry in log if "bug" in entry]


PROMISE = "no code of a stranger runs, nothing outside is read or written, no secret is told, a refusal is one line"
CAMPAIGN = Campaign("hostile", PROMISE, every_case, prepare, {"version": 1})
