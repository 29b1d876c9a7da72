"""Values of the files beside weights (config.json, preprocessor_config.json), checked before they are used."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], values: Mapping[str, Any], file_name: str) -> Model:
    """The values that `model` names.

    Raises:
        UserError: one is of another kind than it needs to be; the file and the value are named.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:2])
        raise UserError(f"{file_name} gives {place}={first['input']!r:.80}: {first['msg']}") from error


def pair_of(value: object) -> Pair:
    """(height, width) in px, of one number or two.

    Raises:
        UserError: the value is neither.
    """
    sides = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(f"config.json gives the size {value!r:.80}; it needs one number of px, or height and width")
    return sides[0], sides[1]
