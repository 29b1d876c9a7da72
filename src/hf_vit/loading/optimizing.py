"""A loaded model made faster before it only infers: by what, follows from how many images it will see.

A few images are computed by the model as loaded, since optimizing it would cost more than it saves; long runs of
models that are not small use the fastest engine. The numbers are from `benchmarks/results/int8_avx512_bf16.json`: S/16
and B/16 are packed in the time that packing saves on 8 images, and their graphs are made in that of some 5,000.
"""

import copy
from dataclasses import replace

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES
from hf_vit.environment import versions
from hf_vit.errors import UserError, enough_memory
from hf_vit.loading.model import LoadedModel
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel

PACKED_FROM, GRAPH_FROM = 16, 10_000  # images, twice what repays it
GRAPH_PARAMETERS = 5_000_000  # smaller models answer sooner than a graph is made


def engine_for(subject: LoadedModel, num_images: int | None) -> str | None:
    """Return the engine that repays itself, a value of `optimize_for_inference`; None for a model that stays as it was
    loaded.

    That is one of another library, on a GPU, or with parts that cannot be rewritten.

    Args:
        num_images: that it will see; None for a stream of nobody knows how many.
    """
    model = subject.model
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
    if is_small or (num_images is not None and num_images < GRAPH_FROM):
        return "torch"
    engine = choose_engine("auto", model, placement, {})
    return "torch" if engine is None else engine.package


def optimize(subject: LoadedModel, engine: str) -> None:
    """Let an engine compute the subject's model, in place; its fingerprint stays that of its weights."""
    from hf_vit.inference.optimize import optimize_for_inference

    assert isinstance(subject.model, HfPreTrainedModel)
    _ = subject.fingerprint  # it is kept: an optimized model shows no state
    optimize_for_inference(subject.model, engine=engine)


def optimized_copy(subject: LoadedModel, num_images: int | None) -> tuple[LoadedModel, str | None]:
    """Return the subject with a copy of its model that so many images repay, and its engine; else as it is, and
    None.
    """
    engine = engine_for(subject, num_images)
    if engine is None:
        return subject, None
    with enough_memory(f"a copy of {subject.name} that is made faster", "leave that out (--no-optimize)"):
        copied = replace(subject, model=copy.deepcopy(subject.model))
    optimize(copied, engine)
    return copied, engine


def engine_title(engine: str) -> str:
    """Return name and version, for people and facts."""
    return f"{engine} {RUNTIMES[engine].version() if engine in RUNTIMES else versions()[engine]}"


def engine_fact(engine: str | None) -> dict[str, str]:
    """Return what a record keeps of it: nothing of a model as it was loaded."""
    return {} if engine is None else {"engine": engine_title(engine)}


def engine_note(engine: str) -> str:
    """Return what a command says of it."""
    return f"optimized for inference, computed by {engine_title(engine)} (as loaded: --no-optimize)"
