"""All protocols by name, and `evaluate_protocol`, which runs one."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
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
from hf_vit.evaluation.reading import restored_modes
from hf_vit.evaluation.runners import keep_sizes, open_runner, prepare_engine
from hf_vit.families import refuse_regression
from hf_vit.hub.published_results import FEATURE_PROTOCOLS
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.outputs import FEATURES, FeatureChoice, refuse_features
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
# Targets of protocols for dense prediction, see `ImageData`.
TARGETS: dict[str, Target] = {"segmentation": "mask", "detection": "objects"}
# Protocols that read layers or change pixels, or are defined for one image size.
ONE_SIZE_PROTOCOLS = ("linear-probe", "robustness", "corruptions", "patch-drop", "vtab", *TARGETS)
# Protocols that read layers or need gradients, which an optimized model does not have.
UNOPTIMIZED_PROTOCOLS = ("linear-probe", "robustness", "patch-drop", "vtab", *TARGETS)
# Protocols that change pixels or need more than outputs, and so need the model in this process.
SINGLE_PROCESS_PROTOCOLS = ("robustness", "corruptions", "patch-drop", *TARGETS)


@final
@dataclass(frozen=True, repr=False)
class ProtocolRun(Displayed):
    """One run of a protocol.

    Attributes:
        protocol: its name.
        result: the metrics.
        examination: the model and the data.
        settings: all options, including defaults.
        seconds: wall time, including reading and preparing images.
        record: the record in facts.json of the model's folder, if it was saved.
        engine: engine of an optimized model, else None.
    """

    protocol: str
    result: ProtocolResult
    examination: Examination
    settings: dict[str, Any]
    seconds: float
    record: Record | None = None
    engine: str | None = None

    def overview(self) -> dict[str, object]:
        """Return the lines that `print` shows."""
        model, data = self.examination.loaded.name, self.examination.data.name
        inputs = {"protocol": self.protocol, "model": model, "data": data, "split": self.examination.split}
        return inputs | self.result.overview()


def evaluate_protocol(
    protocol: str,
    model: Any,
    data: str | Path | ImageData,
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
    features: str | None = None,
    layers: int = 1,
    norm: bool = True,
    **options: Any,
) -> ProtocolRun:
    """Evaluate a model with a protocol.

    Args:
        protocol: a name in `PROTOCOLS`.
        model: see `load_model`: a folder, a Hub id, "timm:NAME", or (model, image processor).
        data: see `load_data`, or its result.
        split, num_images, batch_size, seed, progress, num_workers: see `Examination`.
        device: torch device, by default a GPU if there is one.
        streaming, skip_bad_images, image_column, label_column: see `load_data`.
        max_num_patches: keep image sizes, and reduce images with more patches than this (`keep_image_sizes`). By
            default the number of an image processor that keeps shapes (SigLIP 2), where the protocol takes any size.
        draft: decode JPEG files at the smallest of their scales that is not below the model's size; faster, with
            slightly different pixels. Not for streams.
        optimize: run a model that is given by name on the engine that pays for so many images (`select_engine`); only
            for protocols that need only logits or features, and for images of one size.
        runner: "local"; or "ray", with one model on every GPU or machine, for the same protocols, a model that is given
            by name and data that is not streamed. All machines need the model and the data under the same names.
        address: HOST:PORT of a Ray cluster; by default Ray is started on this machine.
        features, layers, norm: for few-shot, linear-probe, knn and vtab features of the last layers in place of the
            head's input, see `hf_vit.loading.outputs.read_layer_features`; not "patches".
        **options: options of the protocol (the keyword arguments of its function).

    Raises:
        UserError: the protocol or an option is unknown, or the protocol cannot use the model or the data.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"--protocol {protocol} is unknown; choose one of {', '.join(PROTOCOLS)}")
    function = PROTOCOLS[protocol]
    settings = _collect_settings(protocol, function, options)
    settings |= _collect_input_settings(protocol, max_num_patches, draft)
    choice = FeatureChoice.parse(features, layers, norm, FEATURES[:3])
    if choice is not None:
        if protocol not in FEATURE_PROTOCOLS:
            raise UserError(
                f"--features only works with --protocol {', '.join(FEATURE_PROTOCOLS)}; choose "
                "one of them, or leave --features out"
            )
        settings |= {"features": choice.kind, "layers": choice.layers, "norm": choice.norm}
    if runner == "ray" and protocol in SINGLE_PROCESS_PROTOCOLS:
        raise UserError(f"--protocol {protocol} does not work with --runner ray; leave --runner ray out")
    if runner == "ray" and not isinstance(model, str | Path):
        raise UserError("Ray cannot load a model object; give the model's folder or Hub id, or leave runner='ray' out")
    with restored_modes(model), open_runner(runner, address, device) as ray:
        loaded = _load_model(protocol, model, device if ray is None else "cpu", choice)
        needs_one_size = draft or protocol in ONE_SIZE_PROTOCOLS
        loaded, max_num_patches = keep_sizes(loaded, max_num_patches, needs_one_size=needs_one_size)
        reading: dict[str, Any] = dict(streaming=streaming, skip_bad_images=skip_bad_images)
        reading |= dict(image_column=image_column, label_column=label_column)
        fit_splits = [value for name, value in settings.items() if name.endswith("_split") and value]
        data = _load_data(protocol, data, loaded.image_size, seed, [split, *fit_splits], reading)
        if ray is not None and data.readers:
            raise UserError("--streaming and --runner ray cannot be combined; leave one of them out")
        limits = [number for number in (data.num_examples(split), num_images) if number is not None]
        optimize = optimize and choice is None and protocol not in UNOPTIMIZED_PROTOCOLS
        engine, remote = prepare_engine(
            loaded, model, min(limits, default=None), ray, optimize=optimize, max_num_patches=max_num_patches
        )
        draft_side = loaded.draft_side if draft else None
        how: dict[str, Any] = dict(progress=progress, num_workers=num_workers, remote=remote, draft_side=draft_side)
        examination = Examination(loaded, data, split, num_images, batch_size, seed, choice=choice, **how)
        start = time.perf_counter()
        result = function(examination, **options)
    return ProtocolRun(protocol, result, examination, settings, time.perf_counter() - start, None, engine)


