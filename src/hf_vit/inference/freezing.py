"""What guards an optimized model, whose weights may be packed, folded and kept: they cannot be changed or copied."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, TypeVar, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_vit.errors import UserError, one_line
from hf_vit.rewriting.dense import Merged

Module = TypeVar("Module", bound=nn.Module)
REMEDY = "load the model again with from_pretrained"


@final
class ReadOnly(torch.Tensor):
    """A weight as an optimized model shows it: to be read, as it was; written to, it would part from packed ones."""

    is_meta = False  # asked for by every pass; what has no values is shown as it is
    _base = None  # or those who ask for what it is a view of, and of that again, would never end

    def _is_view(self) -> bool:
        return False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _writes(func.__name__, args, kwargs):
            _refuse_weights()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            weights = [each for each in args if isinstance(each, cls)]

            def shown(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.as_subclass(cls) if any(_share(tensor, each) for each in weights) else tensor

            result = tree_map_only(torch.Tensor, shown, result)
        if hasattr(result, "setflags"):  # numpy's view
            result.setflags(write=False)
        return result


def _share(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    except NotImplementedError:  # nothing in memory, as where a pass is mapped over images
        return False


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's function of this name changes a read-only weight; those in place end in one underscore."""
    first = args[0] if isinstance(args[0], list | tuple) else args[:1]
    outputs = kwargs.get("out")
    if not any(isinstance(each, ReadOnly) for each in (*first, outputs)):
        return False
    if name in ("__set__", "requires_grad_"):  # what is so already: no gradient, none required
        return not (len(args) > 1 and (args[1] is None or args[1] is False))
    in_place = name.endswith("_") and not name.endswith("__")
    operators = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return in_place or operators or name == "__setitem__" or outputs is not None


class Guarded:
    """Goes before the class of an optimized model. What it refuses has changed nothing, nowhere.

    Attributes:
        engine: what computes, "torch" or another; of a user's class that has one, its own.
    """

    _placement: tuple[torch.dtype, torch.device]  # of the model when it was optimized
    engine: str

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
        dtype, device = self._placement
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        if (moved.dtype, moved.device) != self._placement:
            _refuse(f"cast or moved, it stays {dtype} on {device}", "load it again, move or cast it, then optimize it")
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in super().named_parameters(*args, **kwargs):  # pyright: ignore[reportAttributeAccessIssue]
            yield name, _shown(parameter)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):  # pyright: ignore[reportAttributeAccessIssue]
            yield name, _shown(buffer)

    def state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("saved")

    def save_pretrained(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("saved")

    def push_to_hub(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("saved")

    def load_state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse_weights()

    def resize_to(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("resized (it takes images of any size)")

    def compile(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("compiled afterwards", "load it again and give optimize_for_inference compile=True")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("copied or pickled")


class Frozen(Guarded):
    """Goes before the class of every module of the package in an optimized model."""

    @property
    def dtype(self) -> torch.dtype:
        return self._placement[0]

    @property
    def device(self) -> torch.device:
        return self._placement[1]

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            _refuse_weights()
        if name == "forward" or (isinstance(value, nn.Module) and isinstance(self, Merged)):
            _refuse_parts()
        super().__setattr__(name, value)

    def register_forward_hook(self, hook: Any, **kwargs: Any) -> Any:
        self._refuse_listener(hook)
        return super().register_forward_hook(hook, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def register_forward_pre_hook(self, hook: Any, **kwargs: Any) -> Any:
        self._refuse_listener(hook)
        return super().register_forward_pre_hook(hook, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse_listener(self, hook: Any) -> None:
        if isinstance(self, Merged) and hook.__module__ != "transformers.utils.output_capturing":
            _refuse("listened to here, where parts are merged", "use the model as loaded, or hook a whole block")


class Sealed(Frozen):
    """Goes before the class of every module that an engine computes: nothing in it can be changed."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, nn.Module) or name in vars(self)["_modules"]:
            _refuse_parts()
        if name in vars(self)["_parameters"] or name in vars(self)["_buffers"]:
            _refuse_weights()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _refuse_parts()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        _refuse_parts()

    def insert(self, index: int, module: nn.Module) -> None:
        """Of a ModuleList."""
        _refuse_parts()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        _refuse_weights()

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        _refuse_weights()


def refuse_gradients(inputs: torch.Tensor) -> None:
    """Of a pass; they would stop in front of the weights."""
    if inputs.requires_grad and torch.is_grad_enabled():
        raise UserError(f"a model optimized for inference has no gradients; {REMEDY}")


def _shown(weight: torch.Tensor) -> torch.Tensor:
    # A compiler, which only reads, would split its graph at every one that is of a class of ours.
    return weight if weight.is_meta or torch.compiler.is_compiling() else weight.as_subclass(ReadOnly)


def _refuse(what: str, remedy: str = REMEDY) -> NoReturn:
    raise UserError(f"a model optimized for inference cannot be {what}; {remedy}")


def _refuse_parts() -> NoReturn:
    _refuse("given another part here", "put it there before it is optimized")


def _refuse_weights() -> NoReturn:
    _refuse("given other weights", "load them before it is optimized")


@functools.cache
def preceded(kind: type[Module], by: type[nn.Module]) -> type[Module]:
    """A class that goes by the same name, as transformers asks for it, with another before it."""
    mixed: Any = type(kind.__name__, (by, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return mixed


def freeze(
    model: nn.Module,
    placement: tuple[torch.dtype, torch.device],
    engine: str,
    computed: tuple[type[nn.Module], ...],
) -> None:
    """Guard the model itself and all its modules of the package, dropouts too; others of torch stay torch's.

    Args:
        computed: classes of what an engine computes; of that, all parts and weights are out of reach.
    """
    sealed = {part for each in model.modules() if isinstance(each, computed) for part in each.modules()}
    ours = {part for part in model.modules() if type(part).__module__.startswith("hf_vit.")}
    # One of several that would train, of which the others are gone.
    ours |= {child for part in ours for child in part.children() if type(child) is nn.Dropout}
    guarded: Any
    for guarded in list(model.modules()):
        if guarded in sealed:
            for tensors in (guarded._parameters, guarded._buffers):
                tensors.update({name: each.as_subclass(ReadOnly) for name, each in tensors.items() if each is not None})
        if guarded in sealed or guarded is model or guarded in ours:
            vars(guarded)["_placement"] = placement
            if not hasattr(guarded, "engine"):
                guarded.engine = engine
            guarded.__class__ = preceded(type(guarded), by=Sealed if guarded in sealed else _guard_of(guarded))


def _guard_of(model: object) -> type[Any]:
    return Frozen if type(model).__module__.startswith("hf_vit.") else Guarded


def check_freezable(model: object) -> None:
    """Raise UserError for a model that was optimized before, or that holds one, and for one that takes no guard."""
    if not isinstance(model, nn.Module):
        return
    if any(isinstance(module, Guarded) for module in model.modules()):
        raise UserError(f"the model was optimized before; use it as it is, or {REMEDY}")
    try:
        preceded(type(model), by=_guard_of(model))
    except Exception as error:  # whatever making a subclass of a user's class does
        kind = type(model).__name__
        raise UserError(f"nothing can guard a {kind} ({one_line(error)}); optimize the model in it") from error
