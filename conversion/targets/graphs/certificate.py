"""Certify a graph: record the checks it passed, so that anyone can repeat them.

`export.json` lists the checks and the largest differences; `export.npz` holds the model's results. The images are not
stored, as they follow from the checks.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel

from hf_vit.conversion.targets.graphs.int8 import AGREEMENT, Calibration, quantize_file
from hf_vit.conversion.targets.graphs.preprocessing import (
    ENCODED,
    PIXEL_VALUES,
    PREPROCESSED,
    Preprocessing,
    convert_images,
)
from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Runtime
from hf_vit.conversion.targets.graphs.tracing import needs_whole_patches
from hf_vit.conversion.targets.target import OutgoingModel, join_outputs, measure_difference
from hf_vit.environment import list_versions, read_hardware, require
from hf_vit.errors import UserError
from hf_vit.results.documents import Document

NAME, RESULTS = "export.json", "export.npz"
BATCHES = (1, 3, 2, 1, 2, 1)
# Tolerance of int8 results on another machine, where a float that rounds differently changes a whole int8 step.
INT8_TOLERANCE = 0.05


class Check(BaseModel):
    """A batch of images [B, C, H, W] (uint8 [B, H, W, C] for a graph that takes images) for the graph and the model.

    Pixels are noise in [-1, 1), a photograph or 8-bit noise. Noise may have NaN in the first image, which must not
    spread to the others.
    """

    batch: int
    channels: int
    height: int
    width: int
    pixels: Literal["noise", "not finite", "noise of 8 bits", "photograph"] = "noise"
    compares: Literal["results", "preprocessed"] = "results"  # "preprocessed": the image processor's output
    largest_difference: float | None = None  # None: a value is finite in one result only

    def images(self) -> torch.Tensor:
        """Return the images, which are the same on every machine.

        numpy guarantees the output of its bit generators. Photographs are parts of scikit-image's astronaut, a PNG,
        which is repeated beyond its borders.
        """
        if self.pixels == "photograph":
            from skimage.data import astronaut

            photograph = astronaut()
            shifts = 37 * np.arange(self.batch)[:, None]  # px, of every image [B, 1]
            rows = (shifts + np.arange(self.height)) % photograph.shape[0]
            columns = (shifts + np.arange(self.width)) % photograph.shape[1]
            return torch.from_numpy(photograph[rows[:, :, None], columns[:, None]])
        shape = (self.batch, self.channels, self.height, self.width)
        raw = np.random.PCG64(self.batch).random_raw(int(np.prod(shape))) >> np.uint64(40)  # 24 bits, exact in float32
        if self.pixels == "noise of 8 bits":
            return torch.from_numpy(raw.astype(np.uint8).reshape(self.batch, self.height, self.width, self.channels))
        images = torch.from_numpy(raw.astype(np.float32).reshape(shape)) / 2**23 - 1
        if self.pixels == "not finite":
            images[0, :, self.height // 2, self.width // 2] = torch.nan
        return images

    def record_difference(self, expected: torch.Tensor, actual: torch.Tensor) -> "Check":
        """Return the check with the largest difference of two results."""
        finite = expected.isfinite()
        if self.pixels != "not finite" and not finite.all():
            raise UserError(
                "the model's results are NaN or infinite, so it cannot be exported; use a checkpoint from before "
                "the training diverged"
            )
        is_comparable = expected.shape == actual.shape and torch.equal(finite, actual.isfinite())
        difference = measure_difference(expected[finite], actual[finite]) if is_comparable and finite.any() else None
        if is_comparable and self.compares == "preprocessed":
            difference = float((expected - actual).abs().max())
        return self.model_copy(update={"largest_difference": difference})


class Quantization(BaseModel):
    """The layers in int8, and their effect on held-out images (of the test split).

    Attributes:
        mode: what sets the ranges of inputs: calibration images ("static"), or the inputs of every pass ("dynamic").
        calibration_images: number of images that set the ranges and chose the parts in float.
        agreement: share of held-out images whose most likely class is the model's.
        required_agreement: the share that was required.
        accuracy, float_accuracy: accuracy of the graph and of the model; None if the data has other classes.
        layers: number of dense layers of the graph.
        in_float: part that stays in float -> relative change of the logits when only this part is quantized.
    """

    mode: Literal["dynamic", "static"]
    data: str
    data_fingerprint: str
    calibration_images: int
    held_out_images: int
    agreement: float
    required_agreement: float = AGREEMENT
    accuracy: float | None
    float_accuracy: float | None
    layers: int
    in_float: dict[str, float]

    def describe(self) -> str:
        """Return agreement, accuracy and the parts in float, in words."""
        text = f"in int8 {self.agreement:.2%} of {self.held_out_images:,} held-out images get the model's class"
        if self.required_agreement != AGREEMENT:
            text += f" ({self.required_agreement:.2%} required)"
        if self.accuracy is not None and self.float_accuracy is not None:
            text += f", with an accuracy of {self.accuracy:.2%} (in float {self.float_accuracy:.2%})"
        return f"{text}; {', '.join(self.in_float)} stayed in float" if self.in_float else text


class Certificate(Document):
    """The content of `export.json`."""

    command: ClassVar[str] = "hf-vit export"

    file: str
    sha256: str  # for OpenVINO that of its two files, concatenated
    runtime: str = "onnxruntime"  # the package that ran the graph
    model_type: str
    image_sizes: str
    takes: str = PIXEL_VALUES  # the graph's input, see `preprocessing`
    tolerance: float
    outputs: tuple[str, ...] = ()  # the compared outputs, concatenated; empty: the first output
    pixel_tolerance: float | None = None  # for the image processor's output: a step of 1/255 after normalization
    checks: list[Check]
    versions: dict[str, str]
    hardware: dict[str, Any]
    quantization: Quantization | None = None

    @property
    def measured_with(self) -> str:
        return f"{self.runtime} {self.versions[self.runtime]}"

    @property
    def largest_difference(self) -> float:
        """Return the largest difference of results; NaN if a value was finite in one result only."""
        return self._find_largest("results")

    def describe(self) -> str:
        """Return the differences with their bounds, in words."""
        text = f"results differ by at most {self.largest_difference:.1e} ({self.tolerance:.0e} is allowed)"
        if self.pixel_tolerance is None:
            return text
        pixels = self._find_largest("preprocessed")
        return f"{text}, pixel values of resized images by {pixels:.1e} ({self.pixel_tolerance:.1e}, a step of 1/255)"

    def holds(self) -> bool:
        """Return whether all differences are within their bounds; NaN is not."""
        bounds = {"results": self.tolerance, "preprocessed": self.pixel_tolerance}
        return all(bound is None or self._find_largest(compares) <= bound for compares, bound in bounds.items())

    def _find_largest(self, compares: str) -> float:
        """Return the largest difference of all checks of one kind."""
        differences = [check.largest_difference for check in self.checks if check.compares == compares]
        finite_differences = [difference for difference in differences if difference is not None]
        return max(finite_differences) if len(finite_differences) == len(differences) else math.nan


def certify(
    outgoing: OutgoingModel, runtime: Runtime, sizes: list[tuple[int, int]], tolerance: float, size_text: str
) -> Certificate:
    """Compare the model with its graph, write the certificate of the float graph, and return it.

    If int8 is requested and the float graph passes, it is quantized, measured and certified again. `sizes` are the
    (height, width) in px of the batches, `size_text` names the image sizes that the graph takes.
    """
    file = outgoing.folder / runtime.file
    resizes_images = outgoing.takes != PIXEL_VALUES
    checks = _make_checks(outgoing, sizes, runtime.keeps_nan or not needs_whole_patches(outgoing.sizes))
    with torch.no_grad():
        results = [_compute_results(outgoing, check) for check in checks]
    certificate = Certificate(
        file=file.name,
        sha256="",
        runtime=runtime.package,
        model_type=outgoing.config.model_type,
        image_sizes=size_text,
        takes=outgoing.takes,
        tolerance=tolerance,
        pixel_tolerance=Preprocessing.from_processor(outgoing.processor).step if resizes_images else None,
        outputs=tuple(outgoing.compared_outputs if outgoing.is_dense else ()),
        checks=checks,
        versions=_list_versions(runtime),
        hardware=read_hardware(),
    )
    certificate = _compare_and_write(certificate, runtime, file, results)
    if outgoing.quantize is not None and outgoing.calibration is not None and certificate.holds():
        quantization = _quantize(outgoing, runtime, outgoing.quantize, outgoing.calibration)
        _certify_int8(certificate, quantization, outgoing, runtime)
    return certificate


def _certify_int8(
    certificate: Certificate, quantization: Quantization, outgoing: OutgoingModel, runtime: Runtime
) -> None:
    """Replace the certificate of the float graph by that of the quantized one, which is compared with itself."""
    file = outgoing.folder / runtime.file
    # The int8 checks record the quantized graph's results, without the image with NaN, which makes ranges invalid.
    checks = [check for check in certificate.checks if check.pixels != "not finite"]
    graph = runtime.open(file)
    results: list[torch.Tensor] = []
    for check in checks:
        if check.compares == "results":
            results.append(graph.run(convert_images(outgoing.takes, check.images()))["logits"])
        else:
            results.append(_compute_results(outgoing, check))
    updates = {"tolerance": INT8_TOLERANCE, "checks": checks, "quantization": quantization}
    quantized_certificate = _compare_and_write(certificate.model_copy(update=updates), runtime, file, results)
    if not quantized_certificate.holds():
        raise UserError(
            f"the int8 graph gives different results when it runs twice ({quantized_certificate.describe()}), "
            "so nothing was written; please report this"
        )


def _compare_and_write(
    certificate: Certificate, runtime: Runtime, file: Path, results: list[torch.Tensor]
) -> Certificate:
    """Compare a graph with these results, and write the certificate and the results."""
    np.savez(file.with_name(RESULTS), *(result.numpy() for result in results))
    checks = list(_compare(certificate, runtime, file, results))
    certificate = certificate.model_copy(update={"sha256": runtime.sha256(file), "checks": checks})
    certificate.write(file.with_name(NAME))
    return certificate


def _make_checks(outgoing: OutgoingModel, sizes: list[tuple[int, int]], keeps_nan: bool) -> list[Check]:
    """Return a check for every size and one with NaN; if the graph resizes images, checks of its preprocessing too."""
    channels = outgoing.sizes.num_channels
    checks = [
        Check(batch=batch, channels=channels, height=height, width=width)
        for batch, (height, width) in zip(BATCHES, sizes, strict=False)
    ]
    if outgoing.takes == PIXEL_VALUES:
        if not keeps_nan or outgoing.is_dense:  # a dense head may spread NaN to other images
            return checks
        return [*checks, checks[0].model_copy(update={"batch": 2, "pixels": "not finite"})]
    exact: dict[str, Any] = {"pixels": "noise of 8 bits"} | ({"batch": 1} if outgoing.takes == ENCODED else {})
    resized = exact | {"pixels": "photograph", "compares": "preprocessed"}
    return [
        check.model_copy(update=exact if size == sizes[0] else resized)
        for check, size in zip(checks, sizes, strict=True)
    ]


def _compute_results(outgoing: OutgoingModel, check: Check) -> torch.Tensor:
    """Return the model's results for a check's images, or only its image processor's output."""
    images = check.images()
    if outgoing.takes == PIXEL_VALUES:
        return outgoing.compute_results(images)
    pil_images = [Image.fromarray(image) for image in images.numpy()]
    pixel_values = outgoing.processor(images=pil_images, return_tensors="pt")["pixel_values"]
    return pixel_values if check.compares == "preprocessed" else outgoing.compute_results(pixel_values)


