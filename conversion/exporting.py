"""Export a model to the files of another library."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_vit.conversion.fetching import is_within
from hf_vit.conversion.loading import find_source
from hf_vit.conversion.progress import progress, quiet_transformers
from hf_vit.conversion.targets.graphs.certificate import NAME as CERTIFICATE
from hf_vit.conversion.targets.graphs.certificate import Certificate
from hf_vit.conversion.targets.graphs.int8 import AGREEMENT, QUANTIZERS, Calibration
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, IMAGES
from hf_vit.conversion.targets.graphs.runtimes import Mode
from hf_vit.conversion.targets.registry import find_target
from hf_vit.conversion.targets.target import OutgoingModel, has_head
from hf_vit.data.labels import refuse_surrogates
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.families import get_problem_type, refuse_diverged, refuse_other_channels, refuse_regression
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.results.facts import Facts, append_record, make_record
from hf_vit.writing import explain_write_errors

SPELLINGS = ("newer", "older")


@dataclass(frozen=True, repr=False)
class ExportResult(Displayed):
    """The exported files, and how much their results differ from the model's.

    Attributes:
        output: the folder.
        target: name of the target.
        difference: largest difference of the results, relative to the largest value if that exceeds 1.
        measured_with: the library that ran the exported model.
        int8: for a quantized graph, its accuracy on held-out images; None otherwise.
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
    agreement: float | None = None,
    opset: int | None = None,
) -> ExportResult:
    """Export a model to the files of another library; the folder appears complete or not at all.

    Args:
        model: a folder, a Hub id, or anything that `from_hub` loads.
        output: new folder.
        to: name of a target, a key of `TARGETS`.
        force: replace `output` if this package wrote it.
        static: make the graph (ONNX) for the nominal image size only.
        spelling: form of vit_jax's keys: "newer" (default) or "older", as in released files.
        preprocessing: include the image processor in the graph (ONNX, OpenVINO), which then takes `images`, uint8
            [B, H, W, 3], RGB of any size.
        decoding: include the image decoder too; the graph takes `file`, the bytes of one JPEG or PNG, uint8 [N].
        quantize: put dense layers of an ONNX or OpenVINO graph in int8: "dynamic" or "static".
        calibrate: images for it; see `load_data`. The train split sets ranges, the validation split selects the layers
            that stay in float, the test split measures accuracy.
        agreement: share of the test images that must keep the model's class in int8, by default 0.995; recorded.
        opset: ONNX opset, at least 14, for runtimes that cannot read torch's default (20).

    Raises:
        UserError: there is no such model or target, the target cannot express the model, a library is missing, or the
            exported model gives other results.
    """
    start = time.perf_counter()
    target = find_target(to)
    options = {"static": static, "spelling": spelling, "preprocessing": preprocessing, "decoding": decoding}
    options |= {"opset": opset, "quantize": quantize, "calibrate": calibrate, "agreement": agreement}
    target.refuse_options(options)
    if spelling not in (None, *SPELLINGS):
        raise UserError(f"unknown --spelling {spelling!r}; choose from {', '.join(SPELLINGS)}")
    mode = _find_mode(to, quantize, calibrate)
    if agreement is not None and mode is None:
        raise UserError("--agreement is only used with --quantize; add --quantize, or leave --agreement out")
    if agreement is not None and not 0 < agreement <= 1:
        raise UserError(f"--agreement {agreement:g} is out of range; give a share of images above 0 and up to 1")
    target.require_libraries()
    output_folder = prepare_output(output, force)
    if Path(model).exists() and is_within(output_folder, model):
        raise UserError(f"the model {model} is in the output folder {output}; give another output folder")
    with quiet_transformers(), torch.autocast("cpu", enabled=False):  # a graph would keep its casts
        source = find_source(model)
        loaded, processor = source.load(), source.processor()
        refuse_surrogates(list((loaded.config.id2label or {}).values()))
        refuse_diverged(loaded, "the model", "exported")
        if type(loaded).__name__.endswith("ForImageClassification") and not has_head(loaded):
            loaded = getattr(loaded, loaded.base_model_prefix)  # with num_labels=0 the rest returns its pooled output
        target.refuse_inexpressible(loaded)
        arrays = target.make_arrays(loaded)
        if mode is not None:
            if not has_head(loaded):
                raise UserError(
                    f"--quantize {mode} compares predicted classes, but the model has no classifier; give a "
                    "classifier, or leave --quantize out"
                )
            refuse_regression(loaded, str(model), "--quantize", "leave it out")
        input_form = IMAGES if preprocessing else target.takes
        input_form = ENCODED if decoding else input_form  # which includes the preprocessing
        calibration = None
        if calibrate is not None:
            refuse_other_channels(loaded.config, str(model))
            size = as_pair(loaded.config.image_size)
            calibration = Calibration.load(calibrate, processor, size, input_form, agreement or AGREEMENT)
        is_multi_label = get_problem_type(loaded) == "multi_label_classification"
        facts_folder = source.facts_folder if is_multi_label else None
        thresholds = {} if facts_folder is None else Facts.load(facts_folder).find_thresholds()
        with deliver_folder(output_folder, force) as folder:
            graph_form = input_form, mode, calibration, opset, thresholds
            outgoing = OutgoingModel(loaded, processor, arrays, folder, static, spelling or SPELLINGS[0], *graph_form)
            with progress(f"writing {output_folder.name}"), explain_write_errors(output_folder):
                target.write(outgoing)
            with progress(f"comparing {output_folder.name}"), explain_write_errors(output_folder):
                difference, measured_with = target.compare(outgoing)
            if not difference <= target.tolerance(loaded.config):  # refuses NaN too
                raise UserError(
                    f"the exported {target.title} model differs from the original by {difference:.1e} (measured with "
                    f"{measured_with}), so nothing was written; please report this"
                )
            values: dict[str, Any] = {"target": to, "largest_difference": difference, "measured_with": measured_with}
            values |= {"thresholds": thresholds} if thresholds else {}
            certificate = None if mode is None else Certificate.read(folder / CERTIFICATE)  # the target wrote it
            quantization = None if certificate is None else certificate.quantization
            if quantization is not None:
                values["quantization"] = quantization.model_dump(exclude={"data", "data_fingerprint"})
            with explain_write_errors(output_folder):
                append_record(folder, make_record("conversion", values=values, seconds=time.perf_counter() - start))
    int8 = None if quantization is None else quantization.describe()
    if int8 is not None and is_multi_label:
        int8 += "; the class is the most likely label, the other labels of this multi-label model were not compared"
    return ExportResult(Path(output).expanduser(), to, difference, measured_with, int8)


def _find_mode(to: str, quantize: str | None, calibrate: str | None) -> Mode | None:
    """Return how the target's graph is quantized, after checking both options; None without quantization."""
    if quantize is None:
        if calibrate is not None:
            raise UserError("--calibrate is only used with --quantize; add --quantize, or leave --calibrate out")
        return None
    modes = next(quantizer.modes for quantizer in QUANTIZERS.values() if quantizer.target == to)
    if quantize not in modes:
        raise UserError(
            f"--quantize {quantize} cannot be combined with --to {to}; use --quantize "
            f"{' or --quantize '.join(modes)}, or leave it out"
        )
    if calibrate is None:
        raise UserError(f"--quantize {quantize} needs images for calibration; add --calibrate with a data set")
    return quantize
