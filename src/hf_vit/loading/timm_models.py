"""timm's models by name or from a folder, with what is needed to feed them and to read their answers."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.conversion.fetching import TIMM, WRAPPER, config_of_wrapper
from hf_vit.conversion.loading import Source
from hf_vit.conversion.progress import without_transformers_bars, without_transformers_report
from hf_vit.environment import pick_device
from hf_vit.errors import UserError
from hf_vit.loading.folders import load_weights
from hf_vit.repositories.reading import loading, model_folder

if TYPE_CHECKING:
    from torch import nn


def load_timm(source: Source, device: str | None = None) -> Any:
    """Load a model of timm with its weights, in evaluation mode: by name, from a file, or from a folder."""
    name, folder = source.name.removeprefix(TIMM), source.path
    try:
        import timm
    except ImportError as error:
        raise UserError(f"timm:{name} needs timm: pip install timm") from error
    if source.stored.get("model_type") == WRAPPER:
        return _from_wrapper(source).to(pick_device(device))
    place, on_hub = pick_device(device), re.fullmatch(r"hf[-_]hub:(.+?)(?:@(.+))?", name, re.IGNORECASE)
    if on_hub is not None:
        folder = model_folder(on_hub[1], on_hub[2])
    try:
        if folder is None and "@" in name:
            model: Any = _from_file(*name.split("@", 1))
        else:
            model = timm.create_model(name if folder is None else f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # unknown names, no weights, no connection: each has an error of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"timm:{name} cannot be loaded ({reason:.200}); timm.list_models(pretrained=True) lists the "
            "models that can be loaded"
        ) from error
    model.problem_type = source.stored.get("problem_type")
    return model.eval().to(place)


def _from_wrapper(source: Source) -> Any:
    """Return the model inside transformers' class around it, which reads the weights in both of its spellings."""
    import transformers

    is_classifier = "ForImageClassification" in str((source.stored.get("architectures") or [""])[0])
    head = "ForImageClassification" if is_classifier else ""
    with without_transformers_report(), without_transformers_bars(), loading(source.name):
        model = load_weights(source, getattr(transformers, f"AutoModel{head}"), head).timm_model.float()
        config = config_of_wrapper(source.stored)
        names = {name: source.stored[name] for name in ("label_names", "label_descriptions") if name in source.stored}
        classes = {"num_classes": model.num_classes, **names}  # of a bare model none
        model.pretrained_cfg = {**model.pretrained_cfg, **config["pretrained_cfg"], **classes}
    model.problem_type = source.stored.get("problem_type")
    return model.eval()


def _from_file(architecture: str, file: str) -> "nn.Module":
    """A checkpoint alone: as many classes as its head has, whose names it does not tell unless they are ImageNet's."""
    import timm
    from timm.models import get_pretrained_cfg, load_state_dict

    path, config = Path(file).expanduser(), get_pretrained_cfg(architecture)
    if not path.is_file():
        raise UserError(f"there is no file {file}")
    weights, classifier = load_state_dict(str(path)), config.classifier if config else None
    head = weights.get(f"{classifier if isinstance(classifier, str) else (classifier or [''])[0]}.weight")
    options: dict[str, Any] = {} if head is None else {"num_classes": len(head)}
    return timm.create_model(architecture, checkpoint_path=str(path), **options)


def timm_label_names(model: "nn.Module") -> list[list[str]]:
    """Return what a model of timm calls its classes, in the order of its logits: every set of names that is known.

    timm knows the classes of ImageNet (its 1,000 and the larger sets) by WordNet's numbers and by words.
    """
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    config = getattr(model, "pretrained_cfg", None) or {}
    stored = config.get("label_names")
    if isinstance(stored, list | tuple) and len(stored) == model.num_classes:
        names, words = [str(name) for name in stored], config.get("label_descriptions") or {}
        return [names, [str(words[name]) for name in names]] if set(names) <= set(words) else [names]
    subset = infer_imagenet_subset(model)
    if subset is None:
        return []
    imagenet = ImageNetInfo(subset)
    return [list(imagenet.label_names()), cast("list[str]", imagenet.label_descriptions())]
