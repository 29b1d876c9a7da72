"""Guard an optimized model, whose weights may be packed, merged or cached: nothing may change or copy them."""

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
RECORDING = "transformers.utils.output_capturing"  # the module whose hooks record hidden states and attentions


def _refuse(change: str, remedy: str = REMEDY) -> NoReturn:
    """Raise a UserError that names the change and the remedy."""
    raise UserError(f"a model optimized for inference cannot be {change}; {remedy}")


_PARTS = ("given another submodule here", "replace the submodule before optimizing")
_WEIGHTS = ("given other weights", "load the weights before optimizing")


@final
class ReadOnly(torch.Tensor):
    """A weight of an optimized model that can only be read; written to, it would differ from the packed weight."""

    is_meta = False  # a constant, as every pass reads it; tensors without values never become ReadOnly
    _base = None  # code that follows views to their base would never end

    def _is_view(self) -> bool:
        return False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function on frozen weights; refuse one that would write to them, and protect views of them."""
        kwargs = kwargs or {}
        if _writes(func.__name__, args, kwargs):
            _refuse(*_WEIGHTS)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            weights = [argument for argument in args if isinstance(argument, cls)]

            def protect_view(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.as_subclass(cls) if any(_share_memory(tensor, weight) for weight in weights) else tensor

            result = tree_map_only(torch.Tensor, protect_view, result)
        if hasattr(result, "setflags"):  # a NumPy array, which shares the weight's memory
            result.setflags(write=False)
        return result


def _share_memory(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a tensor is in the memory of a weight."""
    try:
        return tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    except NotImplementedError:  # a tensor of torch.func.vmap, which has no memory
        return False


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the torch function of this name changes a read-only weight; in-place names end in "_"."""
    inputs = args[0] if isinstance(args[0], list | tuple) else args[:1]
    outputs = kwargs.get("out")
    if not any(isinstance(tensor, ReadOnly) for tensor in (*inputs, outputs)):
        return False
    if name in ("__set__", "requires_grad_"):
        # Setting no gradient (None or False) changes nothing, as the weight has none.
        sets_nothing = len(args) > 1 and (args[1] is None or args[1] is False)
        return not sets_nothing
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_in_place_operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")  # as __iadd__
    return is_in_place or is_in_place_operator or name == "__setitem__" or outputs is not None


class Guarded:
    """Class put before an optimized model's class; what it refuses changes nothing."""

    _placement: tuple[torch.dtype, torch.device]  # dtype and device of the model when it was optimized
    engine: str  # that computes the model, such as "torch"; a user's class with such an attribute keeps its own

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
            remedy = "load the model again, move or cast it, then optimize it"
            _refuse(f"cast or moved from {dtype} on {device}", remedy)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return _protect(super().named_parameters(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return _protect(super().named_buffers(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]


def _protect(named_weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return weights as `ReadOnly`, for users who list them."""
    for name, weight in named_weights:
        # A compiler only reads them, and a tensor subclass would split its graph.
        yield name, weight if weight.is_meta or torch.compiler.is_compiling() else weight.as_subclass(ReadOnly)


class Frozen(Guarded):
    """Class put before the class of every module of the package in an optimized model."""

    @property
    def dtype(self) -> torch.dtype:
        return self._placement[0]

    @property
    def device(self) -> torch.device:
        return self._placement[1]

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; refuse weights, a new forward, and submodules of merged modules."""
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
        """Refuse a hook on a merged layer, whose values it would not expect; recording hooks are allowed."""
        if isinstance(self, Merged) and hook.__module__ != RECORDING:
            _refuse("hooked at a merged layer", "use the model as loaded, or put the hook on a whole block")


class Sealed(Frozen):
    """Class put before the class of every module that an engine computes, in which nothing can be changed."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; refuse submodules, parameters and buffers."""
        if isinstance(value, nn.Module) or name in vars(self)["_modules"]:
            _refuse(*_PARTS)
        if name in vars(self)["_parameters"] or name in vars(self)["_buffers"]:
            _refuse(*_WEIGHTS)
        super().__setattr__(name, value)


# Methods that are refused with any arguments.
_METHODS: dict[type, dict[str, tuple[str, ...]]] = {
    Guarded: {
        **dict.fromkeys(("state_dict", "save_pretrained", "push_to_hub"), ("saved",)),
        "load_state_dict": _WEIGHTS,
        "resize_to": ("resized (it takes images of any size)",),
        "compile": ("compiled afterwards", "load it again and call optimize_for_inference with compile=True"),
        "__deepcopy__": ("copied",),
        "__reduce_ex__": ("copied or pickled",),
    },
    Sealed: {
        **dict.fromkeys(("__delattr__", "add_module", "insert"), _PARTS),  # insert is a method of ModuleList
        **dict.fromkeys(("register_parameter", "register_buffer"), _WEIGHTS),
    },
}
for _kind, _methods in _METHODS.items():
    for _name, _words in _methods.items():
        setattr(_kind, _name, lambda *_, words=_words, **__: _refuse(*words))


def refuse_gradients(inputs: torch.Tensor) -> None:
    """Raise a UserError if gradients are requested for inputs, as they would not reach the weights."""
    if inputs.requires_grad and torch.is_grad_enabled():
        raise UserError(f"a model optimized for inference computes no gradients; {REMEDY}")


@functools.cache
def add_base(kind: type[Module], base: type[nn.Module]) -> type[Module]:
    """Return a class that inherits from `base`, then from `kind`, and has kind's name, which transformers needs."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    combined_class: Any = type(kind.__name__, (base, kind), names)
    return combined_class


def guard_of(model: object) -> type[Any]:
    """Return the class that guards a module: `Frozen` for the package's and merged ones, `Guarded` for others."""
    return Frozen if isinstance(model, Merged) or type(model).__module__.startswith("hf_vit.") else Guarded


def freeze(
    model: nn.Module, placement: tuple[torch.dtype, torch.device], engine: str, computed: set[nn.Module]
) -> None:
    """Guard the model and all its modules of the package, dropouts included; torch's other modules stay as they are.

    No submodule or weight of the modules that an engine has `computed` may change; `placement` is dtype and device.
    """
    own_modules = {module for module in model.modules() if guard_of(module) is Frozen}
    # Dropouts of torch too, which would be the only modules left that can train.
    own_modules |= {child for module in own_modules for child in module.children() if type(child) is nn.Dropout}
    module: Any
    for module in list(model.modules()):
        if module in computed:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = tensor.as_subclass(ReadOnly)
        if module in computed or module is model or module in own_modules:
            vars(module)["_placement"] = placement
            if not hasattr(module, "engine"):
                module.engine = engine
            module.__class__ = add_base(type(module), base=Sealed if module in computed else guard_of(module))
