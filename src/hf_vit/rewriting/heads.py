"""What a head does not read is not computed."""

from typing import Any

from torch import nn

from hf_vit.models.modeling_hf_vit import HfViTBaseForImageClassification


def num_read_tokens(classifier: HfViTBaseForImageClassification) -> int | None:
    """How many tokens of the last layer the head reads, class and distillation token; None where it may read all.

    Layers that share a block have no last one, and a bias of relative positions is that of all tokens.
    """
    config = classifier.config
    if type(classifier).forward is not HfViTBaseForImageClassification.forward:  # a subclass may read anything
        return None
    shared = len(set(classifier.vit.layers)) < config.num_hidden_layers
    if shared or config.pooling != "token" or config.is_causal or config.position_embedding.startswith("relative"):
        return None
    return config.num_special_tokens - config.num_register_tokens


def only_for_head(
    classifier: HfViTBaseForImageClassification, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of a classifier: its last layer may leave out what nobody reads, records or listens to."""
    config, vit = classifier.config, classifier.vit
    recorded = (kwargs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions"))
    if any(recorded) or config._attn_implementation not in ("eager", "sdpa"):
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
