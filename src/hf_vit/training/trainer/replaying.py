"""What a training leaves of a loss that is no number: the batch, and the weights that met it, to look into.

    OUTPUT/checkpoints/replay-<step>/  batch.safetensors, model.safetensors, config.json, replay.json

Nothing of it is a pickle.
"""

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from transformers import PreTrainedConfig

from hf_vit.errors import UserError
from hf_vit.subjects.device import pick_device

_BATCH, _WEIGHTS, _ABOUT = "batch.safetensors", "model.safetensors", "replay.json"


@dataclass(frozen=True)
class Replay:
    """A step that went wrong, done again up to its loss. `print` it.

    Attributes:
        step: the optimizer step that was to be made.
        learning_rate: of that step.
        loss_then: of the (micro-)batch in training: NaN or an infinity.
        loss: the model's own loss of it now: without label smoothing or a teacher, and with other dropout.
        bad_inputs: the batch's tensors that hold NaN or an infinity.
        bad_images: which images of the batch those are.
        bad_weights: parameters and buffers that do.
        first_bad_module: the first module in order of computation whose output does; None: there is none.
    """

    step: int
    learning_rate: float
    loss_then: float
    loss: float
    bad_inputs: list[str]
    bad_images: list[int]
    bad_weights: list[str]
    first_bad_module: str | None

    def __str__(self) -> str:
        found: list[str] = []
        if self.bad_inputs:
            found.append(f"NaN or infinity in {', '.join(self.bad_inputs)} of images {self.bad_images}")
        if self.bad_weights:
            found.append(f"in the weights {', '.join(self.bad_weights[:3])} ({len(self.bad_weights)} in all)")
        if self.first_bad_module is not None:
            found.append(f"the first output with NaN or infinity is that of {self.first_bad_module or 'the model'}")
        if not found:
            found.append("everything is finite here: it came of dropout, the loss on top of the model, or the device")
        return (
            f"step {self.step} (learning rate {self.learning_rate:.3g}): loss {self.loss_then} in training, "
            f"{self.loss:.6g} now; {'; '.join(found)}"
        )


def save_replay(
    folder: Path,
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    step: int,
    learning_rate: float,
    loss: float,
    bf16: bool,
) -> None:
    """Write a batch and the weights that met it, in one move.

    Args:
        folder: to make; what is there is replaced.
        model: as it was before the step was made.
        batch: of the collator; its tensors are kept.
        step, learning_rate, loss: what the message says.
        bf16: whether it was computed under bfloat16 autocast.

    Raises:
        OSError, SafetensorError: the disk is full, or may not be written.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    for old in (folder, partial):
        shutil.rmtree(old, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial, model, batch)
        about = {"step": step, "learning_rate": learning_rate, "loss": f"{loss}", "bf16": bf16}
        about["class"] = type(model).__name__
        (partial / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, model: nn.Module, batch: Mapping[str, Any]) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in batch.items() if torch.is_tensor(value)}
    save_file(tensors, folder / _BATCH)
    save_model(model, str(folder / _WEIGHTS))
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        config.save_pretrained(folder)


def replay(folder: str | Path, model: nn.Module | None = None, device: str | None = None) -> Replay:
    """Do a step that went wrong again, up to its loss, and find where the first NaN or infinity comes from.

    Args:
        folder: what the error named.
        model: of the same making, to put the weights into; needed for models other than hf_vit's and transformers', and
            for those with an adapter.
        device: torch device; by default a GPU where there is one.

    Raises:
        UserError: the folder holds no such step, or the weights do not fit the model.
    """
    folder, place = Path(folder), pick_device(device)
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        batch = {name: tensor.to(place) for name, tensor in load_file(folder / _BATCH).items()}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no step to replay ({error}); give the folder that the error named") from error
    model = _model(folder, about["class"], model).to(place).train()
    outputs: dict[str, bool] = {}
    with _watched(model, outputs), torch.no_grad(), torch.autocast(place.type, torch.bfloat16, enabled=about["bf16"]):
        found = model(**batch)
    loss = found["loss"] if "loss" in found else found[0]
    bad = {name: tensor for name, tensor in batch.items() if not bool(tensor.isfinite().all())}
    return Replay(
        step=about["step"],
        learning_rate=about["learning_rate"],
        loss_then=float(about["loss"]),
        loss=float(loss.float().mean()),
        bad_inputs=sorted(bad),
        bad_images=sorted({int(row) for tensor in bad.values() for row in (~tensor.isfinite()).nonzero()[:, 0]}),
        bad_weights=[name for name, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())],
        first_bad_module=next((name for name, finite in outputs.items() if not finite), None),
    )


def _model(folder: Path, class_name: str, model: nn.Module | None) -> nn.Module:
    import transformers

    import hf_vit

    if model is None:
        kind: Any = getattr(hf_vit, class_name, None) or getattr(transformers, class_name, None)
        if kind is None or not (folder / "config.json").is_file():
            raise UserError(f"{folder} is of a {class_name}, which cannot be built from here; give the model")
        model = cast(nn.Module, kind(kind.config_class.from_pretrained(folder)))
    try:
        load_model(model, str(folder / _WEIGHTS))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the weights of {folder} do not fit ({reason}); give the model they are of") from error
    return model


@contextmanager
def _watched(model: nn.Module, outputs: dict[str, bool]) -> Generator[None]:
    """While this lasts, note for every module in order of computation whether its output is finite."""

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if torch.is_tensor(output):
                outputs[name] = bool(output.isfinite().all())

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
