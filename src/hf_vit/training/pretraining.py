"""Self-supervised pre-training: a model folder that `finetune` starts from without a flag."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
from hf_vit.training.driver import Job, carry_out, train_once
from hf_vit.training.processes import told_by_first
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run.options import FinetuneOptions, chosen_options
from hf_vit.training.tasks.masking import RandomMasking
from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions
from hf_vit.training.tasks.pretext import PretrainResult
from hf_vit.training.tasks.registry import TASKS, TaskChoices

OBJECTIVES = [name for name, line in TASKS.items() if not line.has_labels]


def pretrain(
    model: str | HfViTBaseConfig,
    data: str,
    output: str | Path,
    *,
    objective: str = "masked-patch",
    recipe: str | Recipe | None = None,
    target: str = "mean_color",
    masking: RandomMasking | None = None,
    static_masks: bool = False,
    contrastive: ContrastiveOptions | None = None,
    class_token: bool | None = None,
    num_hidden_groups: int | None = None,
    causal: bool = False,
    options: FinetuneOptions | None = None,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **settings: object,
) -> PretrainResult:
    """Pre-train a variant or a checkpoint on images, whose labels are not looked at, and leave a complete model folder.

    Bad input raises before any training; a killed run goes on with `resume`, as `finetune`'s does.

    Args:
        model: a variant such as "S/16" or "Ti/4" (fresh weights), a folder, a Hub id, or a configuration.
        data: see `hf_vit.data.load_data`.
        output: a new or empty folder, or with `resume` that of the run.
        objective: a name of `OBJECTIVES`, see `hf_vit.training.tasks.registry`.
        recipe: a name of `RECIPES`, or a recipe; None takes the objective's small one.
        target: of patch prediction: "mean_color", "downsampled" or "pixels" (arXiv 2010.11929, B.1.2).
        masking: of "masked-patch"; by default the paper's.
        static_masks: every image keeps the mask it got first.
        contrastive: of "contrastive"; by default the paper's (arXiv 2104.02057).
        class_token: False: none, and the mean of the patches instead; None keeps the model's.
        num_hidden_groups: layers share weights in so many groups; None keeps the model's.
        causal: masked prediction with causal attention ("next-patch" always has it).
        options: how to run it, if not by keyword.
        command: what was typed, for the facts.
        report: is told what is being done, a line at a time.
        **settings: fields of `FinetuneOptions` (`image_size=32`, `seed=1`, `resume=True`), and values of the recipe or
            its augmentation (`epochs=5`, `color_jitter=0.2`); None changes nothing.

    Raises:
        UserError: bad input, a full disk, too little memory, or a loss that is not a number.
    """
    if objective not in OBJECTIVES:
        raise UserError(f"objective '{objective}' is unknown; choose {', '.join(OBJECTIVES)}")
    line, (options, values) = TASKS[objective], chosen_options(options, settings)
    named = line.recipe if recipe is None else recipe
    chosen = (find_recipe(named) if isinstance(named, str) else named).override(**values)
    fields = _model_fields(class_token, num_hidden_groups, causal)
    choices = TaskChoices(
        target=target, masking=masking, static_masks=static_masks, contrastive=contrastive, fields=fields
    )
    job = Job(model, data, Path(output), chosen, options, command)
    return carry_out(line.make(choices), job, told_by_first(report), train_once)


def _model_fields(class_token: bool | None, num_hidden_groups: int | None, causal: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if class_token is not None:
        fields |= {"pooling": "token" if class_token else "gap", "use_class_token": None}
    if num_hidden_groups is not None:
        fields["num_hidden_groups"] = num_hidden_groups
    if causal:
        fields["is_causal"] = True
    return fields
