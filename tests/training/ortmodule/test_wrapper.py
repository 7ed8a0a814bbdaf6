"""Section 1.1 of ORTModule's reference: the wrapper is like the module that it wraps."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from small_models import Dense, Normed, assert_steps_like_eager, compiles, pair
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTModule
from ort_dynamo.training.ortmodule import ORTModuleTorchModelException


def test_it_has_the_forward_signature_of_the_module() -> None:
    model = Normed()
    assert inspect.signature(ORTModule(model).forward) == inspect.signature(model.forward)


def test_a_step_is_like_eager_in_both_modes() -> None:
    ort_model, model = pair(Normed())
    for _ in range(2):
        assert_steps_like_eager(ort_model, model, torch.randn(5, 8))
        assert_steps_like_eager(ort_model.eval(), model.eval(), torch.randn(5, 8), torch.randn(5, 4), scale=2.0)
        ort_model.train()
        model.train()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(ort_model.get_buffer(name), buffer)


def test_state_parameters_buffers_and_modules_are_the_modules_own() -> None:
    model = Normed()
    ort_model = ORTModule(model)
    assert list(ort_model.state_dict()) == list(model.state_dict())
    assert next(iter(ort_model.state_dict(prefix="a."))) == "a.fc1.weight"
    for method in ("named_parameters", "named_buffers", "named_children", "named_modules"):
        mine, theirs = list(getattr(ort_model, method)()), list(getattr(model, method)())
        assert [name for name, _ in mine] == [name for name, _ in theirs]
        assert all(one is other for (_, one), (_, other) in zip(mine, theirs, strict=True))
    for method in ("parameters", "buffers", "children", "modules"):
        assert [id(one) for one in getattr(ort_model, method)()] == [id(one) for one in getattr(model, method)()]
    assert ort_model.get_parameter("fc1.weight") is model.fc1.weight
    assert ort_model.get_buffer("norm.running_mean") is model.norm.running_mean
    assert ort_model.get_submodule("norm") is model.norm
    assert ort_model.module is model
    assert repr(ort_model) == repr(model).replace("Normed", "ORTModule", 1)


def test_a_state_goes_in_and_out_also_as_a_part_of_another_module() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x))

    torch.manual_seed(1)
    plain, other = Outer(Dense()), Outer(Dense())
    wrapped = Outer(ORTModule(copy.deepcopy(other.inner)))
    wrapped.head = copy.deepcopy(other.head)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert wrapped.load_state_dict(plain.state_dict()).missing_keys == []
    assert_steps_like_eager(wrapped, plain, torch.randn(3, 8))
    wrapped.inner.load_state_dict(other.inner.state_dict())
    torch.testing.assert_close(wrapped.state_dict()["inner.fc1.weight"], other.inner.fc1.weight)
    assert wrapped.eval().inner.module.training is False


@pytest.mark.parametrize("method", ["add_module", "register_module"])
def test_modules_cannot_be_added(method: str) -> None:
    with pytest.raises(ORTModuleTorchModelException, match=r"ORTModule does not support adding modules to it."):
        getattr(ORTModule(Dense()), method)("more", nn.Linear(1, 1))


def test_apply_and_the_methods_that_change_dtype_and_device_reach_the_module() -> None:
    model = Dense()
    ort_model = ORTModule(model)
    seen: list[nn.Module] = []
    assert ort_model.apply(seen.append) is ort_model
    assert seen == [*list(model.modules())[1:], model]
    assert ort_model.double() is ort_model
    assert_steps_like_eager(ort_model, copy.deepcopy(model), torch.randn(3, 8, dtype=torch.float64))
    assert ort_model.to(torch.float32) is ort_model
    assert model.fc1.weight.dtype is torch.float32
    assert ort_model.half().fc1.weight.dtype is torch.float16
    assert ort_model.bfloat16().cpu().float().to("meta").fc1.weight.is_meta
    assert ort_model.requires_grad_(False) is ort_model
    assert not any(p.requires_grad for p in model.parameters())


def test_parameters_and_buffers_can_be_registered() -> None:
    ort_model = ORTModule(Dense())
    ort_model.register_buffer("more", torch.ones(2))
    ort_model.register_parameter("weight", nn.Parameter(torch.ones(2)))
    assert {"more", "weight"} <= set(ort_model.module.state_dict())


def test_attributes_are_read_from_and_set_on_the_module() -> None:
    ort_model = ORTModule(Dense())
    ort_model.more = 5
    assert ort_model.module.more == ort_model.more == 5
    assert "more" not in ort_model.__dict__
    ort_model.fc2 = nn.Linear(16, 2)
    assert ort_model(torch.randn(3, 8)).shape == (3, 2)
    del ort_model.more
    with pytest.raises(AttributeError, match="'Dense' object has no attribute 'more'"):
        _ = ort_model.more
    ort_model._torch_module = True
    assert ort_model.__dict__["_torch_module"] is True
    assert not hasattr(Dense(), "_torch_module")


class Flagged(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.flag = True

    def forward(self, input1: Tensor) -> Tensor:
        return super().forward(input1) if self.flag else input1 * self.fc1.weight.sum()


def test_a_changed_attribute_is_seen_by_the_next_forward() -> None:
    ort_model, model = pair(Flagged())
    x = torch.randn(3, 8)
    assert_steps_like_eager(ort_model, model, x)
    ort_model.flag = model.flag = False
    torch.testing.assert_close(ort_model(x), model(x))


class Talking(Dense):
    def run(self, x: Tensor) -> Tensor:
        return self(x) + 1

    def parent_names(self) -> list[str]:
        return [name for name, _ in super().named_parameters()]

    @property
    def width(self) -> int:
        return self.fc1.in_features

    @classmethod
    def make(cls) -> Talking:
        return cls()


def test_methods_of_the_users_run_the_ortmodule() -> None:
    ort_model, model = pair(Talking())
    x = torch.randn(3, 8)
    before = compiles()
    torch.testing.assert_close(ort_model.run(x), model.run(x))
    assert compiles() > before
    assert ort_model.width == 8
    assert isinstance(ort_model.make(), Talking)
    assert ort_model.parent_names()[0] == "fc1.weight"


def test_a_method_that_is_replaced_stays_with_the_wrapper() -> None:
    ort_model = ORTModule(Talking())

    def instead(x: Tensor) -> Tensor:
        return x

    ort_model.run = instead
    assert ort_model.run is instead
    assert ort_model.module.run is not instead


def test_names_that_both_have_are_warned_about() -> None:
    class Colliding(Dense):
        def __init__(self) -> None:
            super().__init__()
            self._torch_module = True

        def load_state_dict(self) -> None:  # type: ignore[override]
            pass

    with pytest.warns(UserWarning, match="collides") as said:
        ORTModule(Colliding())
    assert [str(one.message) for one in said] == [
        "User Module's attribute name _torch_module collides with ORTModule's attribute name. User Module's attribute "
        "may not be returned when trying to retrieve the attribute through ORTModule.",
        "User Module's attribute name load_state_dict collides with ORTModule's attribute name. User Module's method "
        "may not be called upon invocation through ORTModule.",
    ]


def test_a_module_of_transformers_is_wrapped_without_a_warning() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=8)))


def test_hooks_of_the_wrapper_and_of_the_module_run() -> None:
    ort_model = ORTModule(Dense())
    seen: list[str] = []
    ort_model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    ort_model.register_forward_hook(lambda module, args, output: seen.append("after") or output * 2)
    ort_model.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    ort_model.fc1.register_forward_hook(lambda module, args, output: output + 1)
    x = torch.randn(3, 8, requires_grad=True)
    inner = ort_model.module
    expected = inner.fc2(torch.relu(nn.functional.linear(x, inner.fc1.weight, inner.fc1.bias) + 1)) * 2
    found = ort_model(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside another module"])
def test_hooks_of_states_run(inside: bool) -> None:
    ort_model, seen = ORTModule(Dense()), []
    ort_model.module.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded, by the module"))
    ort_model.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append("before saving"))
    ort_model.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append("saved"))
    ort_model.register_load_state_dict_pre_hook(lambda *_: seen.append("before loading"))
    ort_model.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    outer = nn.ModuleDict({"inner": ort_model}) if inside else ort_model
    outer.load_state_dict(outer.state_dict())
    assert seen == ["before saving", "saved", "before loading", "loaded, by the module", "loaded"]


def test_functions_that_change_a_modules_class_are_refused() -> None:
    inner = nn.Linear(3, 3)
    with pytest.raises(ORTModuleTorchModelException, match="keeps its class"):
        nn.utils.parametrize.register_parametrization(ORTModule(inner), "weight", nn.Identity())
    assert type(inner) is nn.Linear


def test_a_subclass_has_its_own_forward() -> None:
    class Doubled(ORTModule):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*inputs, **kwargs)

    model, x = Dense(), torch.randn(3, 8)
    doubled = Doubled(model)
    for one in (doubled, copy.deepcopy(doubled)):
        torch.testing.assert_close(one(x), 2 * model(x))


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_a_copy_is_an_ortmodule_of_its_own(how: str) -> None:
    ort_model = ORTModule(Talking().eval())
    x = torch.randn(3, 8)
    expected = ort_model(x)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(ort_model))
    elif how == "deepcopy":
        other = copy.deepcopy(ort_model)
    else:
        buffer = io.BytesIO()
        torch.save(ort_model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert type(other) is ORTModule
    assert other.module is not ort_model.module
    assert not other.training
    torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(other.run(x), expected + 1)
    with torch.no_grad():
        other.fc1.weight.zero_()
    torch.testing.assert_close(ort_model(x), expected)


def test_data_parallel_is_refused() -> None:
    message = "ORTModule is not compatible with torch.nn.DataParallel"
    with pytest.raises(ORTModuleTorchModelException, match=message):
        ORTModule(Dense())._replicate_for_data_parallel()


@pytest.mark.parametrize("given", [None, torch.relu, 5])
def test_an_argument_that_is_no_module_is_refused(given: Any) -> None:
    with pytest.raises(ORTModuleTorchModelException, match=r"ORTModule only supports torch.nn.Module as input"):
        ORTModule(given)


def test_a_dropped_ortmodule_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        ort_model = ORTModule(Talking())
        module = weakref.ref(ort_model.module)
        gone = weakref.ref(ort_model)
        del ort_model
        assert gone() is None
        assert module() is None
    finally:
        gc.enable()


def test_a_second_module_of_a_class_compiles_nothing() -> None:
    x = torch.randn(3, 8)
    first, second = ORTModule(Dense()), ORTModule(Dense())
    first(x)
    before = compiles()
    torch.testing.assert_close(second(x), second.module(x))
    assert compiles() == before


def test_a_second_module_of_a_class_keeps_its_own_hooks() -> None:
    x = torch.randn(3, 8)
    ort_models = [ORTModule(Dense()) for _ in range(2)]

    def assert_like_eager() -> None:
        for ort_model in ort_models:
            torch.testing.assert_close(ort_model(x), ort_model.module(x))

    handle = ort_models[1].fc1.register_forward_hook(lambda module, args, output: output + 1)
    assert_like_eager()
    ort_models[0].fc1.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert_like_eager()
    handle.remove()
    assert_like_eager()
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_libraries_take_it_for_a_compiled_module() -> None:
    accelerate = pytest.importorskip("accelerate")
    ort_model = ORTModule(Dense())
    assert isinstance(ort_model, torch._dynamo.OptimizedModule)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.unwrap_model(ort_model) is ort_model
    assert accelerator.unwrap_model(ort_model, keep_torch_compile=False) is ort_model.module
    with pytest.raises(ORTModuleTorchModelException, match="cannot be replaced"):
        ort_model._orig_mod = Dense()
    ort_model.training = False
    assert not ort_model.module.training
    assert ort_model
    assert {"fc1", "state_dict", "module"} <= set(dir(ort_model))


def test_the_package_offers_the_names_lazily() -> None:
    assert {"ORTModule", "DebugOptions", "LogLevel", "optim"} <= set(dir(ort_dynamo))
    from ort_dynamo.training import ORTModule as OfTraining
    from ort_dynamo.training.ortmodule import ORTModule as OfOrtmodule

    assert OfTraining is OfOrtmodule is ORTModule
