"""The two doors of the command line: a checkpoint into a folder that `from_pretrained` reads, and out again."""

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch

from hf_vit.conversion.account import REPORT_BEGIN, ConversionResult, facts_of, report_of
from hf_vit.conversion.building.model import build_model, build_processor
from hf_vit.conversion.building.weights import load_weights
from hf_vit.conversion.fetch.addresses import fetch
from hf_vit.conversion.loading import open_model
from hf_vit.conversion.planning.plan import Plan, PlanOptions, Wishes
from hf_vit.conversion.planning.planner import make_plan
from hf_vit.conversion.progress import progress, without_transformers_bars
from hf_vit.conversion.readers.checkpoint import CheckpointReader
from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
from hf_vit.conversion.targets.graphs.certificate import Certificate
from hf_vit.conversion.targets.graphs.int8 import QUANTIZERS, Calibration, Mode
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, IMAGES
from hf_vit.conversion.targets.registry import find_target
from hf_vit.conversion.targets.target import OutgoingModel, has_head
from hf_vit.conversion.verification.comparing import ArrayCheck, Verification, verify
from hf_vit.conversion.verification.recording import Recording
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.families import refuse_regression
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.delivery import free_folder, new_folder
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.writing import new_file, saying_why

SPELLINGS = ("newer", "older")


def convert(
    source: str | Path,
    output: str | Path,
    *,
    recording: str | Path | None = None,
    report: str | Path | None = None,
    sha256: str | None = None,
    force: bool = False,
    **options: Unpack[PlanOptions],
) -> ConversionResult:
    """Convert a checkpoint of an original code base; the folder appears complete or not at all.

    Args:
        source: a local file or folder, an https:// or gs:// address, or `hf://owner/name/file`; see `addresses.fetch`.
        output: folder to write: weights, code, processor, facts.json. Must be absent or empty.
        recording: .npz with images and results of the original code; the converted model must give the same
            (see `verification.recording`), or nothing is written.
        report: file for a list of every key, its shape, transform and parameter (JSON); an earlier report is replaced,
            another file never.
        sha256: what the source file must be; checked before anything is read.
        force: replace `output` where it is a folder that this package wrote.
        options: what is declared of the source and wanted of the model; see `Wishes`.

    Raises:
        UserError: the source cannot be read or mapped completely, the output is not free, or the converted model does
            not give the recorded results.
    """
    started = time.perf_counter()
    wishes, place = Wishes(**options), free_folder(output, force)
    if recording is not None and _is_within(place, recording):
        raise UserError(f"the folder {output} holds --verify {recording}; give another one")
    recorded = None if recording is None else Recording(recording)
    # The report comes first: a kill between the two then leaves what the same command replaces.
    with ExitStack() as delivery, ExitStack() as reporting:
        report_file = None if report is None else reporting.enter_context(new_file(_free_report(report, place)))
        checkpoint = fetch(source, sha256)
        if _is_within(place, checkpoint.path):
            raise UserError(f"the folder {output} holds the source {checkpoint.name}; give another one")
        with checkpoint.open() as reader, without_transformers_bars():
            plan = make_plan(reader.shapes, wishes, reader.companions, checkpoint.name)
            with progress(f"reading {checkpoint.path.name}", plan.size) as advance:
                weights = load_weights(reader, plan, mapped=True, advance=advance)
            folder = delivery.enter_context(new_folder(place, force))
            with progress(f"writing {place.name}"), saying_why(place):
                build_model(plan, weights.state).save_pretrained(folder)
                build_processor(plan).save_pretrained(folder)
                reader.confirm()
            with progress(f"comparing {place.name}"):
                verification = None if recorded is None else _verify(reader, plan, weights.state, folder, recorded)
            with progress(f"finishing {place.name}"), saying_why(place):
                facts = {"source": checkpoint.name} | facts_of(reader, plan, weights, verification)
                seconds = time.perf_counter() - started
                append_record(folder, new_record("conversion", values=facts, seconds=seconds))
            if report_file is not None:
                with saying_why(Path(report or "")):
                    report_file.write_text(report_of(plan, reader.shapes), encoding="utf-8")
            free_folder(place, force, folder.parent)  # or the report would come of a model that is refused
    return ConversionResult(Path(output), plan, weights.rounded, verification, seconds)


