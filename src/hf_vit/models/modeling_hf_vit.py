"""The Vision Transformer: initialisation, saving and resizing, encoder, heads; its parts are siblings of this file.

Legend: B batch, C channels, H x W px, h x w patch grid, P patch side, N tokens, D hidden size, A heads, K labels.
Sources: Dosovitskiy et al., arXiv 2010.11929 (section 3.1, appendix D.3); the original JAX code fixes what the paper
leaves open (tanh GELU, eps 1e-6, initialisation).
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_hf_vit import AttentionMaps, HfViTAttention
from .blocks_hf_vit import HfViTLayer, HfViTLayerScale, HfViTMLP
from .configuration_hf_vit import HfViTBaseConfig, HfViTConfig
from .embeddings_hf_vit import HfViTEmbeddings, HfViTPatchEmbeddings, Tokens
from .loss_hf_vit import classification_loss
from .pooling_hf_vit import AttentionPooling, HfViTPooler, class_token_index, patch_token_slice
from .positions_hf_vit import PositionTable, RelativePositionBias


def lecun_normal_(kernel: torch.Tensor) -> None:
    """Flax's default for dense layers and convolutions: variance 1 / fan-in, truncated at two deviations.

    transformers' function of this name truncates at +-2 instead, which makes the deviation 14% too large.
    """
    deviation = kernel[0].numel() ** -0.5 / 0.87962566103423978  # what the truncation takes away
    init.trunc_normal_(kernel, std=deviation, a=-2 * deviation, b=2 * deviation)


SIZE_KEYS = ("image_size", "patch_size")
HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class HfViTPreTrainedModel(PreTrainedModel):
    """Abstract: initialisation, sharing and resizing for every model of the package."""

    config: Any
    config_class: ClassVar[type] = HfViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer"]
    _input_embed_layer = "patch_embeddings"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}

    def __init__(self, config: Any) -> None:
        config.validate()  # fields may have been set since it was made
        super().__init__(config)

    @classmethod
    def auto_classes(cls) -> dict[str, type]:
        """The family's class for each Auto class: all that load from one saved folder.

        The modules of the other heads import this one, hence the imports here. They have a second use: transformers
        copies with a model every file that the text of its own names in a relative import.
        """
        from .backbone_hf_vit import HfViTBackbone
        from .pretraining_hf_vit import HfViTForMaskedPatchPrediction

        return {
            "AutoConfig": HfViTConfig,
            "AutoModel": HfViTModel,
            "AutoModelForImageClassification": HfViTForImageClassification,
            "AutoModelForMaskedImageModeling": HfViTForMaskedPatchPrediction,
            "AutoBackbone": HfViTBackbone,
        }

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: initialise as transformers' own models.

        For what it takes for custom code, transformers passes over modules without parameters of their own, so that
        `_init_special_cases` would never run. That guards code that writes weights in place; this one keeps to
        `transformers.initialization`, which leaves loaded weights alone.
        """
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The original code's initialisation (vit_jax): xavier-uniform kernels, zero biases, zero class token."""
        if isinstance(module, nn.Linear | nn.Conv2d) and isinstance(module.bias, nn.Parameter):
            init.zeros_(module.bias)
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, PositionTable):
            for name, parameter in module.named_parameters(recurse=False):
                if "position" in name:
                    init.normal_(parameter, std=self.config.initializer_range)
                else:
                    init.zeros_(parameter)
        elif isinstance(module, RelativePositionBias):
            init.normal_(module.offset_embeddings, std=self.config.initializer_range)
        elif isinstance(module, AttentionPooling):
            init.xavier_uniform_(module.probe)
        elif isinstance(module, HfViTLayerScale):
            init.constant_(module.lambda1, module.initial_value)
        self._init_special_cases(module)

    def _init_special_cases(self, module: nn.Module) -> None:
        """Runs after the children of `module` were initialised: what a parent knows better than its parts."""
        if isinstance(module, HfViTMLP):
            for dense in (module.fc1, module.fc2):
                init.normal_(dense.bias, std=1e-6)
        elif isinstance(module, HfViTPooler) and module.dense is not None:
            lecun_normal_(module.dense.weight)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As transformers', with a complete `auto_map`; `_auto_class` makes transformers copy the code it names."""
        self.config.auto_map = {
            auto_class: f"{own.__module__.rpartition('.')[2]}.{own.__name__}"
            for auto_class, own in self.auto_classes().items()
        }
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Self:
        """As transformers'; another `image_size` or `patch_size` than the checkpoint's resamples its tables.

        Position tables are stretched (arXiv 2010.11929, section 3.2), patch kernels by the pseudo-inverse of the
        resize (FlexiViT, arXiv 2212.08013). Both may come as keywords or in `config`.
        """
        sizes = {name: kwargs.pop(name) for name in SIZE_KEYS if name in kwargs}
        if isinstance(config, PreTrainedConfig) and pretrained_model_name_or_path is not None:
            hub = {name: kwargs[name] for name in HUB_KEYS if name in kwargs}
            stored = type(config).from_pretrained(pretrained_model_name_or_path, **hub)
            changed = [name for name in SIZE_KEYS if getattr(config, name) != getattr(stored, name)]
            if changed:
                sizes = {**{name: getattr(config, name) for name in changed}, **sizes}
                config = copy.deepcopy(config)
                for name in changed:
                    setattr(config, name, getattr(stored, name))
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        if sizes:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.resize_to(**sizes)
        return loaded

    @torch.no_grad()
    def resize_to(
        self, image_size: int | Iterable[int] | None = None, patch_size: int | Iterable[int] | None = None
    ) -> None:
        """Make another image or patch size (px, int or (height, width)) the model's own, in place.

        Learned positions are resampled to the new grid, and the patch kernel to the new patch.

        Raises:
            StrictDataclassError: the new image size does not fit the patch.
        """
        new = copy.deepcopy(self.config)
        for name, value in (("image_size", image_size), ("patch_size", patch_size)):
            if value is not None:
                setattr(new, name, value if isinstance(value, int) else tuple(value))
        new.validate()
        for module in self.modules():
            resize = getattr(module, "resize_to", None)
            if resize is not None and not isinstance(module, PreTrainedModel):
                resize(new)
        for name in SIZE_KEYS:
            if getattr(self.config, name) != getattr(new, name):
                setattr(self.config, name, getattr(new, name))


