"""The named variants: their parameter counts against the papers', timm's models and formulas written out here."""

import re
from pathlib import Path

import pytest
import timm
import torch
from transformers import AutoConfig

import hf_vit
from hf_vit import VARIANTS, UserError, variant_config
from hf_vit.families import find_family
from hf_vit.variants import HYBRIDS, ROTARY, list_variant_names

GOLDEN = Path(__file__).parents[1] / "golden"

# Layers, D, MLP width, heads: arXiv 2010.11929 table 1 (B, L, H), 2106.10270 (Ti, S), 2106.04560 table 2 (g, G),
# 2209.06794 (e), 2305.13035 (So400m). Typed here again, not read from the package.
PAPERS = {
    **{"Ti": (12, 192, 768, 3), "S": (12, 384, 1536, 6), "B": (12, 768, 3072, 12), "L": (24, 1024, 4096, 16)},
    **{"H": (32, 1280, 5120, 16), "So400m": (27, 1152, 4304, 16), "g": (40, 1408, 6144, 16)},
    **{"G": (48, 1664, 8192, 16), "e": (56, 1792, 15360, 16)},
}

# Millions at 224 px without a head; with their heads the papers round to 86, 307, 632, and to 1.0 and 1.8 thousand.
# The hybrids' are exact; the Mixers' of arXiv 2105.01601, table 1.
HEADLESS = {
    **{"Ti/16": 5.5, "S/16": 21.7, "B/32": 87.5, "B/16": 85.8, "L/32": 305.5, "L/16": 303.3, "H/14": 630.8},
    **{"g/14": 1011.2, "G/14": 1842.8, "R+Ti/16": 6.144_704, "R26+S/32": 36.046_912, "R26+B/32": 100.614_976},
    **{"R50+B/16": 97.890_112, "R50+L/32": 327.969_856},
}
MIXERS = {"S/32": 19, "S/16": 18, "B/32": 60, "B/16": 59, "L/32": 206, "L/16": 207, "H/14": 431}

# Of each size up to H and each patch one, to which the formula ties the others, the hybrids and the Mixers.
TIMM = {
    **{"Ti/16": "vit_tiny_patch16_224", "S/32": "vit_small_patch32_224", "B/8": "vit_base_patch8_224"},
    **{"L/16": "vit_large_patch16_224", "H/14": "vit_huge_patch14_224", "R+Ti/16": "vit_tiny_r_s16_p8_224"},
    **{"R26+S/32": "vit_small_r26_s32_224", "R50+L/32": "vit_large_r50_s32_224"},
    **{f"BiT-R{size}": f"resnetv2_{size}_bit" for size in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")},
    **{f"Mixer-{size}": f"mixer_{size.replace('/', '').lower()}_224" for size in MIXERS if size != "H/14"},
    **{
        f"DINOv3-{size}/16": f"vit_{theirs}_patch16_dinov3_qkvb"  # with the biases that Meta's files have
        for size, theirs in {"S": "small", "S+": "small_plus", "B": "base", "L": "large", "H+": "huge_plus"}.items()
    },
    "DINOv3-7B/16": "vit_7b_patch16_dinov3",
    **{
        f"EVA-02-{size}/14": f"eva02_{theirs}_patch14_224"
        for size, theirs in {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}.items()
    },
    "PE-core-B/16": "vit_pe_core_base_patch16_224",
    "PE-core-L/14": "vit_pe_core_large_patch14_336",
    "PE-core-G/14": "vit_pe_core_gigantic_patch14_448",
}

# Millions in the table of Meta's dinov3 (README.md), which rounds coarsely; the exact ones are timm's, above.
DINOV3 = {"S/16": 21, "S+/16": 29, "B/16": 86, "L/16": 300, "H+/16": 840, "7B/16": 6716}

# Variant -> a small model that the original code saved, and what its shapes do not tell.
SAVED = {
    "DINOv3-L/16": ("dinov3_vits.pth", {}), "DINOv3-H+/16": ("dinov3_splus.pth", {}),
    "DINOv3-7B/16": ("dinov3_7b.pth", {}), "EVA-02-L/14": ("eva02_base.pt", {}),
    "PE-core-L/14": ("pe_core.pt", {"num_heads": 2}), "PE-core-G/14": ("pe_core_nocls.pt", {"num_heads": 2}),
    "ViT-5-S/16": ("vit5.pth", {}),
}  # fmt: skip
SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size"),
    *("pooling_intermediate_size", "rotary_reference_grid", "rotary_periods"),
)


