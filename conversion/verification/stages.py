"""What a converted model computes on the way to its logits, under the names and with the axes of the original code."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_vit.conversion.planning.plan import Plan
from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_base import HfBaseConfig
from hf_vit.models.modeling_hf_vit import patch_token_slice
from hf_vit.models.positions_hf_vit import resample_position_table

Stages = dict[str, torch.Tensor]


def stage_names(plan: Plan) -> list[str]:
    """The stages in the order of the computation."""
    if plan.family == "bit":
        return ["stem", *_resnet_stages(plan.config), "logits_2d", "pooled", "pre_logits", "logits"]
    if plan.family == "mixer":
        return ["embedding", *_mixer_stages(plan.config), "pooled", "pre_logits", "logits"]
    blocks = [f"layer_{i}{part}" for i in range(plan.config.num_hidden_layers) for part in ("_attn", "_mlp", "")]
    heads = ("encoded", "pooled", "pre_logits", "logits")
    tables = ("posemb_in", "posemb_out") if plan.config.position_embedding == "learned" else ()
    return [*tables, *_stem_stages(plan), "embedding", "with_posemb", *blocks, *heads]


def run_stages(model: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    """All stages of one forward pass, with the axes of the original: channels last.

    Args:
        model: the converted model.
        pixel_values: [B, C, H, W], in the model's dtype.

    Raises:
        UserError: the images do not fit the model.
    """
    run = {"bit": _run_resnet, "mixer": _run_mixer}.get(plan.family, _run_transformer)
    body = model.base_model
    try:
        with torch.no_grad():
            return run(model, body, pixel_values, plan)
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error


def _blocks(config: HfBaseConfig, inside: str) -> dict[str, str]:
    """Stage -> module of a ResNet, for its stages of units."""
    return {f"block{i + 1}": f"{inside}.stages.{i}" for i in range(len(config.stage_depths))}


def _stem_stages(plan: Plan) -> dict[str, str]:
    """Stage -> module below the patch embeddings, for what precedes the patches of a hybrid; channels last too."""
    if plan.family == "plain":
        return {}
    return {"conv_root": "stem.root_conv", "gn_root": "stem.root_norm", **_blocks(plan.config, "stem")}


def _resnet_stages(config: HfBaseConfig) -> dict[str, str]:
    """Stage -> module, for what follows the root; the norm before the head comes with its ReLU still to follow."""
    return _blocks(config, "encoder") | ({"norm_pre_head": "encoder.norm"} if config.pre_activation else {})


def _mixer_stages(config: Any) -> dict[str, str]:
    """Stage -> module, after the patches."""
    return {f"layer_{i}": f"layers.{i}" for i in range(config.num_hidden_layers)} | {"encoded": "layernorm"}


def _run_transformer(model: Any, body: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    embeddings = body.embeddings
    watched: dict[str, Any] = {"embedding": embeddings.patch_embeddings.projection, "with_posemb": embeddings}
    stem = _stem_stages(plan)
    watched |= {stage: embeddings.patch_embeddings.get_submodule(name) for stage, name in stem.items()}
    for i, layer in enumerate(body.layers):
        watched |= {f"layer_{i}_attn": layer.attention, f"layer_{i}_mlp": layer.mlp, f"layer_{i}": layer}
    with _watching(watched) as stages:
        output = body(pixel_values)
    for stage in ("embedding", *stem):
        stages[stage] = stages[stage].permute(0, 2, 3, 1)
    if not body.config.position_on_class_token:  # that original attaches the class token later
        stages["with_posemb"] = stages["with_posemb"][:, patch_token_slice(body.config)]
    stages["encoded"], stages["pre_logits"] = output.last_hidden_state, output.pooler_output
    stages["pooled"] = body.pooler.pool(output.last_hidden_state)
    stages["logits"] = _logits(model, output, plan)
    if body.config.position_embedding == "learned":
        h, w = stages["embedding"].shape[1:3]
        stages |= _tables(body, (h, w))
    return stages


def _run_resnet(model: Any, body: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    watched = {stage: body.get_submodule(name) for stage, name in _resnet_stages(body.config).items()}
    with _watching(watched) as stages, _watching({"stem": body.encoder.stages[0]}, inputs=True) as roots:
        output = body(pixel_values)
    stages = {stage: maps.permute(0, 2, 3, 1) for stage, maps in (roots | stages).items()}
    grid = body.config.grid_of(*pixel_values.shape[2:])
    head: Callable[[torch.Tensor], torch.Tensor] = model.classifier if plan.has_head else lambda features: features
    stages["logits_2d"] = head(output.last_hidden_state).unflatten(1, grid)
    stages["pooled"] = stages["pre_logits"] = output.pooler_output
    return stages | {"logits": head(output.pooler_output)}


def _run_mixer(model: Any, body: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    watched = {stage: body.get_submodule(name) for stage, name in _mixer_stages(body.config).items()}
    with _watching({"embedding": body.embeddings.patch_embeddings.projection, **watched}) as stages:
        output = body(pixel_values)
    stages["embedding"] = stages["embedding"].permute(0, 2, 3, 1)
    stages["pooled"] = stages["pre_logits"] = output.pooler_output
    return stages | {"logits": model.classifier(output.pooler_output) if plan.has_head else output.pooler_output}


@contextmanager
def _watching(modules: Mapping[str, torch.nn.Module], inputs: bool = False) -> Generator[Stages]:
    """Keeps what the modules give, or get, in the forward passes within."""
    stages: Stages = {}

    def keep(stage: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
            output = given if inputs else output
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "hidden_states", output)
            stages[stage] = output.clone()  # what follows may write into it

        return hook

    handles = [module.register_forward_hook(keep(stage)) for stage, module in modules.items()]
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


def _logits(model: Any, output: Any, plan: Plan) -> torch.Tensor:
    """The head's answer, or what a head would see; of two heads their mean, as the classifier gives it."""
    if not plan.has_head:
        return output.pooler_output
    logits = model.classifier(output.pooler_output)
    if not plan.config.has_distillation_head:
        return logits
    return (logits + model.distillation_classifier(output.last_hidden_state[:, 1])) / 2


def _tables(body: Any, grid: Pair) -> Stages:
    """The position table as stored, and as the forward pass used it."""
    stored = body.embeddings.position_embeddings.detach()
    special = body.embeddings.num_special_rows
    return {"posemb_in": stored, "posemb_out": resample_position_table(stored, body.config.grid, grid, special)}
