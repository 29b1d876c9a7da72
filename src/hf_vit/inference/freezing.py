"""What guards an optimized model, whose weights may be packed, folded and kept: they cannot be changed or copied."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, TypeVar, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_vit.errors import UserError
from hf_vit.inference.layers import Merged

Module = TypeVar("Module", bound=nn.Module)
REMEDY = "load the model again with from_pretrained"
RECORDING = "transformers.utils.output_capturing"  # whose hooks are asked for by output_hidden_states=True


def _refuse(change: str, remedy: str = REMEDY) -> NoReturn:
    raise UserError(f"a model optimized for inference cannot be {change}; {remedy}")


_PARTS = ("given another part here", "put it there before it is optimized")
_WEIGHTS = ("given other weights", "load them before it is optimized")


@final
class ReadOnly(torch.Tensor):
    """A weight as an optimized model shows it: readable; written to, it would differ from the packed ones."""

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
            _refuse(*_WEIGHTS)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            weights = [each for each in args if isinstance(each, cls)]

            def show(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.as_subclass(cls) if any(_share(tensor, each) for each in weights) else tensor

            result = tree_map_only(torch.Tensor, show, result)
        if hasattr(result, "setflags"):  # numpy's view
            result.setflags(write=False)
        return result


def _share(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    except NotImplementedError:  # nothing in memory, as where a pass is mapped over images
        return False


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether torch's function of this name changes a read-only weight; those in place end in one underscore."""
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
        engine: what computes, "torch" or another; a user's class that has an attribute of this name keeps it.
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
        """Refuse moves and casts, except those that change nothing."""
        dtype, device = self._placement
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        if (moved.dtype, moved.device) != self._placement:
            _refuse(f"cast or moved, it stays {dtype} on {device}", "load it again, move or cast it, then optimize it")
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return _shown(super().named_parameters(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return _shown(super().named_buffers(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]


def _shown(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in named:
        # A compiler, which only reads, would split its graph at every one that is of a class of ours.
        yield name, weight if weight.is_meta or torch.compiler.is_compiling() else weight.as_subclass(ReadOnly)


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
            _refuse(*_WEIGHTS)
        if name == "forward" or (isinstance(value, nn.Module) and isinstance(self, Merged)):
            _refuse(*_PARTS)
        super().__setattr__(name, value)

    def register_forward_hook(self, hook: Any, **kwargs: Any) -> Any:
        self._refuse_listener(hook)
        return super().register_forward_hook(hook, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def register_forward_pre_hook(self, hook: Any, **kwargs: Any) -> Any:
        self._refuse_listener(hook)
        return super().register_forward_pre_hook(hook, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse_listener(self, hook: Any) -> None:
        if isinstance(self, Merged) and hook.__module__ != RECORDING:
            _refuse("listened to here, where parts are merged", "use the model as loaded, or hook a whole block")


class Sealed(Frozen):
    """Goes before the class of every module that an engine computes: nothing in it can be changed."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, nn.Module) or name in vars(self)["_modules"]:
            _refuse(*_PARTS)
        if name in vars(self)["_parameters"] or name in vars(self)["_buffers"]:
            _refuse(*_WEIGHTS)
        super().__setattr__(name, value)


# What is refused whatever it is given.
_METHODS: dict[type, dict[str, tuple[str, ...]]] = {
    Guarded: {
        **dict.fromkeys(("state_dict", "save_pretrained", "push_to_hub"), ("saved",)),
        "load_state_dict": _WEIGHTS,
        "resize_to": ("resized (it takes images of any size)",),
        "compile": ("compiled afterwards", "load it again and give optimize_for_inference compile=True"),
        "__deepcopy__": ("copied",),
        "__reduce_ex__": ("copied or pickled",),
    },
    Sealed: {
        **dict.fromkeys(("__delattr__", "add_module", "insert"), _PARTS),  # the last of a ModuleList
        **dict.fromkeys(("register_parameter", "register_buffer"), _WEIGHTS),
    },
}
for _kind, _methods in _METHODS.items():
    for _name, _words in _methods.items():
        setattr(_kind, _name, lambda *_, words=_words, **__: _refuse(*words))


def refuse_gradients(inputs: torch.Tensor) -> None:
    """Raise a UserError for a pass whose gradients would stop in front of the weights."""
    if inputs.requires_grad and torch.is_grad_enabled():
        raise UserError(f"a model optimized for inference has no gradients; {REMEDY}")


@functools.cache
def precede(kind: type[Module], by: type[nn.Module]) -> type[Module]:
    """Return a class of the same name, as transformers asks for it, with another class before it."""
    mixed: Any = type(kind.__name__, (by, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return mixed


def guard_of(model: object) -> type[Any]:
    return Frozen if type(model).__module__.startswith("hf_vit.") else Guarded


def freeze(
    model: nn.Module, placement: tuple[torch.dtype, torch.device], engine: str, computed: set[nn.Module]
) -> None:
    """Guard the model itself and all its modules of the package, dropouts too; others of torch stay torch's.

    Args:
        computed: the parts that an engine computes, of which all parts and weights are out of reach.
    """
    ours = {part for part in model.modules() if type(part).__module__.startswith("hf_vit.")}
    # One of several that would train, of which the others are gone.
    ours |= {child for part in ours for child in part.children() if type(child) is nn.Dropout}
    guarded: Any
    for guarded in list(model.modules()):
        if guarded in computed:
            for tensors in (guarded._parameters, guarded._buffers):
                tensors.update({name: each.as_subclass(ReadOnly) for name, each in tensors.items() if each is not None})
        if guarded in computed or guarded is model or guarded in ours:
            vars(guarded)["_placement"] = placement
            if not hasattr(guarded, "engine"):
                guarded.engine = engine
            guarded.__class__ = precede(type(guarded), by=Sealed if guarded in computed else guard_of(guarded))
