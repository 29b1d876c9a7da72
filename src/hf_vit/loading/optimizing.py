"""Optimize a loaded model for inference if the number of images repays the time that this takes.

For a few images the model runs as loaded; many images run on the fastest engine, unless the model is small. By
`benchmarks/results/int8_avx512_bf16.jsonl`, packing S/16 and B/16 pays from 8 images, and a graph from about 5,000.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES
from hf_vit.environment import list_versions
from hf_vit.errors import UserError, report_full_memory
from hf_vit.loading.model import LoadedModel
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel

PACKED_FROM, GRAPH_FROM = 16, 10_000  # images, twice the number that repays the optimization
GRAPH_PARAMETERS = 5_000_000  # graphs of smaller models do not pay
_OPTIMIZED = "optimized for inference"


def select_engine(loaded: LoadedModel, num_images: int | None) -> str | None:
    """Return the `engine` of `optimize_for_inference` that pays for this many images (None: unknown), or None.

    Models of other libraries, on a GPU or with parts that cannot be rewritten are not optimized.
    """
    model = loaded.model
    if not isinstance(model, HfPreTrainedModel) or (num_images is not None and num_images < PACKED_FROM):
        return None
    from hf_vit.inference.engines import choose_engine
    from hf_vit.inference.plan import check_model

    try:
        placement = check_model(model)
    except UserError:
        return None
    if placement[1].type != "cpu":
        return None
    is_small = sum(parameter.numel() for parameter in model.parameters()) < GRAPH_PARAMETERS
    pays = not is_small and (num_images is None or num_images >= GRAPH_FROM)
    if not pays or loaded.input_size != loaded.image_size:  # a graph takes the size of the config alone
        return "torch"
    engine = choose_engine("auto", model, placement, {})
    return "torch" if engine is None else engine.package


def optimize(loaded: LoadedModel, engine: str) -> None:
    """Optimize the loaded model in place; its fingerprint remains that of the original weights."""
    from hf_vit.inference.optimize import optimize_for_inference

    assert isinstance(loaded.model, HfPreTrainedModel)
    _ = loaded.fingerprint  # cached now, because an optimized model has no state dict
    optimize_for_inference(loaded.model, engine=engine)


def copy_optimized(loaded: LoadedModel, num_images: int | None) -> tuple[LoadedModel, str | None]:
    """Return the loaded model with an optimized copy of its model and the engine; or unchanged and None, see above."""
    engine = select_engine(loaded, num_images)
    if engine is None:
        return loaded, None
    with report_full_memory(f"an optimized copy of {loaded.name}", "run the model as loaded (--no-optimize)"):
        optimized = replace(loaded, model=copy.deepcopy(loaded.model))
    optimize(optimized, engine)
    return optimized, engine


def format_engine(engine: str) -> str:
    """Return the name and version of an engine."""
    return f"{engine} {RUNTIMES[engine].version() if engine in RUNTIMES else list_versions()[engine]}"


def record_engine(engine: str | None) -> dict[str, str]:
    """Return the engine as a field of a record; no field for a model that is not optimized."""
    return {} if engine is None else {"engine": format_engine(engine)}


def describe_engine(engine: str) -> str:
    """Return the notice that a command prints for an optimized model."""
    return f"{_OPTIMIZED}, runs on {format_engine(engine)}; use --no-optimize to run the model as loaded"


def refuse_optimized_result(path: Path, notes: Sequence[str]) -> None:
    """Raise a UserError if the notes of a finished result are those of an optimized model."""
    if any(note.startswith(_OPTIMIZED) for note in notes):
        raise UserError(f"{path} was measured with --optimize; add --optimize, choose another --output, or delete it")