def _compare(certificate: Certificate, runtime: Runtime, file: Path, results: list[torch.Tensor]) -> Iterator[Check]:
    """Yield the checks with the differences of the graph's results from these."""
    graph = runtime.open(file)
    for check, expected in zip(certificate.checks, results, strict=True):
        outputs = graph.run(convert_images(certificate.takes, check.images()))
        names = [PREPROCESSED] if check.compares == PREPROCESSED else certificate.outputs or graph.outputs[:1]
        yield check.record_difference(expected, join_outputs([outputs[name] for name in names]))


def _quantize(outgoing: OutgoingModel, runtime: Runtime, mode: Any, data: Calibration) -> Quantization:
    """Quantize the graph, and measure it on held-out images."""
    layers, in_float = quantize_file(runtime, outgoing.folder / runtime.file, mode, data)
    agreement, accuracy, float_accuracy = measure_agreement(outgoing, runtime, data)
    quantization = Quantization(
        mode=mode,
        data=data.data.name,
        data_fingerprint=data.data.fingerprint,
        calibration_images=len(data.ranging) + len(data.choosing),
        held_out_images=len(data.judging),
        agreement=agreement,
        required_agreement=data.agreement,
        accuracy=accuracy,
        float_accuracy=float_accuracy,
        layers=layers,
        in_float={part: round(change, 5) for part, change in in_float.items()},
    )
    lost_accuracy = 0.0 if accuracy is None or float_accuracy is None else float_accuracy - accuracy
    if agreement < data.agreement or lost_accuracy > data.lost_accuracy:
        raise UserError(
            f"{quantization.describe()}, but at least {data.agreement:.2%} and a loss of at most "
            f"{100 * data.lost_accuracy:.2f} points of accuracy are required, so nothing was written; "
            f"{data.describe_remedy(judging=agreement, lost=lost_accuracy)}give more images with --calibrate, "
            "try the other --quantize, or leave it out"
        )
    return quantization


