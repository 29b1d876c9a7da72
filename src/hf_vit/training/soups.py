"""Model soups (arXiv 2203.05482): the average of several fine-tuned models of one checkpoint."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hf_vit.conversion.progress import quiet_transformers
from hf_vit.data import load_data
from hf_vit.data.sources import refuse_output_in
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.protocols.top1 import ClassificationResult, top1
from hf_vit.evaluation.saving import save_protocol
from hf_vit.hub.card import write_card
from hf_vit.hub.card_metadata import find_common_license, record_base_license
from hf_vit.loading.model import PROBE, LoadedModel, load_model
from hf_vit.loading.pixels import keep_own_sizes
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.results.facts import append_record, make_record
from hf_vit.results.trained_images import note_trained, write_trained
from hf_vit.training.trainer.distributed import get_local_parts
from hf_vit.training.trainer.weights import widen
from hf_vit.writing import explain_write_errors

# Fields of a config that do not change the function that is computed.
_IRRELEVANT = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "label2id", "transformers_version", "initializer_range"),
    *("attention_probs_dropout_prob", "drop_path_rate", "hidden_dropout_prob"),
}


@dataclass(frozen=True)
class Ingredient:
    """A model considered for a soup.

    Attributes:
        name: name of the model, with a number if several have the same name ("vit #1").
        accuracy: validation accuracy, if there is data.
        is_in: whether the soup contains it.
    """

    name: str
    accuracy: float | None = None
    is_in: bool = True


@dataclass(frozen=True)
class Soup:
    """A finished soup.

    Attributes:
        folder: its folder.
        ingredients: in the order in which they were considered.
        accuracy: validation accuracy, if there is data.
        test: result on the test split, if there is data.
    """

    folder: Path
    ingredients: list[Ingredient]
    accuracy: float | None
    test: ClassificationResult | None


@torch.no_grad()
def average_weights(models: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of the first model of the widest dtype with the mean of all weights and running statistics."""
    averaged = copy.deepcopy(max(models, key=lambda model: next(model.parameters()).element_size()))
    for mean, *values in zip(*map(get_local_parts, (averaged, *models)), strict=True):
        if mean.is_floating_point():
            first = widen(mean)  # averaging differences keeps equal weights exact
            mean.copy_(first + (torch.stack(values) - first).mean(0))
    return averaged


def make_soup(
    models: Sequence[str | Path],
    output: str | Path,
    *,
    greedy: bool = False,
    data: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
    skip_bad_images: bool = False,
    image_column: str | None = None,
    label_column: str | None = None,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
) -> Soup:
    """Average the weights of fine-tuned classifiers and write a complete model folder.

    Args:
        models: two or more folders or Hub ids of one architecture with the same classes.
        output: a new or empty folder.
        greedy: add models in the order of their validation accuracy, and keep those that do not make the soup worse
            (recipe 1 of the paper); otherwise all models are averaged (uniform soup).
        data: see `hf_vit.data.load_data`; its validation split selects the models of a greedy soup, and the soup is
            evaluated on its test split.
        batch_size, device, skip_bad_images, image_column, label_column: see `evaluate_protocol`.
        command: the command line for the record.
        report: called with every progress message.

    Raises:
        UserError: there are fewer than two models, or they differ in more than their weights.
    """
    report_line = report or (lambda line: None)
    output = Path(output).expanduser()
    if len(models) < 2:
        raise UserError(f"a model soup averages at least 2 models, but {len(models)} was given; name another model")
    if greedy and data is None:
        raise UserError("a greedy soup is chosen by validation accuracy; give a data set with --data")
    refuse_output_in(data, output)
    prepare_output(output)
    with quiet_transformers():
        loaded = _load_classifiers(models, device)
        reading: dict[str, Any] = dict(image_column=image_column, label_column=label_column)
        reading |= dict(image_size=loaded[0].image_size, skip_bad_images=skip_bad_images, check=False)
        reading |= dict(splits=("validation", "test"), hash_others=True)
        images = None if data is None else load_data(data, **reading)

        def examine(model: nn.Module, split: str) -> Examination | None:
            judged = keep_own_sizes(replace(loaded[0], model=model))  # images in their own size, if its processor does
            return None if images is None else Examination(judged, images, split, batch_size=batch_size, progress=False)

        def measure_accuracy(model: nn.Module) -> float | None:
            examination = examine(model, "validation")
            return None if examination is None else top1(examination).top1

        candidates = [(Ingredient(model.name, measure_accuracy(model.model)), model.model) for model in loaded]
        for ingredient, _ in candidates:
            if ingredient.accuracy is not None:
                report_line(f"{ingredient.name}: validation accuracy {ingredient.accuracy:.2%}")
        if greedy:
            ingredients, soup_model = _select_greedily(candidates, measure_accuracy)
        else:
            ingredients = [ingredient for ingredient, _ in candidates]
            soup_model = average_weights([model for _, model in candidates])
        validation, test = (examine(soup_model, split) for split in ("validation", "test"))
        result = None if test is None else top1(test)
        soup = Soup(output, ingredients, measure_accuracy(soup_model), result)
        used_names = [ingredient.name for ingredient in ingredients if ingredient.is_in]
        used_folders = [model.folder for model in loaded if model.folder is not None and model.name in used_names]
        values = _describe_soup(soup, used_names, greedy, find_common_license([*map(str, models)]))
        free_output = prepare_output(output)
        with deliver_folder(free_output) as folder, explain_write_errors(free_output):
            cast(Any, soup_model).save_pretrained(folder)
            loaded[0].processor.save_pretrained(folder)
            write_trained(folder, [], used_folders)
            fact = None if validation is None else validation.fact()
            append_record(folder, make_record("training", values=values, data=fact, command=command, device=device))
            if test is not None and result is not None:
                run = ProtocolRun("top1", result, test, {}, result.seconds)
                save_protocol(run, folder=folder, command=command, device=device)
            for examination in filter(None, (validation, test)):
                for warning in note_trained(folder, examination.list_digests()):
                    report_line(f"warning: {examination.split} split: {warning}")
            write_card(folder)
    return soup


