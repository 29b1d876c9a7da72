"""What the tests of sharing run in client processes."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def push(folder: str, repo_id: str = "alice/my-vit", limits: dict[str, float] | None = None, **options: Any) -> Any:
    """`hf_vit.push_to_hub`; `limits` replaces constants of the package: "repositories.retrying.STALL" -> value."""
    import hf_vit

    _replace(limits)
    told: list[str] = []
    try:
        result = hf_vit.push_to_hub(folder, repo_id, report=told.append, **options)
    except hf_vit.UserError as error:
        return {"error": str(error), "told": told}
    return {**asdict(result), "told": told}


def push_from(scratch: str, **arguments: Any) -> Any:
    """A push whose temporary files lie in `scratch`."""
    import tempfile

    tempfile.tempdir = scratch
    return push(**arguments)


def push_many(pushes: list[dict[str, Any]]) -> list[Any]:
    """Several pushes in one process, one after the other."""
    return [push(**arguments) for arguments in pushes]


def push_and_load(folder: str, repo_id: str = "alice/my-vit", **options: Any) -> Any:
    """A push, and the logits of what then loads."""
    return push(folder, repo_id, **options), logits(repo_id)


def push_object(folder: str, repo_id: str, facts: bool = True, **options: Any) -> Any:
    """Load a folder's model and push it as an object."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    from hf_vit.results.facts import Facts

    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    records = Facts.load(folder).records if facts else []
    return push(model, repo_id, processor=processor, facts=records, **options)


def verify(
    repo_id: str = "alice/my-vit", limits: dict[str, float] | None = None, examples: bool = False, **options: Any
) -> Any:
    """`hf_vit.hub.verify.verify_repo`; without running the card's examples, which takes seconds, unless asked for."""
    from hf_vit.errors import UserError
    from hf_vit.hub import verify as module
    from hf_vit.hub.verify import verify_repo

    _replace(limits)
    if not examples:
        module.run_examples = lambda *arguments: ([], [])
    told: list[str] = []
    try:
        result = verify_repo(repo_id, report=told.append, **options)
    except UserError as error:
        return {"error": str(error), "told": told}
    return {**asdict(result), "folder": str(result.folder), "told": told}


def program(*arguments: str) -> None:
    """hf-vit."""
    from hf_vit_cli.main import main

    main(list(arguments))


def command(arguments: list[str]) -> None:
    """hf-vit, with its arguments as a list."""
    program(*arguments)


def load(repo_id: str, revision: str | None = None, seed: int = 0, trust: bool = False) -> dict[str, Any]:
    """Everything transformers loads from a repository, on one image: what each way answers."""
    import torch
    import transformers

    extra = {"revision": revision, "trust_remote_code": trust}
    image = make_image(seed)
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


def make_image(seed: int = 0) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


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


def logits_many(loads: list[dict[str, Any]]) -> list[Any]:
    return [logits(**arguments) for arguments in loads]


def stored_token(text: str) -> None:
    """What `hf auth login` leaves."""
    from huggingface_hub import constants

    Path(constants.HF_TOKEN_PATH).write_text(text)


def offline(folder: str) -> str:
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    return push(folder)["error"]


def unreachable(folder: str) -> str:
    """A port where nobody listens."""
    import socket

    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        constants.ENDPOINT = f"http://127.0.0.1:{free.getsockname()[1]}"
    return push(folder)["error"]


def _replace(limits: dict[str, float] | None) -> None:
    import importlib

    for name, value in (limits or {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(f"hf_vit.{module}"), attribute, value)


def upload_raw(repo_id: str, files: dict[str, str], message: str = "by hand") -> str:
    """A commit that somebody made by other means."""
    from huggingface_hub import CommitOperationAdd, HfApi

    HfApi().create_repo(repo_id, exist_ok=True)
    operations = [CommitOperationAdd(name, text.encode()) for name, text in files.items()]
    return HfApi().create_commit(repo_id, operations, commit_message=message).oid


def read(repo_id: str, name: str) -> str:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id, name)).read_text()


def offline_logits(loads: list[dict[str, Any]]) -> list[Any]:
    """The same from the cache, in offline mode."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    return logits_many(loads)


def reconstruct(repo_id: str, trust: bool = False) -> list[float]:
    """What AutoModelForMaskedImageModeling predicts for an image with one patch hidden."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForMaskedImageModeling

    inputs = AutoImageProcessor.from_pretrained(repo_id)(images=make_image(), return_tensors="pt")
    model = AutoModelForMaskedImageModeling.from_pretrained(repo_id, trust_remote_code=trust)
    h, w = model.config.grid_of(*inputs["pixel_values"].shape[2:])
    mask = torch.zeros(1, h * w, dtype=torch.bool)
    mask[0, 2] = True
    with torch.no_grad():
        return model(**inputs, bool_masked_pos=mask)[0].flatten().tolist()


def label_of_noise(folder: str) -> str:
    """The class of the image that `hf-vit verify` shows to examples: 64x64 px of noise."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    model = AutoModelForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        found = model(**AutoImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt")).logits
    return model.config.id2label[found.argmax(-1).item()]


def feature_map(repo_id: str, name: str) -> list[float]:
    import torch
    from transformers import AutoImageProcessor

    import hf_vit

    inputs = AutoImageProcessor.from_pretrained(repo_id)(images=make_image(), return_tensors="pt")
    backbone = getattr(hf_vit, name).from_pretrained(repo_id)
    with torch.no_grad():
        return backbone(**inputs).feature_maps[-1].flatten().tolist()


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
