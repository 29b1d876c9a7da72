"""Every architecture of timm's ViTs, and its options at random: converted with its numbers, or refused by name."""

import itertools
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from originals.google import shapes_of
from originals.pytorch import of_timm, save_timm
from timm.layers import GELUTanh, GluMlp, QuickGELU, RmsNorm
from timm.models import model_entrypoint
from timm.models.naflexvit import batch_patchify
from timm.models.vision_transformer import Attention, Block, LayerNorm, Mlp, ResPostBlock
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock
from torch import nn

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.origins.timm import EXCEPTIONS
from hf_vit.conversion.readers import Companions
from hf_vit.errors import UserError

CHOICES: dict[str, tuple[Any, ...]] = {
    "global_pool": ("token", "avg", "map", "avgmax", "max", "prr", ""),
    "class_token": (True, False),
    "reg_tokens": (0, 2),
    "no_embed_class": (True, False),
    "pool_include_prefix": (True, False),
    "fc_norm": (None, True, False),
    "final_norm": (True, True, False),
    "pre_norm": (False, True),
    "qkv_bias": (True, False),
    "init_values": (None, 0.1),
    "act_layer": ("gelu", "quick_gelu", "gelu_tanh"),
    "img_size": (12, 14),
    "num_classes": (5, 0),
}  # fmt: skip
# Every way to pool with every kind of token; the rest at random.
POOLED = list(itertools.product(*list(CHOICES.values())[:5]))


def drawn(seed: int, pooled: tuple[Any, ...]) -> dict[str, Any]:
    draw = random.Random(seed)
    rest = list(CHOICES.items())[5:]
    return dict(zip(CHOICES, pooled, strict=False)) | {name: draw.choice(values) for name, values in rest}


def reason_to_refuse(options: dict[str, Any]) -> str | None:
    """What a message has to name, judged by timm's code alone; None where the numbers have a place here."""
    special = options["class_token"] or options["reg_tokens"]
    if options["global_pool"] in ("avgmax", "max", "prr", ""):
        return f"global_pool='{options['global_pool']}'"
    if options["global_pool"] == "avg" and options["pool_include_prefix"] and special:
        return "pool_include_prefix=True"
    if options["global_pool"] == "map" and not options["pool_include_prefix"] and options["class_token"]:
        return "pooling skips cls_token"
    return None


@pytest.mark.filterwarnings("ignore:images of 14x14 px hold 3x3 whole patches:UserWarning")
@pytest.mark.parametrize("seed", range(len(POOLED)))
@torch.no_grad()
def test_options_are_converted_exactly_or_refused_by_name(seed: int, tmp_path: Path):
    options = drawn(seed, POOLED[seed])
    if options["global_pool"] == "token" and not options["class_token"]:
        return  # timm has no such model
    model = of_timm(embed_dim=64, num_heads=2, **options)
    source = save_timm(model, tmp_path / "saved", model_args={"embed_dim": 64, "num_heads": 2, **options})
    reason = reason_to_refuse(options)
    if reason is not None:
        with pytest.raises(UserError, match=re.escape(reason)) as refused:
            conversion.convert(source, tmp_path / "out")
        assert "\n" not in str(refused.value)
        return
    result = conversion.convert(source, tmp_path / "out")
    ours = result.plan.model_class.from_pretrained(result.output).double().eval()
    images = torch.randn(2, 3, *model.patch_embed.img_size, dtype=torch.float64)
    output, expected = ours(images), model.double()(images)
    found = output.logits if result.plan.has_head else output.pooler_output
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
    assert conversion.export(result.output, tmp_path / "back", "timm").difference <= 1e-5


