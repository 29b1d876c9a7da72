"""Optimize a model for inference, completely or not at all: freeze it, save time and memory, merge tokens.

Legend: B batch, C channels, H x W px, h x w patch grid, A heads, K head size or size of a query, D hidden size, N
tokens of the image, n tokens after merging, S special tokens, L positions of a line, M lines.
"""

import logging
import math
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.environment import emulates_bfloat16, get_cpu_capabilities, keep_freed_memory
from hf_vit.errors import UserError, report_full_memory
from hf_vit.inference.calibration import record_inputs
from hf_vit.inference.engines import ENGINES, choose_engine, list_engine_modules, make_engine_changes
from hf_vit.inference.freezing import REMEDY, add_base, freeze, refuse_gradients
from hf_vit.inference.layers import FusedLayer, derive, scale_and_shift
from hf_vit.inference.packing import check_int8, pack
from hf_vit.inference.plan import (
    Change,
    check_model,
    has_custom_attention,
    has_listeners,
    list_channelwise_norms,
    make_plan,
)
from hf_vit.models.configuration_hf_axial_resnet import HEADS
from hf_vit.models.embeddings_hf_vit import Grid, HfViTEmbeddings, Rotation, Rows, is_graph
from hf_vit.models.modeling_hf_axial_resnet import HfAxialResNetAttention
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTModel
from hf_vit.models.modeling_hf_vit import (
    AttentionMaps,
    HfViTBaseModel,
    HfViTModel,
    compute_attention_probabilities,
    get_patch_token_slice,
)
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone
from hf_vit.models.resnet_hf_vit import ResNetBottleneck, to_channels_last

Model = TypeVar("Model", bound=nn.Module)