class HfViTBaseModel(HfViTPreTrainedModel):
    """Abstract: image -> tokens -> blocks -> last LayerNorm -> pooled. A family supplies embeddings and blocks."""

    def __init__(self, config: HfViTBaseConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = HfViTEmbeddings(config, self.build_patch_embeddings(config), use_mask_token)
        groups = config.num_hidden_groups or config.num_hidden_layers
        rate_step = config.drop_path_rate / max(groups - 1, 1)
        self.layers = nn.ModuleList([self.build_layer(config, i * rate_step) for i in range(groups)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler: HfViTPooler | None = None
        if add_pooling_layer:
            self.pooler = HfViTPooler(config, HfViTMLP(config) if config.pooling == "map" else None)
        self.post_init()
        if config.position_embedding == "relative":
            # One table for all heads, of which each process of tensor parallelism sees some.
            own = {"layers.*.attention.relative_position": "replicated_with_grad_allreduce"}
            self._tp_plan = {**(self._tp_plan or {}), **own}

    def build_patch_embeddings(self, config: Any) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} is abstract: a family supplies its patch embeddings")

    def build_layer(self, config: Any, drop_path_rate: float) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} is abstract: a family supplies its block")

    def layer_sequence(self) -> list[Any]:
        """The blocks in the order they run; layers of one group share a block (ALBERT)."""
        depth, groups = self.config.num_hidden_layers, len(self.layers)
        return [self.layers[index * groups // depth] for index in range(depth)]

    def embed(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None, **corruption: torch.Tensor | None
    ) -> Tokens:
        dtype = self.layernorm.weight.dtype
        if pixel_values.is_floating_point() and pixel_values.dtype != dtype:
            pixel_values = pixel_values.to(dtype)
        return self.embeddings(pixel_values, patch_attention_mask, **corruption)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        patch_sources: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: [B, C, H, W]; H and W any multiples of the patch.
            patch_attention_mask: [B, h, w], 1 on the image and 0 on padding, for batches of mixed sizes; every image
                stands at the top left and gets the outputs it has on its own.
            interpolate_pos_encoding: accepted for transformers' sake; positions always follow the image's grid.
            bool_masked_pos, patch_sources: [B, h*w], see `corrupt_patches`; for models with a [mask] embedding.

        Returns:
            last_hidden_state [B, N, D], special tokens first (last when `is_causal`); pooler_output [B, D or R], None
            without a pooling layer.

        Raises:
            ValueError: an image does not fit the patch; `output_attentions` without eager attention.
        """
        self._refuse_silent_attentions(kwargs)
        tokens = self.embed(
            pixel_values, patch_attention_mask, bool_masked_pos=bool_masked_pos, patch_sources=patch_sources
        )
        hidden_states = tokens.hidden_states
        attention_mask = self._attention_mask(tokens)
        for layer in self.layer_sequence():
            hidden_states = layer(
                hidden_states, attention_mask, grid=tokens.grid, image_grids=tokens.image_grids, **kwargs
            )
        hidden_states = self.layernorm(hidden_states)
        pooled = None if self.pooler is None else self.pooler(hidden_states, tokens.token_mask)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _attention_mask(self, tokens: Tokens) -> Any:
        if self.config.is_causal:
            return create_causal_mask(self.config, tokens.hidden_states, tokens.token_mask, past_key_values=None)
        return create_bidirectional_mask(self.config, tokens.hidden_states, tokens.token_mask)

    def _refuse_silent_attentions(self, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_attentions", self.config.output_attentions)
        if asked and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True gives nothing under attn_implementation="
                f"'{self.config._attn_implementation}'; use model.attention_maps(pixel_values), which works under "
                "every implementation, or model.set_attn_implementation('eager')"
            )

    def attention_maps(
        self,
        pixel_values: torch.Tensor,
        layers: Iterable[int] | None = None,
        patch_attention_mask: torch.Tensor | None = None,
    ) -> AttentionMaps:
        """Attention probabilities under every attention implementation, recomputed from q and k for `layers` only.

        Args:
            pixel_values: [B, C, H, W].
            layers: indices of layers (negative ones count from the end); None means all.
            patch_attention_mask: [B, h, w], as in `forward`.

        Raises:
            ValueError: there is no such layer.
        """
        depth = self.config.num_hidden_layers
        wanted = set(range(depth)) if layers is None else {i + depth if i < 0 else i for i in layers}
        if not wanted or not wanted <= set(range(depth)):
            raise ValueError(
                f"layers={layers} of a model with {depth} layers; indices run from {-depth} to {depth - 1}"
            )
        tokens = self.embed(pixel_values, patch_attention_mask)
        hidden_states, attention_mask = tokens.hidden_states, self._attention_mask(tokens)
        maps: dict[int, Any] = {}
        for index, layer in enumerate(self.layer_sequence()[: max(wanted) + 1]):
            if index in wanted:
                maps[index] = layer.attention_map(hidden_states, attention_mask, tokens)
            if index < max(wanted):
                hidden_states = layer(hidden_states, attention_mask, grid=tokens.grid, image_grids=tokens.image_grids)
        return AttentionMaps(maps, tokens.grid, patch_token_slice(self.config))


@dataclass
class HfViTImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput`, and with a distillation head the logits of each head [B, K]."""

    cls_logits: torch.Tensor | None = None
    distillation_logits: torch.Tensor | None = None


class HfViTBaseForImageClassification(HfViTPreTrainedModel):
    """Abstract: a family's model with a zero-initialised linear head (2010.11929, section 3.2)."""

    model_class: ClassVar[type[HfViTBaseModel]]

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = self.model_class(config)
        self.classifier = self._head(config, config.representation_size or config.hidden_size)
        if config.has_distillation_head:
            self.distillation_classifier = self._head(config, config.hidden_size)
        self.post_init()

    @staticmethod
    def _head(config: HfViTBaseConfig, width: int) -> nn.Module:
        return nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()

    def _init_special_cases(self, module: nn.Module) -> None:
        super()._init_special_cases(module)
        if module is self:
            for name in ("classifier", "distillation_classifier"):
                head = getattr(self, name, None)
                if isinstance(head, nn.Linear):
                    init.zeros_(head.weight)

    def attention_maps(self, pixel_values: torch.Tensor, **kwargs: Any) -> AttentionMaps:
        """See `HfViTModel.attention_maps`."""
        return self.vit.attention_maps(pixel_values, **kwargs)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> HfViTImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: [B, C, H, W]; H and W any multiples of the patch.
            labels: [B] class indices, or [B, K] probabilities (soft cross-entropy; 0/1 targets with
                `problem_type="multi_label_classification"`).
            patch_attention_mask: [B, h, w], as in `HfViTModel.forward`.

        Returns:
            logits [B, K] (the mean of both heads with a distillation head, arXiv 2012.12877), and loss with labels.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        outputs = self.vit(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)
        logits, heads = self.classifier(outputs.pooler_output), {}
        if self.config.has_distillation_head:
            token = outputs.last_hidden_state[:, class_token_index(self.config) + 1]
            heads = {"cls_logits": logits, "distillation_logits": self.distillation_classifier(token)}
            logits = (heads["cls_logits"] + heads["distillation_logits"]) / 2
        loss = None
        if labels is not None:
            if not self.config.num_labels:
                raise ValueError("labels were given to a model with num_labels=0, which has no head; set num_labels")
            loss = classification_loss(logits, labels, self.config.problem_type, num_items_in_batch)
        return HfViTImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions, **heads
        )


class HfViTModel(HfViTBaseModel):
    """The bare Vision Transformer: tokens and the pooled output. See `HfViTConfig` for every choice."""

    config: HfViTConfig
    _auto_class = "AutoModel"

    def build_patch_embeddings(self, config: Any) -> nn.Module:
        return HfViTPatchEmbeddings(config)

    def build_layer(self, config: Any, drop_path_rate: float) -> nn.Module:
        return HfViTLayer(config, drop_path_rate)


class HfViTForImageClassification(HfViTBaseForImageClassification):
    """The Vision Transformer with a linear classifier on the pooled output."""

    _auto_class = "AutoModelForImageClassification"
    model_class = HfViTModel