# Of timm's class `Eva`, one for each convention of positions, norms, biases and MLPs; heads of 32.
EVA = (
    *("eva_giant_patch14_224", "eva_giant_patch14_clip_224", "eva02_tiny_patch14_224", "eva02_base_patch14_448"),
    *("eva02_base_patch16_clip_224", "eva02_enormous_patch14_clip_224", "vit_mediumd_patch16_rope_reg1_gap_256"),
    *("vit_betwixt_patch16_rope_reg4_gap_256", "vit_pe_core_base_patch16_224", "vit_pe_core_gigantic_patch14_448"),
    *("vit_pe_lang_large_patch14_448", "vit_pe_spatial_base_patch16_512", "vit_small_patch16_rope_224"),
    *("vit_small_patch16_rope_ape_224", "vit_small_patch16_rope_mixed_224", "vit_small_patch16_rope_mixed_ape_224"),
    *("vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3_qkvb", "vit_base_patch16_lingbot"),
    "beit3_base_patch16_224",
)


# What the architecture alone would give otherwise: another kind of rotation, one, or none.
ROTATED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("vit_pe_spatial_base_patch16_512", {"rope_type": "mixed"}),
    "rotated": ("eva02_enormous_patch14_clip_224", {"use_rot_pos_emb": True}),
    "not rotated": ("eva_giant_patch14_224", {"rope_type": "cat"}),
}


@pytest.mark.parametrize("case", [*EVA, *ROTATED])
@torch.no_grad()
def test_class_eva(case: str, tmp_path: Path):
    """Away from the grid that positions were made for; timm's angles, up to 25, are of float32 in any precision."""
    name, options = ROTATED.get(case, (case, {}))
    arguments = {"embed_dim": 64, "num_heads": 2, "img_size": 20, **options}
    model = of_timm(name, **arguments)
    if model.attn_pool is not None:  # has as many heads as the architecture: 8
        model = of_timm(name, **{**arguments, "embed_dim": 128})
    source = save_timm(model, tmp_path / "saved", model_args={**arguments, "depth": 2})
    result = conversion.convert(source, tmp_path / "out")
    assert result.plan.origin == "timm_eva"
    ours = result.plan.model_class.from_pretrained(result.output).eval()
    sizes = [(20, 20)] + ([(16, 8)] if name.endswith(("dinov3", "dinov3_qkvb", "lingbot")) else [])
    for dtype, tolerance in {torch.float32: 5e-5, torch.float64: 5e-6}.items():  # 8e-7 was seen
        for size in sizes:
            images = torch.randn(2, 3, *size, dtype=dtype)
            expected = model.to(dtype)(images)
            found = ours.to(dtype)(images).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    comes_back(result, tmp_path)


@torch.no_grad()
def comes_back(result: Any, folder: Path) -> None:
    """To timm, which gives the same results, and back with the same bits."""
    assert conversion.export(result.output, folder / "exported", "timm").difference <= 1e-5
    again = conversion.convert(folder / "exported", folder / "again")
    ours, back = (one.plan.model_class.from_pretrained(one.output).eval() for one in (result, again))
    assert ours.state_dict().keys() == back.state_dict().keys()
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in ours.state_dict().items())
    images = torch.randn(2, 3, *ours.config.nominal_size)
    assert torch.equal(ours(images).logits, back(images).logits)


NORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "aimv2": ("aimv2_large_patch14_224", {}, {"norm_on_patches": True}),
    "norms after branches": ("vit_base_patch16_rpn_224", {}, {"norm_after_branches": True}),
    "RMSNorm": ("test_vit4", {}, {"norm_type": "rmsnorm", "norm_after_pooling": True}),
    "attention pooling after gates": ("eva02_tiny_patch14_224", {"global_pool": "map", "use_rot_pos_emb": False},
        {"mlp_type": "swiglu", "pooling": "map"}),
    "RMSNorm by argument": ("vit_base_patch16_224", {"norm_layer": "rmsnorm", "global_pool": "map", "pre_norm": True,
        "class_token": False}, {"norm_type": "rmsnorm", "pooling": "map"}),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMS)
