"""Verify that a classifier gives the same answers through every door: `hf-vit verify FOLDER --doors`."""

import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel
from transformers import PreTrainedModel

from hf_vit.conversion.exporting import export
from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
from hf_vit.conversion.targets.graphs.certificate import Certificate
from hf_vit.conversion.targets.graphs.runtimes import ONNXRUNTIME, OPENVINO, Runtime
from hf_vit.conversion.targets.registry import find_target
from hf_vit.data import load_data
from hf_vit.data.images import decode_image, undecode_images
from hf_vit.data.sources import is_builtin
from hf_vit.data.transforms import keeps_shapes
from hf_vit.environment import list_versions, read_hardware
from hf_vit.errors import UserError, to_one_line
from hf_vit.evaluation.reading import compute_scores, convert_to_scores
from hf_vit.families import get_problem_type, refuse_diverged
from hf_vit.hub.contents import HANDLER
from hf_vit.hub.verify import run_program
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.pixels import keep_own_sizes
from hf_vit.pages.making import make_page
from hf_vit.results.documents import Document, ModelInput
from hf_vit.results.facts import DataFact, Facts
from hf_vit.writing import make_scratch_folder

NAME = "doors.json"
MAX_IMAGES = 1000
BOUND = 1e-4
_BATCH = 16
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
_FLAGS = ("--headless=new", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-background-networking")
_SECONDS = 120  # that a browser may take for one image
_FUNCTIONS = {"multi_label_classification": "sigmoid", "regression": "none"}
Entries = list[tuple[str, float]]  # (label, score) of one image
Answers = tuple[list[Entries], str, str | None]  # of all images; the version of what ran; a graph's certificate

# Runs where hf_vit cannot be imported, in a folder whose code this package has just written.
_STRANGER = """\
import json
from handler import EndpointHandler
from PIL import Image
from transformers import pipeline

job = json.load(open("job.json"))
classify = pipeline("image-classification", "model", trust_remote_code=True, device="cpu")
options = {"top_k": job["classes"], "function_to_apply": job["function"]}
answers = {"pipeline": [classify(Image.open(file), **options) for file in job["files"]], "handler": []}
handler, size = EndpointHandler("model"), job["batch"]
for start in range(0, len(job["files"]), size):
    inputs = [open(file, "rb").read() for file in job["files"][start : start + size]]
    answers["handler"] += handler({"inputs": inputs, "parameters": options})
json.dump(answers, open("answers.json", "w"))
"""
# Gives each image to the page's own file input, and sends the logits that the page shows.
_DRIVER = """\
let receive;
document.addEventListener("result", ({ detail }) => receive?.([...detail.outputs.logits.data]));
while (!document.querySelector(".stage")) await new Promise((resolve) => setTimeout(resolve, 50));
const input = document.querySelector("#file");
for (const name of await (await fetch("files.json")).json()) {
  const given = new DataTransfer();
  given.items.add(new File([await (await fetch(`images/${name}`)).blob()], name, { type: "image/png" }));
  const answer = new Promise((resolve) => { receive = resolve; });
  input.files = given.files;
  input.dispatchEvent(new Event("change"));
  await fetch("answer", { method: "POST", body: JSON.stringify(await answer) });
}
"""


class NotTriedError(UserError):
    """A door cannot be tried: its library or browser is missing, or it does not take such a model."""


class Door(BaseModel):
    """What came through one door.

    Attributes:
        name: the door.
        version: library or browser and its version.
        images: number of images.
        equal_labels: number of images with the model's label (multi-label: labels of at least 0.5).
        largest_difference: of a probability; of a value of a regression model relative to the largest if above 1.
        certificate: of an exported graph, in words.
        not_tried: why the door was not tried.
    """

    name: str
    version: str | None = None
    images: int = 0
    equal_labels: int = 0
    largest_difference: float | None = None
    certificate: str | None = None
    not_tried: str | None = None

    @property
    def is_equal(self) -> bool:
        """Return whether the answers are within the bound; another label is then a near tie. NaN is not equal."""
        return self.not_tried is not None or (self.largest_difference is not None and self.largest_difference <= BOUND)


class DoorsCertificate(Document):
    """The content of `doors.json`."""

    command: ClassVar[str] = "hf-vit verify --doors"

    model: ModelInput
    data: DataFact
    bound: float = BOUND
    doors: list[Door]
    versions: dict[str, str]
    hardware: dict[str, Any]

    def rows(self) -> list[list[str]]:
        """Return the table's rows: door, labels equal, largest difference, what ran or why it was not tried."""
        rows: list[list[str]] = []
        for door in self.doors:
            cells = ["-", "-", f"not tried: {door.not_tried}"]
            if door.not_tried is None:
                about = "; ".join(filter(None, (door.version, door.certificate)))
                cells = [f"{door.equal_labels:,} of {door.images:,}", f"{door.largest_difference:.1e}", about]
            rows.append([door.name, *cells])
        return rows


def verify_doors(
    folder: str | Path,
    data: str | None = None,
    *,
    runtime: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> DoorsCertificate:
    """Give the same images to a saved classifier through every door, and write `doors.json` into its folder.

    The reference is the torch model. transformers' `pipeline` and the handler run where hf_vit cannot be imported, on a
    copy of the model with this package's code: code in the folder does not run. All doors compute in float32 on the
    CPU. A door whose library or browser is missing, or that does not take the model, is not tried; the pipeline and the
    page, which resize images to one size, are not tried for a model whose image processor keeps their shape.

    Args:
        folder: folder of a saved classifier.
        data: data set whose test images (at most `MAX_IMAGES`) are used; default: the built-in data that the model was
            trained on, else "photos".
        runtime: folder with the files of ONNX Runtime Web for the browser's page, see `make_page`.
        report: called with each line of progress.

    Raises:
        UserError: the folder holds no classifier, or a door gives other answers.
    """
    loaded = load_model(str(folder), "cpu", as_classifier=True)
    if loaded.processor is None or loaded.folder is None or not hasattr(loaded.model, "save_pretrained"):
        raise UserError(f"{folder} is not a folder that save_pretrained wrote; give the folder of a saved classifier")
    refuse_diverged(loaded.model, str(folder), "tried in float32")
    loaded.model.float()
    model_input = ModelInput(**loaded.describe())
    source = data
    if source is None:
        trained_on = [record.data for record in Facts.load(loaded.folder).filter_kind("training") if record.data]
        source = trained_on[-1].name if trained_on and is_builtin(trained_on[-1].name) else "photos"
    with make_scratch_folder("doors") as scratch:
        images, fact = _write_images(source, scratch / "images")
        model: Any = loaded.model
        for part in (model.config, loaded.processor):  # both may name code elsewhere, which would run
            vars(part).pop("auto_map", None)
        model.save_pretrained(scratch / "model")
        loaded.processor.save_pretrained(scratch / "model")
        ways: dict[str, Callable[[], Answers]] = {
            "torch": lambda: (_run_model(loaded, images), f"torch {torch.__version__}", None),
            **{name: partial(_run_without_package, name, loaded, images, scratch) for name in ("pipeline", "handler")},
            **{each.package: partial(_run_graph, each, loaded, images, scratch) for each in (ONNXRUNTIME, OPENVINO)},
            "browser page": lambda: _run_page(loaded, images, scratch, runtime),
        }
        doors, reference = list[Door](), list[Entries]()
        for name, run in ways.items():
            report(f"computing the answers of {name}")
            try:
                if name == "pipeline" and keeps_shapes(loaded.processor):
                    raise NotTriedError("it resizes images to one size, and the image processor keeps their shape")
                answers, version, certificate = run()
            except NotTriedError as error:
                doors.append(Door(name=name, not_tried=to_one_line(error)))
                continue
            reference = reference or answers  # those of the first, torch
            door = Door(name=name, version=version, images=len(answers), certificate=certificate)
            doors.append(_compare(door, reference, answers, get_problem_type(loaded.model)))
    hardware = read_hardware()
    result = DoorsCertificate(model=model_input, data=fact, doors=doors, versions=list_versions(), hardware=hardware)
    result.write(loaded.folder / NAME)
    return result


def require_equal_doors(result: DoorsCertificate) -> None:
    """Raise a UserError if a door gives other answers than the model."""
    wrong = [door.name for door in result.doors if not door.is_equal]
    if wrong:
        problem = f"{', '.join(wrong)}: answers differ from the torch model's by more than {BOUND:.0e}"
        raise UserError(f"{problem}; see {NAME}, and try the versions that the model was saved with")


@contextmanager
def _explain_refusals() -> Generator[None]:
    """Turn a refusal into `NotTriedError`."""
    try:
        yield
    except UserError as error:
        raise NotTriedError(str(error)) from error


def _write_images(source: str, folder: Path) -> tuple[list[Path], DataFact]:
    """Write the first test images as PNG files, and return them and what they are."""
    data = load_data(source, skip_bad_images=True, multi_label=True)
    split = "test" if "test" in data.splits else next(iter(data.splits))
    rows = undecode_images(data.split(split))
    folder.mkdir()
    files = [folder / f"{number:04}.png" for number in range(min(MAX_IMAGES, len(rows)))]
    for number, file in enumerate(files):
        decode_image(rows[number]["image"]).save(file)
    return files, DataFact(name=data.name, fingerprint=data.fingerprint, split=split, size=len(files))


def _label(loaded: LoadedModel, rows: Iterable[torch.Tensor]) -> list[Entries]:
    """Return scores [K] with their labels, in an order that does not depend on the door."""
    names = loaded.label_sets[-1]
    return [sorted(zip(names, row.tolist(), strict=True)) for row in rows]


def _run_model(loaded: LoadedModel, files: Sequence[Path]) -> list[Entries]:
    """Return the answers of a model or a graph."""
    runner = keep_own_sizes(loaded)
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(files), _BATCH):
            images = [Image.open(file).convert("RGB") for file in files[start : start + _BATCH]]
            rows += compute_scores(runner.model, runner.pixel_values(images))
    return _label(runner, rows)


def _run_without_package(name: str, loaded: LoadedModel, files: Sequence[Path], scratch: Path) -> Answers:
    """Return the answers of transformers' pipeline or of the handler, which run once for both."""
    if not (scratch / "answers.json").is_file():
        shutil.copyfile(str(resources.files("hf_vit.hub") / HANDLER), scratch / HANDLER)
        function = _FUNCTIONS.get(get_problem_type(loaded.model), "softmax")
        job = {"files": list(map(str, files)), "classes": len(loaded.label_sets[-1]), "function": function}
        (scratch / "job.json").write_text(json.dumps(job | {"batch": _BATCH}), encoding="utf-8")
        run_program("transformers without hf_vit", _STRANGER, scratch, _SECONDS * 5 + 5 * len(files))
    answers: Any = json.loads((scratch / "answers.json").read_text(encoding="utf-8"))[name]
    entries = [sorted((entry["label"], entry["score"]) for entry in answer) for answer in answers]
    return entries, f"transformers {list_versions()['transformers']} without hf_vit", None


def _run_graph(runtime: Runtime, loaded: LoadedModel, files: Sequence[Path], scratch: Path) -> Answers:
    """Export the model, and return the answers of the graph and what its certificate says."""
    target = find_target(runtime.target)
    with _explain_refusals():
        target.require_libraries()
        target.refuse_inexpressible(cast(PreTrainedModel, loaded.model))
    folder = scratch / runtime.target
    export(scratch / "model", folder, runtime.target)
    certificate = Certificate.read(folder / CERTIFICATE)
    assert certificate is not None
    return _run_model(load_model(str(folder), "cpu"), files), certificate.measured_with, certificate.describe()


def _run_page(loaded: LoadedModel, files: Sequence[Path], scratch: Path, runtime: str | Path | None) -> Answers:
    """Return the answers of the model's page in a headless browser."""
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        raise NotTriedError("no Chromium or Chrome was found on the PATH; install one of them")
    folder = scratch / "page"
    with _explain_refusals():
        make_page([scratch / "model"], folder, runtime=runtime)
    index = (folder / "index.html").read_text(encoding="utf-8")
    driver = '<script type="module" src="driver.js"></script>'
    (folder / "index.html").write_text(index.replace("</head>", f"{driver}</head>"), encoding="utf-8")
    (folder / "driver.js").write_text(_DRIVER, encoding="utf-8")
    (folder / "files.json").write_text(json.dumps([file.name for file in files]))
    (folder / "images").symlink_to(files[0].parent)
    logits = _read_answers(program, folder, scratch / "profile", len(files))
    about = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return _label(loaded, convert_to_scores(loaded.model, logits)), to_one_line(about), None


def _read_answers(program: str, folder: Path, profile: Path, count: int) -> torch.Tensor:
    """Open the page in a headless browser, and return the logits [count, K] that its driver posts to a local server."""
    answers = queue.Queue[list[float]]()

    class Requests(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Requests, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = subprocess.Popen([program, *flags, f"http://127.0.0.1:{server.server_port}/"], **quiet)
        try:
            return torch.tensor([answers.get(timeout=_SECONDS) for _ in range(count)])
        except queue.Empty as error:
            raise UserError(
                f"the page in {Path(program).name} gave no answer within {_SECONDS} s; try again on an idle machine"
            ) from error
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            server.shutdown()


def _compare(door: Door, reference: list[Entries], answers: list[Entries], kind: str) -> Door:
    """Return the door with what its answers have in common with the reference."""
    equal = 0
    largest = 0.0
    for expected, answer in zip(reference, answers, strict=True):
        if [label for label, _ in expected] != [label for label, _ in answer]:
            return door.model_copy(update={"largest_difference": float("inf")})
        values, others = (np.array([score for _, score in entries]) for entries in (expected, answer))
        scale = max(1.0, float(np.abs(values).max()))
        largest = float(np.maximum(largest, np.abs(values - others).max() / scale))  # NaN stays
        if kind == "multi_label_classification":
            equal += bool(((values >= 0.5) == (others >= 0.5)).all())
        else:
            equal += kind == "regression" or expected[int(values.argmax())][0] == answer[int(others.argmax())][0]
    return door.model_copy(update={"equal_labels": equal, "largest_difference": largest})
