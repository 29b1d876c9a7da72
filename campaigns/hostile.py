"""Every command that takes a repository, against hostile ones: nothing of a stranger runs, reads, writes or learns.

In every cell: the payload leaves no mark, the kernel sees nobody in the folder outside, nothing is written but the
Hub's cache and the command's output, no secret is printed, written or sent to another server than the Hub, and what is
refused is refused in one line without colours, warnings or tracebacks.
"""

import hashlib
import itertools
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from evaluation.tiny import NAMES, make_classifier, make_images, make_processor
from hub.conftest import save_model
from loopback.client import Client, Loopback, Outcome
from loopback.elsewhere import Elsewhere
from pages.small_runtime import save_runtime

from campaigns.engine import Campaign
from campaigns.hostile_hub.attacks import DATA_ATTACKS, MODEL_ATTACKS, PUSH_ATTACKS, SERVER_ATTACKS, WRONG, Attack
from campaigns.hostile_hub.commands import DATA, FOLDERS, MODELS, NOT_A_STRANGERS, PYTHON, takers
from campaigns.hostile_hub.ground import SECRETS, Ground

TOKEN = "hf_alice_write"
GOOD, THEIRS, HOSTILE = "alice/good", "alice/theirs", "mallory/hostile"
LONGEST_LINE = 1000
OF_TRANSFORMERS = ("predict model of transformers", "export model of transformers")
# What half of the commands import when they have been given what they take.
HEAVY = ("evaluate", "hf_vit.training.api", "matplotlib.pyplot", "sklearn.linear_model",
         "torchdata.stateful_dataloader")  # fmt: skip
# Each loads in its own way; the other commands load as one of these.
DOORS = {"predict model", "finetune model", "convert model", "python from_hub", "push model",
         "evaluate data", "embed data --streaming"}  # fmt: skip
# What belongs into the folder of a run: what it printed, its answer, its output, its home and temporary files.
_OF_THE_RUN = {"stdout", "stderr", "answer.json", "out", "home", "tmp"}


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
        self.bases: dict[str, dict[str, bytes]] = {}
        hub.reset()
        client = client_of("xet")
        for repo_id, folder in ((GOOD, self.good), (THEIRS, theirs)):
            self.bases[repo_id] = {path.name: path.read_bytes() for path in folder.iterdir()}
            client.run("campaigns.hostile_hub.ground:upload", repo_id=repo_id, folder=str(folder))
        hub.plant("mallory/code", {"modeling_evil.py": self.ground.payload.encode()}, like=GOOD)
        for repo_id in ("alice/private", HOSTILE):
            hub.plant(repo_id, {}, like=GOOD)

    def try_model(self, command: str, name: str, place: str) -> str:
        """A repository of the Hub ("lfs", "xet"), or the same as a folder ("folder")."""
        like = THEIRS if command.startswith("convert") or command.endswith("of transformers") else GOOD
        attack = ({**MODEL_ATTACKS, **SERVER_ATTACKS})[name](self.ground, self.bases[like])
        if place == "folder":
            folder = self._folder(attack, self.bases[like])
            return self._cell(command, str(folder), str(folder), Attack(), "xet")
        self.hub.plant(HOSTILE, attack.files, like, attack.large)
        return self._cell(command, HOSTILE, f"hf://{HOSTILE}", attack, place)

    def try_data(self, command: str, name: str, transport: str) -> str:
        attack = DATA_ATTACKS[name](self.ground, {}) if name in DATA_ATTACKS else self._served(name)
        self.hub.plant(HOSTILE, attack.files, None, attack.large)
        return self._cell(command, HOSTILE, "", attack, transport)

    def try_push(self, name: str, transport: str) -> str:
        return self._cell("push model", str(self.good), "", PUSH_ATTACKS[name](self.ground, {}), transport)

    def _served(self, name: str) -> Attack:
        """An honest data set, and a server that is not."""
        served = SERVER_ATTACKS[name](self.ground, {})
        honest = DATA_ATTACKS["honest"](self.ground, {})
        return replace(served, files=honest.files, large=honest.large)

    def _folder(self, attack: Attack, base: dict[str, bytes]) -> Path:
        """The repository as somebody's clone of it."""
        folder = self.root / "clone"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in {**base, **attack.files}.items():
            path = folder / name
            if data is not None and is_inside(folder, path):
                with suppress(OSError, ValueError):  # a name that no file can have
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
        return folder

    def _cell(self, command: str, repo: str, address: str, attack: Attack, transport: str) -> str:
        client = self.client_of(transport)
        self.hub.clear_faults()
        self.hub.settings(HOSTILE, gated=False, private=False)
        if attack.settings:
            self.hub.settings(HOSTILE, **attack.settings)
        for path, action, fields in attack.faults:
            self.hub.fault(path, action, **fields)
        self.ground.watch.seen()
        self.elsewhere.requests.clear()
        before = listing(self.root)
        words = {"repo": repo, "hf": address, "good": self.good, "data": self.data, "image": self.ground.picture}
        words["runtime"] = self.runtime
        words["place"] = repo.partition("/")[0] if repo == HOSTILE else repo
        outcome, folder = self._run(client, command, words)
        self.hub.clear_faults()
        self.told = outcome.err
        self._check(outcome, folder, client.home, before)
        return "done" if outcome.code == 0 else "refused"

    def _run(self, client: Client, command: str, words: dict[str, object]) -> tuple[Outcome, Path]:
        if command in PYTHON:
            arguments = {"name": PYTHON[command], "source": words["repo"]}
            job = client.start("campaigns.hostile_hub.ground:python", secrets=SECRETS, **arguments)
        else:
            wanted = {**MODELS, **FOLDERS, **DATA}[command.removesuffix(" of transformers")]
            arguments = [part.format(out="out", new=f"shared-{client.jobs}", **words) for part in wanted]
            job = client.start("campaigns.hostile_hub.ground:command", secrets=SECRETS, arguments=arguments)
        try:
            return job.wait(90), job.folder
        except TimeoutError as error:
            raise AssertionError(f"never ends: {str(error)[-300:]}") from None

    def _check(self, outcome: Outcome, folder: Path, home: Path, before: dict[str, int]) -> None:
        assert not self.ground.mark.exists(), f"a payload ran {self.ground.mark.unlink() or ''}"
        touched = self.ground.watch.seen()
        assert not touched, f"outside, {sorted(set(touched))} was touched"
        changed = {path for path, state in listing(self.root).items() if before.get(path) != state}
        strange = [path for path in changed if not may_write(path)]
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


