"""The way out of the command line: a model into the files of another library."""

import time
from dataclasses import dataclass
from pathlib import Path

from hf_vit.conversion.fetching import is_within
from hf_vit.conversion.loading import open_model
from hf_vit.conversion.progress import progress, quiet_transformers
from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
from hf_vit.conversion.targets.graphs.certificate import Certificate
from hf_vit.conversion.targets.graphs.int8 import QUANTIZERS, Calibration
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, IMAGES
from hf_vit.conversion.targets.graphs.runtimes import Mode
from hf_vit.conversion.targets.registry import find_target
from hf_vit.conversion.targets.target import OutgoingModel, has_head
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.families import refuse_regression
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.delivery import new_folder, prepare_output
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.writing import explain_write_errors

SPELLINGS = ("newer", "older")


@dataclass(frozen=True, repr=False)
class ExportResult(Displayed):
    """What was written, and how far its results are from the model's.

    Attributes:
        output: the folder.
        target: name of the target.
        difference: largest difference of the results, relative to the largest value where that exceeds 1.
        measured_with: the library that ran the written model.
        int8: of a quantized graph, how held-out images are answered; None of others.
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
        raise UserError(f"unknown --spelling {spelling!r}; choose from {', '.join(SPELLINGS)}")
    mode = _mode_of(to, quantize, calibrate)
    target.require_libraries()
    place = prepare_output(output, force)
    if Path(model).exists() and is_within(place, model):
        raise UserError(f"the folder {output} holds the model itself; give another one")
    with quiet_transformers():
        loaded, processor = open_model(model)
        target.refuse_inexpressible(loaded)
        arrays = target.arrays_of(loaded)
        if mode is not None and not has_head(loaded):
            raise UserError(
                "--quantize is checked by comparing predictions, so it needs a classifier, not a bare model"
            )
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
            with progress(f"writing {place.name}"), explain_write_errors(place):
                target.write(outgoing)
            with progress(f"comparing {place.name}"), explain_write_errors(place):
                difference, measured_with = target.compare(outgoing)
            if not difference <= target.tolerance(loaded.config):  # refuses NaN too
                raise UserError(
                    f"the model for {target.title} gives other results, {difference:.1e} apart (measured "
                    f"with {measured_with}), so nothing was written; please report this"
                )
            values = {"target": to, "largest_difference": difference, "measured_with": measured_with}
            with explain_write_errors(place):
                record = new_record("conversion", values=values, seconds=time.perf_counter() - started)
                append_record(folder, record)
    certificate = None if mode is None else Certificate.read(place / CERTIFICATE)
    quantization = None if certificate is None else certificate.quantization
    int8 = None if quantization is None else quantization.describe()
    return ExportResult(Path(output), to, difference, measured_with, int8)


def _mode_of(to: str, quantize: str | None, calibrate: str | None) -> Mode | None:
    """Return how a target's graph is quantized; None: not at all. A UserError for a way it does not have, or no
    images.
    """
    if quantize is None:
        if calibrate is not None:
            raise UserError("--calibrate is for --quantize; add that, or leave it out")
        return None
    modes = next(each.modes for each in QUANTIZERS.values() if each.target == to)
    for mode in modes:
        if mode == quantize:
            if calibrate is None:
                raise UserError(f"--quantize {mode} needs images to measure with; add --calibrate DATA")
            return mode
    raise UserError(f"--quantize {quantize!r} cannot be combined with --to {to}; give {' or '.join(modes)}")
