"""VisionEncoderDecoderModel with our encoder: the example describes drawn scenes; other decoders fit as well."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    TrOCRConfig,
    TrOCRForCausalLM,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)

import hf_vit


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[2] / "examples" / "image_captioning.py"
    spec = importlib.util.spec_from_file_location("image_captioning", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_no_description_is_both_learnt_and_judged(example):
    parts = {name: {str(scene) for scene in scenes} for name, scenes in example.split_scenes(0).items()}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == len(example.all_scenes()) == 3780
    learnt = [scene for scene in example.split_scenes(0)["train"]]
    pairs = {(group.colour, group.shape) for scene in learnt for group in (scene.first, scene.second)}
    assert not pairs & example.HELD_OUT
    assert {colour for colour, _ in pairs} == set(example.COLOURS)
    assert {shape for _, shape in pairs} == set(example.SHAPES)
    assert all(
        any(f"{colour} {shape}" in text for colour, shape in example.HELD_OUT) for text in parts["new combinations"]
    )


def test_bleu_by_hand(example):
    """Papineni et al., 2002: precisions 5/6, 3/5, 2/4, 1/3, a word as often as the reference has it; brevity."""
    found = example.bleu(["the cat sat on the mat"], ["the cat sat on a mat"])
    assert found == pytest.approx((5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert example.bleu(["the cat sat on"], ["the cat sat on the mat"]) == pytest.approx(math.exp(1 - 6 / 4))
    assert example.bleu(["one two three four"], ["one two three four"]) == 1
    assert example.bleu(["a b c d"], ["d c b a"]) == 0


@pytest.mark.parametrize(
    "name", ["vit", pytest.param("hybrid", marks=pytest.mark.slow), pytest.param("axial", marks=pytest.mark.slow)]
)
def test_the_example_in_small(name, example, tmp_path, capsys):
    record = example.main(tmp_path, name, images=200, steps=40, tests=12)
    assert json.loads((tmp_path / "captions.json").read_text()) == record
    assert record["losses"][0] < 0.8 * math.log(24)  # of 24 words: 3.18 by guessing
    shown = capsys.readouterr().out
    for part in ("new images", "new combinations"):
        assert record[part]["images"] == 12
        wrong = record[part]["wrong"]
        assert (record[part]["exact_match"] == 1) == (not wrong)
        assert f"{part}: exact {record[part]['exact_match']:.1%}" in shown


CROSS = {"vocab_size": 20, "add_cross_attention": True}
BERT = {
    **{**CROSS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    **{"max_position_embeddings": 16, "is_decoder": True},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
GPT2 = {**CROSS, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 2}
TROCR = {  # its cross-attention reads the encoder's width itself
    **{"vocab_size": 20, "d_model": 24, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 16, "dropout": 0.0, "cross_attention_hidden_size": 32},
}
DECODERS = {
    "BERT, equal widths": (BertConfig, BERT, BertLMHeadModel, False),
    "GPT-2, projected": (GPT2Config, GPT2, GPT2LMHeadModel, True),
    "TrOCR, cross_attention_hidden_size": (TrOCRConfig, TROCR, TrOCRForCausalLM, False),
}
PAIRS = [
    *(("HfViT", name) for name in DECODERS),
    *((family, "GPT-2, projected") for family in ("HfHybridViT", "HfAxialViT", "HfLocalViT")),
]


@pytest.mark.parametrize(("family", "decoder"), PAIRS)
def test_decoders_of_any_width(family, decoder, tiny_config, learn, tmp_path):
    """The encoder from a saved folder; trained, saved as one and loaded again."""
    config_class, options, decoder_class, projected = DECODERS[decoder]
    AutoModel.from_config(tiny_config(family)).save_pretrained(tmp_path / "encoder")
    model = VisionEncoderDecoderModel.from_encoder_decoder_pretrained(
        str(tmp_path / "encoder"), decoder_model=decoder_class(config_class(**options))
    )
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    assert type(model.encoder) is getattr(hf_vit, f"{family}Model")
    assert hasattr(model, "enc_to_dec_proj") is projected

    pixel_values, labels = torch.randn(3, 3, 64, 64), torch.randint(3, 20, (3, 6))
    learn(family, model, model.encoder, lambda: model(pixel_values=pixel_values, labels=labels).loss)

    pair = VisionEncoderDecoderConfig.from_encoder_decoder_configs(tiny_config(family), GPT2Config(**GPT2))
    built = VisionEncoderDecoderModel(pair).encoder
    assert (type(built), built.config.patch_size) == (type(model.encoder), 16)
    model.save_pretrained(tmp_path / "captioner")
    again, info = VisionEncoderDecoderModel.from_pretrained(tmp_path / "captioner", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    with torch.no_grad():
        before, after = (m(pixel_values=pixel_values, labels=labels).logits for m in (model, again.eval()))
        assert torch.equal(before, after)
        tokens = [m.generate(pixel_values, max_new_tokens=6, do_sample=False) for m in (model, again)]
    assert torch.equal(*tokens)
