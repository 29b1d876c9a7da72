"""Define the Axial-ViT: every block attends along rows, then along columns, each followed by an MLP.

Legend: B batch, N = h*w tokens of the patch grid, D hidden size, A heads. A line is a row or a column of the grid.
Sources: arXiv 2010.11929 appendix D.6; axial attention is from arXiv 1912.12180.
"""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from .backbone_hf_vit import HfViTBaseBackbone
from .configuration_hf_axial_vit import HfAxialViTConfig
from .configuration_hf_resnet import compute_stem_stride
from .embeddings_hf_vit import Grid, HfViTPatchEmbeddings, Rotation, Tokens, compute_angles, to_rotation
from .modeling_hf_axial_resnet import HfAxialResNetStem
from .modeling_hf_vit import (
    HfViTAttention,
    HfViTBaseForImageClassification,
    HfViTBaseModel,
    HfViTForImageClassification,
    HfViTLayer,
    HfViTPreTrainedModel,
    make_attention_mask,
)
from .pretraining_hf_vit import HfViTBaseForMaskedPatchPrediction

LineRotations = tuple[Rotation | None, Rotation | None]  # of rows, of columns
LineMasks = tuple[torch.Tensor | None, torch.Tensor | None]  # for rows, for columns


def transpose_grid(tokens: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Reorder tokens [B, h*w, ...], row by row, to [B, w*h, ...], column by column."""
    return tokens.unflatten(1, grid).transpose(1, 2).flatten(1, 2)


def split_mask(token_mask: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a mask [B, N] bool into masks of rows [B*h, w] and columns [B*w, h].

    A line of padding alone attends to itself, so that nothing is NaN.
    """
    rows = token_mask.reshape(-1, grid[1])
    columns = transpose_grid(token_mask, grid).reshape(-1, grid[0])
    return tuple(lines | ~lines.any(dim=1, keepdim=True) for lines in (rows, columns))  # pyright: ignore[reportReturnType]


def make_line_rotations(config: HfAxialViTConfig, tokens: Tokens) -> LineRotations:
    """Return the rotations along rows [lines, 1, w, K/2] and along columns [lines, 1, h, K/2]; None without."""
    if not isinstance(tokens.rotation, torch.Tensor):  # coordinates, as a line has one axis
        return None, None
    coordinates = tokens.rotation.unbind(-1)  # [B or 1, N] each
    rows, columns = coordinates if config.rotary_axis_order == "row_column" else reversed(coordinates)
    rotations: list[Rotation] = []
    for line, length in ((columns, tokens.grid[1]), (transpose_grid(rows, tokens.grid), tokens.grid[0])):
        lines = line.reshape(-1, length, 1)
        lines = lines[:1] if tokens.image_grids is None else lines  # all are the same
        rotations.append(to_rotation(compute_angles(config, lines, config.rotary_base, config.rotary_periods)[:, None]))
    return rotations[0], rotations[1]


class HfAxialViTLayer(nn.Module):
    """Row attention and MLP, then column attention and MLP: [B, N, D] -> [B, N, D], tokens row by row.

    Lines are folded into the batch, and the grid is transposed after each half. Each half is a plain ViT block;
    activation checkpointing recomputes one half at a time.
    """

    def __init__(self, config: HfAxialViTConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.config = config
        self.row = HfViTLayer(config, drop_path_rate)
        self.column = HfViTLayer(config, drop_path_rate)

    @property
    def layernorm_before(self) -> nn.Module:
        """Return the first norm, that of the row block."""
        return self.row.layernorm_before

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: LineMasks,
        grid: Grid,
        rotation: LineRotations = (None, None),
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform tokens [B, N, D]: attend along rows, then along columns."""
        (row_mask, column_mask), (along_row, along_column) = attention_mask, rotation
        hidden_states = self.attend_along(self.row, hidden_states, grid[1], row_mask, rotation=along_row, **kwargs)
        columns = transpose_grid(hidden_states, grid)
        columns = self.attend_along(self.column, columns, grid[0], column_mask, rotation=along_column, **kwargs)
        return transpose_grid(columns, (grid[1], grid[0]))

    def attend_along(
        self, block: nn.Module, tokens: torch.Tensor, length: int, mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """Run a block on every line of `length` tokens; input and output are [B, N, D]."""
        if self.training:  # for drop path
            kwargs["num_lines"] = tokens.shape[1] // length
        return block(tokens.reshape(-1, length, tokens.shape[-1]), mask, **kwargs).reshape(tokens.shape)

    def compute_attention_map(
        self, hidden_states: torch.Tensor, attention_mask: LineMasks, tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maps of this block for its input [B, N, D]: rows [B, A, h, w, w] and columns [B, A, w, h, h]."""
        h, w = tokens.grid
        masks = (None, None) if tokens.token_mask is None else split_mask(tokens.token_mask, tokens.grid)
        along_row, along_column = make_line_rotations(self.config, tokens)
        rows = self._compute_line_maps(self.row, hidden_states, (h, w), masks[0], along_row)
        hidden_states = self.attend_along(self.row, hidden_states, w, attention_mask[0], rotation=along_row)
        columns = self._compute_line_maps(
            self.column, transpose_grid(hidden_states, (h, w)), (w, h), masks[1], along_column
        )
        return rows, columns

    def _compute_line_maps(
        self, block: HfViTLayer, tokens: torch.Tensor, grid: Grid, mask: torch.Tensor | None, rotation: Rotation | None
    ) -> torch.Tensor:
        """Return one block's maps [B, A, lines, length, length] for tokens [B, N, D], whose `grid`
        is (lines, length).
        """
        lines = tokens.reshape(-1, grid[1], tokens.shape[-1])
        lines = lines if block.norm_after_branches else block.layernorm_before(lines)
        maps = block.attention.compute_probabilities(lines, mask, grid, None, rotation)
        return maps.unflatten(0, (-1, grid[0])).transpose(1, 2)


class HfAxialViTStemEmbeddings(nn.Module):
    """AxialResNet as a stem, then patches of its map, each projected: [B, C, H, W] -> [B, h*w, D], row by row."""

    def __init__(self, config: HfAxialViTConfig) -> None:
        super().__init__()
        self.patch_stride = config.patch_stride
        stride = compute_stem_stride(config.stage_depths or ())
        patch = self.patch_stride[0] // stride, self.patch_stride[1] // stride
        self.stem = HfAxialResNetStem(config)
        self.projection = nn.Conv2d(
            self.stem.out_channels, config.hidden_size, patch, stride=patch, bias=not config.norm_before_layers
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(self.stem(pixel_values).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)

    def check_size(self, config: HfAxialViTConfig) -> None:
        """Raise a ValueError if the patch size changes, as the projection of a stem's map cannot be resized."""
        if self.patch_stride != config.patch_stride:
            raise ValueError(
                f"an Axial-ViT with a stem cannot change its patch size from {self.patch_stride} px to "
                f"patch_size={config.patch_size}; leave patch_size out"
            )


class HfAxialViTPreTrainedModel(HfViTPreTrainedModel):
    """Abstract: what every model of the axial family shares."""

    config: HfAxialViTConfig
    config_class = HfAxialViTConfig
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfAxialViTLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": HfAxialViTLayer,
        "attentions": [
            OutputRecorder(HfViTAttention, index=1, layer_name="row"),
            OutputRecorder(HfViTAttention, index=1, layer_name="column"),
        ],
    }


class HfAxialViTModel(HfAxialViTPreTrainedModel, HfViTBaseModel):
    """The bare Axial-ViT; `last_hidden_state` is the grid, row by row, and may be rectangular and large."""

    def build_patch_embeddings(self, config: HfAxialViTConfig) -> nn.Module:
        return HfViTPatchEmbeddings(config) if config.stage_depths is None else HfAxialViTStemEmbeddings(config)

    def build_layer(self, config: HfAxialViTConfig, drop_path_rate: float) -> nn.Module:
        return HfAxialViTLayer(config, drop_path_rate)

    def _make_layer_arguments(self, tokens: Tokens) -> dict[str, Any]:
        arguments = super()._make_layer_arguments(tokens)
        if tokens.rotation is not None:
            arguments["rotation"] = make_line_rotations(self.config, tokens)
        return arguments

    def _make_attention_mask(self, tokens: Tokens) -> LineMasks:
        """Return the masks of rows and of columns; both None if nothing is padded."""
        if tokens.token_mask is None:
            return None, None
        h, w = tokens.grid
        return tuple(  # pyright: ignore[reportReturnType]
            make_attention_mask(self.config, tokens.hidden_states.reshape(lines.shape[0], length, -1), lines)
            for lines, length in zip(split_mask(tokens.token_mask, tokens.grid), (w, h), strict=True)
        )


class HfAxialViTForImageClassification(HfAxialViTPreTrainedModel, HfViTBaseForImageClassification):
    """The Axial-ViT with a linear classifier on the pooled output."""

    model_class = HfAxialViTModel

    @classmethod
    def from_vit(cls, checkpoint: str | Path | HfViTForImageClassification, **overrides: Any) -> Self:
        """Start from a plain ViT: its blocks are copied into both axes, for fine-tuning at high resolution.

        A grid has no special tokens, so these are dropped with their positions and their head, and token pooling
        becomes GAP. Given periods of a rotation are dropped too, as a line has one axis. Use `resize_to` to change the
        image size afterwards.

        Args:
            checkpoint: a `HfViTForImageClassification`, or an argument of its `from_pretrained`.
            overrides: fields of the new config, for example drop_path_rate.

        Raises:
            StrictDataclassError: an axial model cannot have all the ViT's features (causal attention, relative
                positions).
            ValueError: `stage_depths` is given.
        """
        if overrides.get("stage_depths") is not None:
            raise ValueError(
                f"stage_depths={overrides['stage_depths']} cannot be set in from_vit, as a ViT's patch kernel does not "
                "fit a stem; leave stage_depths out"
            )
        is_model = isinstance(checkpoint, nn.Module)
        vit: Any = checkpoint if is_model else HfViTForImageClassification.from_pretrained(checkpoint)
        changed_fields = {
            "pooling": "map" if vit.config.pooling.startswith("map") else "gap",
            **{"use_class_token": None, "use_distillation_token": False, "num_register_tokens": 0},
            **{"use_distillation_head": None, "rotary_register_base": None, "rotary_periods": None},
        }
        model = cls._from_fields_of(vit, **changed_fields | overrides)
        vit_weights = vit.state_dict()
        weights: dict[str, torch.Tensor] = {}
        for name in model.state_dict():
            weight = vit_weights[name.replace(".row.", ".").replace(".column.", ".")]
            if name.endswith("embeddings.position_embeddings"):
                weight = weight[:, vit.config.num_special_positions :]
            elif name == "classifier.weight":  # of "token_and_gap" the half that reads the mean
                weight = weight[:, -model.config.pooled_size :]
            weights[name] = weight
        model.load_state_dict(weights)
        return model


class HfAxialViTForMaskedPatchPrediction(HfAxialViTPreTrainedModel, HfViTBaseForMaskedPatchPrediction):
    """The Axial-ViT with a head that predicts patches; see `HfViTForMaskedPatchPrediction`."""

    model_class = HfAxialViTModel


class HfAxialViTBackbone(HfAxialViTPreTrainedModel, HfViTBaseBackbone):
    """The Axial-ViT as a backbone; see `HfViTBackbone`."""

    model_class = HfAxialViTModel
