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
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.protocols.top1 import ClassificationResult, top1
from hf_vit.evaluation.saving import save_protocol
from hf_vit.hub.card import write_card
from hf_vit.hub.card_metadata import find_common_license
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.results.delivery import new_folder, prepare_output
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.trained_images import write_trained
from hf_vit.results.writing import explain_write_errors
from hf_vit.training.trainer.distributed import local_parts
from hf_vit.training.trainer.weights import wide

# Fields of a config that do not change the function that is computed.
_IRRELEVANT = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "label2id", "transformers_version", "initializer_range"),
    *("attention_probs_dropout_prob", "drop_path_rate", "hidden_dropout_prob"),
}


@dataclass(frozen=True)
class Ingredient:
    """A model of a soup: its name, numbered (vit #1) where several have the same, and its validation accuracy."""

    name: str
    accuracy: float | None = None
    is_in: bool = True


@dataclass(frozen=True)
class Soup:
    """A finished soup: folder, ingredients in the order in which they were considered, accuracy on both splits."""

    folder: Path
    ingredients: list[Ingredient]
    accuracy: float | None
    test: ClassificationResult | None


@torch.no_grad()
def average_weights(models: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of the first model with the mean of all models' weights and running statistics."""
    averaged = copy.deepcopy(models[0])
    for mean, *values in zip(*map(local_parts, (averaged, *models)), strict=True):
        if mean.is_floating_point():
            first = wide(mean)  # what all have in common stays to the bit
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
    """Average the weights of fine-tuned classifiers and leave a complete model folder.

    Args:
        models: two or more folders or Hub ids of one architecture and the same classes.
        output: a new or empty folder.
        greedy: add the models by falling validation accuracy, and keep each that does not make the soup worse (recipe 1
            of the paper); otherwise all are averaged (uniform).
        data: see `hf_vit.data.load_data`; greedy chooses by its validation split, the test split measures the soup.
    """
    say, output = report or (lambda line: None), Path(output)
    if len(models) < 2:
        raise UserError(f"a soup needs two or more models, not {len(models)}")
    if greedy and data is None:
        raise UserError("a greedy soup needs validation accuracy; give --data")
    prepare_output(output)
    with quiet_transformers():
        loaded = [load_model(model, device, as_classifier=True) for model in models]
        names = [each.name for each in loaded]
        for place, each in enumerate(loaded):
            if each.processor is None:
                raise UserError(f"{each.name} is a timm model; a soup needs classifiers of hf_vit or transformers")
            if names.count(each.name) > 1:
                loaded[place] = replace(each, name=f"{each.name} #{place + 1}")
        for other in loaded[1:]:
            _need_same(loaded[0], other)
        reading: dict[str, Any] = dict(image_column=image_column, label_column=label_column)
        reading |= dict(image_size=loaded[0].image_size, skip_bad_images=skip_bad_images)
        images = None if data is None else load_data(data, **reading)

        def measure(model: nn.Module, split: str) -> ProtocolRun | None:
            if images is None:
                return None
            judged = Examination(replace(loaded[0], model=model), images, split, batch_size=batch_size, progress=False)
            result = top1(judged)
            return ProtocolRun("top1", result, judged, {}, result.seconds)

        def accuracy(model: nn.Module) -> float | None:
            run = measure(model, "validation")
            return None if run is None else cast(ClassificationResult, run.result).top1

        shelf = [(Ingredient(each.name, accuracy(each.model)), each.model) for each in loaded]
        for ingredient, _ in shelf:
            if ingredient.accuracy is not None:
                say(f"{ingredient.name}: validation accuracy {ingredient.accuracy:.2%}")
        if greedy:
            ingredients, mixed = _greedy(shelf, accuracy)
        else:
            ingredients, mixed = [ingredient for ingredient, _ in shelf], average_weights([model for _, model in shelf])
        test = measure(mixed, "test")
        soup = Soup(output, ingredients, accuracy(mixed), None if test is None else cast(Any, test.result))
        used = [ingredient.name for ingredient in ingredients if ingredient.is_in]
        recipe = {"soup": "greedy" if greedy else "uniform", "source": "arXiv 2203.05482"}
        recipe["ingredients"] = ", ".join(used)
        values: dict[str, Any] = {"recipe": recipe, "tried": len(ingredients)}
        if (license := find_common_license([*map(str, models)])) is not None:
            values["base_license"] = license
        if soup.accuracy is not None:
            values["validation_accuracy"] = soup.accuracy
            values["validation_accuracies"] = {each.name: each.accuracy for each in ingredients}
        chosen_by = None if test is None else replace(test.examination, split="validation").fact()
        place = prepare_output(output)
        with new_folder(place) as folder, explain_write_errors(place):
            cast(Any, mixed).save_pretrained(folder)
            loaded[0].processor.save_pretrained(folder)
            write_trained(folder, [], [each.folder for each in loaded if each.folder is not None and each.name in used])
            append_record(folder, new_record("training", command=command, data=chosen_by, device=device, values=values))
            if test is not None:
                save_protocol(test, folder=folder, command=command, device=device)
            write_card(folder)
    return soup


def _need_same(first: LoadedModel, other: LoadedModel) -> None:
    configs: list[Any] = [subject.model.config for subject in (first, other)]
    one, two = (
        {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT} for config in configs
    )
    different = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    if different:
        shown = ", ".join("classes" if name == "id2label" else name for name in different)
        raise UserError(
            f"{first.name} and {other.name} differ in {shown}; a soup needs models fine-tuned from one "
            "checkpoint on the same classes"
        )


def _greedy(
    shelf: Sequence[tuple[Ingredient, nn.Module]], judge: Callable[[nn.Module], float | None]
) -> tuple[list[Ingredient], nn.Module]:
    """Follow recipe 1: the best model first; each later one stays if the soup is then as good or better."""
    (first, model), *others = sorted(shelf, key=lambda pair: pair[0].accuracy or 0.0, reverse=True)
    kept, soup, best, ingredients = [model], copy.deepcopy(model), first.accuracy or 0.0, [first]
    for ingredient, other in others:
        trial = average_weights([*kept, other])
        accuracy = judge(trial) or 0.0
        is_in = accuracy >= best
        if is_in:
            kept, soup, best = [*kept, other], trial, accuracy
        ingredients.append(replace(ingredient, is_in=is_in))
    return ingredients, soup
