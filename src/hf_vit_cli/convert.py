"""`hf-vit convert`."""

from pathlib import Path

from hf_vit_cli.command import collect_options, print_safely
from hf_vit_cli.options import arg, opt, parse_size


def convert(
    model: str = arg(..., "Checkpoint: file, folder, https:// or gs:// URL, hf://owner/name/file or timm:NAME."),
    output: Path = arg(..., "New folder for the converted model."),
    image_size: str | None = opt(
        None,
        "Image size that the model was trained at, such as 224 or 224x160, if it cannot be inferred.",
        metavar="HxW",
    ),
    resize_to: str | None = opt(
        None, "Resample the position embeddings to another image size, such as 384 or 384x256.", metavar="HxW"
    ),
    num_labels: int | None = opt(
        None, "Replace the head with a new one, filled with zeros, for this number of classes.", metavar="N"
    ),
    labels: Path | None = opt(
        None,
        "Replace the head as --num-labels does, with class names from a text file (one per line) or a JSON list.",
        metavar="FILE",
    ),
    head: Path | None = opt(
        None, "File of a DINOv2 or DINOv3 linear classifier, for a model whose source is the backbone.", metavar="FILE"
    ),
    drop_pre_logits: bool = opt(
        False, "Drop the representation layer (pre-logits) and the head that follows it.", "--drop-pre-logits"
    ),
    num_heads: int | None = opt(None, "Number of attention heads, if the checkpoint does not record it.", metavar="N"),
    hidden_act: str | None = opt(
        None,
        "Activation, if the checkpoint does not record it: gelu, gelu_pytorch_tanh, quick_gelu or "
        "another name of transformers.",
        metavar="NAME",
    ),
    pooling: str | None = opt(
        None,
        "Pooling, if the checkpoint does not record it: token (class token, or the first patch), gap, token_and_gap "
        "(class token and mean of the patches) or map.",
        metavar="NAME",
    ),
    position_embedding: str | None = opt(
        None, "Position embedding, if the checkpoint has no table of positions: sincos_2d or none.", metavar="NAME"
    ),
    rotary_embedding: str | None = opt(
        None, "Rotary positions, if the checkpoint does not record them: axial or none.", metavar="NAME"
    ),
    norm_after_branches: bool = opt(
        False,
        "The model has its norms after attention and MLP instead of before, as EVA-02-CLIP-E; "
        "checkpoints do not record it.",
        "--norm-after-branches",
    ),
    prefix: str | None = opt(
        None, "Prefix of the model's weights, if it is part of a larger model, such as visual.", metavar="NAME"
    ),
    verify: Path | None = opt(
        None,
        "Recording (.npz) of images and outputs of the original code; the conversion fails unless the "
        "model reproduces them.",
        metavar="IO.npz",
    ),
    report: Path | None = opt(
        None,
        "JSON file that lists every weight of the checkpoint with its shape, transform and new name.",
        metavar="FILE",
        dir_okay=False,
    ),
    sha256: str | None = opt(
        None,
        "Expected SHA-256 of the checkpoint file (64 hexadecimal digits); any other file is refused.",
        metavar="HEX",
    ),
    force: bool = opt(False, "Replace the output of an earlier conversion.", "--force"),
) -> None:
    """Convert a checkpoint of another library into a folder that from_pretrained loads."""
    values = collect_options(locals(), "model", "output", "verify")
    from hf_vit.conversion import api
    from hf_vit.conversion.origins.beside import read_labels

    values |= {
        "image_size": parse_size(image_size),
        "resize_to": parse_size(resize_to, "--resize-to"),
        "labels": None if labels is None else read_labels(labels),
    }
    result = api.convert(model, output, recording=verify, **values)
    if (assumption := api.assumption(result.plan)) is not None:
        print_safely(assumption, err=True)
    print_safely(api.describe(result))