def optimize_for_inference(
    model: Model,
    *,
    engine: str = "auto",
    compile: bool = False,
    quantize: str | None = None,
    calibrate: torch.Tensor | None = None,
    merge_tokens: int | None = None,
) -> Model:
    """Make a model faster at inference, in place: same inputs, same outputs up to rounding, no more training or saving.

    q, k and v become one product, LayerScale and batch norms are merged into the weights, kernels are standardized
    once, and a product cuts patches instead of a convolution. The last layer of a classifier that reads its class token
    computes only that token, unless hidden states or attentions are requested or a hook reads them. On CPUs weights are
    packed for oneDNN, which adds biases, residuals and GELU while the product is in the cache. bfloat16 is computed in
    float32 on processors without instructions for it. Position tables are cached per image size, and freed memory is
    kept for the next pass (`hf_vit.keep_freed_memory`, for the whole process).

    The whole model is checked and everything new is built before anything changes, so a model that is refused, or for
    which memory runs out, stays as it was. While it is optimized, its weights are in memory twice.

    Args:
        model: a model of this package, or a module that contains one, on its final device and in its final dtype,
            without adapters, hooks or parametrizations on the modules that are rewritten.
        engine: "torch"; "openvino" or "onnxruntime", for bare models and classifiers on CPUs in float32 (OpenVINO also
            bfloat16), which need at least twice the weights' memory; torch computes what their graph does not return
            (hidden states, padding, hooks). "auto": OpenVINO where it works and was measured to be faster, else torch.
        compile: compile the model with torch's inductor instead of packing weights. Needs a C++ compiler; the first
            call with each shape is slow; set hooks and heads before it. `hf-vit bench models` shows which is faster.
        quantize: "int8": compute dense layers on CPUs in int8 by oneDNN (weights per channel, inputs by the range of
            the batch, or of each token where a residual is added); patches, convolutions, attention's products and the
            head stay in float. Outputs change; check the model's accuracy. Without VNNI instructions it is not fast,
            and weights are coarser.
        calibrate: with quantize, images as the model takes them (about 100, [B, C, H, W]). The inputs that layers have
            on them, 4 D x D bytes each, balance the channels of norms with the weights that read them (SmoothQuant)
            and choose how weights are rounded (GPTQ), which changes outputs less and costs no time later.
        merge_tokens: patch tokens that every block merges into others (token merging, arXiv 2210.09461), for Vision
            Transformers and hybrids. Faster, but outputs change; check the model's accuracy. `attention_maps` still
            cover all patches. Hidden states, backbones and padding are refused.

    Returns:
        `model`, in evaluation mode and frozen: training, casting, moving, copying or saving it raises UserError and
            changes nothing. `model.engine` names the engine.

    Raises:
        UserError: an unknown option; a model that would lose something (the message names the module); too little
            memory.
    """
    names = ("auto", "torch", *ENGINES)
    if engine not in names:
        raise UserError(f"engine={engine!r} is unknown; choose from {', '.join(map(repr, names))}")
    if quantize not in (None, "int8"):
        raise UserError(f"quantize={quantize!r} is unknown; use 'int8' or None")
    dtype, device = placement = check_model(model)
    if quantize is not None:
        check_int8(model, device, compile)
    elif calibrate is not None:
        raise UserError("calibrate is for quantize='int8'; give both, or leave calibrate out")
    if not isinstance(calibrate, torch.Tensor | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"calibrate is a {type(calibrate).__name__}; give a tensor of images as the model takes them")
    if merge_tokens is not None:
        check_mergeable(model, merge_tokens)
    options = {"compile": compile, "quantize": quantize, "merge_tokens": merge_tokens}
    runtime = choose_engine(engine, model, placement, options)
    graph_changes = list[Change]()
    is_emulated = dtype == torch.bfloat16 and device.type == "cpu" and emulates_bfloat16()
    # A compiler cannot read packed weights, and precomputes by itself what depends only on weights.
    finish = None if compile else partial(pack, in_int8=quantize is not None)
    with (
        report_full_memory(
            "the model's weights a second time", "use the model as it is, or a machine with more memory"
        ),
        torch.autocast(device.type, enabled=False),  # a graph would keep its casts, also in the cache
        nullcontext() if calibrate is None else record_inputs(model, calibrate),
    ):
        plan = make_plan(model, torch.float32 if is_emulated or quantize is not None else dtype, finish)
        if runtime is not None:
            try:
                graph_changes = make_engine_changes(model, runtime, dtype, plan)
            except UserError:
                if engine != "auto":
                    raise
    if merge_tokens is not None:
        plan.changes += make_merging_changes(model, plan.changes, merge_tokens)
    plan.changes += [*(list_channelwise_norms(model) if compile else list_memory_changes(model)), *graph_changes]
    plan.carry_out()
    model.eval().requires_grad_(False)
    if compile:
        compile_frozen(model)
    freeze(model, placement, runtime.package if runtime and graph_changes else "torch", list_engine_modules(model))
    if device.type == "cpu":
        keep_freed_memory()
    return model


def compile_frozen(model: nn.Module) -> None:
    """Compile a frozen model with torch's inductor, on CPUs with a C++ wrapper, which is faster than Python's.

    The settings also hold while dynamo traces the model, when options of `compile` would come too late.
    """
    from torch._inductor import config  # imported late, as it takes a second

    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    # On AMD's CPUs float32 products are faster in oneDNN than in Intel's MKL, which inductor uses. A CPU with AMX is
    # excluded, as oneDNN could use the lower precision that is allowed below.
    capabilities = get_cpu_capabilities()
    mkl_is_slow = str(capabilities.get("cpu_name")).startswith("AMD") and not capabilities.get("amx_tile")
    use_onednn = _use_onednn_products if on_cpu and mkl_is_slow else nullcontext
    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def run_frozen(*args: Any, **kwargs: Any) -> Any:
        """Run a pass without gradients and under inductor's settings."""
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Tensor):
                refuse_gradients(argument)
        with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=on_cpu), use_onednn():
            return compiled(*args, **kwargs)

    model._compiled_call_impl = run_frozen


_lock = threading.Lock()
_previous_precisions: list[str] = []  # one entry per running pass: the setting from before the first of them


@contextmanager
def _use_onednn_products() -> Generator[None]:
    """Allow lower precision, which makes inductor use oneDNN; CPUs without instructions for it lose no precision."""
    matmul_settings: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    with _lock:
        _previous_precisions.append(_previous_precisions[0] if _previous_precisions else matmul_settings.fp32_precision)
        matmul_settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        with _lock:
            previous = _previous_precisions.pop()
            if not _previous_precisions:
                matmul_settings.fp32_precision = previous