def measure_agreement(
    outgoing: OutgoingModel, runtime: Runtime, data: Calibration
) -> tuple[float, float | None, float | None]:
    """Measure the graph on held-out images.

    Returns:
        The share of images that get the model's class, and the accuracy of graph and model, None if the data has other
        classes.
    """
    names = [outgoing.config.id2label[index] for index in range(outgoing.config.num_labels)]
    class_indices = [names.index(name) if names.count(name) == 1 else -1 for name in data.data.label_names]
    classes = torch.tensor(class_indices)
    graph = runtime.open(outgoing.folder / runtime.file)
    is_same, is_correct, is_float_correct = (list[torch.Tensor]() for _ in range(3))
    with torch.no_grad():
        for batch, pixel_values, labels in data.judging.iterate_labeled_batches():
            expected = outgoing.compute_results(pixel_values).argmax(-1)
            actual = graph.run(batch)["logits"].argmax(-1)
            is_same.append(expected == actual)
            is_correct.append(actual == classes[labels])
            is_float_correct.append(expected == classes[labels])
    shares = [float(torch.cat(matches).double().mean()) for matches in (is_same, is_correct, is_float_correct)]
    agreement, accuracy, float_accuracy = shares
    return (agreement, None, None) if -1 in class_indices else (agreement, accuracy, float_accuracy)


