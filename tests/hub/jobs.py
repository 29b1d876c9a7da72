"""What the tests of sharing run in client processes."""

import contextlib
import importlib
import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

THEIRS = "alice/theirs"


def replace(limits: dict[str, float] | None) -> None:
    """Replace constants of the package: "repositories.hub.STALL" -> value."""
    for name, value in (limits or {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(f"hf_vit.{module}"), attribute, value)


def push(
    folder: Any,
    repo_id: str = "alice/my-vit",
    limits: dict[str, float] | None = None,
    scratch: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
    **options: Any,
) -> Any:
    """`hf_vit.push_to_hub`; its temporary files lie in `scratch`."""
    import tempfile

    from huggingface_hub import constants

    import hf_vit

    replace(limits)
    tempfile.tempdir = scratch or tempfile.tempdir
    constants.HF_HUB_OFFLINE, constants.ENDPOINT = offline, endpoint or constants.ENDPOINT
    told: list[str] = []
    try:
        result = hf_vit.push_to_hub(folder, repo_id, report=told.append, **options)
    except hf_vit.UserError as error:
        return {"error": str(error), "told": told}
    return {**asdict(result), "told": told}


def push_many(pushes: list[dict[str, Any]]) -> list[Any]:
    return [push(**arguments) for arguments in pushes]


def push_and_load(folder: str, repo_id: str = "alice/my-vit", **options: Any) -> Any:
    """A push, and the logits of what then loads."""
    return push(folder, repo_id, **options), logits(repo_id)


def push_object(folder: str, repo_id: str, facts: bool = True, **options: Any) -> Any:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    from hf_vit.results.facts import Facts

    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    return push(model, repo_id, processor=processor, facts=Facts.load(folder).records if facts else [], **options)


def fetch_space(repo_id: str, folder: str) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(repo_id, repo_type="space", local_dir=folder)


def verify(
    repo_id: str = "alice/my-vit", limits: dict[str, float] | None = None, examples: bool = False, **options: Any
) -> Any:
    """`hf_vit.hub.verify.verify_repo`; without running the card's examples, which takes seconds, unless asked for."""
    from hf_vit import UserError
    from hf_vit.hub.verify import verify_repo

    replace(limits)
    if not examples:
        skip_examples()
    try:
        result = verify_repo(repo_id, **options)
    except UserError as error:
        return {"error": str(error)}
    return {**asdict(result), "folder": str(result.folder)}


def skip_examples() -> None:
    from hf_vit.hub import verify

    verify.run_examples = lambda *arguments: ({}, [])


def command(arguments: list[str], secrets: bool = False, examples: bool = True) -> None:
    """hf-vit; with a stored token, tokens of others in the environment and a secret in the home folder."""
    from hf_vit_cli.main import main

    if not examples:
        skip_examples()
    if secrets:
        stored_token("hf_alice_write")
        Path(".secret").write_text("x")
        os.environ |= {"AWS_SECRET_ACCESS_KEY": "x", "WANDB_TOKEN": "x", "HOME": str(Path.cwd())}
    main(arguments)


def stored_token(text: str) -> None:
    from huggingface_hub import constants

    Path(constants.HF_TOKEN_PATH).write_text(text)


def make_image(seed: int = 0) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def load(repo_id: str, trust: bool = False) -> dict[str, Any]:
    """Everything transformers loads from a repository, on one image: what each way answers."""
    import torch
    import transformers

    image, extra = make_image(), {"trust_remote_code": trust}
    processor = transformers.AutoImageProcessor.from_pretrained(repo_id, **extra)
    inputs = processor(images=image, return_tensors="pt")
    classifier = transformers.AutoModelForImageClassification.from_pretrained(repo_id, **extra)
    with torch.no_grad():
        trunk = transformers.AutoModel.from_pretrained(repo_id, **extra)(**inputs)
        logits = classifier(**inputs).logits
    pipe = transformers.pipeline("image-classification", model=repo_id, device="cpu", **extra)
    found = pipe(image, top_k=classifier.config.num_labels)
    return {
        "class": type(classifier).__module__.split(".")[0],
        "logits": logits[0].tolist(),
        "pooled": trunk.pooler_output[0].tolist(),
        "pipeline": {entry["label"]: entry["score"] for entry in found},
        "package": sorted(name for name in sys.modules if name.split(".")[0] == "hf_vit"),
    }


def load_many(loads: list[dict[str, Any]]) -> list[Any]:
    return [load(**arguments) for arguments in loads]


def logits(repo_id: str, **options: Any) -> Any:
    """The classifier's answer; the error's name and text where it does not load."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    try:
        processor = AutoImageProcessor.from_pretrained(repo_id, **options)
        model = AutoModelForImageClassification.from_pretrained(repo_id, **options)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    with torch.no_grad():
        return model(**processor(images=make_image(), return_tensors="pt")).logits[0].tolist()


def logits_many(loads: list[dict[str, Any]], offline: bool = False) -> list[Any]:
    """Of several repositories; in offline mode from the cache."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = offline
    return [logits(**arguments) for arguments in loads]


def feature_map(repo_id: str, name: str) -> list[float]:
    import torch
    from transformers import AutoImageProcessor

    import hf_vit

    inputs = AutoImageProcessor.from_pretrained(repo_id)(images=make_image(), return_tensors="pt")
    backbone = getattr(hf_vit, name).from_pretrained(repo_id)
    with torch.no_grad():
        return backbone(**inputs).feature_maps[-1].flatten().tolist()


def upload_raw(repo_id: str, files: dict[str, str]) -> str:
    """A commit that somebody made by other means."""
    from huggingface_hub import CommitOperationAdd, HfApi

    HfApi().create_repo(repo_id, exist_ok=True)
    operations = [CommitOperationAdd(name, text.encode()) for name, text in files.items()]
    return HfApi().create_commit(repo_id, operations, commit_message="by hand").oid


def read(repo_id: str, name: str) -> str:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id, name)).read_text()


