"""What guards an optimized model, whose weights may be packed, folded and kept: they cannot be changed or copied."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import nn

from hf_vit.errors import UserError

REMEDY = "load the model again with from_pretrained"


class Frozen:
    """Goes before the class of every module of an optimized model. What it refuses has changed nothing, nowhere.

    Attributes:
        placement: the dtype and device of the model when it was optimized.
    """

    placement: tuple[torch.dtype, torch.device]

    def train(self, mode: bool = True) -> Self:
        if mode:
            _refuse("trained")
        return super().train(False)  # pyright: ignore[reportAttributeAccessIssue] (the module's own)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            _refuse("trained")
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves and casts: those that change nothing may stay in a user's code."""
        dtype, device = self.placement
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        if (moved.dtype, moved.device) != self.placement:
            _refuse(f"cast or moved, it stays {dtype} on {device}", "load it again, move or cast it, then optimize it")
        return self

    def state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("saved")

    def save_pretrained(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("saved")

    def push_to_hub(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("saved")

    def load_state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("given other weights", "load them before it is optimized")

    def resize_to(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("resized (it takes images of any size)")

    def compile(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("compiled afterwards", "load it again and give optimize_for_inference compile=True")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("copied or pickled")


def _refuse(what: str, remedy: str = REMEDY) -> NoReturn:
    raise UserError(f"a model optimized for inference cannot be {what}; {remedy}")


@functools.cache
def frozen_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that goes by the same name, as transformers asks for it, and is guarded."""
    return type(kind.__name__, (Frozen, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def freeze(model: nn.Module, placement: tuple[torch.dtype, torch.device]) -> None:
    """Guard the model itself and all its modules of the package; torch's own stay torch's."""
    guarded: Any
    for guarded in model.modules():
        if guarded is model or type(guarded).__module__.startswith("hf_vit."):
            guarded.placement = placement
            guarded.__class__ = frozen_class(type(guarded))


def check_not_frozen(model: object) -> None:
    """Raise UserError for a model that was optimized before, or that holds one."""
    if isinstance(model, nn.Module) and any(isinstance(module, Frozen) for module in model.modules()):
        raise UserError(f"the model was optimized before; use it as it is, or {REMEDY}")
