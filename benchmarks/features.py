"""Compare the features of eight kinds of models with transformers, timm and the original codes.

Class token, patch tokens and intermediate layers, each with and without the model's last norm, at three sizes in three
dtypes, on random weights: those of tests/golden, with what the original codes recorded, and of a DeiT. Peers run the
model that hf_vit exports to them; their features come from `forward_intermediates` and `hidden_states`. A cell is
equal, or explained (equal to hf_vit with the named settings), or absent in the library, or unexplained and printed.
"""

import contextlib
import copy
import functools
import inspect
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from departures import CASES, GOLDEN, open_peers, record_cases
from huggingface_hub.errors import StrictDataclassError
from script import Script, save_with_processor, vit_sizes
from torch import nn

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.conversion import convert

# Kind -> case of tests/golden.
KINDS = {
    "ViT": "vit_tok", "DeiT, distilled": "", "DINOv2": "dinov2_plain", "DINOv2, registers": "dinov2_reg",
    "DINOv3": "dinov3_vits", "EVA-02": "eva02_clip", "Perception Encoder": "pe_core", "AIMv2": "aimv2",
}  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# Largest difference of equal features, as a share of the largest value. In bfloat16 both codes round: neither may be
# further from float64 than twice the other.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-10}
FLOAT32 = "float32 inside"  # in float64 some step is not
REFUSALS = {AssertionError: "whole patches only", RuntimeError: "one size only"}
RESIZE = "interpolate_pos_encoding"  # of transformers' models that refuse other sizes without it
NORMS = {True: "norm", False: "no norm"}
Features = dict[str, torch.Tensor | None]


def name_features(token: Any, patches: Any, earlier: Any, norm: bool) -> Features:
    features = {"class token": token, "patch tokens": patches, "intermediate layers": earlier}
    return {f"{name}, {NORMS[norm]}": value for name, value in features.items()}


def collect(layers: list[tuple[torch.Tensor | None, torch.Tensor]], norm: bool) -> Features:
    """Name features of all layers, of each the class token [B, D] and the patch tokens [B, N, D]."""
    earlier = [patches.flatten(1) for _, patches in layers[:-1]]
    return name_features(*layers[-1], torch.cat(earlier, 1), norm)


def read_ours(model: Any, images: torch.Tensor, norm: bool) -> Features:
    states = model.get_intermediate_layers(images, layers=range(model.config.num_hidden_layers), norm=norm)
    return collect([(state.class_token, state.patch_tokens) for state in states], norm)


