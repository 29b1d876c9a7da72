"""Optional fast paths for inference. They do not travel: a stored checkpoint keeps separate q, k, v and plain weights.

Legend: B batch, C channels, H x W px, h x w patch grid, P patch side, N tokens, D hidden size, A heads, K head size.
"""

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_vit.environment import emulates_bfloat16
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.embeddings_hf_vit import HfViTPatchEmbeddings
from hf_vit.models.modeling_hf_vit import HfViTAttention, HfViTBaseForImageClassification, HfViTLayer, HfViTLayerScale

EMULATES_BFLOAT16 = emulates_bfloat16()
# The GELUs that can be fused: hidden_act -> torch's name of the approximation.
FUSED_GELUS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}

Model = TypeVar("Model", bound=nn.Module)
# For which weights are packed best: the tokens of one 224 px image; other numbers run as well.
_ROWS = 197
_REMEDY = "load the model again with from_pretrained"


def optimize_for_inference(model: Model, *, compile: bool = False) -> Model:
    """Make a model faster at inference, in place: same inputs, same outputs up to rounding, no more training or saving.

    q, k and v become one product, LayerScale goes into the weights, and patches are cut by a product instead of a
    convolution. The last layer of a classifier that reads its class token computes only that, unless hidden states or
    attentions are asked for (a hook on it sees as much). On CPUs weights are packed for oneDNN, which then adds biases,
    residuals and GELU while the product is in the cache. Packed weights take the place of the plain ones: memory stays
    as it was, but for a moment with one layer twice; bfloat16 weights are packed as float32 where the processor has no
    instructions for bfloat16. All families gain; a hybrid's stem and an AxialResNet stay as they are.

    Args:
        model: any model of this package, on its device and in its dtype (they are final).
        compile: instead of packing weights, compile with torch's inductor and the weights frozen into the graph. It
            needs a C++ compiler, a slow first call for every input shape, and weights twice in memory. Which of the two
            is faster depends on the processor (`hf-vit bench models`).

    Returns:
        `model`, in evaluation mode.

    Raises:
        UserError: it holds no layer that could be made faster (not of this package, or optimized before).
    """
    targets = [module for module in model.modules() if type(module) in _REPLACEMENTS]
    if not any(isinstance(module, HfViTLayer) for module in targets):
        raise UserError(
            f"{type(model).__name__} has no layers to optimize; give a model of hf_vit's ViT, Hybrid or Axial family "
            "that was not optimized before"
        )
    model.eval().requires_grad_(False)
    with torch.no_grad():
        _replace(model)
    for module in model.modules():
        if isinstance(module, HfViTBaseForImageClassification):
            _shorten_last_layer(module)
        elif isinstance(module, PackedDense) and not compile:  # a compiler could not read packed weights
            module.pack()
    if compile:
        _compile_frozen(model)
    return model


def _compile_frozen(model: nn.Module) -> None:
    """`model.compile()`, frozen: that has to be set while dynamo traces too, and as an option it comes too late."""
    from torch._inductor import config  # not before it is needed: it takes a second

    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), config.patch(freezing=True):
            return compiled(*args, **kwargs)

    model._compiled_call_impl = frozen


def _replace(parent: nn.Module) -> None:
    for name, child in parent.named_children():
        build = _REPLACEMENTS.get(type(child))
        if build is None:
            _replace(child)
        else:
            setattr(parent, name, _with_hooks_of(child, build(child)).eval())


def _shorten_last_layer(classifier: HfViTBaseForImageClassification) -> None:
    """What the head does not read is not computed, unless hidden states or attentions are asked for."""
    config, layers = classifier.config, getattr(classifier.base_model, "layers", None)
    if not layers or not isinstance(layers[-1], PackedLayer) or len(layers) < config.num_hidden_layers:
        return
    if config.pooling != "token" or config.is_causal or config.position_embedding == "relative":
        return
    layers[-1].num_read = config.num_special_tokens
    classifier.register_forward_pre_hook(_only_for_head, with_kwargs=True)