logger = logging.getLogger(__name__)
KEPT_GRIDS = 16  # number of image sizes whose tables are kept; the oldest is dropped first
SMALL_MAP = 1024  # cells of a map; torch normalizes smaller maps by another, slower kernel
CACHED_LOGITS = 2**18  # logits computed at a time on a CPU, so that they fit into its cache


@final
class CachingEmbeddings(HfViTEmbeddings):
    """`HfViTEmbeddings` that computes resampled and sinusoidal tables, and rotations, once per grid.

    Cached tables would not follow changes of their parameters, so the parameters are hidden in `tables`.
    """

    cache: dict[str, dict[Any, Any]]
    tables: tuple[HfViTEmbeddings]  # in a tuple, which makes it no submodule

    def compute_position_table(self, grid: Grid, like: torch.Tensor) -> Rows:
        """Return the position embeddings of a grid from the cache, or compute and cache them."""
        return self._find("compute_position_table", grid, like)

    def rotation(self, grid: Grid, like: torch.Tensor, image_grids: list[Grid] | None = None) -> Rotation | None:
        """Return the rotation of a grid from the cache, or compute and cache it; padded batches are not cached."""
        return self._find("rotation", grid, like) if image_grids is None else super().rotation(grid, like, image_grids)

    def _find(self, method: str, grid: Grid, like: torch.Tensor) -> Any:
        """Return what a method of `tables` returns for a grid, from the cache if it is there."""
        compute = getattr(self.tables[0], method)
        if type(like) is not torch.Tensor:  # a tracer's tensor, which may have no values
            return compute(grid, like)
        cache = self.cache.setdefault(method, {})
        key = (grid, like.dtype, like.device, is_graph())
        value = cache.get(key)
        if value is None:
            if len(cache) >= KEPT_GRIDS:
                cache.pop(next(iter(cache)), None)
            value = cache[key] = compute(grid, like)
        return value


