"""What a head does not read is not computed."""

from typing import Any

from torch import nn

from hf_vit.models.modeling_hf_vit import HfViTBaseForImageClassification, HfViTBaseModel, HfViTTokenPooler


def num_read_tokens(classifier: HfViTBaseForImageClassification) -> int | None:
    """How many tokens of the last layer the head reads, class and distillation token; None where it may read all.

    Layers that share a block have no last one, and a bias of relative positions is that of all tokens.
    """
    config, vit = classifier.config, classifier.vit
    plain = _is_plain(classifier, HfViTBaseForImageClassification) and _is_plain(vit, HfViTBaseModel)
    if not (plain and _reads_token(vit.pooler)):
        return None
    shared = len(set(vit.layers)) < config.num_hidden_layers
    if shared or config.pooling != "token" or config.is_causal or config.position_embedding.startswith("relative"):
        return None
    return config.num_special_tokens - config.num_register_tokens


def _is_plain(part: nn.Module | None, kind: type[nn.Module], *methods: str) -> bool:
    """Whether its forward and other methods are those of a class of the package, whatever guards it.

    A subclass, or what was put on the object, may read anything.
    """
    return isinstance(part, kind) and all(
        getattr(getattr(part, name), "__func__", None) is getattr(kind, name) for name in ("forward", *methods)
    )


def _reads_token(pooler: nn.Module | None) -> bool:
    return _is_plain(pooler, HfViTTokenPooler, "pool")


def only_for_head(
    classifier: HfViTBaseForImageClassification, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of a classifier: its last layer may leave out what nobody reads, records or listens to."""
    config, vit = classifier.config, classifier.vit
    recorded = (kwargs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions"))
    if any(recorded) or config._attn_implementation not in ("eager", "sdpa") or not _reads_token(vit.pooler):
        return args, kwargs
    ends = [end for end in (vit.layers[-1], vit.layernorm, vit.pooler) if end is not None]
    if has_listeners(vit) or any(has_listeners(part) for end in ends for part in end.modules()):
        return args, kwargs
    return args, {**kwargs, "only_for_head": True}


def attends_otherwise(config: Any) -> bool:
    """Whether a function computes the attention that is not known to give what all others do."""
    name = config._attn_implementation
    return name not in ("eager", "sdpa", "flex_attention") and "flash" not in str(name)


def has_listeners(module: nn.Module) -> bool:
    """Whether somebody hears or changes what goes in or comes out, by a hook or as accelerate does it.

    transformers' recording, which is asked for, does not count.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks)