def count(name: str, labels: int = 0, **overrides) -> int:
    config = variant_config(name, num_labels=labels, **overrides)
    with torch.device("meta"):
        model = find_family(config.model_type).classes["classification" if labels else "model"](config)
    return sum(parameter.numel() for parameter in model.parameters())


def count_of_timm(name: str, labels: int) -> int:
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=labels)
    return sum(parameter.numel() for parameter in theirs.parameters())


def block(width: int, mlp: int) -> int:
    """Two norms, four projections and two dense layers, all with biases."""
    return 4 * width + 4 * (width * width + width) + width * mlp + mlp + mlp * width + width


def stem(depths: tuple[int, ...]) -> tuple[int, int]:
    """Parameters of the ResNet, and its channels: convolutions without bias, and a group norm after each."""
    total, channels = 7 * 7 * 3 * 64 + 2 * 64, 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        total += channels * 4 * width + 2 * 4 * width  # projection of the first unit
        for _ in range(depth):
            total += channels * width + 9 * width * width + width * 4 * width + 2 * (width + width + 4 * width)
            channels = 4 * width
    return total, channels


def formula(name: str) -> int:
    """Without a head, at 224 px."""
    if name in HYBRIDS:
        depths = {"R+": (), "R26+": (2, 2, 2, 2), "R50+": (3, 4, 6, 3) if name.endswith("/32") else (3, 4, 9)}
        stem_count, channels = stem(depths[re.match(r"R\d*\+", name)[0]])
        layers, width, mlp, _ = PAPERS[name.split("+")[1].split("/")[0]]
        side = {"R+Ti/16": 8}.get(name, 1)
        places = 7 if name.endswith("/32") or side == 8 else 14
        patches = stem_count + channels * side * side * width + width
        return patches + width + (places**2 + 1) * width + layers * block(width, mlp) + 2 * width
    size, patch = name.removeprefix("Axial-").removeprefix("Local-").split("/")  # a local model's are a plain one's
    layers, width, mlp, _ = PAPERS[size]
    side = 224 // int(patch)
    patches = int(patch) ** 2 * 3 * width + width
    if name.startswith("Axial-"):  # two tables of half the width, no class token, every block twice
        return patches + 2 * side * width // 2 + 2 * layers * block(width, mlp) + 2 * width
    return patches + width + (side * side + 1) * width + layers * block(width, mlp) + 2 * width


def test_count_is_the_formulas():
    names = [name for name in list_variant_names() if not name.startswith(("AxialResNet", "BiT", "Mixer", *ROTARY))]
    assert {name: count(name) for name in names} == {name: formula(name) for name in names}


def test_count_is_the_published():
    for name, millions in HEADLESS.items():
        assert count(name) / 1e6 == pytest.approx(millions, abs=1e-9 if name in HYBRIDS else 0.05), name
    assert {name for name in list_variant_names() if name.startswith("Mixer")} == {f"Mixer-{size}" for size in MIXERS}
    for size, millions in MIXERS.items():
        assert count(f"Mixer-{size}") / 1e6 == pytest.approx(millions, abs=0.5), size
    for size, millions in DINOV3.items():
        assert count(f"DINOv3-{size}") / 1e6 == pytest.approx(millions, rel=0.03), size
    # 3.9 thousand million (arXiv 2209.06794) counts attention pooling and the 29,593 labels of JFT-3B.
    assert count("e/14", labels=29_593, pooling="map") / 1e9 == pytest.approx(3.9, abs=0.05)
    grids = {"R+Ti/16": (7, 7), "R26+S/32": (7, 7), "R50+B/16": (14, 14), "R50+L/32": (7, 7)}
    assert {name: variant_config(name, image_size=224).grid for name in grids} == grids


