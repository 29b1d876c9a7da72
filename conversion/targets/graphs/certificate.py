"""The certificate of a graph: what it was compared with before it appeared, so that anyone can compare it again.

`export.json` lists the checks and the largest differences; `export.npz` holds what the model gave. The images are not
kept: they follow from the check.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel

from hf_vit.conversion.targets.graphs.int8 import Calibration, quantize_file
from hf_vit.conversion.targets.graphs.preprocessing import (
    ENCODED,
    PIXEL_VALUES,
    PREPROCESSED,
    Preprocessing,
    as_given,
)
from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Runtime
from hf_vit.conversion.targets.graphs.tracing import only_whole_patches
from hf_vit.conversion.targets.target import OutgoingModel, join_outputs, largest_difference
from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.results.documents import Document

NAME, RESULTS = "export.json", "export.npz"
BATCHES = (1, 3, 2, 1, 2, 1)
# Of int8: answers as the model's on held-out images, and accuracy that may be lost.
AGREEMENT, ACCURACY = 0.995, 0.003
# Of results in int8 that are computed again elsewhere: a float that is rounded the other way is a whole step.
INT8_TOLERANCE = 0.05


class Check(BaseModel):
    """A batch of images [B, C, H, W] (of a graph that takes images, uint8 [B, H, W, C]) for the graph and the model.

    Pixels are noise in [-1, 1), maybe with NaN in the first image, which must not spread to the others; or 8 bits.
    """

    batch: int
    channels: int
    height: int
    width: int
    pixels: Literal["noise", "not finite", "noise of 8 bits", "photograph"] = "noise"
    compares: Literal["results", "preprocessed"] = "results"  # the latter: by the image processor
    largest_difference: float | None = None  # None where one is finite, the other not

    def images(self) -> torch.Tensor:
        """Return the same everywhere: numpy promises the numbers of its bit generators, and the photograph is a PNG.

        Photographs are parts of scikit-image's astronaut, which is repeated beyond its borders.
        """
        if self.pixels == "photograph":
            from skimage.data import astronaut

            photograph = astronaut()
            rows, columns = (
                np.arange(side)[None] + 37 * np.arange(self.batch)[:, None] for side in (self.height, self.width)
            )
            height, width = photograph.shape[:2]
            return torch.from_numpy(photograph[rows[:, :, None] % height, columns[:, None] % width])
        shape = (self.batch, self.channels, self.height, self.width)
        raw = np.random.PCG64(self.batch).random_raw(int(np.prod(shape))) >> np.uint64(40)  # 24 bits, exact in float32
        if self.pixels == "noise of 8 bits":
            return torch.from_numpy(raw.astype(np.uint8).reshape(self.batch, self.height, self.width, self.channels))
        images = torch.from_numpy(raw.astype(np.float32).reshape(shape)) / 2**23 - 1
        if self.pixels == "not finite":
            images[0, :, self.height // 2, self.width // 2] = torch.nan
        return images

    def compared(self, ours: torch.Tensor, theirs: torch.Tensor) -> "Check":
        finite = ours.isfinite()
        if self.pixels != "not finite" and not finite.all():
            raise UserError("the model's results are not finite (NaN or infinity); its weights are damaged or diverged")
        same = ours.shape == theirs.shape and torch.equal(finite, theirs.isfinite())
        difference = largest_difference(ours[finite], theirs[finite]) if same and finite.any() else None
        if same and self.compares == "preprocessed":
            difference = float((ours - theirs).abs().max())
        return self.model_copy(update={"largest_difference": difference})


class Quantization(BaseModel):
    """The layers in int8, and what that does to the answers for held-out images (of the test split).

    Attributes:
        mode: ranges of what enters a layer are set by images ("static"), or by every batch ("dynamic").
        calibration_images: of the train and validation splits, which set the ranges and chose what stays in float.
        agreement: share of held-out images whose most likely class is the model's.
        accuracy, float_accuracy: of the graph and of the model; None where the data has other classes.
        layers: dense layers of the graph.
        in_float: part that stays in float -> relative change of the logits when it alone is quantized.
    """

    mode: Literal["dynamic", "static"]
    data: str
    data_fingerprint: str
    calibration_images: int
    held_out_images: int
    agreement: float
    accuracy: float | None
    float_accuracy: float | None
    layers: int
    in_float: dict[str, float]

    def describe(self) -> str:
        text = f"in int8 {self.agreement:.2%} of {self.held_out_images:,} held-out images are answered as by the model"
        if self.accuracy is not None and self.float_accuracy is not None:
            text += f", {self.accuracy:.2%} rightly (in float {self.float_accuracy:.2%})"
        return f"{text}; {', '.join(self.in_float)} stayed in float" if self.in_float else text


class Certificate(Document):
    """The content of `export.json`."""

    command: ClassVar[str] = "hf-vit export"

    file: str
    sha256: str  # of OpenVINO's two files, one after the other
    runtime: str = "onnxruntime"  # the package that ran the graph
    model_type: str
    image_sizes: str
    takes: str = PIXEL_VALUES  # see `preprocessing`
    tolerance: float
    outputs: tuple[str, ...] = ()  # those that are compared, one beside the other; empty: the first
    pixel_tolerance: float | None = None  # of what the image processor makes: a step of 1/255, scaled as its values are
    checks: list[Check]
    versions: dict[str, str]
    hardware: dict[str, Any]
    quantization: Quantization | None = None

    @property
    def measured_with(self) -> str:
        return f"{self.runtime} {self.versions[self.runtime]}"

    @property
    def largest_difference(self) -> float:
        """Return that of results; NaN where one was finite and the other not."""
        return self._largest("results")

    def describe(self) -> str:
        """Return the differences with their bounds."""
        text = f"results differ by at most {self.largest_difference:.1e} ({self.tolerance:.0e} is allowed)"
        if self.pixel_tolerance is None:
            return text
        pixels = self._largest("preprocessed")
        return f"{text}, pixel values of resized images by {pixels:.1e} ({self.pixel_tolerance:.1e}, a step of 1/255)"

    def holds(self) -> bool:
        """Return whether every bound is kept; NaN keeps none."""
        bounds = {"results": self.tolerance, "preprocessed": self.pixel_tolerance}
        return all(bound is None or self._largest(compares) <= bound for compares, bound in bounds.items())

    def _largest(self, compares: str) -> float:
        differences = [check.largest_difference for check in self.checks if check.compares == compares]
        return float("nan") if None in differences else max(each for each in differences if each is not None)


def certify(
    outgoing: OutgoingModel, runtime: Runtime, sizes: list[tuple[int, int]], tolerance: float, words: str
) -> Certificate:
    """Run the model and its graph at these sizes (H, W), write the certificate of the graph in float, and return it.

    Where int8 is asked for and the graph keeps its bounds, it is quantized, judged, and certified again; a UserError
    where it answers too many held-out images otherwise, or too many wrongly.
    """
    file = outgoing.folder / runtime.file
    checks = _make_checks(outgoing, sizes, runtime.keeps_nan or not only_whole_patches(outgoing.sizes))
    with torch.no_grad():
        results = [_result_of(outgoing, check) for check in checks]
    certificate = Certificate(
        file=file.name,
        sha256="",
        runtime=runtime.package,
        model_type=outgoing.config.model_type,
        image_sizes=words,
        takes=outgoing.takes,
        tolerance=tolerance,
        pixel_tolerance=None if outgoing.takes == PIXEL_VALUES else Preprocessing.of(outgoing.processor).step,
        outputs=tuple(outgoing.compared if outgoing.is_dense else ()),
        checks=checks,
        versions=_versions(runtime),
        hardware=hardware(),
    )
    certificate = _write(certificate, runtime, file, results)
    if outgoing.quantize is None or outgoing.calibration is None or not certificate.holds():
        return certificate
    quantization = _quantize(outgoing, runtime, outgoing.quantize, outgoing.calibration)
    # Its checks repeat the results of the quantized graph, without the image of NaN: a range that holds NaN is none.
    checks, graph = [check for check in certificate.checks if check.pixels != "not finite"], runtime.open(file)
    results = [
        graph.run(as_given(outgoing.takes, check.images()))["logits"]
        if check.compares == "results"
        else _result_of(outgoing, check)
        for check in checks
    ]
    changed = {"tolerance": INT8_TOLERANCE, "checks": checks, "quantization": quantization}
    in_int8 = _write(certificate.model_copy(update=changed), runtime, file, results)
    if not in_int8.holds():
        raise UserError(
            f"the int8 graph is not deterministic: {in_int8.describe()}; nothing was written, please report"
        )
    return certificate


def _write(certificate: Certificate, runtime: Runtime, file: Path, results: list[torch.Tensor]) -> Certificate:
    np.savez(file.with_name(RESULTS), *(result.numpy() for result in results))
    checks = list(_compare(certificate, runtime, file, results))
    certificate = certificate.model_copy(update={"sha256": runtime.sha256(file), "checks": checks})
    certificate.write(file.with_name(NAME))
    return certificate


def _make_checks(outgoing: OutgoingModel, sizes: list[tuple[int, int]], keeps_nan: bool) -> list[Check]:
    """Return a batch of every size, and one not finite; where the graph resizes images, all sizes but the first."""
    channels = outgoing.sizes.num_channels
    checks = [
        Check(batch=batch, channels=channels, height=height, width=width)
        for batch, (height, width) in zip(BATCHES, sizes, strict=False)
    ]
    if outgoing.takes == PIXEL_VALUES:
        if not keeps_nan or outgoing.is_dense:  # a place that is not finite is looked up in another one
            return checks
        return [*checks, checks[0].model_copy(update={"batch": 2, "pixels": "not finite"})]
    exact: dict[str, Any] = {"pixels": "noise of 8 bits"} | ({"batch": 1} if outgoing.takes == ENCODED else {})
    resized = exact | {"pixels": "photograph", "compares": "preprocessed"}
    return [
        check.model_copy(update=exact if size == sizes[0] else resized)
        for check, size in zip(checks, sizes, strict=True)
    ]


def _result_of(outgoing: OutgoingModel, check: Check) -> torch.Tensor:
    """Return what the model, or its image processor alone, makes of the images."""
    images = check.images()
    if outgoing.takes == PIXEL_VALUES:
        return outgoing.outcome(images)
    pictures = [Image.fromarray(image) for image in images.numpy()]
    pixel_values = outgoing.processor(images=pictures, return_tensors="pt")["pixel_values"]
    return pixel_values if check.compares == "preprocessed" else outgoing.outcome(pixel_values)


def _compare(certificate: Certificate, runtime: Runtime, file: Path, results: list[torch.Tensor]) -> Iterator[Check]:
    """Iterate over the checks, with the differences of a graph's results from these."""
    graph = runtime.open(file)
    for check, ours in zip(certificate.checks, results, strict=True):
        outputs = graph.run(as_given(certificate.takes, check.images()))
        names = [PREPROCESSED] if check.compares == PREPROCESSED else certificate.outputs or graph.outputs[:1]
        yield check.compared(ours, join_outputs([outputs[name] for name in names]))