def _is_within(folder: Path, place: str | Path) -> bool:
    """Whether a place is the folder or lies in it, where links lead."""
    real = Path(os.path.realpath(place))  # of a link that leads to itself, Path.resolve raises
    return folder in (real, *real.parents)


def _free_report(path: str | Path, output: Path) -> Path:
    """Where a report can be written.

    Raises:
        UserError: there is no such folder, it is the model's, or another file is there.
    """
    path = Path(path)
    if _is_within(output, path):
        raise UserError(f"--report {path} is in the folder of the model; give a place outside")
    if not path.parent.is_dir():
        raise UserError(f"the folder of --report {path} does not exist; create it first")
    if not path.exists():
        return path
    with saying_why(path), path.open("rb") as file:
        is_report = file.read(len(REPORT_BEGIN)) == REPORT_BEGIN
    if not is_report:
        raise UserError(f"--report {path} is there already and is no report of a conversion; give another name")
    return path


def _verify(
    reader: CheckpointReader, plan: Plan, state: dict[str, torch.Tensor], folder: Path, recording: Recording
) -> Verification:
    """Compare the model as written (float32), and the same plan carried out in float64, with the recording."""

    def written() -> torch.nn.Module:
        model = plan.model_class.from_pretrained(folder).eval()
        saved = model.state_dict()
        if not all(torch.equal(saved[name], value) for name, value in state.items()):
            raise RuntimeError(f"the model in {folder} does not hold the weights that were saved")
        return model

    def in_double() -> torch.nn.Module:
        return build_model(plan, load_weights(reader, plan, torch.float64).state)

    verification = verify(recording, plan, {torch.float32: written, torch.float64: in_double})
    if verification.first_difference is not None:
        raise UserError(
            f"the converted model does not give the results of {recording.name}, so nothing is written: the first "
            f"stage that differs is {_difference(verification.first_difference)}"
        )
    return verification


def _difference(check: ArrayCheck) -> str:
    return (
        f"'{check.stage}' ({check.array}: {check.precision} differs by {check.difference:.1e}, tolerance "
        f"{check.tolerance:.0e})"
    )


@dataclass(frozen=True, repr=False)
class ExportResult(Displayed):
    """What was written, and how far its results are from the model's.

    Attributes:
        output: the folder.
        target: name of the target.
        difference: largest difference of the results, relative to the largest value where that exceeds 1.
        measured_with: the library that ran the written model.
        int8: of a quantised graph, how held-out images are answered; None of others.
    """

    output: Path
    target: str
    difference: float
    measured_with: str
    int8: str | None = None

    def overview(self) -> dict[str, object]:
        difference = f"{self.difference:.1e}, measured with {self.measured_with}"
        int8 = {} if self.int8 is None else {"int8": self.int8}
        return {"output": self.output, "target": self.target, "largest difference": difference, **int8}


