"""VisionEncoderDecoderModel with our encoder: the example writes its captions back; other decoders fit as well."""

import importlib.util
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
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["vit", pytest.param("hybrid", marks=pytest.mark.slow), pytest.param("axial", marks=pytest.mark.slow)],
)
def test_the_example_writes_its_ten_captions_back(name, example, tmp_path, capsys):
    before, after = example.main(tmp_path / "captioner", name, steps=150)
    assert before == after == list(example.CAPTIONS.values())
    assert len(set(after)) == 10
    assert "10 of 10 captions" in capsys.readouterr().out


BERT = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "is_decoder": True,
    "add_cross_attention": True,
}
GPT2 = {"vocab_size": 20, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 2, "add_cross_attention": True}
TROCR = {
    "vocab_size": 20,
    "d_model": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "cross_attention_hidden_size": 32,  # its cross-attention reads the encoder's width itself
}
DECODERS = {
    "BERT, equal widths": (BertConfig, BERT, BertLMHeadModel, False),
    "GPT-2, projected": (GPT2Config, GPT2, GPT2LMHeadModel, True),
    "TrOCR, cross_attention_hidden_size": (TrOCRConfig, TROCR, TrOCRForCausalLM, False),
}
PAIRS = [("HfViT", name) for name in DECODERS] + [
    (family, "GPT-2, projected") for family in ("HfHybridViT", "HfAxialViT", "HfLocalViT")
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

    model.save_pretrained(tmp_path / "captioner")
    again, info = VisionEncoderDecoderModel.from_pretrained(tmp_path / "captioner", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        before, after = (m(pixel_values=pixel_values, labels=labels).logits for m in (model, again.eval()))
        assert torch.equal(before, after)
        tokens = [m.generate(pixel_values, max_new_tokens=6, do_sample=False) for m in (model, again)]
    assert torch.equal(*tokens)


def test_config_of_a_pair_names_our_encoder(family, tiny_config):
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(tiny_config(family), GPT2Config(**GPT2))
    model = VisionEncoderDecoderModel(config)
    assert type(model.encoder) is getattr(hf_vit, f"{family}Model")
    assert model.encoder.config.patch_size == 16