def _load_model(protocol: str, model: Any, device: str | None, choice: FeatureChoice | None) -> LoadedModel:
    """Load the model; raise UserError if the protocol cannot use it, or if the facts of its folder are damaged."""
    needs_classifier = protocol not in (*FEATURE_PROTOCOLS, *TARGETS)
    loaded = load_model(model, device, as_classifier=needs_classifier)
    if needs_classifier:
        others = "few-shot, linear-probe or knn"
        remedy = f"get its values with hf-vit predict, or choose {others}, which only need features"
        refuse_regression(loaded.model, loaded.name, f"protocol {protocol}", remedy)
    if choice is not None:
        refuse_features(loaded.model, choice)
    if loaded.folder is not None:
        Facts.load(loaded.folder)  # raises now if facts.json is damaged, and not after the work
    return loaded


def _load_data(
    protocol: str,
    source: str | Path | ImageData,
    image_size: tuple[int, int] | None,
    seed: int,
    splits: Sequence[str],
    reading: dict[str, Any],
) -> ImageData:
    """Load the data of a protocol; `reading` are options of `load_data`, which VTAB's tasks do not have.

    The fingerprint is that of the whole data, as in the record of the training.
    """
    if protocol != "vtab" or isinstance(source, ImageData):
        reading |= dict(multi_label=protocol == "multi-label", target=TARGETS.get(protocol, "label"))
        return load_data(source, image_size=image_size, **reading, check=False, splits=splits, hash_others=True)
    unsupported = [option for option, value in reading.items() if value]
    if unsupported:
        raise UserError(f"VTAB's tasks are read as published; leave {_format_options(unsupported)} out")
    return load_vtab(str(source), seed)


def _collect_input_settings(protocol: str, max_num_patches: int | None, draft: bool) -> dict[str, Any]:
    """Return the settings that change the preparation of images; raise UserError if the protocol forbids them."""
    if max_num_patches is not None and protocol in ONE_SIZE_PROTOCOLS:
        raise UserError(f"--protocol {protocol} needs images of one size; leave --max-num-patches out")
    if draft and (max_num_patches is not None or protocol in TARGETS):
        raise UserError("--draft only works for classifiers that resize all images to one size; leave --draft out")
    settings = {"max_num_patches": max_num_patches, "draft": draft or None}
    return {name: value for name, value in settings.items() if value is not None}


def _collect_settings(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a protocol, including defaults; raise UserError for unknown ones."""
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown_options = sorted(set(options) - set(defaults))
    if unknown_options:
        parameters = {other: set(inspect.signature(run).parameters) for other, run in PROTOCOLS.items()}
        others = [other for other, names in parameters.items() if set(unknown_options) <= names]
        remedy = f"choose --protocol {' or '.join(others)}" if others else "leave it out"
        raise UserError(f"--protocol {name} has no option {_format_options(unknown_options)}; {remedy}")
    settings = {**defaults, **options}
    return {key: list(value) if isinstance(value, tuple | list | range) else value for key, value in settings.items()}


def _format_options(names: Sequence[str]) -> str:
    """Return names of options as they are typed."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
