"""A tiny classifier of every kind that can be compared, saved as its library saves it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIDE = 32
SCALE = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}


def processor() -> Any:
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size={"height": SIDE, "width": SIDE}, do_convert_rgb=True, **SCALE)


def labels(names: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def enliven(model: nn.Module) -> nn.Module:
    """Heads begin at zero, norms forget the images: let answers differ from image to image."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "classifier" in name and parameter.ndim > 1:
            nn.init.normal_(parameter)
    return model.eval()


_VIT: dict[str, Any] = {
    "image_size": SIDE, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip


def _hf_vit(config: str, model: str, **fields: Any) -> Callable[[Sequence[str]], nn.Module]:
    def build(names: Sequence[str]) -> nn.Module:
        import hf_vit

        return getattr(hf_vit, model)(getattr(hf_vit, config)(image_size=SIDE, **fields, **labels(names)))

    return build


def _transformers(family: str, **fields: Any) -> Callable[[Sequence[str]], nn.Module]:
    def build(names: Sequence[str]) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**fields, **labels(names))
        return getattr(transformers, f"{family}ForImageClassification")(config)

    return build


_BODY = {key: value for key, value in _VIT.items() if key not in ("image_size", "patch_size")}
_CONVOLUTIONS: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
TRANSFORMERS: dict[str, Callable[[Sequence[str]], nn.Module]] = {
    "vit": _hf_vit("HfViTConfig", "HfViTForImageClassification", patch_size=8, **_BODY),
    "hybrid": _hf_vit(
        "HfHybridViTConfig", "HfHybridViTForImageClassification", stage_depths=(1,), stem_width=32, **_BODY
    ),
    "axial": _hf_vit("HfAxialViTConfig", "HfAxialViTForImageClassification", patch_size=8, **_BODY),
    "local": _hf_vit("HfLocalViTConfig", "HfLocalViTForImageClassification", patch_size=8, **_BODY),
    "axial_resnet": _hf_vit(
        "HfAxialResNetConfig", "HfAxialResNetForImageClassification", stage_depths=(1,), stem_width=16
    ),
    "bit": _transformers("Bit", num_groups=4, **_CONVOLUTIONS),
    "swin": _transformers(
        "Swin", image_size=SIDE, patch_size=4, window_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2]
    ),
    "regnet": _transformers("RegNet", groups_width=8, **_CONVOLUTIONS),
    "resnet": _transformers("ResNet", layer_type="basic", **_CONVOLUTIONS),
    "deit": _transformers("DeiT", **_VIT),
}

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "cait": ("cait_xxs24_224", {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 1, "depth_token_only": 1}),
    "mixer": ("mixer_s16_224", {"img_size": SIDE, "mlp_ratio": [0.5, 0.0625]}),
    "coatnet": ("test_coatnet", {"img_size": SIDE}),
    "nfnet": ("test_nfnet", {}),
    "tresnet": ("tresnet_m", {"width_factor": 0.125, "layers": [1, 1, 1, 1]}),
    "efficientnet": ("test_efficientnet", {}),
    "skresnet": ("skresnet18", {"layers": [1, 1, 1, 1], "channels": [16, 16, 16, 16], "stem_width": 8}),
    "halonet": ("halonet26t", {"width_factor": 0.0625, "stem_type": "3x3", "stem_pool": "",
                               "self_attn_kwargs": {"block_size": 2, "halo_size": 1}}),
    "coat": ("coat_tiny", {"img_size": SIDE, "embed_dims": [16] * 4, "serial_depths": [1] * 4, "parallel_depth": 1}),
}  # fmt: skip


def save(kind: str, folder: Path, names: Sequence[str]) -> Path:
    torch.manual_seed(0)
    if kind in TIMM:
        return save_timm(kind, folder, names)
    if kind == "igpt":
        return save_image_gpt(folder)
    enliven(TRANSFORMERS[kind](names)).save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def save_timm(kind: str, folder: Path, names: Sequence[str]) -> Path:
    import timm
    from timm.models._hub import save_for_hf

    architecture, fields = TIMM[kind]
    model = timm.create_model(architecture, num_classes=len(names), **fields)
    nn.init.normal_(model.get_classifier().weight)
    # CoaT's blocks share what tells positions apart; safetensors wants a copy for each.
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update({name: value.clone() for name, value in state.items()})
    )
    fed = {"input_size": (3, SIDE, SIDE), "crop_pct": 1.0, "mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.2)}
    labelled = {"label_names": list(names)}
    save_for_hf(model, str(folder), model_config=labelled, safe_serialization=True, data_config=fed)
    return folder


def save_image_gpt(folder: Path, side: int = 8) -> Path:
    """A tiny ImageGPT: 27 colours, a token a pixel."""
    from transformers import ImageGPTConfig, ImageGPTImageProcessor, ImageGPTModel

    levels = torch.tensor([-1.0, 0.0, 1.0])
    config = ImageGPTConfig(vocab_size=28, n_positions=side * side, n_embd=16, n_layer=4, n_head=2)
    ImageGPTModel(config).save_pretrained(folder)
    clusters = torch.cartesian_prod(levels, levels, levels).tolist()
    ImageGPTImageProcessor(clusters=clusters, size={"height": side, "width": side}).save_pretrained(folder)
    return folder
