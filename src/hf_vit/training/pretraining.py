"""Self-supervised pre-training: a model folder that `finetune` starts from without a flag."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_vit.errors import UserError
from hf_vit.training.finetuning import FinetuneOptions, Run, prepare, quiet_transformers
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run.processes import first_goes_first, need_same, told_by_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
    from hf_vit.training.tasks.contrastive import ContrastiveOptions
    from hf_vit.training.tasks.masking import RandomMasking
    from hf_vit.training.tasks.objectives import Objective

ObjectiveName = Literal["masked-patch", "next-patch", "contrastive"]
# Objective -> the recipe it has where none is named.
OBJECTIVES: dict[str, str] = {
    "masked-patch": "pretrain-small",
    "next-patch": "pretrain-small",
    "contrastive": "contrastive-small",
}
TARGETS = ("mean_color", "downsampled", "pixels")


@dataclass(frozen=True)
class PretrainResult:
    """A finished pre-training.

    Attributes:
        folder: holds model, processor, facts.json, learning_curve.png, a picture and README.md.
        model: after the last step, in evaluation mode; of a contrastive training the encoder alone.
        processor: its image processor.
        picture: the file in `folder` that shows what was learnt.
        validation_loss: of the objective, on the validation split, after the last step; None without an evaluation.
        steps: optimizer steps done.
        seconds: spent training, evaluations and checkpoints included.
        history: the Trainer's log, one entry a logging or evaluation.
    """

    folder: Path
    model: "PreTrainedModel"
    processor: Any
    recipe: Recipe
    picture: Path
    validation_loss: float | None
    steps: int
    seconds: float
    history: list[dict[str, Any]] = field(repr=False)


def pretrain(
    model: "str | HfViTBaseConfig",
    data: str,
    output: str | Path,
    *,
    objective: str = "masked-patch",
    recipe: str | Recipe | None = None,
    target: str = "mean_color",
    masking: "RandomMasking | None" = None,
    static_masks: bool = False,
    contrastive: "ContrastiveOptions | None" = None,
    class_token: bool | None = None,
    num_hidden_groups: int | None = None,
    causal: bool = False,
    options: FinetuneOptions | None = None,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **overrides: Any,
) -> PretrainResult:
    """Pre-train a variant or a checkpoint on images, whose labels are not looked at, and leave a complete model folder.

    Bad input raises before any training; a killed run goes on with `resume`, as `finetune`'s does.

    Args:
        model: a variant such as "S/16" or "Ti/4" (fresh weights), a folder, a Hub id, or a configuration.
        data: see `hf_vit.data.load_data`.
        output: a new or empty folder, or with `resume` that of the run.
        objective: a name of `OBJECTIVES`.
        recipe: a name of `RECIPES`, or a recipe; None takes the objective's small one.
        target: of patch prediction: "mean_color", "downsampled" or "pixels" (arXiv 2010.11929, B.1.2).
        masking: of "masked-patch"; by default the paper's.
        static_masks: every image keeps the mask it got first.
        contrastive: of "contrastive"; by default the paper's (arXiv 2104.02057).
        class_token: False: none, and the mean of the patches instead; None keeps the model's.
        num_hidden_groups: layers share weights in so many groups; None keeps the model's.
        causal: masked prediction with causal attention ("next-patch" always has it).
        options: how to run it.
        command: what was typed, for the facts.
        report: is told what is being done, a line at a time.
        **overrides: values of the recipe or its augmentation; None changes nothing.

    Raises:
        UserError: bad input, a full disk, too little memory, or a loss that is not a number.
    """
    say, options = told_by_first(report), options or FinetuneOptions()
    if objective not in OBJECTIVES:
        raise UserError(f"objective '{objective}' is unknown; choose {', '.join(OBJECTIVES)}")
    if target not in TARGETS:
        raise UserError(f"target '{target}' is unknown; choose {', '.join(TARGETS)}")
    named = OBJECTIVES[objective] if recipe is None else recipe
    chosen = (find_recipe(named) if isinstance(named, str) else named).override(**overrides)
    _refuse_classifier_values(chosen)
    fields = _model_fields(class_token, num_hidden_groups, causal)
    if objective == "contrastive":
        if options.micro_batch_size not in (None, chosen.batch_size):
            raise UserError(
                f"a contrastive batch of {chosen.batch_size} images cannot be accumulated from parts of "
                f"{options.micro_batch_size}: its images are each other's negatives; choose a smaller --batch-size"
            )
        options = replace(options, micro_batch_size=chosen.batch_size)
    with quiet_transformers():
        from hf_vit.training.run.running import train

        learning = _objective(objective, target, masking, static_masks, contrastive, fields)
        with first_goes_first(options.device):
            run = prepare(model, data, Path(output), chosen, options, command, say, learning.build, learning.settings())
        need_same("training data", run.data.fingerprint)
        trainer, seconds = train(run, say, learning.build_trainer)
        return _complete(run, learning, trainer, seconds)


def _refuse_classifier_values(recipe: Recipe) -> None:
    """Raise where a recipe asks for what only a classifier's training does."""
    asked = {
        "loss bce": recipe.loss == "bce",
        "tune": recipe.tune != "all",
        "layer_decay": recipe.layer_decay is not None,
        "average_decay": recipe.average_decay is not None,
        "sam_rho": recipe.sam_rho > 0,
    }
    if wrong := [name for name, is_asked in asked.items() if is_asked]:
        raise UserError(
            f"{', '.join(wrong)} of the recipe {recipe.name} is for classifiers (hf-vit finetune); pre-train with "
            "another recipe"
        )