@torch.no_grad()
def test_other_norms(case: str, tmp_path: Path):
    name, options, fields = NORMS[case]
    arguments = {"embed_dim": 64, "num_heads": 2, "img_size": 20, **options}
    model = of_timm(name, **arguments)
    source = save_timm(model, tmp_path / "saved", model_args={**arguments, "depth": 2})
    result = conversion.convert(source, tmp_path / "out")
    assert {name: getattr(result.plan.config, name) for name in fields} == fields
    ours = result.plan.model_class.from_pretrained(result.output).double().eval()
    images = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    expected = model.double()(images)
    torch.testing.assert_close(ours(images).logits, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
    comes_back(result, tmp_path)


def test_class_eva_needs_its_config(tmp_path: Path):
    torch.save(of_timm("vit_small_patch16_rope_mixed_224", embed_dim=64, num_heads=2).state_dict(), tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"rotary positions of timm's class Eva, whose config.json is missing"):
        conversion.convert(tmp_path / "a.pth", tmp_path / "out")


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_pe_spatial_base_patch16_512", "test_vit3"])
@torch.no_grad()
def test_a_file_by_name_pools_as_its_architecture(name: str, tmp_path: Path):
    """A file that timm's training saved does not say that the head reads the mean, beside a class token."""
    model = of_timm(name, embed_dim=192, num_heads=3)
    torch.save(model.state_dict(), tmp_path / "a.pth")
    ours = hf_vit.from_hub(f"timm:{name}@{tmp_path / 'a.pth'}", image_size=(12, 12))
    images = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(ours(images).logits, model(images), rtol=1e-5, atol=1e-4)


NAFLEX = timm.list_models(module="naflexvit")


def in_own_shapes(images: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Images [3, H, W] as a padded batch for timm's NaFlexVit, and for us, in patches of 4 px."""
    grids = [(image.shape[1] // 4, image.shape[2] // 4) for image in images]
    longest, (height, width) = max(h * w for h, w in grids), (max(sides) for sides in zip(*grids, strict=True))
    like = images[0]
    patches, valid = like.new_zeros(len(images), longest, 48), torch.zeros(len(images), longest, dtype=torch.bool)
    coordinates = torch.zeros(len(images), longest, 2, dtype=torch.int64)
    pixels, mask = like.new_zeros(len(images), 3, 4 * height, 4 * width), torch.zeros(len(images), height, width)
    for row, (image, (h, w)) in enumerate(zip(images, grids, strict=True)):
        patches[row, : h * w] = batch_patchify(image[None], (4, 4))[0][0]
        coordinates[row, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        valid[row, : h * w] = True
        pixels[row, :, : 4 * h, : 4 * w] = image
        mask[row, :h, :w] = 1
    theirs = {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}
    return theirs, {"pixel_values": pixels, "patch_attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAFLEX), ("naflexvit_base_patch16_gap", {"pre_norm": True})]
)
@torch.no_grad()
def test_images_in_their_own_shape(name: str, options: dict[str, bool], tmp_path: Path):
    """One padded batch of many shapes, where timm resizes tables in float32; and the table's own in float64."""
    grid = (5, 5) if "parfac" in name else (5, 4)
    arguments = {"embed_dim": 64, "num_heads": 1, "pos_embed_grid_size": grid, "depth": 2, "patch_size": 4, **options}
    model = of_timm(name, **arguments)
    result = conversion.convert(save_timm(model, tmp_path / "saved", model_args=arguments), tmp_path / "out")
    assert (result.plan.origin, result.plan.config.grid) == ("timm_naflex", grid)
    pixels = hf_vit.image_processor_from_hub(result.output)  # as many patches as a square of the architecture's size
    assert pixels.max_num_patches == (model.pretrained_cfg["input_size"][1] // 4) ** 2
    ours: Any = result.plan.model_class.from_pretrained(result.output).eval()
    images = [torch.randn(3, *size) for size in ((20, 16), (8, 36), (28, 12), (40, 48), (4, 4))]
    theirs, own = in_own_shapes(images)
    expected = model(theirs)
    assert (ours(**own).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    for image, logits in zip(images, expected, strict=True):
        assert (ours(image[None]).logits[0] - logits).abs().max() <= 1e-5 * expected.abs().max()
    native = torch.randn(2, 3, 20, 4 * grid[1], dtype=torch.float64)
    difference = ours.double()(native).logits - model.double()(native)
    assert difference.abs().max() <= (1e-7 if "parfac" in name else 1e-10)  # of which the sum is stored in float32
    pixels.max_num_patches = 23
    pixels.save_pretrained(result.output)
    exported = conversion.export(result.output, tmp_path / "exported", "timm")
    assert exported.difference <= 1e-5
    back: Any = timm.create_model(f"local-dir:{exported.output}", pretrained=True).eval()
    for image, logits in zip(images, expected, strict=True):  # also by timm's plain ViT, where that resizes in this way
        assert (back(image[None])[0] - logits).abs().max() <= 1e-5 * expected.abs().max()
    again = conversion.convert(exported.output, tmp_path / "again")
    assert again.plan.config.to_dict() == result.plan.config.to_dict()
    assert hf_vit.image_processor_from_hub(again.output).max_num_patches == 23


def test_tables_of_rows_and_columns_of_other_lengths_are_refused(tmp_path: Path):
    arguments = {"embed_dim": 64, "num_heads": 1, "pos_embed_grid_size": (5, 4), "depth": 1, "patch_size": 4}
    model = of_timm("naflexvit_base_patch16_parfac_gap", **arguments)
    with pytest.raises(UserError, match=r"keeps the aspect ratio of tables for \[4, 5\] rows and columns"):
        conversion.convert(save_timm(model, tmp_path / "saved", model_args=arguments), tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pos_embed_ar_preserving": True}, "pos_embed_interp_mode='bilinear', .*pos_embed_ar_preserving=True"),
        ({"pos_embed_interp_mode": "nearest"}, "pos_embed_interp_mode='nearest'"),
        ({"patchify_channels_last": False}, "argument patchify_channels_last=False of timm"),
        ({"pos_embed_use_grid_sample": True}, "argument pos_embed_use_grid_sample=True of timm"),
        ({"patch_size": 8}, "it has patch_size=8, the weights need 4"),
        (None, "give the folder with timm's config.json"),
    ],
)  # fmt: skip
def test_other_naflex_is_refused(arguments: dict[str, Any] | None, reason: str, tmp_path: Path):
    sizes = {"embed_dim": 64, "num_heads": 1, "pos_embed_grid_size": (5, 4), "depth": 2, "patch_size": 4}
    folder = save_timm(
        of_timm("naflexvit_base_patch16_siglip", **sizes), tmp_path, model_args=sizes | (arguments or {})
    )
    with pytest.raises(UserError, match=reason):
        conversion.convert(folder if arguments is not None else folder / "model.safetensors", tmp_path / "out")


RELATIVE = "vit_relpos_small_patch16_224"


def of_relpos(**arguments: Any) -> Any:
    """A model of timm with relative positions, whose MLP gives biases that matter."""
    model = of_timm(RELATIVE, embed_dim=64, num_heads=2, init_values=0.1, **arguments)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            parameter.data.mul_(3)
    return model


def assert_same(model: Any, ours: Any) -> None:
    """In float32: what the MLP gives is rounded when it is written."""
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    expected = model(images)
    torch.testing.assert_close(ours(images).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


RELATIVES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "rectangular": {"img_size": 20},
    "class token": {"class_token": True, "global_pool": "token", "fc_norm": False},
    "shared": {"shared_rel_pos": True, "rel_pos_dim": 48},
    "table": {"rel_pos_type": "bias"},
}  # fmt: skip


@pytest.mark.parametrize("case", RELATIVES)
@torch.no_grad()
def test_relative_positions(case: str, tmp_path: Path):
    options = {"embed_dim": 64, "num_heads": 2, "init_values": 0.1, **RELATIVES[case]}
    model = of_relpos(**RELATIVES[case])
    if case == "rectangular":
        model.pretrained_cfg["crop_mode"] = "squash"
    source = save_timm(model, tmp_path / "saved", model_args=options)
    result = conversion.convert(source, tmp_path / "out", report=tmp_path / "report.json")
    assert not result.plan.ignored
    assert result.plan.config.position_embedding == "relative_bias"
    named = (tmp_path / "report.json").read_text()
    assert all(name in named for name in model.state_dict())
    assert_same(model, result.plan.model_class.from_pretrained(result.output).eval())
    with pytest.raises(UserError, match="does not support position_embedding='relative_bias'"):
        conversion.export(result.output, tmp_path / "back", "timm")
    if case == "table":
        with pytest.raises(UserError, match=r"cannot resample relative positions"):
            conversion.convert(source, tmp_path / "large", resize_to=(20, 16))
        return
    large = conversion.convert(source, tmp_path / "large", resize_to=(20, 16))
    model.set_input_size((20, 16))
    assert_same(model, large.plan.model_class.from_pretrained(large.output).eval())


def test_what_weights_do_not_tell_of_relative_positions(tmp_path: Path):
    shapes = shapes_of(of_relpos().state_dict())
    with pytest.raises(UserError, match=r"do not record the image size .*; give it with --image-size"):
        conversion.plan(shapes)
    assert conversion.plan(shapes, image_size=(12, 12)).config.num_attention_heads == 2
    without_scale = {name: shape for name, shape in shapes.items() if ".ls" not in name}
    with pytest.raises(UserError, match=r"before or after attention and MLP; give the folder"):
        conversion.plan(without_scale, image_size=(12, 12))
    less = {name: shape for name, shape in shapes.items() if name != "blocks.1.attn.rel_pos.mlp.fc2.bias"}
    with pytest.raises(UserError, match=r"1 keys missing: blocks\.1\.attn\.rel_pos\.mlp\.fc2\.bias"):
        conversion.plan(less, image_size=(12, 12))
    beside_token = of_relpos(rel_pos_type="bias", class_token=True, global_pool="avg").state_dict()
    with pytest.raises(UserError, match="class token has relative positions does not convert"):
        conversion.plan(shapes_of(beside_token), image_size=(12, 12))


MODULES = ("vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "deit")
ACTIVATIONS = {nn.GELU: "gelu", GELUTanh: "gelu_pytorch_tanh", QuickGELU: "quick_gelu", nn.SiLU: "silu"}


def architectures() -> list[str]:
    """Every name but for its image size, and every size of those that the table of exceptions knows."""
    names = [name for name in timm.list_models() if re.match(r"vit_|deit|flexivit|test_vit|eva_large", name)]
    names = [name for name in names if model_entrypoint(name).__module__.rpartition(".")[2] in MODULES]
    known = [name for name in names if any(re.fullmatch(exception, name) for exception in EXCEPTIONS)]
    others = {re.sub(r"_\d+$", "", name): name for name in names if name not in known}
    return sorted([*known, *others.values(), "vit_base_patch32_224_clip_laion2b"])  # the last is a name of timm 0.6


@cache
def built(name: str) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, depth=1, num_classes=3)


def is_expressible(model: Any) -> bool:
    """Whether the models here have all that this one has, judged by timm's modules, not by names of keys."""
    block = model.blocks[0]
    if type(block) in (RelPosBlock, ResPostRelPosBlock):
        return True
    if type(block) not in (Block, ResPostBlock) or type(block.attn) is not Attention:
        return False
    inside = (block.attn.q_norm, block.attn.norm, block.mlp.norm)
    plain = all(isinstance(norm, nn.Identity) for norm in inside) and type(block.norm1) in (LayerNorm, RmsNorm)
    is_swiglu = type(block.mlp) is GluMlp and isinstance(block.mlp.act, nn.SiLU) and not block.mlp.gate_last
    stem = getattr(model.patch_embed, "backbone", None)
    stems = stem is None or any("StdConv2d" in type(part).__name__ for part in stem.modules())
    norms = all(type(norm) in (LayerNorm, RmsNorm, nn.Identity) for norm in (model.norm, model.fc_norm))
    pooled = model.global_pool == "map" or (model.global_pool in ("token", "avg") and not model.pool_include_prefix)
    return plain and (type(block.mlp) is Mlp or is_swiglu) and stems and norms and pooled


def plan_of(name: str) -> conversion.Plan:
    model = built(name)
    pretrained = {"input_size": (3, *model.patch_embed.img_size), "interpolation": "bicubic"}
    config = {"architecture": name, "global_pool": model.global_pool, "pretrained_cfg": pretrained}
    return conversion.plan(shapes_of(model.state_dict()), companions=Companions(config))


@pytest.mark.filterwarnings("ignore:Mapping deprecated model")
@pytest.mark.parametrize("name", architectures())
def test_architecture_is_understood_or_refused(name: str):
    model = built(name)
    if not is_expressible(model) or not re.match(r"vit_|deit|flexivit|test_vit|eva_", name):
        reasons = (
            "hf_vit does not support",
            r"of timm, but the weights are those of a plain ViT",
            "looks like part of a ViT of timm",
        )
        with pytest.raises(UserError, match="|".join(reasons)):
            plan_of(name)
        return
    plan, block = plan_of(name), model.blocks[0]
    config, is_relative = plan.config, type(block) in (RelPosBlock, ResPostRelPosBlock)
    assert config.norm_after_branches == (type(block) in (ResPostBlock, ResPostRelPosBlock))
    assert config.norm_type == ("rmsnorm" if type(block.norm1) is RmsNorm else "layernorm")
    assert config.num_attention_heads == block.attn.num_heads
    assert config.mlp_type == ("swiglu" if type(block.mlp) is GluMlp else "dense")
    assert config.hidden_act == ACTIVATIONS[type(block.mlp.act)]
    norms = [not isinstance(norm, nn.Identity) for norm in (model.norm, model.fc_norm)]
    assert norms == {False: [True, False], True: [False, True], None: [False, False]}[config.norm_after_pooling]
    assert config.layer_norm_eps == block.norm1.eps
    assert is_relative or config.norm_before_layers == (type(model.norm_pre) is LayerNorm)
    assert config.num_register_tokens == getattr(model, "num_reg_tokens", 0)
    of_registers = config.num_register_tokens and getattr(model, "pool_include_prefix", False)
    of_map = "map_with_registers" if of_registers else "map"
    assert config.pooling == {"token": "token", "avg": "gap", "map": of_map}[model.global_pool]
    assert config.has_class_token == (model.cls_token is not None)
    assert config.use_distillation_token == hasattr(model, "dist_token")
    if is_relative:
        assert config.position_embedding == "relative_bias"
        tables = sum(row.transform == "offset_mlp" for row in plan.rows)
        assert tables == config.num_hidden_layers
        return
    on_special = not model.no_embed_class or model.cls_token is None
    of_registers = config.num_register_tokens and not model.no_embed_class
    assert config.position_on_class_token == ("with_registers" if of_registers else on_special)
    assert config.qkv_bias == (block.attn.qkv.bias is not None)
    scale = getattr(block, "ls1", nn.Identity())
    assert (config.layer_scale_init_value is not None) == (not isinstance(scale, nn.Identity))
    assert config.grid == tuple(model.patch_embed.grid_size)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(torch.Size(row.parameter_shape).numel() for row in plan.rows) == count
    assert not plan.ignored