def _quantize(outgoing: OutgoingModel, runtime: Runtime, mode: Any, data: Calibration) -> Quantization:
    """Quantize the graph, and judge it by held-out images."""
    layers, in_float = quantize_file(runtime, outgoing.folder / runtime.file, mode, data)
    agreement, accuracy, float_accuracy = judge(outgoing, runtime, data)
    quantization = Quantization(
        mode=mode,
        data=data.data.name,
        data_fingerprint=data.data.fingerprint,
        calibration_images=len(data.ranging) + len(data.choosing),
        held_out_images=len(data.judging),
        agreement=agreement,
        accuracy=accuracy,
        float_accuracy=float_accuracy,
        layers=layers,
        in_float={part: round(change, 5) for part, change in in_float.items()},
    )
    lost = 0.0 if accuracy is None or float_accuracy is None else float_accuracy - accuracy
    if agreement < AGREEMENT or lost > ACCURACY:
        raise UserError(
            f"{quantization.describe()}; needed are {AGREEMENT:.1%} and at most {100 * ACCURACY:.1f} points "
            "less, so nothing was written: give more images (--calibrate), try the other --quantize, or "
            "leave it out"
        )
    return quantization


def judge(outgoing: OutgoingModel, runtime: Runtime, data: Calibration) -> tuple[float, float | None, float | None]:
    """Return the share of held-out images answered as by the model, and the accuracy of graph and model where the
    labels of the data are the model's.
    """
    names = [outgoing.config.id2label[index] for index in range(outgoing.config.num_labels)]
    known = [names.index(name) if names.count(name) == 1 else -1 for name in data.data.label_names]
    classes, graph = torch.tensor(known), runtime.open(outgoing.folder / runtime.file)
    answers = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
    with torch.no_grad():
        for batch, pixel_values, labels in data.judging.labeled():
            ours, theirs = outgoing.outcome(pixel_values).argmax(-1), graph.run(batch)["logits"].argmax(-1)
            answers.append((ours == theirs, theirs == classes[labels], ours == classes[labels]))
    agreement, *accuracies = (float(torch.cat(each).double().mean()) for each in zip(*answers, strict=True))
    return (agreement, None, None) if -1 in known else (agreement, accuracies[0], accuracies[1])


