"""ORTModule: a module that runs another one in ONNX Runtime and is otherwise like it."""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ort_dynamo.embedding import installed_runtime, make_options
from ort_dynamo.errors import RuntimeNotInstalledError, SeveralRuntimesError
from ort_dynamo.training.ortmodule.data_types import module_device
from ort_dynamo.training.ortmodule.debug_options import DebugOptions
from ort_dynamo.training.ortmodule.environment import Settings, read_settings
from ort_dynamo.training.ortmodule.execution import ExecutionManager
from ort_dynamo.training.ortmodule.fallback import (
    FallbackManager,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleTorchModelException,
    wrap_exception,
)
from ort_dynamo.training.ortmodule.logger import configure_logger
from ort_dynamo.training.torch_internals import CompiledModule

__all__ = ["ORTModule", "TorchModule"]

_NO_DATA_PARALLEL = (
    "ORTModule is not compatible with torch.nn.DataParallel. "
    "Please use torch.nn.parallel.DistributedDataParallel instead."
)


class TorchModule:
    """Runs a user's module in its current mode.

    Args:
        module: the user's module.
        debug_options: the messages and models to write.
        settings: the settings of the compile.

    Raises:
        ORTModuleFallbackException: a subclass of it, if the module cannot run and no policy runs it in PyTorch.
    """

    def __init__(self, module: nn.Module, debug_options: DebugOptions, settings: Settings) -> None:
        self._original_module = module
        self._fallback_manager = FallbackManager(module, settings.fallback_policy, settings.fallback_retry)
        try:
            _check_module(module)
        except ORTModuleFallbackException as exception:
            self._fallback_manager.handle_exception(exception, for_good=True)
        self.configure(debug_options, settings)

    def configure(self, debug_options: DebugOptions, settings: Settings) -> None:
        """Compile by these from now on; raises InvalidOptionError where they make no options."""
        make_options(settings.options())
        self.debug_options = debug_options
        self.settings = settings
        self._fallback_manager.policy = settings.fallback_policy
        self._fallback_manager.retry = settings.fallback_retry
        logger = configure_logger(debug_options.logging.log_level)
        self._managers = {
            is_training: ExecutionManager(
                self._original_module, is_training, debug_options, settings, self._fallback_manager, logger
            )
            for is_training in (True, False)
        }

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module in its mode; a compile or export around the ORTModule has the module in its own graph."""
        run = self._original_module if torch.compiler.is_compiling() else self._managers[self.is_training()].forward
        return run(*inputs, **kwargs)

    def is_training(self) -> bool:
        """Check whether the module is in training mode and gradients are recorded."""
        return self._original_module.training and torch.is_grad_enabled()

    def _execution_manager(self, is_training: bool) -> ExecutionManager:
        return self._managers[is_training]


def _check_module(module: nn.Module) -> None:
    if isinstance(module, nn.DataParallel):
        raise wrap_exception(ORTModuleTorchModelException, TypeError(_NO_DATA_PARALLEL))
    try:
        installed_runtime()
    except (RuntimeNotInstalledError, SeveralRuntimesError) as error:
        raise wrap_exception(ORTModuleInitException, error) from error
    module_device(module)


class ORTModule(CompiledModule):
    """Wraps a module so that its forward and backward run in ONNX Runtime.

    It behaves like the module: parameters, buffers, children, attributes, methods, hooks and `state_dict` are the
    module's own. It is an instance of the class of torch.compile(module), so libraries that save a compiled module save
    the wrapped one. An operator that ONNX Runtime cannot run is run in eager mode, if the fallback policy allows it.

    Args:
        module: the module to run. Other wrappers (DistributedDataParallel) go around the ORTModule.
        debug_options: the messages and models to write.

    Raises:
        ORTModuleFallbackException: a subclass of it, if the module cannot run and no fallback policy runs it in PyTorch
            (ORTMODULE_FALLBACK_POLICY; python -m ort_dynamo help migrating_from_ortmodule).
        InvalidVariableError: an environment variable has an invalid value.
        InvalidOptionError: ORTMODULE_MEMORY_OPT_CONFIG has no plans.
    """

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None) -> None:
        from ort_dynamo.training import ortmodule  # its constants may be changed by the program

        if not isinstance(module, nn.Module):
            message = f"ORTModule only supports torch.nn.Module as input. {type(module)} is not supported."
            raise wrap_exception(ORTModuleTorchModelException, TypeError(message))
        nn.Module.__init__(self)
        options = debug_options or DebugOptions()
        default = Settings(
            onnx_opset_version=ortmodule.ONNX_OPSET_VERSION,
            fallback_policy=ortmodule.ORTMODULE_FALLBACK_POLICY,
            fallback_retry=ortmodule.ORTMODULE_FALLBACK_RETRY,
        )
        settings = read_settings(default, configure_logger(options.logging.log_level))
        self.__dict__["_torch_module"] = TorchModule(module, options, settings)
        self._become(module)

    def _become(self, module: nn.Module) -> None:
        """Take the module's signature and its containers; warn of names that both have."""
        own = self.__dict__
        for name in _CONTAINERS:
            own.pop(name, None)  # found in the module from now on, as is every name that is not here
        self._take_forward()
        own["_user_methods"] = frozenset(_user_methods(module))

    def _take_forward(self) -> None:
        """Take the signature of the module's forward, unless a subclass of ORTModule has its own forward."""
        if type(self).forward is ORTModule.forward:
            self.__dict__["forward"] = _forward_of(self._torch_module, self.module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward in ONNX Runtime.

        The first call in each mode compiles and takes longer. Each object replaces this function by one with the
        signature of the module's forward.

        Args:
            inputs: positional arguments of the module's forward.
            kwargs: its keyword arguments.

        Returns:
            The module's results: tensors, and sequences and mappings of them, with their own types.
        """
        return self._torch_module.forward(*inputs, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.__dict__["_torch_module"]._original_module

    # The class above has one that warns, at each call, of hooks that an ORTModule may have.
    __call__: Callable[..., Any] = nn.Module.__call__

    @property
    def training(self) -> bool:
        """The mode of the wrapped module."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_torch_module" in self.__dict__:  # nn.Module sets it before there is a module
            self.module.training = mode

    @property
    def _orig_mod(self) -> nn.Module:
        return self.module

    @_orig_mod.setter
    def _orig_mod(self, module: nn.Module) -> None:
        if module is not self.module:
            raise wrap_exception(
                ORTModuleTorchModelException, ValueError("the module of an ORTModule cannot be replaced")
            )

    def _is_training(self) -> bool:
        return self._torch_module.is_training()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise wrap_exception(ORTModuleTorchModelException, NotImplementedError(_NO_DATA_PARALLEL))

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Raise ORTModuleTorchModelException: modules are added to the wrapped module, before it is wrapped."""
        raise wrap_exception(
            ORTModuleTorchModelException, NotImplementedError("ORTModule does not support adding modules to it.")
        )

    def register_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Raise ORTModuleTorchModelException, as `add_module` does."""
        self.add_module(name, module)

    # -- methods of nn.Module, done by the module -----------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Apply a function to the wrapped module and all in it."""
        self.module.apply(fn)  # type: ignore[arg-type]
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the wrapped module; each mode has graphs of its own, which are kept."""
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state_dict, with its keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict into the wrapped module."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the wrapped module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter to the wrapped module."""
        self.module.register_parameter(name, param)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the wrapped module's parameter of a name."""
        return self.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """Return the wrapped module's buffer of a name."""
        return self.module.get_buffer(target)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the wrapped module's parameters."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the wrapped module's parameters with their names."""
        return self.module.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return the wrapped module's buffers."""
        return self.module.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the wrapped module's buffers with their names."""
        return self.module.named_buffers(*args, **kwargs)

    def children(self) -> Iterator[nn.Module]:
        """Return the wrapped module's children."""
        return self.module.children()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the wrapped module's children with their names."""
        return self.module.named_children()

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """Return the wrapped module and all in it."""
        return self.module.modules(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the wrapped module and all in it, with their names."""
        return self.module.named_modules(*args, **kwargs)

    # -- attributes -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if "_torch_module" not in self.__dict__:  # an object that is being made or unpickled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        module = self.module
        if name in self.__dict__.get("_user_methods", ()) and name not in module.__dict__:
            # A method of the user's that calls self(...) has to come by here.
            return types.MethodType(inspect.getattr_static(type(module), name), self)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in _PROPERTIES:
            object.__setattr__(self, name, value)
        elif name == "__class__":
            reason = "An ORTModule keeps its class. Call fully_shard and the like with the model, before you wrap it."
            raise wrap_exception(ORTModuleTorchModelException, NotImplementedError(reason))
        elif name in own or "_user_methods" not in own or name in own["_user_methods"] or name in _OWN:
            own[name] = value
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        return (copyreg.__newobj__, (type(self),), self.__getstate__())  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        torch_module = self.__dict__["_torch_module"]
        state = {name: value for name, value in self.__dict__.items() if name not in ("_torch_module", "forward")}
        made_of = torch_module._original_module, torch_module.debug_options, torch_module.settings
        return {"state": state, "made_of": made_of}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["state"])
        self.__dict__["_torch_module"] = TorchModule(*state["made_of"])
        self._take_forward()


_CONTAINERS = (
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_OWN = frozenset({"_compiled_call_impl", "_original_forward"})
"""Attributes that torch and accelerate set on a module that they change, and take for the module's own."""

_PROPERTIES = frozenset({"training", "_orig_mod"})


def _forward_of(torch_module: TorchModule, module: nn.Module) -> Callable[..., Any]:
    """Make a function with the signature of the module's forward. It has no reference to the ORTModule."""

    @functools.wraps(module.forward)
    def forward(*inputs: Any, **kwargs: Any) -> Any:
        return torch_module.forward(*inputs, **kwargs)

    return forward


def _user_methods(module: nn.Module) -> Iterator[str]:
    """Names of methods that the user's class adds, to be bound to the ORTModule; warns of names that both have.

    A method that calls `super()` stays the module's: it would not find its class in an ORTModule.
    """
    theirs = {name for name in dir(type(module)) if not name.startswith("__") and name != "forward"}
    for name in sorted(theirs | (module.__dict__.keys() - vars(nn.Module()).keys())):
        in_torch = inspect.getattr_static(nn.Module, name, None)
        found = inspect.getattr_static(module, name)
        collides = inspect.getattr_static(ORTModule, name, None) is not None or name in _OWN_ATTRIBUTES
        if isinstance(found, types.FunctionType):
            of_torch = found is in_torch or found.__module__.partition(".")[0] == "torch"
            if of_torch or name in (*_FLUENT, "train"):
                continue
            if collides:
                _warn_of_collision(name, "method may not be called upon invocation through ORTModule.")
            elif "__class__" not in found.__code__.co_freevars:
                yield name
        elif in_torch is None and collides:
            advice = "attribute may not be returned when trying to retrieve the attribute through ORTModule."
            _warn_of_collision(name, advice)


_OWN_ATTRIBUTES = frozenset({"_torch_module", "_user_methods"})


def _warn_of_collision(name: str, advice: str) -> None:
    message = f"User Module's attribute name {name} collides with ORTModule's attribute name. User Module's {advice}"
    warnings.warn(message, UserWarning, stacklevel=5)


_FLUENT = (
    *("bfloat16", "cpu", "cuda", "double", "eval", "extra_repr", "float", "get_extra_state", "half", "ipu", "mtia"),
    *("requires_grad_", "set_extra_state", "share_memory", "to", "to_empty", "type", "xpu", "zero_grad"),
)
"""Methods of nn.Module that a class may override: those of the wrapped module are called."""


def _delegated(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Module, name))
    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    return method


for _name in _FLUENT:
    setattr(ORTModule, _name, _delegated(_name))
