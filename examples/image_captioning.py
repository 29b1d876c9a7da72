"""Image captioning: a Vision Transformer that sees, a small causal decoder that tells what.

    python examples/image_captioning.py --output out/captions [--model vit | hybrid | axial]

transformers' VisionEncoderDecoderModel joins any `hf_vit` model to any causal decoder with cross-attention. Here both
are tiny and untrained; they learn ten captions of ten photographs by heart (about ten seconds on one CPU core) and
write them back from the images alone, before and after saving. Real captioning is the same code with a pretrained
encoder (`AutoModel.from_pretrained(...)`), a pretrained decoder and more pictures than ten.
"""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTImageProcessor,
)

from hf_vit import HfAxialViTConfig, HfHybridViTConfig, HfViTConfig

# Photographs inside scikit-image's wheel. The captions share words, so that the decoder has to look.
CAPTIONS = {
    "astronaut.png": "a smiling astronaut in an orange suit",
    "camera.png": "a man in a coat looks through a camera",
    "chelsea.png": "a striped cat with green eyes and whiskers",
    "coffee.png": "a red cup of coffee on a wooden table",
    "coins.png": "four rows of old coins on a dark table",
    "hubble_deep_field.jpg": "many small galaxies in a dark sky",
    "moon.png": "a round crater on the gray moon",
    "motorcycle_left.png": "a red motorcycle in a garage",
    "retina.jpg": "the red retina of an eye",
    "rocket.jpg": "a white rocket in the evening sky",
}


# Encoders of every family, with patches of 8 px.
FAMILIES = {
    "vit": (HfViTConfig, {"patch_size": 8}),
    "hybrid": (HfHybridViTConfig, {"stage_depths": (1, 1), "stem_width": 32}),
    "axial": (HfAxialViTConfig, {"patch_size": 8}),
}


def load_photographs() -> list[Image.Image]:
    """The photographs of `CAPTIONS`, in its order, as RGB."""
    photographs: list[Image.Image] = []
    for name in CAPTIONS:
        with as_file(files("skimage") / "data" / name) as path, Image.open(path) as image:
            photographs.append(image.convert("RGB"))
    return photographs


def build_tokenizer(captions: list[str]) -> PreTrainedTokenizerFast:
    """One token a word; every caption ends in <end>, which is also what generation stops at."""
    special = ["<pad>", "<start>", "<end>", "<unknown>"]
    words = sorted({word for caption in captions for word in caption.split()})
    vocabulary = {token: index for index, token in enumerate(special + words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
        unk_token="<unknown>",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, family: str, image_size: int = 64) -> VisionEncoderDecoderModel:
    """A ViT encoder 64 wide and a GPT-2 decoder 48 wide; transformers projects from one width to the other."""
    config_class, own = FAMILIES[family]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    encoder = config_class(image_size=image_size, **sizes, **own)
    decoder = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=4,
        add_cross_attention=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    tokens = {"decoder_start_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **tokens)
    model = VisionEncoderDecoderModel(config, AutoModel.from_config(encoder), GPT2LMHeadModel(decoder))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, max_new_tokens=16, **tokens)
    return model


def train(
    model: VisionEncoderDecoderModel, pixel_values: torch.Tensor, labels: torch.Tensor, steps: int, lr: float = 2e-3
) -> list[float]:
    """AdamW on the whole batch, pixel_values [B, 3, H, W] and labels [B, T]; returns the losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(pixel_values=pixel_values, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write_captions(
    model: VisionEncoderDecoderModel, tokenizer: PreTrainedTokenizerFast, pixel_values: torch.Tensor
) -> list[str]:
    """Greedy captions of images [B, 3, H, W]."""
    tokens = model.eval().generate(pixel_values, do_sample=False)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def main(output: Path, family: str = "vit", steps: int = 200, seed: int = 0) -> tuple[list[str], list[str]]:
    """Train, save, reload; returns the captions before saving and after reloading."""
    torch.manual_seed(seed)
    captions = list(CAPTIONS.values())
    size = {"height": 64, "width": 64}
    processor = ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_convert_rgb=True)
    pixel_values = processor(load_photographs(), return_tensors="pt")["pixel_values"]
    tokenizer = build_tokenizer(captions)
    batch = tokenizer(captions, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)  # -100: no loss on padding

    model = build_model(tokenizer, family)
    losses = train(model, pixel_values, labels, steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.4f} in {steps} steps")
    before = write_captions(model, tokenizer, pixel_values)

    for part in (model, tokenizer, processor):
        part.save_pretrained(output)
    again = VisionEncoderDecoderModel.from_pretrained(output)  # `import hf_vit` told transformers of the encoder
    after = write_captions(again, PreTrainedTokenizerFast.from_pretrained(output), pixel_values)
    for name, wanted, written in zip(CAPTIONS, captions, after, strict=True):
        print(f"{'ok   ' if written == wanted else 'WRONG'} {name:<22} {written}")
    print(f"{sum(a == b for a, b in zip(captions, after, strict=True))} of {len(captions)} captions; saved in {output}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/captions"), help="folder for the trained model")
    parser.add_argument("--model", choices=FAMILIES, default="vit", help="family of the encoder (default: vit)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.output, arguments.model, arguments.steps, arguments.seed)