def _only_for_head(classifier: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = classifier.config
    recorded = (kwargs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions"))
    if any(recorded) or config._attn_implementation not in ("eager", "sdpa"):
        return args, kwargs
    return args, {**kwargs, "only_for_head": True}


def _with_hooks_of(old: nn.Module, new: nn.Module) -> nn.Module:
    """A user's hooks, and those by which transformers records hidden states and attentions."""
    for name in vars(old):
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            setattr(new, name, getattr(old, name))
    return new


@final
class PackedDense(nn.Module):
    """x W' + b, then GELU or + residual in the same pass: [.., D] -> [.., M]. Its weights are nobody's parameters.

    Args:
        weight, bias: [M, D], [M] or None; they can be freed afterwards.
        activation: "gelu", "gelu_pytorch_tanh" or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        self.dtype, self.device = weight.dtype, weight.device
        self.approximate = None if activation is None else FUSED_GELUS[activation]
        is_emulated = EMULATES_BFLOAT16 and self.dtype == torch.bfloat16 and self.device.type == "cpu"
        self.wide = torch.float32 if is_emulated else self.dtype
        self.is_packed = False
        self.register_buffer("weight", weight.detach().to(self.wide), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().to(self.wide), persistent=False)

    def pack(self) -> None:
        """For oneDNN, where it can; the packed weight takes the place of the plain one and is no buffer."""
        weight = self.weight
        if _can_pack(weight):
            del self.weight
            self.weight, self.is_packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), True

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if torch.is_grad_enabled() and inputs.requires_grad:
            raise UserError(f"a model optimized for inference has no gradients; {_REMEDY}")
        wide = None if residual is None else residual.to(self.wide)
        return self._product(inputs.to(self.wide), wide).to(inputs.dtype)

    def _product(self, inputs: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if not self.is_packed:
            outputs = F.linear(inputs, self.weight, self.bias)
            if self.approximate is not None:
                outputs = F.gelu(outputs, approximate=self.approximate)
            return outputs if residual is None else outputs + residual
        dense = torch.ops.mkldnn._linear_pointwise
        if residual is not None:
            return dense.binary(inputs, residual, self.weight, self.bias, "add")
        if self.approximate is not None:
            return dense(inputs, self.weight, self.bias, "gelu", [], self.approximate)
        return dense(inputs, self.weight, self.bias, "none", [], "")

    def train(self, mode: bool = True) -> "PackedDense":
        if mode:
            raise UserError(f"a model optimized for inference cannot be trained; {_REMEDY}")
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedDense":
        """Moves and casts: only those that change nothing."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) != (self.dtype, self.device):
            raise UserError(
                f"a model optimized for inference stays {self.dtype} on {self.device}; {_REMEDY}, move or cast it, "
                "then optimize it"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise UserError(f"a model optimized for inference cannot be saved; {_REMEDY} and save that")


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


@final
class PackedAttention(HfViTAttention):
    """`HfViTAttention` whose q, k and v are one product, and whose output projection adds the residual."""

    def __init__(self, attention: HfViTAttention, scale: HfViTLayerScale | None) -> None:
        nn.Module.__init__(self)
        for name in ("config", "head_dim", "scaling", "is_causal", "attention_dropout", "relative_position"):
            setattr(self, name, getattr(attention, name))
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = torch.cat([part.bias for part in parts]) if attention.config.qkv_bias else None
        self.qkv = PackedDense(torch.cat([part.weight for part in parts]), bias)
        self.o_proj = _scaled(attention.o_proj, scale)  # pyright: ignore[reportAttributeAccessIssue]

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        return self.heads(query), self.heads(key), self.heads(value)

    def attend(self, hidden_states: torch.Tensor, attention_mask: Any = None, num_queries: Any = None, **kwargs: Any):  # pyright: ignore
        """As the base class; with `num_queries` only the first tokens attend, to all tokens."""
        if num_queries is None:
            return super().attend(hidden_states, attention_mask, **kwargs)
        query, key, value = self.project(hidden_states)
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :num_queries]
        attended = F.scaled_dot_product_attention(
            query[:, :, :num_queries], key, value, attention_mask, scale=self.scaling
        )
        return attended.transpose(1, 2).flatten(2), None

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.project(hidden_states)[:2]

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, probabilities = self.attend(hidden_states, attention_mask, **kwargs)
        return self.o_proj(attended, residual), probabilities


@final
class PackedLayer(HfViTLayer):
    """`HfViTLayer` with packed weights: the same norms, attention and MLP, each of which adds its residual.

    The last one of a classifier that reads special tokens computes these alone, `num_read` of them.
    """

    def __init__(self, layer: HfViTLayer) -> None:
        GradientCheckpointingLayer.__init__(self)
        self.num_read: int | None = None
        self.layernorm_before, self.layernorm_after = layer.layernorm_before, layer.layernorm_after
        attention = PackedAttention(layer.attention, layer.layer_scale1)
        self.attention = _with_hooks_of(layer.attention, attention)  # pyright: ignore[reportAttributeAccessIssue]
        mlp, activation = layer.mlp, layer.attention.config.hidden_act
        fused = activation in FUSED_GELUS
        self.fc1 = PackedDense(mlp.fc1.weight, mlp.fc1.bias, activation if fused else None)
        self.activation = nn.Identity() if fused else mlp.activation_fn
        self.fc2 = _scaled(mlp.fc2, layer.layer_scale2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        only_for_head: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        num_queries = self.num_read if only_for_head else None
        normed, residual = self.layernorm_before(hidden_states), hidden_states[:, :num_queries]
        hidden_states, _ = self.attention(normed, attention_mask, residual=residual, num_queries=num_queries, **kwargs)
        normed = self.layernorm_after(hidden_states)
        return self.fc2(self.activation(self.fc1(normed)), hidden_states)


@final
class PackedPatchEmbeddings(nn.Module):
    """Patches by one product: [B, C, H, W] -> [B, h*w, D], row by row."""

    def __init__(self, patch_embeddings: HfViTPatchEmbeddings) -> None:
        super().__init__()
        projection = patch_embeddings.projection
        self.patch = projection.kernel_size
        self.dense = PackedDense(projection.weight.permute(0, 2, 3, 1).flatten(1), projection.bias)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        cut = pixel_values.unflatten(2, (-1, self.patch[0])).unflatten(4, (-1, self.patch[1]))  # [B, C, h, P, w, P]
        return self.dense(cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))

    def resize_to(self, config: HfViTConfig) -> None:
        if config.patch_stride != self.patch:
            raise UserError(f"a model optimized for inference keeps its patch of {self.patch} px; {_REMEDY}")


def _scaled(dense: nn.Linear, scale: HfViTLayerScale | None) -> PackedDense:
    """A dense layer and the LayerScale that follows it."""
    if scale is None:
        return PackedDense(dense.weight, dense.bias)
    return PackedDense(dense.weight * scale.lambda1[:, None], dense.bias * scale.lambda1)


# What stands for what; the children of a replaced module are not looked at.
_REPLACEMENTS: dict[type, Callable[[Any], nn.Module]] = {
    HfViTLayer: PackedLayer,
    HfViTPatchEmbeddings: PackedPatchEmbeddings,
}
