"""A training that ends on the Hub: looked at before the first step, shared once at the end, failures told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_vit.errors import UserError
from hf_vit.hub.card import refresh_card
from hf_vit.hub.licenses import declared_license, license_of, need_license
from hf_vit.hub.preflight import PushOptions, find_destination
from hf_vit.hub.push import push_to_hub
from hf_vit.hub.push_result import PushResult
from hf_vit.results.facts import DataFact, append_record, new_record

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
        UserError: see `hf_vit.hub.preflight.find_destination`.
    """
    return find_destination(HfApi(token=token), repo_id, PushOptions(private=private, token=token), say).repo_id


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


class SharingTrainer(Trainer):
    """A `Trainer` whose `push_to_hub=True` looks at token and repository first, and shares once at the end.

    Args:
        data_fact: name of the training data, for the card of a shared model; by default what the data set says.
        license: of a shared model; by default that of the checkpoint it began with.

    Raises:
        UserError: the model cannot be shared.
    """

    def __init__(
        self, *args: Any, data_fact: DataFact | None = None, license: str | None = None, **kwargs: Any
    ) -> None:
        self.data_fact, self.license = data_fact, license
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, and with `push_to_hub=True` share the result."""
        output = super().train(*args, **kwargs)
        if self.args.push_to_hub:
            self.push_to_hub()
        return output

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Find out before the training whether its result can be shared; the repository is made when it is.

        Raises:
            UserError: no token, no right to write, no image processor, no name of the data.
        """
        self.push_in_progress = None
        if not self.is_world_process_zero():
            return
        if self.processing_class is None:
            raise UserError("a model is shared together with its image processor; give processing_class=")
        if self._data() is None:
            raise UserError(
                "the card of a shared model names the training data, and this data set has no name; give "
                "data_fact=DataFact(name=...) (hf_vit.results.facts)"
            )
        if declared_license(Path(str(self.args.output_dir))) is None:
            need_license(self.license, self._base())
        name = self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name
        self.hub_model_id = check_before(
            name, lambda line: None, private=self._is_private(private), token=token or self.args.hub_token
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model into the output folder, record the training, and share both; see `hf_vit.push_to_hub`.

        Args:
            blocking: only True: a failure must be able to raise.

        Returns:
            A `PushResult` on the first process, None on others.

        Raises:
            UserError: says what is wrong; the model stays in the output folder.
        """
        if not blocking:
            raise UserError("push_to_hub(blocking=False) would hide a failure; leave it out")
        if not self.hub_model_id:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        folder = Path(str(self.args.output_dir))
        record = new_record(
            "training",
            values=self._values(),
            seed=self.args.seed,
            data=self._data(),
            seconds=self._last("train_runtime"),
            device=str(self.args.device),
        )
        append_record(folder, record)
        refresh_card(folder, license=self.license)
        return share_finished(
            folder,
            str(self.hub_model_id),
            lambda line: None,
            message=commit_message or "End of training",
            revision=revision or self.args.hub_revision,
            private=self._is_private(private),
            token=token or self.args.hub_token,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: what is shared is shared once, when it is complete."""

    def _is_private(self, private: bool | None) -> bool:
        return bool(self.args.hub_private_repo if private is None else private)

    def _data(self) -> DataFact | None:
        """The training data by its name, as far as a `datasets.Dataset` knows it; None without a name."""
        if self.data_fact is not None:
            return self.data_fact
        dataset: Any = self.train_dataset
        info = getattr(dataset, "info", None)
        name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
        if name is None:
            return None
        split = getattr(dataset, "split", None)
        size = len(dataset) if hasattr(dataset, "__len__") else None
        fingerprint = getattr(dataset, "_fingerprint", None)
        return DataFact(name=str(name), fingerprint=fingerprint, split=None if split is None else str(split), size=size)

    def _values(self) -> dict[str, Any]:
        """What is known of the training: settings, steps, losses, and the last evaluation."""
        values: dict[str, Any] = {"recipe": _settings(self.args), "steps": self.state.global_step}
        for name, key in (
            ("training_loss", "train_loss"),
            ("validation_accuracy", "eval_accuracy"),
            ("validation_loss", "eval_loss"),
        ):
            if (value := self._last(key)) is not None:
                values[name] = value
        if (origin := self._base()) is not None:
            values["base_model"] = origin if not Path(origin).exists() else Path(origin).name
            values |= {"base_license": license} if (license := license_of(origin)) else {}
        return values

    def _base(self) -> str | None:
        """The checkpoint that the model was loaded from."""
        return str(getattr(self.accelerator.unwrap_model(self.model), "name_or_path", "") or "") or None

    def _last(self, key: str) -> float | None:
        return next((entry[key] for entry in reversed(self.state.log_history) if key in entry), None)


def _settings(arguments: TrainingArguments) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in _RECIPE}
    return {name: getattr(value, "value", value) for name, value in values.items() if value not in (None, False, -1)}
