"""The end of a run: one look at the test split, then the finished folder in one move."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError
from hf_vit.evaluation import evaluate_classifier, save_evaluation
from hf_vit.hub.card import write_card
from hf_vit.results.facts import DataFact, append_record, new_record
from hf_vit.training.finetuning import SPLIT_SEED, FinetuneResult, Run
from hf_vit.training.run.checkpoints import is_full_disk, move_into
from hf_vit.training.run.learning_curve import LEARNING_CURVE_NAME, plot_learning_curve
from hf_vit.training.run.processes import is_first, wait_for_all, world_size
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.sharding import whole_model


def complete(run: Run, trainer: HfViTTrainer, seconds: float) -> FinetuneResult:
    """Evaluate, write everything beside the checkpoints, and move it into the output folder when it is complete.

    Raises:
        UserError: the disk is full; the checkpoints stay.
    """
    model: Any = whole_model(trainer.accelerator.unwrap_model(trainer.model))
    model.eval()
    model.set_attn_implementation("sdpa")
    test = evaluate_classifier(
        model,
        run.processor,
        run.data.split("test"),
        label_names=run.data.label_names,
        batch_size=run.micro_batch_size,
        device=run.options.device,
        progress=False,
    )
    best = best_evaluation(trainer.state.log_history, trainer.state.best_global_step)
    result = FinetuneResult(
        folder=run.output,
        model=model,
        processor=run.processor,
        recipe=run.recipe,
        validation={"accuracy": best["eval_accuracy"], "loss": best["eval_loss"]},
        test=test,
        steps=trainer.state.global_step,
        best_step=int(best["step"]),
        seconds=seconds,
        history=trainer.state.log_history,
        trials=run.trials,
    )
    deliver(run, lambda folder: _write(run, result, folder))
    return result


def deliver(run: Run, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside the checkpoints, move it into the output when it is complete, and tidy up.

    The first process does, when no other reads the checkpoints any more; all return when it has.

    Raises:
        UserError: the disk is full; the checkpoints stay.
    """
    wait_for_all()
    if is_first():
        _deliver(run, write)
    wait_for_all()


def _deliver(run: Run, write: Callable[[Path], None]) -> None:
    # Of the same name as the output, which is the model's name in the card.
    parcel = run.work / "finished" / run.output.absolute().name
    try:
        shutil.rmtree(parcel, ignore_errors=True)
        parcel.mkdir(parents=True)
        write(parcel)
        move_into(parcel, run.output)
    except Exception as error:  # of safetensors, torch or the system
        if not is_full_disk(error):
            raise
        with suppress(OSError):
            shutil.rmtree(parcel)
        raise UserError(
            f"the disk of {run.output} is full; the checkpoints are complete: free space, then go on with --resume"
        ) from error
    if not run.options.keep_checkpoints:
        shutil.rmtree(run.work)


def best_evaluation(history: list[dict[str, Any]], best_step: int | None) -> dict[str, Any]:
    """The log entry of the evaluation the best checkpoint was chosen by."""
    entries = [entry for entry in history if "eval_accuracy" in entry]
    return next((entry for entry in entries if entry["step"] == best_step), entries[-1])


def _write(run: Run, result: FinetuneResult, folder: Path) -> None:
    result.model.save_pretrained(folder)
    run.processor.save_pretrained(folder)
    plot_learning_curve(result.history, folder / LEARNING_CURVE_NAME)
    append_record(
        folder,
        new_record(
            "training",
            command=run.command,
            seed=run.options.seed,
            data=data_fact(run, "train", run.data.num_examples("train")),
            seconds=result.seconds,
            device=run.options.device,
            values=training_values(run, result),
        ),
    )
    save_evaluation(
        folder,
        result.test,
        data=data_fact(run, "test", result.test.num_images),
        command=run.command,
        seed=SPLIT_SEED,
        device=run.options.device,
    )
    write_card(folder)


def training_values(run: Run, result: FinetuneResult) -> dict[str, Any]:
    """What facts.json says of a training: what was really used, and what came out on the validation split."""
    values = run_values(run, result.model, result.steps, result.seconds, result.history)
    values["recipe"]["head_bias"] = run.recipe.initial_head_bias(len(run.data.label_names))
    if run.trials:
        values["learning_rate_sweep"] = [dict(trial) for trial in run.trials]
    return {
        **values,
        **run.objective,
        "best_step": result.best_step,
        "validation_accuracy": result.validation["accuracy"],
        "validation_loss": result.validation["loss"],
    }


def run_values(run: Run, model: Any, steps: int, seconds: float, history: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of the facts that every objective has."""
    logged = [entry["loss"] for entry in history if "loss" in entry]
    config = run.model.config
    of_the_model = {
        "image_size": config.image_size,
        "dropout": config.hidden_dropout_prob,
        "drop_path": config.drop_path_rate,
    }
    values: dict[str, Any] = {
        "recipe": run.recipe.settings() | of_the_model,
        "steps": steps,
        "planned_steps": run.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "micro_batch_size": run.micro_batch_size,
        "world_size": world_size(),
        "precision": "bf16" if run.bf16 else "fp32",
        "images_per_second": round(steps * run.recipe.batch_size / seconds, 2) if seconds else None,
    }
    if logged:
        values["training_loss"] = logged[-1]
    if run.source.checkpoint is not None:
        values["base_model"] = run.source.name
    else:
        values["variant"] = run.source.name
    if run.data.skipped:
        values["skipped_images"] = len(run.data.skipped)
    return values


def data_fact(run: Run, split: str, size: int | None) -> DataFact:
    return DataFact(name=run.data.name, fingerprint=run.data.fingerprint, split=split, size=size)
