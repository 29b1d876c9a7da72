"""Two classifiers asked about the same images: where one is right and the other is not, and whether that is chance."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, final

from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.top1_figures import draw_images, shortened, thumbnail_of
from hf_vit.evaluation.reading import scores_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

PICTURED = 25


class Answer(NamedTuple):
    """The most likely class of an image, its probability, and whether it is the right one."""

    label: str
    probability: float
    is_right: bool


@final
@dataclass(frozen=True)
class Disagreement:
    """An image to which two models answer differently.

    Attributes:
        index: its place among those that judge.
        file: its name, where the data is made of files.
        label: the right class.
        answers: the first model's and the second's.
        thumbnail: the image, small.
    """

    index: int
    file: str | None
    label: str
    answers: tuple[Answer, Answer]
    thumbnail: "Image" = field(repr=False)

    @property
    def sureness(self) -> float:
        """The probability of the less sure of the two answers."""
        return min(answer.probability for answer in self.answers)


@final
@dataclass(frozen=True)
class PairedAccuracy:
    """How two classifiers answer the same images.

    Attributes:
        num_images: images that both answered.
        both_right, only_first, only_second: of these, those that both answer right, and one alone.
        num_disagreements: images with different answers, right or wrong.
        pictured: of these the `PICTURED` of which both models are surest.
    """

    num_images: int
    both_right: int
    only_first: int
    only_second: int
    num_disagreements: int
    pictured: list[Disagreement]

    @property
    def accuracies(self) -> tuple[float, float]:
        """Top-1 accuracy of the first and of the second."""
        right = (self.both_right + self.only_first, self.both_right + self.only_second)
        return right[0] / self.num_images, right[1] / self.num_images

    @property
    def p_value(self) -> float:
        """Of McNemar's exact test, two-sided, that both are right equally often (Psychometrika 12, 1947)."""
        from scipy.stats import binomtest

        apart = self.only_first + self.only_second
        return float(binomtest(self.only_first, apart).pvalue) if apart else 1.0

    def draw(self) -> "Figure":
        """The images on which they disagree: the right class, and both answers."""
        return draw_images([each.thumbnail for each in self.pictured], list(map(_title, self.pictured)))


def judge_both(first: Examination, second: Examination) -> PairedAccuracy:
    """Ask two classifiers, one after the other, about the images that judge; a few bytes an image are kept.

    Args:
        first, second: with the same data, split, number of images and seed.

    Raises:
        UserError: one is no classifier, or knows not all classes of the data.
    """
    _ = second.model_classes  # told before the first is asked
    before = [answer for batch in _answers(first) for answer, _, _ in batch]
    counts, pictured, different, index = {True: [0, 0], False: [0, 0]}, list[Disagreement](), 0, 0
    for batch in _answers(second):
        for answer, label, image in batch:
            earlier = before[index]
            counts[earlier.is_right][not answer.is_right] += 1
            if earlier[::2] != answer[::2]:
                different += 1
                each = Disagreement(index, None, label, (earlier, answer), thumbnail_of(image))
                pictured = heapq.nlargest(PICTURED, [*pictured, each], key=lambda each: (each.sureness, -each.index))
            index += 1
    if index != len(before):
        raise UserError(f"'{first.data.name}' gave {len(before):,} images, then {index:,}; give data that stays")
    (both, only_first), (only_second, _) = counts[True], counts[False]
    named = [replace(each, file=second.file_name(each.index)) for each in pictured]
    return PairedAccuracy(index, both, only_first, only_second, different, named)


def _answers(examination: Examination) -> "Iterator[list[tuple[Answer, str, Image]]]":
    """Batch by batch each image's answer, right class, and the image."""
    names: Sequence[str] = list(map(one_line, examination.answers))
    for logits, labels, images in examination.pictured_logits(what=f"asking {examination.subject.name}"):
        probabilities, classes = scores_of(examination.subject.model, logits).max(dim=-1)
        rows = zip(probabilities.tolist(), classes.tolist(), labels.tolist(), images, strict=True)
        yield [(Answer(names[best], value, best == label), names[label], image) for value, best, label, image in rows]


def _title(each: Disagreement) -> str:
    first, second = (f"{shortened(answer.label, 14)} {answer.probability:.0%}" for answer in each.answers)
    place = f"image {each.index}" if each.file is None else shortened(each.file)
    return f"{shortened(each.label, 20)} · {place}\n{first} | {second}"