def _load_classifiers(models: Sequence[str | Path], device: str | None) -> list[LoadedModel]:
    """Load the models, each with a name of its own; raise UserError if they cannot be averaged."""
    loaded = [load_model(model, device, as_classifier=True) for model in models]
    names = [model.name for model in loaded]
    for index, model in enumerate(loaded):
        if model.processor is None or model.is_graph:
            raise UserError(
                f"{model.name} is a timm model or an exported graph, which cannot be averaged; give classifiers of "
                "hf_vit or transformers"
            )
        if names.count(model.name) > 1:
            loaded[index] = replace(model, name=f"{model.name} #{index + 1}")
    for other in loaded[1:]:
        _require_same_config(loaded[0], other)
    return loaded


def _describe_soup(soup: Soup, used_names: list[str], greedy: bool, license: dict[str, str]) -> dict[str, Any]:
    """Return the values of the soup's training record."""
    recipe = {"soup": "greedy" if greedy else "uniform", "source": "arXiv 2203.05482"}
    recipe["ingredients"] = ", ".join(used_names)
    values: dict[str, Any] = {"recipe": recipe, "tried": len(soup.ingredients), **record_base_license(license)}
    if soup.accuracy is not None:
        values["validation_accuracy"] = soup.accuracy
        values["validation_accuracies"] = {ingredient.name: ingredient.accuracy for ingredient in soup.ingredients}
    return values


def _require_same_config(first: LoadedModel, other: LoadedModel) -> None:
    """Raise UserError if two models differ in fields of their configs that change the computed function, or in pixels.

    All models are evaluated with the first one's image processor, which the soup gets.
    """
    fields: dict[str, Any] = cast(Any, first.model).config.to_dict()
    other_fields: dict[str, Any] = cast(Any, other.model).config.to_dict()
    names = sorted({*fields, *other_fields} - _IRRELEVANT)
    different = [name for name in names if fields.get(name) != other_fields.get(name)]
    # By the processor itself, as that of a SigLIP 2 keeps the shapes of images, which `prepare` refuses.
    pixels, other_pixels = (
        model.processor(images=PROBE, return_tensors="pt")["pixel_values"] for model in (first, other)
    )
    if pixels.shape != other_pixels.shape or not torch.allclose(pixels, other_pixels, rtol=0, atol=0.05):
        different.append("the image processor")
    if different:
        differences = ", ".join("classes" if name == "id2label" else name for name in different)
        raise UserError(
            f"{first.name} and {other.name} cannot be averaged, because they differ in {differences}; give models "
            "that were fine-tuned from the same checkpoint on the same classes"
        )


def _select_greedily(
    candidates: Sequence[tuple[Ingredient, nn.Module]], measure_accuracy: Callable[[nn.Module], float | None]
) -> tuple[list[Ingredient], nn.Module]:
    """Follow recipe 1: start with the best model, and keep every further one that does not make the soup worse."""
    (first, model), *others = sorted(candidates, key=lambda pair: pair[0].accuracy or 0.0, reverse=True)
    selected_models, ingredients = [model], [first]
    soup, best = copy.deepcopy(model), first.accuracy or 0.0
    for ingredient, other in others:
        trial = average_weights([*selected_models, other])
        accuracy = measure_accuracy(trial) or 0.0
        is_in = accuracy >= best
        if is_in:
            selected_models.append(other)
            soup, best = trial, accuracy
        ingredients.append(replace(ingredient, is_in=is_in))
    return ingredients, soup
