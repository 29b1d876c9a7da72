"""A training that ends on the Hub: looked at before the first step, shared once at the end, failures told."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi

from hf_vit.errors import UserError
from hf_vit.hub.card import refresh_card
from hf_vit.hub.preflight import PushOptions, find_target
from hf_vit.hub.push import PushResult, push_to_hub
from hf_vit.results.facts import DataFact, append_record, new_record

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

# What the card's recipe tells of a training that was set up with transformers' own arguments.
_RECIPE = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "optim",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "max_grad_norm",
    "bf16",
    "fp16",
)


def check_before(repo_id: str, say: Callable[[str], None], *, private: bool = False, token: str | None = None) -> str:
    """Make sure, before a training, that its result can be shared; nothing is made.

    Returns:
        The repository's full name.

    Raises:
        UserError: see `hf_vit.hub.preflight.find_target`.
    """
    return find_target(HfApi(token=token), repo_id, PushOptions(private=private, token=token), say).repo_id


def share_finished(folder: Path, repo_id: str, say: Callable[[str], None], **options: Any) -> PushResult:
    """Push a finished model; a failure says that nothing is lost.

    Raises:
        UserError: the push failed; the folder is complete.
    """
    try:
        return push_to_hub(folder, repo_id, report=say, **options)
    except UserError as error:
        raise UserError(
            f"the model in {folder} is complete, but sharing it failed: {error} Later: hf-vit push {folder} {repo_id}"
        ) from error


def check_trainer(trainer: "HfViTTrainer", private: bool | None, token: str | None) -> str:
    """The same for `HfViTTrainer`, whose arguments name the repository.

    Raises:
        UserError: also where the card would lack the image processor or the data's name.
    """
    if trainer.processing_class is None:
        raise UserError("a model is shared together with its image processor; give processing_class=")
    if data_of(trainer) is None:
        raise UserError(
            "the card of a shared model names the training data, and this data set has no name; give "
            "data_fact=DataFact(name=...) (hf_vit.results.facts)"
        )
    arguments = trainer.args
    name = arguments.hub_model_id or Path(str(arguments.output_dir)).absolute().name
    private = bool(arguments.hub_private_repo if private is None else private)
    return check_before(name, lambda line: None, private=private, token=token or arguments.hub_token)


def share_trainer(
    trainer: "HfViTTrainer", message: str, revision: str | None, private: bool | None, token: str | None
) -> PushResult:
    """Record the training in the output folder, which holds the saved model, render its card, and push it."""
    arguments = trainer.args
    folder = Path(str(arguments.output_dir))
    append_record(
        folder,
        new_record(
            "training",
            values=training_values(trainer),
            seed=arguments.seed,
            data=data_of(trainer),
            seconds=_last(trainer, "train_runtime"),
            device=str(arguments.device),
        ),
    )
    refresh_card(folder)
    return share_finished(
        folder,
        str(trainer.hub_model_id),
        lambda line: None,
        message=message,
        revision=revision or arguments.hub_revision,
        private=bool(arguments.hub_private_repo if private is None else private),
        token=token or arguments.hub_token,
    )


def data_of(trainer: "HfViTTrainer") -> DataFact | None:
    """The training data by its name, as far as a `datasets.Dataset` knows it; None without a name."""
    if trainer.data_fact is not None:
        return trainer.data_fact
    dataset: Any = trainer.train_dataset
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    if name is None:
        return None
    split = getattr(dataset, "split", None)
    size = len(dataset) if hasattr(dataset, "__len__") else None
    fingerprint = getattr(dataset, "_fingerprint", None)
    return DataFact(name=str(name), fingerprint=fingerprint, split=None if split is None else str(split), size=size)


def training_values(trainer: "HfViTTrainer") -> dict[str, Any]:
    """What is known of the training: settings, steps, losses, and the last evaluation."""
    values: dict[str, Any] = {"recipe": _settings(trainer.args), "steps": trainer.state.global_step}
    for name, key in (("training_loss", "train_loss"), ("validation_accuracy", "eval_accuracy"),
                      ("validation_loss", "eval_loss")):  # fmt: skip
        if (value := _last(trainer, key)) is not None:
            values[name] = value
    origin = str(getattr(trainer.accelerator.unwrap_model(trainer.model), "name_or_path", "") or "")
    if origin:
        values["base_model"] = origin if not Path(origin).exists() else Path(origin).name
    return values


def _settings(arguments: "TrainingArguments") -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in _RECIPE}
    return {name: getattr(value, "value", value) for name, value in values.items() if value not in (None, False, -1)}


def _last(trainer: "HfViTTrainer", key: str) -> float | None:
    return next((entry[key] for entry in reversed(trainer.state.log_history) if key in entry), None)