def eval_results(repo_id: str) -> Any:
    """The results that the Hub shows beside a model."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(repo_id, expand=["evalResults"]).eval_results
    return found and [asdict(entry) for entry in found]


def embed_into(repo_id: str, within: str, **options: Any) -> Any:
    """`hf_vit.evaluation.embed` into a repository that is not there, then is, and then is full."""
    from huggingface_hub import HfApi

    from hf_vit.errors import UserError
    from hf_vit.evaluation import embed

    told: list[Any] = []
    for _ in range(3):
        try:
            told.append(embed(output=f"hf://{repo_id}/{within}", **options).done_before)
        except UserError as error:
            told.append(str(error))
            HfApi().create_repo(repo_id)
    return told


def share(kind: str, folder: str) -> list[list[float]]:
    """Upload an untrained model of transformers or timm whose head is not zero; its logits."""
    import timm
    import torch
    from huggingface_hub import HfApi
    from timm.models import save_for_hf
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    if kind == "timm":
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}
        model: Any = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=5, **sizes)
        torch.nn.init.normal_(model.head.weight)
        save_for_hf(model, folder, model_args=sizes)
    else:
        model = ViTForImageClassification(
            ViTConfig(image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                      intermediate_size=48, num_labels=5)
        )  # fmt: skip
        torch.nn.init.normal_(model.classifier.weight)
        model.save_pretrained(folder)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    HfApi().create_repo(THEIRS)
    HfApi().upload_folder(repo_id=THEIRS, folder_path=folder)
    with torch.no_grad():
        answer = model.eval()(_noise())
    return getattr(answer, "logits", answer).tolist()


def _noise() -> Any:
    import torch

    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def take_over(model: str, output: str) -> dict[str, Any]:
    """Load and convert a model of another library, fine-tune it for a step, look at it, count its FLOPs."""
    import timm.models
    import torch
    from training.conftest import make_colour_folder
    from transformers import AutoModelForImageClassification

    import hf_vit
    from hf_vit import conversion
    from hf_vit.results.facts import Facts

    conversion.convert(f"hf://{THEIRS}", Path(output) / "converted")
    models = hf_vit.from_hub(THEIRS), AutoModelForImageClassification.from_pretrained(f"{output}/converted")
    with torch.no_grad():
        logits = [model(_noise()).logits.tolist() for model in models]
    # timm's own repositories are not on this Hub.
    released = {"hf_hub_id": THEIRS, "input_size": (3, 32, 32)}
    timm.models.get_pretrained_cfg = lambda name: SimpleNamespace(to_dict=lambda: released)
    data = str(make_colour_folder(Path(output) / "images", count=10))
    short = ["--image-size", "8", "--steps", "1", "--batch-size", "4", "--evaluations", "1", "--skip-bad-images"]
    log = io.StringIO()
    for words in (
        ["finetune", "--model", model, "--data", data, "--output", f"{output}/tuned", *short],
        ["analyze", model, "--images", data, "--output", f"{output}/seen", "--only", "attention_distance"],
        ["cost", model],
    ):
        with contextlib.redirect_stderr(log), contextlib.suppress(SystemExit):
            command(words)
    values = Facts.load(Path(output) / "tuned").records[0].values
    seen = (Path(output) / "seen" / "attention_distance.json").is_file()
    conversions = log.getvalue().count("converted in memory")
    activation = json.loads((Path(output) / "tuned" / "config.json").read_text())["hidden_act"]
    return {"logits": logits, "told": [values.get("base_model"), values.get("origin"), seen, conversions, activation]}


def train(
    folder: str,
    hub_model_id: str,
    named: bool | str = True,
    processor: bool = True,
    catch: bool = True,
    license: str | None = "mit",
    resume: str | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Two steps of `HfViTTrainer(push_to_hub=True)` on images of noise, of which the first is the better.

    With `again` the model is evaluated and shared once more.
    """
    import torch
    from datasets import Dataset
    from evaluation.tiny import make_processor
    from transformers import TrainingArguments

    from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
    from hf_vit.results.facts import DataFact, append_record, make_record
    from hf_vit.training import HfViTTrainer

    torch.manual_seed(0)
    config = HfViTConfig(image_size=(8, 12), patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                         intermediate_size=16, num_labels=2)  # fmt: skip
    images = [{"pixel_values": torch.randn(3, 8, 12), "labels": index % 2} for index in range(6)]
    accuracies = [0.25, 0.75]
    arguments = TrainingArguments(
        folder, push_to_hub=True, hub_model_id=hub_model_id, max_steps=2, save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="accuracy", per_device_train_batch_size=3,
        learning_rate=1e-3, use_cpu=True, report_to="none",
    )  # fmt: skip
    parts: dict[str, Any] = {
        "model": HfViTForImageClassification(config),
        "args": arguments,
        "train_dataset": images,
        "eval_dataset": images,
        "processing_class": make_processor() if processor else None,
        "compute_metrics": lambda _: {"accuracy": accuracies.pop()},
    }
    if named == "by the dataset":
        parts["train_dataset"] = Dataset.from_list(images, split="train").with_format("torch")
        parts["train_dataset"].info.dataset_name = "colours"
    trainer = None
    try:
        fact = DataFact(name="colours", split="train", size=6) if named is True else None
        trainer = HfViTTrainer(**parts, data_fact=fact, license=license, layer_decay=0.5)
        trainer.train(resume)
        if again:
            append_record(folder, make_record("evaluation", values={"top1": 0.5}))
            trainer.push_to_hub()
    except UserError as error:
        if not catch:
            raise
        return {"error": str(error), "steps": 0 if trainer is None else trainer.state.global_step}
    return {"logits": logits(folder)}
