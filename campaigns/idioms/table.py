"""The table of idioms: name -> what is tried, filled by `@idiom` in the modules beside."""

from collections.abc import Callable
from dataclasses import dataclass

from campaigns.idioms.trial import QUANTISED, Subject, Tensors, Trial


@dataclass(frozen=True)
class Idiom:
    """An ordinary thing to do with a model.

    Attributes:
        name: in cases and on the page.
        attempt: does it; gives what the model answers then, and what a freshly built one of the same weights answers.
        changes: the weights or the function are others afterwards, so that a model that missed it answers otherwise.
        slow: takes seconds: tried on each family's classifier, by its default choice, alone.
        dtypes: those it is for.
        takes: whether a subject has what the idiom is about.
    """

    name: str
    attempt: Callable[[Trial], tuple[Tensors, Tensors]]
    changes: bool = False
    slow: bool = False
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", *QUANTISED)
    takes: Callable[[Subject], bool] = lambda subject: True

    def fits(self, subject: Subject) -> bool:
        return subject.dtype in self.dtypes and self.takes(subject) and (not self.slow or is_plainest(subject))


def is_plainest(subject: Subject) -> bool:
    return (subject.head, subject.choice) == ("classification", "default")


IDIOMS: dict[str, Idiom] = {}
PLAIN = ("float64", "float32", "bfloat16")  # of idioms that quantised weights do not take
EXACT = ("float64", "float32")
FLOAT32 = ("float32",)


def idiom(name: str, **settings: object) -> Callable:
    def enter(attempt: Callable) -> Callable:
        assert name not in IDIOMS
        IDIOMS[name] = Idiom(name, attempt, **settings)  # type: ignore[arg-type]
        return attempt

    return enter