def verify(folder: Path, runtime: Runtime | None = None) -> Certificate:
    """Repeat the checks of an exported folder on this machine; return its certificate with the new differences.

    The default `runtime` is the one that the certificate names.

    Raises:
        UserError: a file is missing, damaged or changed, or a difference exceeds its bound.
    """
    certificate = Certificate.read(folder / NAME)
    if certificate is None:
        targets = [runtime.target for runtime in RUNTIMES.values()]
        raise UserError(
            f"{folder} has no {NAME}, so it is not an exported graph; give a folder written by hf-vit export "
            f"--to {' or --to '.join(targets)}"
        )
    file = folder / Path(certificate.file).name
    if certificate.runtime not in RUNTIMES:
        raise UserError(
            f"{folder / NAME} is for the runtime {certificate.runtime!r}, but this version only knows "
            f"{', '.join(RUNTIMES)}; run pip install --upgrade hf-vit, or export the model again"
        )
    runtime = runtime or RUNTIMES[certificate.runtime]
    require(runtime.package, purpose=str(file))
    try:
        sha256 = runtime.sha256(file)
        with np.load(folder / RESULTS) as arrays:
            results = [torch.from_numpy(arrays[name]) for name in arrays.files]
        if len(results) != len(certificate.checks):
            raise ValueError(
                f"{RESULTS} holds {len(results)} results, but {NAME} lists {len(certificate.checks)} checks"
            )
    except (OSError, ValueError, BadZipFile) as error:
        raise UserError(
            f"{file.name} or {RESULTS} in {folder} is missing or damaged; export the model again with hf-vit export"
        ) from error
    if sha256 != certificate.sha256:
        raise UserError(
            f"{file} was changed after the export (its SHA-256 is not that in {NAME}); export the model again"
        )
    checks = list(_compare(certificate, runtime, file, results))
    repeated = certificate.model_copy(
        update={"checks": checks, "versions": _list_versions(runtime), "hardware": read_hardware()}
    )
    if not repeated.holds():
        raise UserError(
            f"{file} gives different results on this machine ({repeated.describe()}); install the versions "
            f"listed in {NAME}, or export the model again on this machine"
        )
    return repeated


def _list_versions(runtime: Runtime) -> dict[str, str]:
    """Return the versions of all libraries and of the runtime."""
    return {**list_versions(), runtime.package: runtime.version()}