def test_count_is_timms():
    for name, theirs in TIMM.items():
        assert count(name, labels=1000) == count_of_timm(theirs, 1000), name
    assert count("So400m/14", pooling="map") == count_of_timm("vit_so400m_patch14_siglip_224", 0)


def vit5(layers: int, width: int, heads: int, mlp: int, cells: int, patch: int, labels: int) -> int:
    """ViT-5's code: no biases of q, k and v, norms of one weight, of a head too, LayerScales, 4 registers."""
    per_block = 2 * width + 4 * width**2 + width + 2 * (width // heads) + 2 * width * mlp + mlp + width + 2 * width
    outside = 3 * patch**2 * width + width + (1 + 4 + cells) * width + width
    return layers * per_block + outside + labels * (width + 1)


def test_count_of_vit5_is_its_codes():
    saved = torch.load(GOLDEN / "vit5.pth", weights_only=True)["model"]
    learned = sum(value.numel() for key, value in saved.items() if not key.endswith(".freqs"))
    assert vit5(2, 48, 3, 144, 25, 8, 12) == learned
    for size in "SBL":
        layers, width, mlp, heads = PAPERS[size]
        assert count(f"ViT-5-{size}/16", labels=1000) == vit5(layers, width, heads, mlp, 196, 16, 1000), size


@pytest.mark.parametrize("name", SAVED)
def test_rotary_variants_are_converted_models(name: str, tmp_path: Path):
    """All but sizes and labels is what the original's file converts to."""
    file, options = SAVED[name]
    hf_vit.convert(GOLDEN / file, tmp_path / "out", **options)
    theirs = AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    ours = variant_config(name, **{size: theirs[size] for size in SIZES}).to_dict()
    of_files = {"auto_map", "architectures", "dtype", "id2label", "label2id", "_name_or_path"}
    assert {key: ours[key] for key in ours if key not in of_files and ours[key] != theirs[key]} == {}


def test_every_size_of_the_papers_is_there():
    assert set(PAPERS) == set(VARIANTS)
    for size, (layers, width, mlp, heads) in PAPERS.items():
        config = variant_config(f"{size}/14")
        assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, width, mlp)
        assert (config.num_attention_heads, config.patch_size, config.image_size) == (heads, 14, 224)


def test_overrides_and_free_patch_sizes():
    config = variant_config("Ti/4", image_size=32, num_labels=10, pooling="gap")
    assert (config.patch_size, config.grid, config.num_labels, config.pooling) == (4, (8, 8), 10, "gap")
    assert variant_config("ViT-B/16").to_dict() == variant_config("B/16").to_dict()
    for name, family in {"B/16": "HfViT", "R50+B/16": "HfHybridViT", "Axial-B/16": "HfAxialViT"}.items():
        assert variant_config(name).to_dict() == getattr(hf_vit, f"{family}Config")().to_dict()
    assert variant_config("Local-B/16").to_dict() == hf_vit.HfLocalViTConfig().to_dict()


NEAREST = {
    **{"B16": "B/16", "L/": "L/16", "XL/16": "L/16", "r50+b/16": "R50+B/16", "R50+B/32": "R26+B/32"},
    **{"Mixer-XL/16": "Mixer-L/16", "": "B/16"},
}


@pytest.mark.parametrize(("name", "nearest"), NEAREST.items())
def test_unknown_names_get_the_nearest(name: str, nearest: str):
    with pytest.raises(UserError, match=f"'{re.escape(name)}' is unknown; give one of the form SIZE/PATCH") as error:
        variant_config(name)
    assert nearest in str(error.value)
