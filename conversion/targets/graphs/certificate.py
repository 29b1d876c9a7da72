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
from pydantic import BaseModel

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Runtime
from hf_vit.conversion.targets.target import OutgoingModel, largest_difference
from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.results.documents import Document

NAME, RESULTS = "export.json", "export.npz"
BATCHES = (1, 3, 2, 1, 2, 1)


class Check(BaseModel):
    """A batch of images [B, C, H, W] that the graph and the model were given.

    Attributes:
        pixels: noise in [-1, 1), or the same with NaN in the first image, which must not spread to the others.
        largest_difference: relative to the largest value where that exceeds 1; None where one is finite, the other not.
    """

    batch: int
    channels: int
    height: int
    width: int
    pixels: Literal["noise", "not finite"] = "noise"
    largest_difference: float | None = None

    def images(self) -> torch.Tensor:
        """The same everywhere: numpy promises the numbers of its bit generators."""
        shape = (self.batch, self.channels, self.height, self.width)
        raw = np.random.PCG64(self.batch).random_raw(int(np.prod(shape))) >> np.uint64(40)  # 24 bits, exact in float32
        images = torch.from_numpy(raw.astype(np.float32).reshape(shape)) / 2**23 - 1
        if self.pixels == "not finite":
            images[0, :, self.height // 2, self.width // 2] = torch.nan
        return images

    def compared(self, ours: torch.Tensor, theirs: torch.Tensor) -> "Check":
        finite = ours.isfinite()
        same = ours.shape == theirs.shape and torch.equal(finite, theirs.isfinite())
        difference = largest_difference(ours[finite], theirs[finite]) if same and finite.any() else None
        return self.model_copy(update={"largest_difference": difference})


class Certificate(Document):
    """What `export.json` holds.

    Attributes:
        sha256: of the graph's file; of OpenVINO's two, one after the other.
        runtime: the package that ran the graph.
        tolerance: bound of every check.
        versions, hardware: with and on which the model and the graph were run.
    """

    command: ClassVar[str] = "hf-vit export"

    file: str
    sha256: str
    runtime: str = "onnxruntime"
    model_type: str
    image_sizes: str
    tolerance: float
    checks: list[Check]
    versions: dict[str, str]
    hardware: dict[str, Any]

    @property
    def measured_with(self) -> str:
        return f"{self.runtime} {self.versions[self.runtime]}"

    @property
    def largest_difference(self) -> float:
        """NaN where a check found one finite and the other not."""
        differences = [check.largest_difference for check in self.checks]
        return float("nan") if None in differences else max(each for each in differences if each is not None)


def certify(
    outgoing: OutgoingModel, runtime: Runtime, sizes: list[tuple[int, int]], tolerance: float, words: str
) -> Certificate:
    """Run the model and its graph at these sizes (H, W), and write the certificate beside the graph."""
    file = outgoing.folder / runtime.file
    given = [
        Check(batch=batch, channels=outgoing.config.num_channels, height=height, width=width)
        for batch, (height, width) in zip(BATCHES, sizes, strict=False)
    ]
    given.append(given[0].model_copy(update={"batch": 2, "pixels": "not finite"}))
    with torch.no_grad():
        results = [outgoing.outcome(check.images()) for check in given]
    np.savez(outgoing.folder / RESULTS, *(result.numpy() for result in results))
    certificate = Certificate(
        file=file.name,
        sha256=runtime.sha256(file),
        runtime=runtime.package,
        model_type=outgoing.config.model_type,
        image_sizes=words,
        tolerance=tolerance,
        checks=list(_compared(runtime, file, given, results)),
        versions=_versions(runtime),
        hardware=hardware(),
    )
    certificate.write(outgoing.folder / NAME)
    return certificate


def verify(folder: Path) -> Certificate:
    """Repeat the checks of an exported folder on this machine; its certificate, with the differences of today.

    Raises:
        UserError: a file is missing, damaged or another than the certified one, or a difference exceeds the bound.
    """
    certificate = Certificate.read(folder / NAME)
    if certificate is None:
        targets = [runtime.target for runtime in RUNTIMES.values()]
        raise UserError(f"{folder} has no {NAME}; give a folder that hf-vit export --to {' or '.join(targets)} wrote")
    file = folder / Path(certificate.file).name
    if certificate.runtime not in RUNTIMES:
        raise UserError(f"{folder / NAME} is for {certificate.runtime!r}, which is none of {', '.join(RUNTIMES)}")
    runtime = RUNTIMES[certificate.runtime]
    runtime.require(file)
    try:
        sha256 = runtime.sha256(file)
        with np.load(folder / RESULTS) as arrays:
            results = [torch.from_numpy(arrays[name]) for name in arrays.files]
        if len(results) != len(certificate.checks):
            raise ValueError("as many results as checks are needed")
    except (OSError, ValueError, BadZipFile) as error:
        raise UserError(f"{folder} lacks {file.name} or {RESULTS}, whole; export the model again") from error
    if sha256 != certificate.sha256:
        raise UserError(f"{file} is not the file that {NAME} certifies: it was changed; export the model again")
    checks = list(_compared(runtime, file, certificate.checks, results))
    repeated = certificate.model_copy(update={"checks": checks, "versions": _versions(runtime), "hardware": hardware()})
    if not repeated.largest_difference <= certificate.tolerance:  # NaN, too
        raise UserError(
            f"{file} gives other results here, {repeated.largest_difference:.1e} from the model's; "
            f"{certificate.tolerance:.0e} is allowed: use the versions and the kind of machine that {NAME} names"
        )
    return repeated


def _versions(runtime: Runtime) -> dict[str, str]:
    return {**versions(), runtime.package: runtime.version()}


def _compared(runtime: Runtime, file: Path, checks: list[Check], results: list[torch.Tensor]) -> Iterator[Check]:
    graph = runtime.open(file)
    for check, ours in zip(checks, results, strict=True):
        yield check.compared(ours, graph.run(check.images())[graph.outputs[0]])