def _model_fields(class_token: bool | None, num_hidden_groups: int | None, causal: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if class_token is not None:
        fields |= {"pooling": "token" if class_token else "gap", "use_class_token": None}
    if num_hidden_groups is not None:
        fields["num_hidden_groups"] = num_hidden_groups
    if causal:
        fields["is_causal"] = True
    return fields


def _objective(
    name: str,
    target: str,
    masking: "RandomMasking | None",
    static_masks: bool,
    contrastive: "ContrastiveOptions | None",
    fields: dict[str, Any],
) -> "Objective":
    from hf_vit.training.tasks.contrastive import ContrastiveOptions
    from hf_vit.training.tasks.masking import NextPatch, RandomMasking
    from hf_vit.training.tasks.objectives import Contrast, PatchPrediction

    if name == "contrastive":
        return Contrast(contrastive or ContrastiveOptions(), fields)
    policy = NextPatch() if name == "next-patch" else masking or RandomMasking()
    return PatchPrediction(target, policy, static_masks, fields)


def _complete(run: Run, objective: "Objective", trainer: Any, seconds: float) -> PretrainResult:
    """Write everything beside the checkpoints, and move it into the output folder when it is complete."""
    from hf_vit.training.run.completion import deliver
    from hf_vit.training.trainer.sharding import whole_model

    model = objective.result(whole_model(trainer.accelerator.unwrap_model(trainer.model))).eval()
    model.set_attn_implementation("sdpa")
    history, steps = trainer.state.log_history, trainer.state.global_step
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    result = PretrainResult(
        folder=run.output,
        model=model,
        processor=run.processor,
        recipe=run.recipe,
        picture=run.output / objective.picture,
        validation_loss=losses[-1] if losses else None,
        steps=steps,
        seconds=seconds,
        history=history,
    )
    deliver(run, lambda folder: _write(run, objective, result, folder))
    return result


def _write(run: Run, objective: "Objective", result: PretrainResult, folder: Path) -> None:
    from hf_vit.hub.card import write_card
    from hf_vit.results.facts import append_record, new_record
    from hf_vit.training.run.completion import data_fact, run_values
    from hf_vit.training.run.learning_curve import LEARNING_CURVE_NAME, plot_learning_curve

    result.model.save_pretrained(folder)
    run.processor.save_pretrained(folder)
    plot_learning_curve(result.history, folder / LEARNING_CURVE_NAME)
    objective.draw(run, result.model, folder / objective.picture)
    values = {
        **run_values(run, result.model, result.steps, result.seconds, result.history),
        "objective": objective.settings(),
        "validation_loss": result.validation_loss,
    }
    append_record(
        folder,
        new_record(
            "training",
            command=run.command,
            seed=run.options.seed,
            data=data_fact(run, "train", run.data.num_examples("train")),
            seconds=result.seconds,
            device=run.options.device,
            values=values,
        ),
    )
    write_card(folder)
