"""Measure how far hf_vit, timm and transformers are from the original PyTorch codes of 2023 to 2026.

Files, images and results are those of tests/golden: random weights of the original codes. hf_vit converts a file. Peers
run the model that hf_vit exports to them, with the settings that their own classes for this model have. Printed is the
largest absolute difference of a logit, or of a normalized token of models without a head.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from script import Script, parser

from hf_vit.conversion import convert, export
from hf_vit.errors import UserError

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
# Case -> what its file does not hold.
CASES: dict[str, dict[str, Any]] = {
    "dinov2_plain": {"num_heads": 2}, "dinov2_reg": {"num_heads": 2},
    "dinov3_vits": {}, "dinov3_splus": {}, "dinov3_7b": {}, "dinov3_periods_bf16": {},
    "eva01_clip": {"num_heads": 2}, "eva02_base": {}, "eva02_clip": {},
    "eva02_clip_e": {"num_heads": 2, "norm_after_branches": True},
    "pe_core": {"num_heads": 2}, "pe_core_nocls": {"num_heads": 2}, "pe_spatial": {"num_heads": 3},
    "pe_lang_l": {"num_heads": 2},
    "rope_axial": {"num_heads": 3, "image_size": (40, 40)},
    "rope_axial_ape": {"num_heads": 2, "rotary_embedding": "axial"},
    "rope_mixed": {"num_heads": 3, "image_size": (40, 40)}, "rope_mixed_ape": {"num_heads": 2},
    "vit5": {}, "aimv2": {"num_heads": 2}, "aimv2_native": {"num_heads": 4},
}  # fmt: skip
TOKENS = ("norm_cls", "norm_reg", "norm_patch")
RESULTS = ("logits", "features", "output", "norm_tokens", "tokens_f64")


def read_result(recorded: dict[str, np.ndarray], size: str) -> torch.Tensor:
    """Return the recorded logits, or all normalized tokens."""
    whole = [name for name in RESULTS if f"{name}_{size}" in recorded][:1]
    names = whole or [name for name in TOKENS if f"{name}_{size}" in recorded]
    arrays = [torch.from_numpy(recorded[f"{name}_{size}"]).double() for name in names]
    if whole:
        return arrays[0]
    return torch.cat([array if array.ndim == 3 else array[:, None] for array in arrays], dim=1)


def open_peers(ours: Any, converted: Path, folder: Path) -> dict[str, Any]:
    """Export a model with the settings of the peers' own classes; leave out libraries that have no class for it."""
    config, models = ours.config, dict[str, Any]()
    for library in ("timm", "transformers"):
        fields: dict[str, Any] = {"rotary_periods": None, "position_interpolation_offset": 0.0}
        if library == "timm" and config.norm_before_layers and config.rotary_embedding:
            fields["rotary_reference_grid"] = config.grid  # timm's Perception Encoders rescale positions
        source = folder / f"for {library}"
        model = type(ours).from_pretrained(converted, **fields)
        model.save_pretrained(source)
        (source / "preprocessor_config.json").write_bytes((converted / "preprocessor_config.json").read_bytes())
        try:
            export(source, folder / library, library)
        except UserError:
            continue
        if library == "timm":
            name = f"local-dir:{folder / library}"
            models[library] = timm.create_model(name, pretrained=True, dynamic_img_size=True).eval()
        else:
            models[library] = transformers.AutoModel.from_pretrained(folder / library).eval()
    return models


def run(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model of timm, or all normalized tokens."""
    if isinstance(model, transformers.PreTrainedModel):
        return model(images).last_hidden_state
    return model(images) if model.num_classes else model.forward_features(images)


@torch.no_grad()
def compare(report: Script, case: str, folder: Path) -> None:
    path = next(path for path in GOLDEN.glob(f"{case}.*") if path.suffix != ".npz")
    result = convert(path, folder / "model", **CASES[case])
    ours = result.plan.model_class.from_pretrained(result.output).eval()
    peers, recorded = open_peers(ours, folder / "model", folder), dict(np.load(GOLDEN / f"{case}.io.npz"))

    def compute(images: torch.Tensor) -> torch.Tensor:
        outputs = ours(images)
        return outputs.logits if result.plan.has_head else outputs.last_hidden_state

    for size in (name.removeprefix("images_") for name in recorded if name.startswith("images_")):
        images, expected = torch.from_numpy(recorded[f"images_{size}"]), read_result(recorded, size)
        row: dict[str, float | None] = {"timm": None, "transformers": None}
        contestants = {"hf_vit": compute, **{name: partial(run, model) for name, model in peers.items()}}
        for name, contestant in contestants.items():
            with contextlib.suppress(AssertionError):  # timm takes whole patches alone
                row[name] = float((contestant(images).double() - expected).abs().max())
        report.record(case=case, size=size, **row)


def record_cases(description: str | None, cases: Iterable[str], compare: Callable[[Script, str, Path], None]) -> None:
    """Compare every case in a temporary folder of its own, and record the rows."""
    report = Script(parser(description, turns=1).parse_args())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            compare(report, case, Path(folder))
    report.finish()


if __name__ == "__main__":
    record_cases(__doc__, CASES, compare)