def verify(folder: Path) -> Certificate:
    """Repeat the checks of an exported folder on this machine, and return its certificate with today's differences.

    A UserError where a file is missing, damaged or another than the certified one, or a difference exceeds the bound.
    """
    certificate = Certificate.read(folder / NAME)
    if certificate is None:
        targets = [runtime.target for runtime in RUNTIMES.values()]
        raise UserError(f"{folder} has no {NAME}; give a folder that hf-vit export --to {' or '.join(targets)} wrote")
    file = folder / Path(certificate.file).name
    if certificate.runtime not in RUNTIMES:
        raise UserError(f"{folder / NAME} is for {certificate.runtime!r}, which is not one of {', '.join(RUNTIMES)}")
    runtime = RUNTIMES[certificate.runtime]
    runtime.require(file)
    try:
        sha256 = runtime.sha256(file)
        with np.load(folder / RESULTS) as arrays:
            results = [torch.from_numpy(arrays[name]) for name in arrays.files]
        if len(results) != len(certificate.checks):
            raise ValueError("as many results as checks are needed")
    except (OSError, ValueError, BadZipFile) as error:
        raise UserError(f"{folder} lacks {file.name} or {RESULTS}; export the model again") from error
    if sha256 != certificate.sha256:
        raise UserError(f"{file} does not match {NAME}: it was changed; export the model again")
    checks = list(_compare(certificate, runtime, file, results))
    repeated = certificate.model_copy(update={"checks": checks, "versions": _versions(runtime), "hardware": hardware()})
    if not repeated.holds():
        raise UserError(
            f"{file} gives different results on this machine: {repeated.describe()}; use the versions and "
            f"the kind of machine listed in {NAME}, or export the model again on this machine"
        )
    return repeated


def _versions(runtime: Runtime) -> dict[str, str]:
    return {**versions(), runtime.package: runtime.version()}
