"""Model soups (arXiv 2203.05482): fine-tunings of one checkpoint averaged into one model that costs no more to run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hf_vit.data import ImageData, load_data
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.protocols.top1 import ClassificationResult, top1
from hf_vit.evaluation.saving import save_protocol
from hf_vit.hub.card import write_card
from hf_vit.hub.licenses import common_license
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.results.delivery import free_folder, new_folder
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.trained_images import write_trained
from hf_vit.results.writing import saying_why
from hf_vit.training.run import quiet_transformers
from hf_vit.training.trainer.distributed import local_parts
from hf_vit.training.trainer.weights import wide

# What a config says of training or of its file, not of the function that is computed.
_IRRELEVANT = {
    "_name_or_path",
    "architectures",
    "attention_probs_dropout_prob",
    "auto_map",
    "drop_path_rate",
    "dtype",
    "hidden_dropout_prob",
    "initializer_range",
    "label2id",
    "transformers_version",
}


@dataclass(frozen=True)
class Ingredient:
    """A model of a soup.

    Attributes:
        name: of its folder or on the Hub, with its place (vit #1) where several have the same.
        accuracy: on the validation split; None without data.
        is_in: whether it was put in.
    """

    name: str
    accuracy: float | None = None
    is_in: bool = True


@dataclass(frozen=True)
class Soup:
    """A finished soup.

    Attributes:
        folder: holds model, processor, facts.json and card.
        ingredients: in the order in which they were considered.
        accuracy: of the soup on the validation split; None without data.
        test: measured once, on the test split; None without data.
    """

    folder: Path
    ingredients: list[Ingredient]
    accuracy: float | None
    test: ClassificationResult | None


@torch.no_grad()
def average_weights(models: Sequence[nn.Module]) -> nn.Module:
    """A copy of the first model with the mean of all models' weights; batch norm's running statistics alike."""
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
        greedy: put the models in by falling validation accuracy, and keep each that does not make the soup worse
            (recipe 1 of the paper); else all go in (uniform).
        data: see `hf_vit.data.load_data`; what greedy chooses by, and what the soup is judged on.
        batch_size: images a forward pass.
        device: torch device; by default a GPU where there is one.
        skip_bad_images: leave unreadable images out, see `load_data`.
        image_column, label_column: of a list or table, see `load_data`.
        command: what was typed, for the facts.
        report: is told each model's accuracy.

    Raises:
        UserError: bad input; models that are not the same function of their weights.
    """
    say, output = report or (lambda line: None), Path(output)
    _check(models, greedy, data)
    free_folder(output)
    with quiet_transformers():
        loaded = _told_apart([_open(model, device) for model in models])
        for other in loaded[1:]:
            _need_same(loaded[0], other)
        images = None
        if data is not None:
            size = loaded[0].image_size
            reading: dict[str, Any] = dict(image_column=image_column, label_column=label_column)
            images = load_data(data, image_size=size, skip_bad_images=skip_bad_images, **reading)
        judge = _judge(images, loaded[0], batch_size)
        shelf = [(Ingredient(model.name, judge(model.model)), model) for model in loaded]
        for ingredient, _ in shelf:
            if ingredient.accuracy is not None:
                say(f"{ingredient.name}: validation accuracy {ingredient.accuracy:.2%}")
        ingredients, mixed = (
            _greedy(shelf, judge) if greedy else ([i for i, _ in shelf], average_weights([m.model for m in loaded]))
        )
        chosen = replace(loaded[0], model=mixed)
        judged = None if images is None else _examination(chosen, images, "test", batch_size)
        soup = Soup(output, ingredients, judge(mixed), None if judged is None else top1(judged))
        license, kind = common_license([*map(str, models)]), "greedy" if greedy else "uniform"
        names = {one.name for one in ingredients if one.is_in}
        bases = [model.folder for model in loaded if model.folder is not None and model.name in names]
        _deliver(soup, chosen, judged, kind, command, device, license, bases)
    return soup


def _open(source: str | Path, device: str | None) -> LoadedModel:
    subject = load_model(source, device, as_classifier=True)
    if subject.processor is None:
        raise UserError(
            f"{subject.name} is a model of timm; a soup needs classifiers of this package or of transformers"
        )
    return subject


def _told_apart(subjects: Sequence[LoadedModel]) -> list[LoadedModel]:
    """Those of one name by their places: vit #1, vit #2."""
    names = [subject.name for subject in subjects]
    return [
        subject if names.count(subject.name) == 1 else replace(subject, name=f"{subject.name} #{place}")
        for place, subject in enumerate(subjects, start=1)
    ]


def _check(models: Sequence[str | Path], greedy: bool, data: str | None) -> None:
    if len(models) < 2:
        raise UserError(f"a soup of {len(models)} model is none; give two or more")
    if greedy and data is None:
        raise UserError("a greedy soup chooses by validation accuracy; give --data")


def _need_same(first: LoadedModel, other: LoadedModel) -> None:
    configs: list[Any] = [subject.model.config for subject in (first, other)]
    one, two = (
        {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT} for config in configs
    )
    different = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    if different:
        shown = ", ".join("classes" if name == "id2label" else name for name in different)
        raise UserError(
            f"{first.name} and {other.name} differ in {shown}; a soup needs fine-tunings of one checkpoint on the "
            "same classes"
        )


def _judge(images: ImageData | None, first: LoadedModel, batch_size: int) -> Callable[[nn.Module], float | None]:
    """Accuracy on the validation split; None without data."""
    if images is None:
        return lambda model: None
    known = images
    return lambda model: top1(_examination(replace(first, model=model), known, "validation", batch_size)).top1


def _examination(subject: LoadedModel, images: ImageData, split: str, batch_size: int) -> Examination:
    return Examination(subject, images, split, batch_size=batch_size, progress=False)


def _greedy(
    shelf: Sequence[tuple[Ingredient, LoadedModel]], judge: Callable[[nn.Module], float | None]
) -> tuple[list[Ingredient], nn.Module]:
    """Recipe 1: the best first; each later one stays if the soup is then as good or better."""
    ranked = sorted(shelf, key=lambda pair: pair[0].accuracy or 0.0, reverse=True)
    kept: list[nn.Module] = [ranked[0][1].model]
    soup: nn.Module = copy.deepcopy(kept[0])
    best = ranked[0][0].accuracy or 0.0
    ingredients = [ranked[0][0]]
    for ingredient, model in ranked[1:]:
        trial = average_weights([*kept, model.model])
        accuracy = judge(trial) or 0.0
        is_in = accuracy >= best
        if is_in:
            kept, soup, best = [*kept, model.model], trial, accuracy
        ingredients.append(replace(ingredient, is_in=is_in))
    return ingredients, soup


def _deliver(
    soup: Soup,
    model: LoadedModel,
    judged: Examination | None,
    kind: str,
    command: str | Sequence[str] | None,
    device: str | None,
    license: str | None,
    bases: Sequence[Path],
) -> None:
    """Write everything beside the output, and move it there when it is complete."""
    place = free_folder(soup.folder)
    with new_folder(place) as parcel, saying_why(place):
        cast(Any, model.model).save_pretrained(parcel)
        model.processor.save_pretrained(parcel)
        names = ", ".join(i.name for i in soup.ingredients if i.is_in)
        recipe = {"soup": kind, "source": "arXiv 2203.05482", "ingredients": names}
        values: dict[str, Any] = {"recipe": recipe, "tried": len(soup.ingredients)}
        if license is not None:
            values["base_license"] = license
        if soup.accuracy is not None:
            values["validation_accuracy"] = soup.accuracy
            values["validation_accuracies"] = {i.name: i.accuracy for i in soup.ingredients}
        chosen_by = None if judged is None else replace(judged, split="validation").fact()
        write_trained(parcel, [], bases)
        append_record(parcel, new_record("training", command=command, data=chosen_by, device=device, values=values))
        if judged is not None and soup.test is not None:
            test = ProtocolRun("top1", soup.test, judged, {}, soup.test.seconds)
            save_protocol(test, folder=parcel, command=command, device=device)
        write_card(parcel)
