"""Values of the files beside weights (config.json, preprocessor_config.json), checked before they are used."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(gt=0, le=2**20)]  # px, channels, layers, ...
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def checked(model: type[Model], values: Mapping[str, Any], file_name: str) -> Model:
    """The values that `model` names, none of them turned into what it is not ("4" is no number).

    Raises:
        UserError: one is of another kind than it needs to be; the file and the value are named.
    """
    try:
        plain = json.loads(json.dumps(dict(values), default=str))  # with lists for the tuples of Python's configs
        return model.model_validate(plain, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:3])
        raise UserError(f"{file_name} gives {place}={first['input']!r:.80}: {first['msg']}") from error


def pair_of(value: object) -> Pair:
    """(height, width) in px, of one number or two.

    Raises:
        UserError: the value is neither.
    """
    sides = tuple(value) if isinstance(value, list | tuple) else (value, value)
    counts = [side for side in sides if isinstance(side, int) and side is not True and 0 < side <= 2**20]
    if len(sides) != 2 or len(counts) != 2:
        raise UserError(f"config.json gives the size {value!r:.80}; it needs one number of px, or height and width")
    return counts[0], counts[1]
