"""The images that a record was measured on: found by their public name or given, and known by their fingerprint."""

import re
from collections.abc import Sequence
from pathlib import Path

from hf_vit.data import ImageData, load_data
from hf_vit.data.annotations import Target
from hf_vit.data.sources import is_builtin
from hf_vit.errors import UserError
from hf_vit.hub.published_results import hub_dataset
from hf_vit.results.facts import DataFact

_NAME = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?(:[\w.\-]+)?")


class SameData:
    """Loads every data set once.

    Args:
        image_size: (height, width) px that built-in sets come in: the model's.
        given: what the user named; see `load_data`.
    """

    def __init__(self, image_size: tuple[int, int] | None, given: Sequence[str] = ()) -> None:
        self.image_size, self.given = image_size, given
        self._loaded: dict[tuple[str, bool, Target], ImageData | UserError] = {}

    def of(self, fact: DataFact, target: Target = "label") -> tuple[ImageData | None, str]:
        """The data with the record's fingerprint, whose images bear `target`; or None, and why there is none."""
        if not fact.fingerprint:
            return None, "the record holds no fingerprint of its data"
        names = [*([fact.name] if is_public(fact) else []), *self.given]
        if not names:
            return None, f"{fact.name} is no public data set; say where it is with --data"
        reasons = list[str]()
        for name in names:
            for streaming in (False, True) if target == "label" else (False,):  # a stream's fingerprint is another
                data = self._load(name, streaming, target)
                if isinstance(data, UserError):
                    reasons.append(str(data))
                    break
                if data.fingerprint == fact.fingerprint:
                    return data, ""
            else:
                reasons.append(f"{name} is not what was measured: its content has another fingerprint")
        return None, "; ".join(reasons)

    def _load(self, name: str, streaming: bool, target: Target) -> ImageData | UserError:
        key = name, streaming, target
        if key not in self._loaded:
            try:  # what was left out then is left out now: the fingerprint is of the rest
                self._loaded[key] = load_data(
                    name, streaming=streaming, skip_bad_images=True, image_size=self.image_size, target=target
                )
            except UserError as error:
                self._loaded[key] = error
        return self._loaded[key]


def is_public(fact: DataFact) -> bool:
    """Whether a name, which a stranger may have written, is that of a public data set, and no path of this machine."""
    if is_builtin(fact.name):
        return True
    is_name = _NAME.fullmatch(fact.name) is not None and hub_dataset(fact) is not None
    return is_name and not Path(fact.name).expanduser().exists()