@final
class PortionedAttention(HfAxialResNetAttention):
    """`HfAxialResNetAttention` that computes only as many lines at a time as fit into a CPU's cache.

    Both of its batch norms become one sum, unless they have hooks.
    """

    def add_normalized(self, content: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Apply both batch norms and add the results, as one scale for each and one shift."""
        if has_listeners(self.content_norm) or has_listeners(self.position_norm):
            return super().add_normalized(content, position)
        scale, shift = (tensor.view(content.shape[2:]) for tensor in scale_and_shift(self.content_norm))
        other_scale, other_shift = (tensor.view(content.shape[2:]) for tensor in scale_and_shift(self.position_norm))
        return torch.addcmul(torch.addcmul(shift + other_shift, content, scale), position, other_scale)

    def attend_lines(
        self, qkv: torch.Tensor, scales: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor
    ) -> torch.Tensor:
        """Attend along as many lines at a time as fit into the cache of a CPU."""
        compute = super().attend_lines
        offsets = (to_q, to_k, to_v)
        if qkv.device.type != "cpu":
            return compute(qkv, scales, *offsets)
        lines_per_portion = max(CACHED_LOGITS // (HEADS * qkv.shape[2] ** 2), 1)
        return torch.cat([compute(portion, scales, *offsets) for portion in qkv.split(lines_per_portion)])


@final
class InPlaceBottleneck(ResNetBottleneck):
    """`ResNetBottleneck` that overwrites values that nothing reads again, unless its parts have hooks."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Transform a map [B, C, H, W]; where hooks listen, compute it in the original way."""
        if any(has_listeners(child) for child in self.children()):
            return super().forward(features)
        residual = features
        if self.projection is not None and self.projection_norm is not None:
            residual = _normalize(self.projection_norm, self.projection(features))
        hidden = F.relu_(_normalize(self.norm1, self.conv1(features)))
        hidden = F.relu_(_normalize(self.norm2, self.conv2(hidden)))
        return F.relu_(_normalize(self.norm3, self.conv3(hidden)).add_(residual))


def _normalize(norm: nn.GroupNorm, features: torch.Tensor) -> torch.Tensor:
    """Apply a GroupNorm to [B, C, H, W].

    For small bfloat16 maps with few channels per group and channels-last memory, torch's CPU kernel is slower than
    changing the memory order twice.
    """
    is_slow = features.device.type == "cpu" and features.dtype == torch.bfloat16
    if is_slow and features.shape[2] * features.shape[3] < SMALL_MAP and norm.num_channels <= 8 * norm.num_groups:
        return to_channels_last(norm(features.contiguous()))
    return norm(features)


def list_memory_changes(model: nn.Module) -> list[Change]:
    """Return the changes of class for modules that keep their weights."""
    changes: list[Change] = []
    for module in model.modules():
        if type(module) is HfViTEmbeddings:
            visible_parameters = {name: value for name, value in module._parameters.items() if "position" not in name}
            tables: Any = derive(HfViTEmbeddings, module, without=tuple(module._modules))
            tables.training = False  # training moves coordinates at random
            tables._parameters = {name: value.detach() for name, value in module.named_parameters(recurse=False)}
            changes += [
                *(Change(module, "cache", {}), Change(module, "tables", (tables,))),
                *(Change(module, "_parameters", visible_parameters), Change(module, "__class__", CachingEmbeddings)),
            ]
        elif type(module) is HfAxialResNetAttention:
            changes.append(Change(module, "__class__", PortionedAttention))
        elif type(module) is ResNetBottleneck:
            changes.append(Change(module, "__class__", InPlaceBottleneck))
    return changes


@final
class TokenGroups:
    """The groups into which one pass merges the tokens; special tokens come first and are never merged."""

    def __init__(self, num_merged: int, num_special: int) -> None:
        self.num_merged, self.num_special = num_merged, num_special  # a block merges at most half of its patch tokens
        self.sizes: torch.Tensor | None = None  # [B, n, 1], tokens in each group; None before the first merge
        self.group_of: torch.Tensor | None = None  # [B, N], the group of each token of the image

    @property
    def attention_bias(self) -> torch.Tensor | None:
        """Return the bias [B, 1, 1, n] that weights groups by their sizes (proportional attention, section 3)."""
        return None if self.sizes is None else self.sizes.log()[:, None, None, :, 0]

    def merge(self, hidden_states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Merge tokens [B, n, D] by bipartite soft matching of their keys [B, n, K], the heads' mean (section 3)."""
        special = self.num_special
        count = min(self.num_merged, (hidden_states.shape[1] - special) // 2)
        if count < 1:
            return hidden_states
        # Tokens with an even index are matched to tokens with an odd one; all tokens count, as in the authors' code.
        even = slice(special + special % 2, None, 2)
        odd = slice(special + 1 - special % 2, None, 2)
        normalized_keys = F.normalize(keys, dim=-1)
        similarity, best_match = (normalized_keys[:, even] @ normalized_keys[:, odd].mT).max(dim=-1)
        order = similarity.argsort(dim=1, descending=True)
        merged_indices = order[:, :count]
        kept_indices = order[:, count:].sort(dim=1).values
        merge_targets = best_match.gather(1, merged_indices)

        def sum_groups(values: torch.Tensor) -> torch.Tensor:
            """Add the values of merged tokens to those of their partners."""
            shape = (-1, -1, values.shape[2])
            sources, targets = values[:, even], values[:, odd]
            moved = sources.gather(1, merged_indices[..., None].expand(shape))
            kept_sources = sources.gather(1, kept_indices[..., None].expand(shape))
            targets = targets.scatter_add(1, merge_targets[..., None].expand(shape), moved)
            return torch.cat((values[:, :special], kept_sources, targets), dim=1)

        sizes = torch.ones_like(hidden_states[..., :1]) if self.sizes is None else self.sizes
        self.sizes = sum_groups(sizes)
        # The kept even tokens come before the odd ones.
        first_target = special + kept_indices.shape[1]
        is_kept = torch.ones_like(best_match).scatter(1, merged_indices, 0)
        group_of = torch.arange(hidden_states.shape[1], device=order.device).repeat(order.shape[0], 1)
        group_of[:, even] = torch.where(is_kept > 0, special + is_kept.cumsum(dim=1) - 1, first_target + best_match)
        group_of[:, odd] = torch.arange(first_target, self.sizes.shape[1], device=order.device)
        self.group_of = group_of if self.group_of is None else group_of.gather(1, self.group_of)
        return sum_groups(hidden_states * sizes) / self.sizes

    def spread(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Give every token of the image the state of its group: [B, n, D] -> [B, N, D]."""
        if self.group_of is None:
            return hidden_states
        return hidden_states.gather(1, self.group_of[..., None].expand(-1, -1, hidden_states.shape[2]))

    def spread_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Divide each group's attention evenly among its tokens: [B, A, n, n] -> [B, A, N, N]; rows still sum to 1."""
        if self.group_of is None or self.sizes is None:
            return probabilities
        shares = probabilities / self.sizes[:, None, None, :, 0]
        rows, columns = self.group_of[:, None, :, None], self.group_of[:, None, None, :]
        shares = shares.gather(2, rows.expand(-1, shares.shape[1], -1, shares.shape[3]))
        return shares.gather(3, columns.expand(-1, shares.shape[1], shares.shape[2], -1))


@final
class MergingLayer(FusedLayer):
    """`FusedLayer` that merges tokens between attention and MLP; the last layer returns all tokens of the image."""

    is_last: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        only_for_head: bool = False,
        groups: TokenGroups | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend, then merge tokens by their keys, then apply the MLP: [B, N, D] -> [B, fewer, D]."""
        assert groups is not None, (
            "a MergingLayer only runs inside a MergingModel, which chooses the tokens to merge; use "
            "optimize_for_inference(model, merge_tokens=...)"
        )
        num_queries = self.num_read if only_for_head else None
        query, key, value = self.attention.project(self.layernorm_before(hidden_states))
        query = query[:, :, :num_queries]
        output = F.scaled_dot_product_attention(query, key, value, groups.attention_bias, scale=self.attention.scaling)
        hidden_states = self.attention.o_proj(output.transpose(1, 2).flatten(2), hidden_states[:, :num_queries])
        if num_queries is None and not self.is_last:
            hidden_states = groups.merge(hidden_states, key.mean(dim=1))
        hidden_states = self.mlp(self.layernorm_after(hidden_states), hidden_states)
        return groups.spread(hidden_states) if num_queries is None and self.is_last else hidden_states

    def compute_merged_map(self, hidden_states: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """Return this block's map [B, A, N, N] over all tokens of the image, for its input [B, n, D]."""
        query, key = self.attention.query_and_key(self.layernorm_before(hidden_states))
        return groups.spread_map(
            compute_attention_probabilities(query, key, self.attention.scaling, groups.attention_bias)
        )


class MergingModel(HfViTBaseModel):
    """Class put before the class of a model whose layers merge tokens."""

    num_merged: int
    checked_grids: set[Grid]  # those for which it was checked that enough tokens are left

    def make_groups(self) -> TokenGroups:
        return TokenGroups(self.num_merged, self.config.num_special_tokens)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorated method lists its parameters)
        self, pixel_values: torch.Tensor, patch_attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the outputs with merged tokens; refuse padding, custom attention, hidden states and attentions."""
        _refuse_padding(patch_attention_mask)
        if has_custom_attention(self.config):
            raise UserError(
                "merge_tokens does not work with a custom attention function; load the model with a built-in "
                "attn_implementation, such as 'sdpa'"
            )
        for name in ("output_hidden_states", "output_attentions"):
            requested_value = kwargs.get(name)
            if getattr(self.config, name) if requested_value is None else requested_value:
                raise UserError(f"{name} is not available with merge_tokens, as blocks merge tokens; {REMEDY}")
        grid = self.config.grid_of(*pixel_values.shape[-2:])
        if not is_graph() and grid not in self.checked_grids:
            self.checked_grids.add(grid)
            _warn_of_few_tokens(self, grid, self.num_merged)
        kwargs["groups"] = self.make_groups()
        return super().forward(pixel_values, **kwargs)

    def attention_maps(
        self, pixel_values: torch.Tensor, layers: Iterable[int] | None = None, patch_attention_mask: Any = None
    ) -> AttentionMaps:
        """Return attention maps over all patches, merged ones included; see `HfViTModel.attention_maps`."""
        _refuse_padding(patch_attention_mask)
        indices = self._resolve_layers(layers)
        tokens = self.embed(pixel_values, None)
        groups = self.make_groups()
        hidden_states = tokens.hidden_states
        maps = dict[int, Any]()
        for index, layer in enumerate(self.layer_sequence()):
            if index in indices:
                maps[index] = layer.compute_merged_map(hidden_states, groups)
            hidden_states = layer(hidden_states, groups=groups)
        return AttentionMaps(maps, tokens.grid, get_patch_token_slice(self.config))


def _refuse_padding(patch_attention_mask: Any) -> None:
    if patch_attention_mask is not None:
        raise UserError("merge_tokens does not work with patch_attention_mask; give images of one size")


def check_mergeable(model: nn.Module, num_merged: object) -> None:
    """Raise a UserError for an invalid number of tokens, and for models whose tokens cannot be merged."""
    if type(num_merged) is not int or num_merged < 1:
        raise UserError(
            f"merge_tokens={num_merged!r} is not a number of tokens; give how many each block merges, or None"
        )
    vits = [module for module in model.modules() if isinstance(module, HfViTBaseModel)]
    for vit in vits:
        config = vit.config
        reasons = {
            f"a {type(vit).__name__}, which needs all tokens on a grid": type(vit) not in _MERGING,
            "causal attention": config.is_causal,
            f"position_embedding={config.position_embedding!r}": config.position_embedding.startswith("relative"),
            "rotary positions": config.rotary_embedding is not None,
            "norms inside or after attention": (
                config.use_qk_norm or config.norm_in_attention or config.norm_after_branches
            ),
            "a custom attention function": has_custom_attention(config),
            "layers that share blocks": len(set(vit.layers)) < config.num_hidden_layers,
        }
        if obstacle := next((reason for reason, applies in reasons.items() if applies), None):
            raise UserError(f"merge_tokens does not work with {obstacle}; leave merge_tokens out")
    if not vits or any(isinstance(module, HfBaseBackbone) for module in model.modules()):
        raise UserError(
            f"merge_tokens does not work with {type(model).__name__}; give a Vision Transformer without a "
            "head, or a classifier"
        )
    for vit in vits:
        _warn_of_few_tokens(vit, vit.config.grid, num_merged)


def _warn_of_few_tokens(vit: HfViTBaseModel, grid: Grid, num_merged: int) -> None:
    """Log a warning if the blocks of a model run out of patch tokens to merge in images of this grid."""
    patches = tokens = math.prod(grid)
    is_short = False
    for _ in vit.layers[1:]:  # the last block merges none
        is_short = is_short or num_merged > tokens // 2
        tokens -= min(num_merged, tokens // 2)
    if is_short:
        logger.warning(
            "merge_tokens=%d leaves %d of the %d patch tokens of an image, so features may be far off; choose at "
            "most %d, or compare the accuracy with hf-vit evaluate",
            num_merged, tokens, patches, max(1, patches // len(vit.layers)),
        )  # fmt: skip


def make_merging_changes(model: nn.Module, changes: list[Change], num_merged: int) -> list[Change]:
    """Return the changes of class for the models in a model, and for their layers that `changes` builds."""
    vits: list[Any] = [module for module in model.modules() if isinstance(module, HfViTBaseModel)]
    new_modules = {(change.owner, change.name): change.value for change in changes}
    merging: list[Change] = []
    for vit in vits:
        last_index = len(vit.layers) - 1
        for index in range(last_index + 1):
            layer = new_modules[vit.layers, str(index)]
            merging += [Change(layer, "__class__", MergingLayer), Change(layer, "is_last", index == last_index)]
        merging += [Change(vit, "num_merged", num_merged), Change(vit, "checked_grids", {tuple(vit.config.grid)})]
        merging.append(Change(vit, "__class__", _MERGING[type(vit)]))
    return merging


_MERGING = {kind: add_base(kind, base=MergingModel) for kind in (HfViTModel, HfHybridViTModel)}