def may_write(path: str) -> bool:
    """Into a model's own folder facts, card and pictures of what was measured."""
    pictures = ("confusion_matrix.png", "wrong_images.png")
    name = Path(path).name
    is_ours = name in ("facts.json", "README.md", *pictures) or name.startswith("analysis_")
    return path.startswith(("good/", "clone/")) and is_ours


def is_inside(folder: Path, path: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(folder) and path.name not in ("", "...", "..")


def listing(root: Path) -> dict[str, int]:
    """Every file below with the time of its last change."""
    inside = [root, *(path for path in root.iterdir() if path.is_dir() and path.name != "outside")]
    files = [path for place in inside for path in (place.iterdir() if place == root else place.rglob("*"))]
    return {str(path.relative_to(root)): path.lstat().st_mtime_ns for path in files if not path.is_dir()}


def check_words(outcome: Outcome) -> None:
    """Nothing for a terminal but words; of a refusal one line."""
    for stream in (outcome.out, outcome.err):
        strange = [sign for sign in stream if unicodedata.category(sign) in ("Cc", "Cf") and sign not in "\n\t"]
        assert not strange, f"control characters {strange[:5]}: {stream[-300:]!r}"
    assert "Traceback" not in outcome.err, outcome.err[-400:]
    lines = outcome.err.splitlines()
    foreign = [
        line
        for line in lines
        if not line.startswith(("hf-vit: ", "note: ", "assumed, ", "left out", "step ", "warning: "))
    ]
    assert not foreign, f"foreign words: {foreign[-3:]}"
    refusals = [line for line in lines if line.startswith("hf-vit: ")]
    assert len(refusals) == (outcome.code != 0), f"exit {outcome.code} with {lines[-3:]}"
    assert all(20 < len(line) < LONGEST_LINE for line in refusals), refusals


def lot(case: str, number: int) -> int:
    """A number below `number`, drawn by a hash of the case: every run draws the same."""
    return int(hashlib.sha256(case.encode()).hexdigest(), 16) % number


def model_cases() -> Iterator[str]:
    """Every attack on every door, and on what stands behind the same door every eighth; each at one place of three."""
    for command, name in itertools.product([*MODELS, *PYTHON, *OF_TRANSFORMERS], (*MODEL_ATTACKS, *SERVER_ATTACKS)):
        if (command in DOORS or lot(f"{command}{name}", 8) == 0) and not leaves_out(command, name):
            is_served = name in SERVER_ATTACKS or command == "verify repo"
            places = ["lfs", "xet"] if is_served else ["lfs", "xet", "folder"]
            yield f"{command}/{name}/{places[lot(name + command, len(places))]}"
    for command, name in itertools.product(FOLDERS, MODEL_ATTACKS):
        drawn = command in DOORS or lot(f"{command}{name}", 8) == 0
        if drawn and not leaves_out(command, name):
            yield f"{command}/{name}/folder"


def leaves_out(command: str, name: str) -> bool:
    """Of the many wrong values of a field every command meets about one; the readers have a campaign of their own."""
    return name.startswith(("config: ", "processor: ")) and name.endswith(tuple(WRONG)) and lot(command + name, 8) > 0


def data_cases() -> Iterator[str]:
    served = [name for name in SERVER_ATTACKS if name not in DATA_ATTACKS]
    for command, name in itertools.product(DATA, (*DATA_ATTACKS, *served)):
        if command in DOORS or lot(f"{command}{name}", 8) == 0:
            yield f"{command}/{name}/{('lfs', 'xet')[lot(name + command, 2)]}"


def push_cases() -> Iterator[str]:
    for name, transport in itertools.product(PUSH_ATTACKS, ("lfs", "xet")):
        yield f"push/{name}/{transport}"


def every_case() -> list[str]:
    return [*model_cases(), *data_cases(), *push_cases()]


def attempt(field: Field, case: str) -> str:
    command, name, place = case.split("/", 2)
    if "/" in place:  # the name of an attack holds none
        raise ValueError(case)
    if command == "push":
        return field.try_push(name, place)
    return field.try_data(command, name, place) if command in DATA else field.try_model(command, name, place)


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
            made.preload(*HEAVY)
            return made

        def client_of(transport: str) -> Client:
            client().transport = transport
            client().clear()
            return client()

        field = Field(folder / "field", hub, client_of, elsewhere)
        yield lambda case: attempt(field, case)
        log = hub.log()
        assert not [entry for entry in log if entry["origin"] == "storage" and entry["hub_token"]]
        assert not [entry for entry in log if "bug" in entry]


CAMPAIGN = Campaign(
    name="hostile",
    promise="no code of a stranger runs, nothing outside is read or written, no secret is told, a refusal is one line",
    cases=every_case,
    prepare=prepare,
    settings={"version": 1},
)
