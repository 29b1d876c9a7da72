"""Sharing as other libraries do it, and taking over what they shared."""

from pathlib import Path
from typing import Any

REPO = "alice/theirs"
TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 5,
}


def images() -> Any:
    import torch

    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def share(kind: str, folder: str) -> list[list[float]]:
    """Upload an untrained model whose head is not zero; its logits."""
    import torch
    from huggingface_hub import HfApi

    torch.manual_seed(0)
    model = _timm(folder) if kind == "timm" else _transformers(kind, folder)
    HfApi().create_repo(REPO)
    HfApi().upload_folder(repo_id=REPO, folder_path=folder)
    with torch.no_grad():
        answer = model.eval()(images())
    return getattr(answer, "logits", answer).tolist()


def _transformers(kind: str, folder: str) -> Any:
    import torch
    import transformers

    family = {"vit": "ViT", "deit": "DeiT"}[kind]
    model = getattr(transformers, f"{family}ForImageClassification")(getattr(transformers, f"{family}Config")(**TINY))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return model


def _timm(folder: str) -> Any:
    import timm
    import torch
    from timm.models import save_for_hf

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes)
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, folder, model_args={key: value for key, value in sizes.items() if key != "num_classes"})
    return model


def take(output: str) -> list[list[list[float]]]:
    """Logits of `hf_vit.from_hub`, and of what `hf-vit convert` leaves."""
    import torch
    from transformers import AutoModelForImageClassification

    import hf_vit
    from hf_vit import conversion

    conversion.convert(f"hf://{REPO}", Path(output))
    models = hf_vit.from_hub(REPO), AutoModelForImageClassification.from_pretrained(output)
    with torch.no_grad():
        return [model(images()).logits.tolist() for model in models]


def start(model: str, output: str) -> dict[str, Any]:
    """Fine-tune a name of the Hub for a step, look at it, and count its FLOPs: what the facts and the log say."""
    import contextlib
    import io
    from types import SimpleNamespace

    import timm.models
    from training.conftest import make_colour_folder

    from hf_vit.results.facts import Facts
    from hf_vit_cli.main import main

    def known(name: str) -> Any:
        return SimpleNamespace(to_dict=lambda: {"hf_hub_id": REPO})

    timm.models.get_pretrained_cfg = known  # timm's own repositories are not on this Hub
    folder = Path(output)
    data = make_colour_folder(folder / "images", count=10)
    short = ["--steps", "1", "--batch-size", "4", "--evaluations", "1", "--skip-bad-images"]
    log = io.StringIO()
    for words in (
        ["finetune", "--model", model, "--data", str(data), "--output", f"{output}/tuned", "--image-size", "8", *short],
        ["analyze", model, "--images", str(data), "--output", f"{output}/seen", "--only", "attention_distance"],
        ["cost", model],
    ):
        with contextlib.redirect_stderr(log), contextlib.suppress(SystemExit):
            main(words)
    values = Facts.load(folder / "tuned").records[0].values
    return {name: values.get(name) for name in ("base_model", "origin")} | {
        "told": log.getvalue().count("converted on the way"),
        "seen": (folder / "seen" / "attention_distance.json").is_file(),
        "log": log.getvalue(),
    }
