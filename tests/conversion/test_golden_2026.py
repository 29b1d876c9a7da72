"""Converted models give the digits of the original PyTorch code, at every recorded size and in both precisions."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.readers import open_checkpoint
from hf_vit.errors import UserError


@dataclass(frozen=True)
class Case:
    """One recorded model: its file, fields of its config, what people declare, and set when they load it."""

    file: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


DINOV3 = {"rotary_embedding": "axial", "position_embedding": "none", "key_bias": False, "num_register_tokens": 4}
CASES = {
    "dinov3_vits": Case("dinov3_vits.pth", DINOV3 | {"num_attention_heads": 3, "mlp_type": "dense"}),
    "dinov3_splus": Case("dinov3_splus.pth", DINOV3 | {"mlp_type": "swiglu", "intermediate_size": 160}),
    "dinov3_7b": Case("dinov3_7b.pth", DINOV3 | {"qkv_bias": False, "key_bias": True, "intermediate_size": 128}),
    "dinov3_periods_bf16": Case("dinov3_periods_bf16.pth", DINOV3 | {"rotary_periods": (1.0, 3.15625, 10.0, 31.625)}),
    "eva02_base": Case(
        "eva02_base.pt",
        {"rotary_reference_grid": 5, "norm_in_mlp": True, "norm_in_attention": False, "norm_after_pooling": True},
    ),
    "eva02_clip": Case("eva02_clip.pt", {"rotary_reference_grid": 5, "norm_in_attention": True, "key_bias": False}),
    "eva01_clip": Case("eva01_clip.pt", {"rotary_embedding": None, "norm_after_branches": False}, {"num_heads": 2}),
    "eva02_clip_e": Case(
        "eva02_clip_e.pt", {"norm_after_branches": True}, {"num_heads": 2, "norm_after_branches": True}
    ),
    "pe_core": Case("pe_core.pt", {"rotary_offset": 1, "pooling": "map", "pooling_num_heads": 8}, {"num_heads": 2}),
    "pe_core_nocls": Case("pe_core_nocls.pt", {"rotary_offset": 0, "use_class_token": False}, {"num_heads": 2}),
    "pe_spatial": Case("pe_spatial.pt", {"rotary_offset": 1, "norm_after_pooling": None}, {"num_heads": 3}),
    "pe_lang_l": Case("pe_lang_l.pt", {"rotary_axis_order": "column_row"}, {"num_heads": 2}),
    "rope_axial": Case("rope_axial.bin", {"position_embedding": "none"}, {"num_heads": 3, "image_size": (40, 40)}),
    "rope_axial_ape": Case(
        "rope_axial_ape.bin", {"position_embedding": "learned"}, {"num_heads": 2, "rotary_embedding": "axial"}
    ),
    "rope_mixed": Case("rope_mixed.bin", {"rotary_embedding": "mixed"}, {"num_heads": 3, "image_size": (40, 40)}),
    "rope_mixed_ape": Case("rope_mixed_ape.bin", {"position_on_class_token": False}, {"num_heads": 2}),
    "vit5": Case("vit5.pth", {"rotary_base": 10_000.0, "rotary_register_base": 100.0, "use_qk_norm": True}),
    "aimv2": Case("aimv2.safetensors", {"norm_type": "rmsnorm"}, {"num_heads": 2}),
    "aimv2_native": Case("aimv2_native.safetensors", {"position_embedding": "sincos_2d_mae"}, {"num_heads": 4}),
    "dinov2_reg": Case("dinov2_reg.pth", {"position_interpolation_offset": 0.0}, {"num_heads": 2}),
    "dinov2_plain": Case("dinov2_plain.pth", {"position_interpolation_offset": 0.1}, {"num_heads": 2}),
    "dinov2_giant_l4": Case(  # the file does not tell of this pair, which no released model has
        "dinov2_giant_l4.pth", {"mlp_type": "swiglu"}, {"num_heads": 2}, {"position_interpolation_offset": 0.1}
    ),
}


def stages_of(folder: Path, model: Any, images: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Recorded name -> what the converted model gives for it."""
    body, config = model.base_model, model.config
    outputs = body(images, output_hidden_states=True)
    last, states, first = outputs.last_hidden_state, outputs.hidden_states, config.num_special_tokens
    registers = slice(first - config.num_register_tokens, first)
    features = model.get_intermediate_layers(images, range(config.num_hidden_layers))

    def in_order(tokens: torch.Tensor) -> torch.Tensor:
        """Registers of ViT-5 stand last."""
        is_last = config.rotary_register_base is not None
        return torch.cat([tokens[:, :1], tokens[:, first:], tokens[:, registers]], dim=1) if is_last else tokens

    def feature_map(stage: int) -> torch.Tensor:
        kind = type(AutoBackbone.from_config(AutoConfig.from_pretrained(folder)))
        backbone = kind.from_pretrained(folder, out_features=[f"stage{stage}"], dtype=model.dtype).eval()
        return backbone(images).feature_maps[0]

    def logits() -> torch.Tensor:
        return model(images).logits

    return {
        "embedded": lambda: states[0],
        "norm_cls": lambda: features[-1].class_token,
        "norm_reg": lambda: features[-1].other_tokens,
        "norm_patch": lambda: features[-1].patch_tokens,
        "norm_tokens": lambda: last,
        "patch": lambda: features[-1].patch_tokens,  # of EVA-02, whose norm follows the mean
        "prenorm": lambda: in_order(states[-1]),
        "tokens": lambda: states[-1],
        "layer0": lambda: in_order(states[1]),
        "layer0_tokens": lambda: states[1],
        "layer0_norm_map": lambda: features[0].feature_map,
        "layer1_norm_map": partial(feature_map, 2),
        "layer1_patch": lambda: model.get_intermediate_layers(images, [1], norm=False)[0].patch_tokens,
        "pooled": lambda: outputs.pooler_output,
        **dict.fromkeys(("logits", "features"), logits),
        "output": (lambda: last) if model is body else logits,
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:images of .* hold:UserWarning")
def test_converted_model_gives_the_originals_digits(case: str, golden: Path, tmp_path: Path):
    wanted = CASES[case]
    result = conversion.convert(golden / wanted.file, tmp_path / "model", **wanted.options)
    config = result.plan.config
    assert {name: getattr(config, name) for name in wanted.fields} == wanted.fields
    recorded, compared = dict(np.load(golden / f"{case}.io.npz")), set[str]()
    sizes = {name.removeprefix("images_") for name in recorded if name.startswith("images_")}
    kind = AutoModelForImageClassification if result.plan.has_head else AutoModel
    for ending, dtype, tolerance in (("", torch.float32, 1e-5), ("_f64", torch.float64, 1e-10)):
        model = kind.from_pretrained(tmp_path / "model", dtype=dtype, **wanted.overrides).eval()
        for size in sizes:
            images = torch.from_numpy(recorded[f"images_{size}"]).to(dtype)
            with torch.no_grad():
                for stage, compute in stages_of(tmp_path / "model", model, images).items():
                    if (name := f"{stage}{ending}_{size}") in recorded:
                        difference = (compute() - torch.from_numpy(recorded[name])).abs().max()
                        assert difference <= tolerance, name
                        compared.add(name)
    assert compared == recorded.keys() - {f"images_{size}" for size in sizes}


@pytest.mark.parametrize(("dtype", "ending", "tolerance"), [(torch.float32, "", 1e-5), (torch.float64, "_f64", 1e-10)])
def test_images_in_their_own_shape_give_the_originals_digits(
    dtype: torch.dtype, ending: str, tolerance: float, golden: Path, tmp_path: Path
):
    """SigLIP 2's tower of big_vision, in one padded batch of three shapes; row i of the record is shape i."""
    result = conversion.convert(golden / "naflex_map.npz", tmp_path / "model")
    assert (result.plan.config.image_size, result.plan.config.pooling) == (48, "map")
    recorded = dict(np.load(golden / "naflex_map.io.npz"))
    shapes = [(48, 48), (32, 56), (24, 80)]
    images, mask = torch.zeros(3, 3, 48, 80, dtype=dtype), torch.zeros(3, 6, 10)
    for row, (height, width) in enumerate(shapes):
        images[row, :, :height, :width] = torch.from_numpy(recorded[f"images_{height}x{width}"][0])
        mask[row, : height // 8, : width // 8] = 1
    model = AutoModel.from_pretrained(tmp_path / "model", dtype=dtype).eval()
    with torch.no_grad():
        output = model(images, patch_attention_mask=mask, output_hidden_states=True)
    named = {"head_input": output.pooler_output, "logits": output.pooler_output, "encoded": output.last_hidden_state}
    if not ending:
        named |= {"with_posemb": output.hidden_states[0], "layer_0": output.hidden_states[1]}
    for name, found in named.items():
        for row, (height, width) in enumerate(shapes):
            theirs = torch.from_numpy(recorded[name + ending][row])
            ours = found[row] if found.ndim == 2 else found[row][mask[row].flatten().bool()]
            theirs = theirs if theirs.ndim == 1 else theirs[: height * width // 64]
            # The record's attention pooling is that of float32 also in its float64 run.
            limit = 1e-6 if ending and name != "encoded" else tolerance
            assert (ours - theirs).abs().max() <= limit, (name, row)


# Keys without which a file is that of another model, or does not tell less.
NEEDLESS = re.compile(
    r"(.*\.)?(mask_token|storage_tokens|proj|pos_embed|freqs_t_[xy]|local_cls_norm\..+|.*bias_mask|.*freqs_cos|logit_scale)"
    r"|blocks\.\d\.attn\.rope.*|(visual\.)?blocks\.\d\.attn\.rope\..+|(model\.)?blocks\.1\.attn\.rope\w*\.freqs"
    r"|(text|transformer|token_embedding|ln_final)\..+|positional_embedding|text_projection"
)


@pytest.mark.parametrize(
    "case", ["dinov3_vits", "dinov3_7b", "eva02_clip", "eva01_clip", "pe_core", "rope_mixed", "vit5"]
)
def test_files_without_one_of_their_keys_are_refused(case: str, golden: Path):
    with open_checkpoint(golden / CASES[case].file) as reader:
        shapes = reader.shapes
    assert conversion.plan(shapes, **CASES[case].options).rows
    for key in shapes:
        if not NEEDLESS.fullmatch(key):
            with pytest.raises(UserError):
                conversion.plan({name: shape for name, shape in shapes.items() if name != key}, **CASES[case].options)


@pytest.mark.parametrize("in_one_file", [False, True], ids=["--head", "one file"])
@pytest.mark.parametrize("case", ["dinov2_reg", "dinov2_plain", "dinov3_7b"])
@pytest.mark.filterwarnings("ignore:images of .* hold:UserWarning")
def test_linear_head_reads_class_token_and_mean(case: str, in_one_file: bool, golden: Path, tmp_path: Path):
    """Beside the backbone's file or in one module with it: the head's product with the originals' recorded tokens."""
    wanted, recorded = CASES[case], dict(np.load(golden / f"{case}.io.npz"))
    width = recorded[next(name for name in recorded if name.startswith("norm_cls"))].shape[-1]
    weight, bias = (torch.rand(size, generator=torch.Generator().manual_seed(0)) for size in ((7, 2 * width), (7,)))
    source, options = golden / wanted.file, dict(wanted.options)
    if in_one_file:
        backbone = {f"backbone.{name}": value for name, value in torch.load(source).items()}
        source = tmp_path / "both.pth"
        torch.save(backbone | {"linear_head.weight": weight, "linear_head.bias": bias}, source)
    else:
        options["head"] = tmp_path / "head.pth"
        torch.save({"weight": weight, "bias": bias}, options["head"])
    result = conversion.convert(source, tmp_path / "model", **options)
    assert result.plan.config.pooling == "token_and_gap"
    (record,) = json.loads((tmp_path / "model/facts.json").read_text())
    files = {"sha256": source} if in_one_file else {"sha256": source, "linear_head_sha256": options["head"]}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert {name: value for name, value in record["values"].items() if "sha256" in name} == digests
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model", dtype=torch.float64).eval()
    for size in (name.removeprefix("images_") for name in recorded if name.startswith("images_")):
        with torch.no_grad():
            logits = model(torch.from_numpy(recorded[f"images_{size}"]).double()).logits
        means = recorded[f"norm_patch_f64_{size}"].mean(axis=1)
        features = np.concatenate([recorded[f"norm_cls_f64_{size}"], means], axis=1)
        np.testing.assert_allclose(logits, features @ weight.double().numpy().T + bias.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["dinov2_reg", "dinov3_vits"])
def test_a_head_in_the_backbone_reads_the_class_token(case: str, golden: Path, tmp_path: Path):
    """Of users who fine-tuned the class of torch.hub, whose `head` has no weights."""
    backbone = torch.load(golden / CASES[case].file)
    weight, bias = torch.rand(7, len(backbone["norm.weight"])), torch.rand(7)
    torch.save(backbone | {"head.weight": weight, "head.bias": bias}, tmp_path / "tuned.pth")
    model = hf_vit.from_hub(tmp_path / "tuned.pth", **CASES[case].options)
    with torch.no_grad():
        outputs = model.vit(images := torch.rand(2, 3, 112, 224))
        torch.testing.assert_close(model(images).logits, outputs.last_hidden_state[:, 0] @ weight.T + bias)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"weight": (7, 200), "bias": (7,)}, "class tokens of the last four layers"),
        ({"weight": (7, 40), "bias": (7,)}, r"linear_head.weight.*7x40"),
        ({"linear.weight": (7, 80), "linear.bias": (7,)}, "'weight' and 'bias' only"),
    ],
)
def test_other_heads_are_refused(head: dict[str, tuple[int, ...]], message: str, golden: Path, tmp_path: Path):
    torch.save({name: torch.zeros(shape) for name, shape in head.items()}, tmp_path / "head.pth")
    with pytest.raises(UserError, match=message):
        conversion.convert(golden / "dinov2_reg.pth", tmp_path / "model", head=tmp_path / "head.pth", num_heads=2)
    assert not (tmp_path / "model").exists()
