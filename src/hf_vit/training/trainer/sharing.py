"""Share a training on the Hub: check the destination before the first step, push once at the end, raise failures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError
from hf_vit.hub.card import refresh_card
from hf_vit.hub.card_metadata import find_license, read_license, record_base_license, require_license
from hf_vit.hub.push import Push, PushResult, push_to_hub
from hf_vit.results.facts import DataFact, Facts, append_record, make_record
from hf_vit.training.trainer.callbacks import Clock, find_callbacks

# Arguments of transformers that the model card shows as the recipe.
_RECIPE = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "num_train_epochs", "max_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "label_smoothing_factor", "max_grad_norm"),
    *("bf16", "fp16"),
)
_OWN = ("layer_decay", "average_decay")  # arguments of `HfViTTrainer` itself, for the same
# Values of a record -> names in the Trainer's log.
_LOGGED = {"training_loss": "train_loss", "validation_accuracy": "eval_accuracy", "validation_loss": "eval_loss"}


def check_before(
    repo_id: str, report: Callable[[str], None], *, private: bool = False, token: str | None = None
) -> str:
    """Check before a training that its result can be pushed, and return the full name of the repository."""
    push = Push(repo_id, private=private, token=token, report=report)
    push.find_destination()
    return push.repo_id


def share_finished(folder: Path, repo_id: str, report: Callable[[str], None], **options: Any) -> PushResult:
    """Push a finished model; if that fails, the error says that the folder is complete."""
    try:
        return push_to_hub(folder, repo_id, report=report, **options)
    except UserError as error:
        raise UserError(
            f"the model in {folder} is complete, but pushing it failed: {error}; push it later with hf-vit "
            f"push {folder} {repo_id}"
        ) from error


def check_trainer(trainer: Any, token: str | None, private: bool | None) -> str:
    """Check that a trainer's model can be pushed, and return the full name of the repository.

    Raises:
        UserError: image processor, name of the data, license or access to the repository are missing.
    """
    arguments = trainer.args
    folder = Path(str(arguments.output_dir))
    if trainer.processing_class is None:
        raise UserError("a model can only be pushed with its image processor; pass processing_class= to the trainer")
    if (trainer.data_fact or _name_data(trainer.train_dataset)) is None:
        raise UserError(
            "the model card needs the name of the training data; pass data_fact=DataFact(name=...) of "
            "hf_vit.results.facts"
        )
    if not read_license(folder):
        require_license(trainer.license, _get_base_model(trainer))
    return check_before(
        arguments.hub_model_id or folder.absolute().name,
        lambda line: None,
        private=_is_private(trainer, private),
        token=token or arguments.hub_token,
    )


def _get_last(trainer: Any, key: str) -> float | None:
    """Return the last value that the trainer logged under a key; of an evaluation that of the weights it loaded."""
    step = trainer.state.best_global_step if trainer.args.load_best_model_at_end and key.startswith("eval_") else None
    entries = (entry for entry in reversed(trainer.state.log_history) if step in (None, entry.get("step")))
    return next((entry[key] for entry in entries if key in entry), None)


def _collect_values(trainer: Any) -> dict[str, Any]:
    """Return the values of the training's record: recipe, steps, scores, and the base model with its license."""
    recipe: dict[str, Any] = {}
    for name in (*_RECIPE, *_OWN):
        setting = getattr(trainer if name in _OWN else trainer.args, name)
        if setting not in (None, False, -1):  # turned off
            recipe[name] = getattr(setting, "value", setting)  # the value of an enum
    values: dict[str, Any] = {"recipe": recipe, "steps": trainer.state.global_step}
    scores = {name: _get_last(trainer, key) for name, key in _LOGGED.items()}
    values |= {name: value for name, value in scores.items() if value is not None}
    base = _get_base_model(trainer)
    if base is not None:
        values["base_model"] = base if not Path(base).exists() else Path(base).name
        values |= record_base_license(find_license(base))
    return values


def share_training(
    trainer: Any, message: str, token: str | None, revision: str | None, private: bool | None
) -> PushResult:
    """Record a training in the output folder of its model, and push the folder."""
    arguments = trainer.args
    folder = Path(str(arguments.output_dir))
    record = make_record(
        "training",
        values=_collect_values(trainer),
        seed=arguments.seed,
        data=trainer.data_fact or _name_data(trainer.train_dataset),
        seconds=find_callbacks(trainer, Clock)[0].seconds or None,
        device=str(arguments.device),
    )
    facts = Facts.load(folder)
    latest = facts.find_latest("training")
    # One record for a training that is shared again, as evaluations count only after the last training.
    if latest is None or latest.seconds != record.seconds or facts.has_replaced_weights:
        append_record(folder, record)
    refresh_card(folder, license=trainer.license)
    return share_finished(
        folder,
        str(trainer.hub_model_id),
        lambda line: None,
        message=message,
        revision=revision or arguments.hub_revision,
        private=_is_private(trainer, private),
        token=token or arguments.hub_token,
    )


def _is_private(trainer: Any, private: bool | None) -> bool:
    """Return `private`, by default the trainer's setting."""
    return bool(trainer.args.hub_private_repo if private is None else private)


def _name_data(dataset: Any) -> DataFact | None:
    """Return the entry of a `datasets.Dataset` in facts.json, or None if it has no name."""
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    if name is None:
        return None
    split = getattr(dataset, "split", None)
    size = len(dataset) if hasattr(dataset, "__len__") else None
    return DataFact(name=str(name), split=None if split is None else str(split), size=size)


def _get_base_model(trainer: Any) -> str | None:
    """Return the name of the checkpoint that the model was loaded from, or None."""
    return str(getattr(trainer.bare_model(), "name_or_path", "") or "") or None
