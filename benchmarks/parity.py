"""Measure how far the logits of hf_vit, transformers and timm are from the original code's, on the same checkpoints.

The checkpoints, images and results are those of tests/golden (Google's original JAX code on random weights; see the
README there). hf_vit converts the file; transformers' ViT takes the converted weights under its own names, with its
own defaults; timm reads the original file with its own loader. Printed is the largest absolute difference of a logit.
"""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from script import Script, parser
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HfViTForImageClassification
from hf_vit.conversion import convert

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
CASES = ("vit_tok", "vit_tok_rep", "vit_gap", "vit_optprefix", "vit_lneps")
RESIZED = (("vit_tok", 48), ("vit_tok", 96), ("vit_tok", 112), ("vit_gap", 96), ("vit_gap", 112))


def hf_vit_model(case: str, folder: Path) -> HfViTForImageClassification:
    convert(GOLDEN / f"{case}.ckpt.npz", folder / case)
    return HfViTForImageClassification.from_pretrained(folder / case).eval()


def transformers_model(ours: HfViTForImageClassification) -> ViTForImageClassification | None:
    """Return transformers' ViT with its own defaults, or None if it lacks the pooling or layer."""
    config = ours.config
    if config.pooling != "token" or config.representation_size is not None:
        return None
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "num_labels")
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    model = ViTForImageClassification(ViTConfig(image_size=size, **{name: getattr(config, name) for name in names}))
    model.load_state_dict(ours.state_dict())
    return model.eval()


def timm_model(case: str, ours: HfViTForImageClassification, image_size: int | None = None) -> VisionTransformer:
    config = ours.config
    native = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    has_token = config.pooling == "token"
    model = VisionTransformer(
        img_size=native, patch_size=config.patch_size, num_classes=config.num_labels, embed_dim=config.hidden_size,
        global_pool="token" if has_token else "avg", class_token=has_token, fc_norm=False,
        depth=config.num_hidden_layers, num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
    )  # fmt: skip
    model.load_pretrained(str(GOLDEN / f"{case}.ckpt.npz"), "opt/target/" if case == "vit_optprefix" else "")
    if image_size is not None:
        side = image_size // config.patch_size
        table = resample_abs_pos_embed(model.pos_embed.data, [side, side], num_prefix_tokens=model.num_prefix_tokens)
        model.pos_embed = torch.nn.Parameter(table)
        model.patch_embed.set_input_size((image_size, image_size))
    return model.eval()


@torch.no_grad()
def compare(case: str, folder: Path, image_size: int | None = None) -> dict[str, float | None]:
    name, suffix = (case, "") if image_size is None else (f"resize_{case}", f"_{image_size}")
    recorded = np.load(GOLDEN / f"{name}.io.npz")
    images = torch.from_numpy(recorded[f"images{suffix}"]).permute(0, 3, 1, 2)
    expected = torch.from_numpy(recorded[f"logits{suffix}"]).double()
    wide = torch.from_numpy(recorded[f"logits_f64{suffix}"])

    def difference(logits: torch.Tensor, target: torch.Tensor = expected) -> float:
        return (logits.double() - target).abs().max().item()

    ours = hf_vit_model(case, folder)
    row: dict[str, float | None] = {"hf_vit": difference(ours(images).logits)}
    theirs = transformers_model(ours)
    stretch = {} if image_size is None else {"interpolate_pos_encoding": True}
    row["transformers"] = None if theirs is None else difference(theirs(images, **stretch).logits)
    row["timm"] = None
    if ours.config.representation_size is None:
        row["timm"] = difference(timm_model(case, ours, image_size)(images))
    row["hf_vit, float64"] = difference(ours.double()(images.double()).logits, wide)
    return row


def main() -> None:
    report = Script(parser(__doc__, turns=1).parse_args())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for case, size in [*((case, None) for case in CASES), *RESIZED]:
        with tempfile.TemporaryDirectory() as folder:
            report.record(case=case if size is None else f"{case} at {size} px", **compare(case, Path(folder), size))
    report.finish()


if __name__ == "__main__":
    main()