def export(
    model: str | Path,
    output: str | Path,
    to: str,
    *,
    force: bool = False,
    static: bool = False,
    spelling: str | None = None,
    preprocessing: bool = False,
    decoding: bool = False,
    quantize: str | None = None,
    calibrate: str | None = None,
    opset: int | None = None,
) -> ExportResult:
    """Write a model in the files of another library; the folder appears complete or not at all.

    Args:
        model: a folder, a Hub id, or anything that `from_hub` loads.
        output: new folder.
        to: name of a target, a key of `TARGETS`.
        force: replace `output` where it is a folder that this package wrote.
        static: a graph (ONNX) for the nominal image size alone.
        spelling: of the keys of vit_jax, "newer" (by default) or "older", as released files have it.
        preprocessing: the graph (ONNX, OpenVINO) begins with the image processor: it takes `images`, uint8
            [B, H, W, 3], RGB of any size.
        decoding: and with the decoder, too: it takes `file`, the bytes of one JPEG or PNG, uint8 [N].
        quantize: dense layers of a graph in int8, "static" or (ONNX) "dynamic".
        calibrate: the data for that; see `load_data`. Its train split sets ranges, its validation split chooses what
            stays in float, its test split judges.
        opset: of ONNX, 14 or later, for runtimes that do not read torch's default (20).

    Raises:
        UserError: there is no such model or target, the target cannot express the model, a library is missing, or the
            written model gives other results.
    """
    target, started = find_target(to), time.perf_counter()
    given: dict[str, object] = {"static": static, "spelling": spelling, "preprocessing": preprocessing}
    given |= {"decoding": decoding, "quantize": quantize, "calibrate": calibrate, "opset": opset}
    target.refuse_options(given)
    if spelling not in (None, *SPELLINGS):
        raise UserError(f"--spelling {spelling!r} is none; give one of {', '.join(SPELLINGS)}")
    mode = _mode_of(to, quantize, calibrate)
    target.require_libraries()
    place = free_folder(output, force)
    if Path(model).exists() and _is_within(place, model):
        raise UserError(f"the folder {output} holds the model itself; give another one")
    with without_transformers_bars():
        loaded, processor = open_model(model)
        target.refuse_inexpressible(loaded)
        arrays = target.arrays_of(loaded)
        if mode is not None and not has_head(loaded):
            raise UserError("--quantize is judged by answers, and a bare model has none; give a classifier")
        if mode is not None:
            refuse_regression(loaded, str(model), "--quantize", "leave it out")
        takes = ENCODED if decoding else IMAGES if preprocessing else target.takes
        size, images = as_pair(loaded.config.image_size), None
        if calibrate is not None:
            images = Calibration.of(calibrate, processor, size, takes)
        with new_folder(place, force) as folder:
            outgoing = OutgoingModel(
                loaded, processor, arrays, folder, static, spelling or SPELLINGS[0], takes, mode, images, opset
            )
            with progress(f"writing {place.name}"), saying_why(place):
                target.write(outgoing)
            with progress(f"comparing {place.name}"), saying_why(place):
                difference, measured_with = target.compare(outgoing)
            if not difference <= target.tolerance(loaded.config):  # refuses NaN too
                raise UserError(
                    f"the model for {target.title} gives other results, {difference:.1e} apart (measured with "
                    f"{measured_with}), so nothing is written; please report this"
                )
            values = {"target": to, "largest_difference": difference, "measured_with": measured_with}
            with saying_why(place):
                record = new_record("conversion", values=values, seconds=time.perf_counter() - started)
                append_record(folder, record)
    int8 = None if mode is None else _int8_of(place)
    return ExportResult(Path(output), to, difference, measured_with, int8)


def _int8_of(place: Path) -> str | None:
    """What its certificate says of a quantised graph."""
    certificate = Certificate.read(place / CERTIFICATE)
    quantization = None if certificate is None else certificate.quantization
    return None if quantization is None else quantization.describe()


def _mode_of(to: str, quantize: str | None, calibrate: str | None) -> Mode | None:
    """How a target's graph is quantised; None: not at all.

    Raises:
        UserError: in a way that the target does not have, or without images.
    """
    if quantize is None:
        if calibrate is not None:
            raise UserError("--calibrate is for --quantize; add that, or leave it out")
        return None
    modes = next(each.modes for each in QUANTIZERS.values() if each.runtime.target == to)
    for mode in modes:
        if mode == quantize:
            if calibrate is None:
                raise UserError(f"--quantize {mode} needs images to measure with; add --calibrate DATA")
            return mode
    raise UserError(f"--quantize {quantize!r} does not go with --to {to}; give {' or '.join(modes)}")
