"""All protocols by name, and how one is carried out."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from hf_vit.data import ImageData, load_data
from hf_vit.data.annotations import Target
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.calibration import calibration
from hf_vit.evaluation.protocols.dense import detection, segmentation
from hf_vit.evaluation.protocols.frame import ProtocolResult
from hf_vit.evaluation.protocols.imagenet import objectnet, real
from hf_vit.evaluation.protocols.multi_label import multi_label
from hf_vit.evaluation.protocols.probes import few_shot, linear_probe, nearest_neighbors
from hf_vit.evaluation.protocols.robustness import corruptions, patch_drop, robustness
from hf_vit.evaluation.protocols.top1 import top1
from hf_vit.evaluation.protocols.vtab import load_vtab, vtab
from hf_vit.evaluation.reading import evaluating
from hf_vit.evaluation.runners import choose_engine, running
from hf_vit.families import refuse_regression
from hf_vit.hub.published_results import FEATURE_PROTOCOLS
from hf_vit.loading.model import load_model
from hf_vit.loading.pixels import keep_image_sizes
from hf_vit.results.facts import Facts, Record

PROTOCOLS: dict[str, Callable[..., ProtocolResult]] = {
    "top1": top1,
    "few-shot": few_shot,
    "linear-probe": linear_probe,
    "knn": nearest_neighbors,
    "calibration": calibration,
    "robustness": robustness,
    "corruptions": corruptions,
    "patch-drop": patch_drop,
    "multi-label": multi_label,
    "real": real,
    "objectnet": objectnet,
    "vtab": vtab,
    "segmentation": segmentation,
    "detection": detection,
}
# What images bear besides labels, see `ImageData`.
TARGETS: dict[str, Target] = {"segmentation": "mask", "detection": "objects"}
# They look at every depth or change pixels, or are defined for one size.
OF_ONE_SIZE = ("linear-probe", "robustness", "corruptions", "patch-drop", "vtab", *TARGETS)
# They look inside a model or ask it for gradients.
READING_INSIDE = ("linear-probe", "robustness", "patch-drop", "vtab", *TARGETS)
# They need the model in their own process: they change pixels, or judge by more than its answers.
IN_ONE_PROCESS = ("robustness", "corruptions", "patch-drop", *TARGETS)


@final
@dataclass(frozen=True, repr=False)
class ProtocolRun(Displayed):
    """A protocol that was carried out.

    Attributes:
        protocol: its name.
        result: what it measured.
        examination: the model and the data.
        settings: every option, those that were not given too.
        seconds: wall time, reading and preparing the images included.
        record: what the model's folder was told, if it has one and was told.
        engine: what computed an optimized model; None for one that was as it was loaded.
    """

    protocol: str
    result: ProtocolResult
    examination: Examination
    settings: dict[str, Any]
    seconds: float
    record: Record | None = None
    engine: str | None = None

    def overview(self) -> dict[str, object]:
        model, data = self.examination.subject.name, self.examination.data.name
        about = {"protocol": self.protocol, "model": model, "data": data, "split": self.examination.split}
        return about | self.result.overview()


def evaluate_protocol(
    protocol: str,
    model: Any,
    data: str | ImageData,
    *,
    split: str = "test",
    num_images: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
    streaming: bool = False,
    skip_bad_images: bool = False,
    image_column: str | None = None,
    label_column: str | None = None,
    num_workers: int = 0,
    max_num_patches: int | None = None,
    draft: bool = False,
    optimize: bool = False,
    runner: str = "local",
    address: str | None = None,
    **options: Any,
) -> ProtocolRun:
    """Evaluate a model by a protocol.

    Args:
        protocol: of `PROTOCOLS`.
        model: see `load_model`: a folder, a Hub id, "timm:NAME", or (model, image processor).
        data: see `load_data`, or what it gave.
        split, num_images, batch_size, seed, progress, num_workers: see `Examination`.
        device: torch device; by default a GPU where there is one.
        streaming, skip_bad_images, image_column, label_column: see `load_data`.
        max_num_patches: images in their own size and shape, shrunk where they hold more patches (`keep_image_sizes`).
        draft: decode JPEG files at the smallest of their own scales that covers the size that images are resized to:
            faster, and other pixels by a little. Not of streams.
        optimize: compute a model that is loaded here by what is fastest for so many images (`select_engine`); for
            protocols that only ask for answers or features, of images of one size.
        runner: "local"; or "ray", for protocols that only ask for answers or features, of a model given by its name and
            of data that is no stream: a model on every GPU or machine, which share model and data under these names.
        address: HOST:PORT of a cluster of Ray; by default Ray is started on this machine.
        **options: of the protocol, the keyword arguments of its function.

    Raises:
        UserError: an unknown protocol or option, or whatever the protocol cannot do with the model or the data.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol '{protocol}'; choose from {', '.join(PROTOCOLS)}")
    function = PROTOCOLS[protocol]
    settings = _settings(protocol, function, options) | _fed(protocol, max_num_patches, draft)
    if runner == "ray" and protocol in IN_ONE_PROCESS:
        raise UserError(f"protocol {protocol} runs in one process; leave --runner ray out")
    if runner == "ray" and not isinstance(model, str | Path):
        raise UserError("a model object runs in this process only; give its folder, or leave --runner ray out")
    with (
        evaluating(model[0]) if isinstance(model, tuple) else nullcontext(),
        running(runner, address, device) as ray,
    ):
        of_classes = protocol not in (*FEATURE_PROTOCOLS, *TARGETS)
        subject = load_model(model, device if ray is None else "cpu", as_classifier=of_classes)
        if of_classes:
            others = "few-shot, linear-probe or knn"
            remedy = f"hf-vit predict gives its values, or choose {others}, which need features only"
            refuse_regression(subject.model, subject.name, f"protocol {protocol}", remedy)
        if max_num_patches is not None:
            subject = keep_image_sizes(subject, max_num_patches)
        if subject.folder is not None:
            Facts.load(subject.folder)  # damaged facts are told before the work, not after it
        if isinstance(data, str):
            reading: dict[str, Any] = dict(streaming=streaming, skip_bad_images=skip_bad_images)
            reading |= dict(image_column=image_column, label_column=label_column)
            if protocol == "vtab":
                if given := [name for name, value in reading.items() if value]:
                    raise UserError(f"VTAB tasks are read as published; leave {_shown(given)} out")
                data = load_vtab(data, seed)
            else:
                reading |= dict(multi_label=protocol == "multi-label", target=TARGETS.get(protocol, "label"))
                data = load_data(data, image_size=subject.image_size, **reading)
        if ray is not None and data.readers:
            raise UserError("a stream is evaluated in one process; leave --streaming or --runner ray out")
        known = [number for number in (data.num_examples(split), num_images) if number is not None]
        optimize = optimize and max_num_patches is None and protocol not in READING_INSIDE
        options_of_model: Any = {"optimize": optimize, "max_num_patches": max_num_patches}
        engine, remote = choose_engine(subject, model, min(known, default=None), ray, **options_of_model)
        side = subject.draft_side if draft else None
        examination = Examination(
            subject, data, split, num_images, batch_size, seed, progress, num_workers, remote, side
        )
        started = time.perf_counter()
        result = function(examination, **options)
    return ProtocolRun(protocol, result, examination, settings, time.perf_counter() - started, None, engine)


def _fed(protocol: str, max_num_patches: int | None, draft: bool) -> dict[str, Any]:
    """Return how images are fed otherwise than the model's image processor says."""
    if max_num_patches is not None and protocol in OF_ONE_SIZE:
        raise UserError(f"protocol {protocol} needs images of one size; leave --max-num-patches out")
    if draft and (max_num_patches is not None or protocol in TARGETS):
        raise UserError("--draft works only on classifiers that resize images to one size; leave it out")
    fed = {"max_num_patches": max_num_patches, "draft": draft or None}
    return {name: value for name, value in fed.items() if value is not None}


def _settings(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a protocol, given or not."""
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if unknown := sorted(set(options) - set(known)):
        others = [other for other, each in PROTOCOLS.items() if set(unknown) <= set(inspect.signature(each).parameters)]
        advice = f"choose --protocol {' or '.join(others)}" if others else "leave that out"
        raise UserError(f"protocol {name} has no {_shown(unknown)}; {advice}")
    return {
        key: list(value) if isinstance(value, tuple | list) else value for key, value in {**known, **options}.items()
    }


def _shown(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