def read_peer(model: Any, images: torch.Tensor, norm: bool) -> Features:
    if not isinstance(model, transformers.PreTrainedModel):
        _, layers = model.forward_intermediates(images, norm=norm, return_prefix_tokens=True, output_fmt="NLC")
        if not model.num_prefix_tokens:
            return collect([(None, patches) for patches in layers], norm)
        return collect([(prefix[:, 0], patches) for patches, prefix in layers], norm)
    resize = {RESIZE: True} if RESIZE in inspect.signature(model.forward).parameters else {}
    states = model(images, output_hidden_states=True, **resize).hidden_states[1:]
    last_norm = next(getattr(model, name) for name in ("layernorm", "norm", "rms_norm") if hasattr(model, name))
    count = (images.shape[2] // model.config.patch_size) * (images.shape[3] // model.config.patch_size)
    has_class = states[0].shape[1] > count
    states = [last_norm(state) if norm else state for state in states]
    return collect([(state[:, 0] if has_class else None, state[:, -count:]) for state in states], norm)


def read_original(recorded: dict[str, torch.Tensor], size: str, dtype: torch.dtype, count: int, norm: bool) -> Features:
    if dtype == torch.bfloat16:
        recorded = {}
    ending = f"_f64_{size}" if dtype == torch.float64 else f"_{size}"

    def find(*names: str) -> torch.Tensor | None:
        return next((recorded[name + ending] for name in names if name + ending in recorded), None)

    whole = find("norm_tokens", "encoded", "output") if norm else find("prenorm", "layer_2")
    token, patches = (find("norm_cls"), find("norm_patch")) if norm else (None, None)
    if whole is not None and whole.ndim == 3:  # the output of a Perception Encoder is its embedding
        token, patches = whole[:, 0] if whole.shape[1] > count else None, whole[:, -count:]
    if norm:
        maps = find("layer0_norm_map")
        earlier = None if maps is None else maps.flatten(2).transpose(1, 2).flatten(1)
    else:
        states = [find(name) for name in ("layer0", "layer0_tokens", "layer_0", "layer_1")]
        states = [state[:, -count:].flatten(1) for state in states if state is not None]
        earlier = torch.cat(states, 1) if states else None
    return name_features(token, patches, earlier, norm)


def open_kind(case: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write hf_vit's model of a kind into a folder, and return it with what the original code recorded."""
    if not case:
        torch.manual_seed(0)
        sizes = vit_sizes(48, 96, num_hidden_layers=2, image_size=64, patch_size=16)
        ours = HfViTForImageClassification(HfViTConfig(use_distillation_token=True, **sizes)).eval()
        for parameter in ours.parameters():
            nn.init.normal_(parameter, std=0.2)
        save_with_processor(ours, folder)
        return ours, {}
    file = next(path for path in sorted(GOLDEN.glob(f"{case}.*")) if ".io." not in path.name and path.suffix != ".json")
    result = convert(file, folder, **CASES.get(case, {}))
    arrays = dict(np.load(GOLDEN / f"{case}.io.npz"))
    if "images" in arrays:  # of the Flax code: channels come last, and names have no size
        images = arrays.pop("images").transpose(0, 3, 1, 2)
        size = f"{images.shape[2]}x{images.shape[3]}"
        arrays = {f"{name}_{size}": value for name, value in {"images": images, **arrays}.items()}
    return result.plan.model_class.from_pretrained(folder).eval(), {k: torch.from_numpy(v) for k, v in arrays.items()}


def list_images(ours: Any, recorded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the images of three sizes: recorded ones, then a larger square and a rectangle."""
    images = {name[7:]: value for name, value in recorded.items() if name.startswith("images_")}
    (height, width), (rows, columns) = ours.config.patch_stride, ours.config.grid
    for shape in ((rows, columns), (rows + 2, columns + 2), (rows - 1, columns + 1)):
        size = f"{shape[0] * height}x{shape[1] * width}"
        if size not in images and len(images) < 3:
            generator = torch.Generator().manual_seed(len(images))
            images[size] = torch.randn(1, 3, shape[0] * height, shape[1] * width, generator=generator)
    return images


def list_variations(config: Any) -> dict[str, dict[str, Any]]:
    """Return other settings by their names, those of no difference first."""
    tables = {f"position_interpolation={x}": x for x in ("bicubic_antialias", "bicubic", "bilinear")}
    variations: dict[str, dict[str, Any]] = {"": {}}
    for name, kind in tables.items():
        variations[name] = {"position_interpolation": kind, "position_interpolation_offset": 0.0}
    if config.rotary_embedding:
        for name, fields in list(variations.items()):
            variations[f"rotary_reference_grid, {name}".rstrip(", ")] = {"rotary_reference_grid": config.grid, **fields}
    return variations


def measure(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


class Comparison:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.ours, self.recorded = open_kind(KINDS[kind], folder / "model")
        self.images = list_images(self.ours, self.recorded)
        self.peers: dict[str, Any] = {"hf_vit": None, "original": None, "timm": None, "transformers": None}
        self.peers |= open_peers(self.ours, folder / "model", folder)
        self.variations: dict[str, Any] = {}
        self.copies: dict[tuple[str, tuple[torch.dtype, ...]], Any] = {}
        for name, fields in list_variations(self.ours.config).items():
            with contextlib.suppress(StrictDataclassError):  # the model has no such setting
                self.variations[name] = type(self.ours).from_pretrained(folder / "model", **fields).eval()

    def read(self, library: str, size: str, dtype: torch.dtype, norm: bool) -> Features:
        images, model = self.images[size].to(dtype), self.peers[library]
        if library == "original":
            rows, columns = self.ours.config.grid_of(*images.shape[2:])
            return read_original(self.recorded, size, dtype, rows * columns, norm)
        return read_peer(self.cast(library, model, dtype), images, norm)

    def read_variation(self, name: str, size: str, norm: bool, *dtypes: torch.dtype) -> Features:
        """Return the features of hf_vit with other settings, whose weights had all these dtypes in turn."""
        images = functools.reduce(torch.Tensor.to, dtypes, self.images[size])
        return read_ours(self.cast(name, self.variations[name], *dtypes), images, norm)

    def cast(self, name: str, model: Any, *dtypes: torch.dtype) -> Any:
        if (name, dtypes) not in self.copies:
            self.copies[name, dtypes] = functools.reduce(nn.Module.to, dtypes, copy.deepcopy(model))
        return self.copies[name, dtypes]

    def find_variation(self, library: str) -> str:
        """Return the first settings with which hf_vit's patch tokens are those of the library at all sizes."""
        for name in self.variations:
            differences = []
            for size in self.images:
                with contextlib.suppress(*REFUSALS):
                    theirs = self.read(library, size, torch.float32, True)["patch tokens, norm"]
                    ours = self.read_variation(name, size, True, torch.float32)["patch tokens, norm"]
                    differences.append(measure(ours, theirs))
            if max(differences) < TOLERANCES[torch.float32]:
                return name
        return ""

    def find_default(self, library: str) -> str:
        """Return whether the patch tokens that a library gives by default had the last norm."""
        (size, images), model = next(iter(self.images.items())), self.peers[library]
        if library == "hf_vit":
            default = self.ours.get_intermediate_layers(images)[0].patch_tokens
        elif library == "timm":
            default = model.forward_intermediates(images)[1][-1].flatten(2).transpose(1, 2)
        else:
            default = model(images, output_hidden_states=True).hidden_states[-1]
        for norm in (True, False):
            tokens = self.read_variation("", size, norm, torch.float32)[f"patch tokens, {NORMS[norm]}"]
            if measure(default[:, -tokens.shape[1] :], tokens) < TOLERANCES[torch.float32]:
                return NORMS[norm]
        return "unexplained"

    def judge(self, library: str, variation: str, size: str, dtype: torch.dtype, norm: bool) -> dict[str, str]:
        """Return for every feature "equal", a reason, or "unexplained" with the difference."""
        names = collect([(None, torch.zeros(1, 1, 1))] * 2, norm)
        try:
            theirs = self.read(library, size, dtype, norm)
        except (AssertionError, RuntimeError) as error:
            return dict.fromkeys(names, REFUSALS[type(error)])
        settings = dict.fromkeys(("", variation))
        rounded = exact = {name: self.read_variation(name, size, norm, dtype) for name in settings}
        if dtype == torch.bfloat16:
            exact = {name: self.read_variation(name, size, norm, dtype, torch.float64) for name in settings}
        verdicts: dict[str, str] = {}
        for name, value in theirs.items():
            if value is None or rounded[""][name] is None:
                verdicts[name] = "not recorded" if library == "original" else "no class token"
                continue
            errors = [measure(rounded[setting][name], exact[setting][name]) for setting in settings]
            limits = {"": TOLERANCES.get(dtype, 2 * max(errors))}
            if dtype == torch.float64:
                limits[FLOAT32] = TOLERANCES[torch.float32]
            differences = {setting: measure(value, exact[setting][name]) for setting in settings}
            reasons = (
                ", ".join(filter(None, (setting, inside))) or "equal"
                for setting, difference in differences.items()
                for inside, limit in limits.items()
                if difference <= limit
            )
            verdicts[name] = next(reasons, f"unexplained: {differences[variation]:.1e} (limit {limits['']:.1e})")
        return verdicts


@torch.no_grad()
def compare(report: Script, kind: str, folder: Path) -> None:
    comparison = Comparison(kind, folder)
    for library, model in comparison.peers.items():
        is_peer, cells = model is not None, Counter[str]()
        if is_peer or (library == "original" and comparison.recorded):
            variation = comparison.find_variation(library) if is_peer else ""
            for size, dtype, norm in itertools.product(comparison.images, DTYPES, NORMS):
                for feature, verdict in comparison.judge(library, variation, size, dtype, norm).items():
                    cells[verdict.partition(":")[0]] += 1
                    if verdict.startswith("unexplained"):
                        print(f"{kind}, {library}, {size}, {dtype}, {feature}: {verdict}")
        default = comparison.find_default(library) if is_peer or library == "hf_vit" else None
        sizes = list(comparison.images)
        report.record(kind=kind, library=library, sizes=sizes, default=default, cells=dict(cells))


if __name__ == "__main__":
    record_cases(__doc__, KINDS, compare)
