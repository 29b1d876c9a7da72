"""Options for another task (`--resize-to`, `--num-labels`, `--drop-pre-logits`), and the report on every origin."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from originals.bit_paper import as_big_transfer, make_resnet_v2
from originals.mixer import mixer_of_timm
from originals.open_clip import open_clip_tower
from originals.pytorch import hybrid_of_timm, of_timm, of_transformers, vit_hybrid_parts

import hf_vit.conversion as conversion
from hf_vit.conversion.account import report_of
from hf_vit.conversion.origins.registry import ORIGINS
from hf_vit.conversion.origins.transforms import TRANSFORMS
from hf_vit.conversion.readers.checkpoint import Companions
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from hf_vit_cli.main import main


@pytest.mark.parametrize("labels", [None, 3])
def test_dropped_representation_layer(labels, golden: Path, tmp_path: Path):
    source = golden / "vit_tok_rep.ckpt.npz"
    options = [] if labels is None else ["--num-labels", str(labels)]
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(source), str(tmp_path / "model"), "--drop-pre-logits", *options])
    assert stop.value.code == 0
    theirs = np.load(golden / "vit_tok_rep.io.npz")
    images = torch.from_numpy(theirs["images"]).permute(0, 3, 1, 2)
    if labels is None:
        model = HfViTModel.from_pretrained(tmp_path / "model").eval()
    else:
        classifier = HfViTForImageClassification.from_pretrained(tmp_path / "model").eval()
        assert classifier.classifier.weight.shape == (labels, classifier.config.hidden_size)
        assert not classifier.classifier.weight.any()
        model = classifier.vit
    with torch.no_grad():
        output = model(images)
    assert model.config.representation_size is None
    assert float((output.last_hidden_state - torch.from_numpy(theirs["encoded"])).abs().max()) <= 1e-5
    assert torch.equal(output.pooler_output, output.last_hidden_state[:, 0])
    (record,) = json.loads((tmp_path / "model" / "facts.json").read_text())
    head = "replaced by a new head" if labels else "head of the dropped representation layer"
    assert record["values"]["ignored"] == {"dropped representation layer": 2, head: 2}


def test_representation_layer_that_is_not_there(checkpoint, write_npz, tmp_path: Path):
    with pytest.raises(UserError, match=r"no representation layer .*leave out --drop-pre-logits"):
        conversion.convert(write_npz(checkpoint()), tmp_path / "model", drop_pre_logits=True)
    assert not (tmp_path / "model").exists()


def test_all_transfer_options_at_once(checkpoint, write_npz, tmp_path: Path):
    source = write_npz(checkpoint(representation=6))
    result = conversion.convert(
        source, tmp_path / "model", resize_to=(16, 24), labels=["cat", "dog"], drop_pre_logits=True
    )
    config = result.plan.config
    assert (config.grid, config.num_labels, config.representation_size) == ((4, 6), 2, None)
    assert config.id2label == {0: "cat", 1: "dog"}
    with torch.no_grad():
        model = HfViTForImageClassification.from_pretrained(result.output)
        assert not model(torch.randn(1, 3, 16, 24)).logits.any()


def shapes_of(arrays) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in arrays.items()}


def files(golden: Path) -> dict[str, tuple[dict[str, tuple[int, ...]], Companions]]:
    """Origin -> (key -> shape, what lies beside) of a file of it."""
    vit = of_transformers("ViTModel")
    deit = of_transformers("DeiTForImageClassificationWithTeacher")
    hybrid = vit_hybrid_parts()
    towers = {
        "transformers_clip_classifier": of_transformers("CLIPForImageClassification"),
        "transformers_clip": of_transformers("CLIPVisionModel"),
        "transformers_siglip": of_transformers("SiglipVisionModel"),
        "transformers_dinov2": of_transformers("Dinov2WithRegistersModel", use_swiglu_ffn=True),
    }
    clip = shapes_of(open_clip_tower().state_dict())
    small, alone = shapes_of(of_timm(embed_dim=64, num_heads=1).state_dict()), Companions()
    encoder = {key: shape for key, shape in small.items() if not key.startswith("head.")}
    return {
        "vit_jax": (shapes_of(np.load(golden / "vit_tok_rep.ckpt.npz")), alone),
        "vit_jax_hybrid": (shapes_of(np.load(golden / "hybrid_r50.ckpt.npz")), alone),
        "big_vision": (shapes_of(np.load(golden / "bv_map_sincos_rep_scan.ckpt.npz")), alone),
        "bit": (shapes_of(np.load(golden / "bit_v1.ckpt.npz")), alone),
        "mixer": (shapes_of(np.load(golden / "mixer.ckpt.npz")), alone),
        "timm_mixer": (shapes_of(mixer_of_timm().state_dict()), alone),
        "bit_paper": (shapes_of(as_big_transfer(make_resnet_v2())), alone),
        "transformers_vit": (shapes_of(vit.state_dict()), Companions(vit.config.to_dict())),
        "transformers_deit": (shapes_of(deit.state_dict()), Companions(deit.config.to_dict())),
        "transformers_vit_hybrid": (shapes_of(hybrid.state_dict()), Companions(hybrid.json())),
        **{
            origin: (shapes_of(model.state_dict()), Companions(model.config.to_dict()))
            for origin, model in towers.items()
        },
        "open_clip": ({key: shape for key, shape in clip.items() if key != "proj"}, alone),
        "mae": (encoder | {"mask_token": (1, 1, 64), "decoder_embed.weight": (8, 64)}, alone),
        "dino": ({f"teacher.backbone.{key}": shape for key, shape in encoder.items()}, alone),
        "timm_vit": (small, alone),
        "timm_hybrid": (shapes_of(hybrid_of_timm().state_dict()), alone),
    }


def test_report_tells_every_key_of_every_origin(golden: Path):
    sources = files(golden)
    assert set(sources) == {origin.name for origin in ORIGINS}
    for name, (shapes, companions) in sources.items():
        options = {"image_size": (64, 64)} if "scan" in str(shapes) or name == "big_vision" else {}
        plan = conversion.plan(shapes, companions=companions, **options)
        assert plan.origin == name
        report = json.loads(report_of(plan, shapes))
        assert report["origin"] == name
        assert {row["source"]: tuple(row["shape"]) for row in report["keys"]} == shapes, name
        model = plan.model_class(plan.config)
        told = [row["target"] for row in report["keys"] if "target" in row]
        assert sorted(told) == sorted(model.state_dict()), name
        for row in report["keys"]:
            assert ("ignored" in row) != (row.get("transform") in TRANSFORMS), row
            if "target" in row:
                assert tuple(row["target_shape"]) == tuple(model.state_dict()[row["target"]].shape)
                parts = row["piece"][1] if "piece" in row else row["shape"][0] if "block" in row else 1
                assert math.prod(row["target_shape"]) * parts == math.prod(row["shape"])
