"""A model in ONNX as a torch module that can be trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto
from torch import Tensor, nn

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.graph.model_limits import domain_of
from ort_dynamo.onnx_module.build import CONSTANTS, Builder
from ort_dynamo.onnx_module.build_control import CONTROL
from ort_dynamo.onnx_module.check_model import check_model, read_opsets
from ort_dynamo.onnx_module.program import Stored
from ort_dynamo.onnx_module.state_keys import Holder, place_of, state_keys, tensor_of
from ort_dynamo.onnx_module.tensor_data import element_type, read_tensor, take_in, with_inner_data, write_tensor

__all__ = ["OnnxModule", "to_model_proto"]

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The key under which torch's exporter writes an initializer's kind: PARAMETER, BUFFER or CONSTANT_TENSOR."""


_OWN_NAMES = frozenset({CONSTANTS, "_model", "_program", "_types", "input_names", "onnx_names", "output_names"})


class OnnxModule(nn.Module):
    """A module that computes an ONNX graph, with the graph's weights as its parameters.

    A weight is a float initializer of the outermost graph that torch's exporter marked as a parameter. If it marked
    nothing, every float initializer with at least one axis is a weight. Python scalars, such as the epsilon of a norm
    or a scale, have no axis; name weights without an axis in `scalars`. The running statistics of BatchNormalization,
    the weights of classes in a loss, and settings (sizes, scales, ratios, bounds) are no weights.

    An exporter that folds constants, or shares equal initializers, changes the weights. Export with `optimize=False`,
    or with `do_constant_folding=False` and `training=torch.onnx.TrainingMode.TRAINING`.

    In train mode, Dropout and BatchNormalization behave as in training if the file says so (`training_mode`); in eval
    mode they never do.

    Args:
        model: the file; a copy is kept for `to_model_proto`, without the weights' data.
        frozen: the ONNX names of weights that are not trained: they do not require a gradient.
        scalars: the ONNX names of weights without an axis, in files that do not mark parameters.
        base_dir: the folder of external data; by default no external data is read.

    Attributes:
        onnx_names: the ONNX name of each key of the state dict; they differ if the name is invalid in torch.
        input_names: the inputs of the graph that are no initializers, in order.
        output_names: the outputs of the graph, in order.

    Raises:
        OnnxModelError: the file is not valid, or a node is not supported, which is named; or a weight without an axis
            is a setting, such as a bound of Clip, and not in `frozen`. It is also a ValueError.
        TypeError: `model` is no ModelProto.
    """

    onnx_names: dict[str, str]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def __init__(
        self,
        model: ModelProto,
        frozen: Collection[str] = (),
        *,
        scalars: Collection[str] = (),
        base_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, ModelProto):
            raise TypeError(f"expected an onnx.ModelProto, not {type(model).__name__}")
        base_dir = None if base_dir is None else Path(base_dir)
        try:
            model = with_inner_data(model, base_dir)
            self._types = check_model(model)
            stored = _initializers(model, scalars, base_dir)
            builder = self._build(model, stored)
        except UnicodeDecodeError as error:  # protobuf decodes a name when it is read
            raise OnnxModelError(reason=f"a name in it is not text: {error}") from error
        constants = Holder()
        for name, one in builder.constants.items():
            if one.uses & {"data", "statistic"}:
                constants.register_buffer(name, one.data, persistent=False)
        self.add_module(CONSTANTS, constants)
        self._hold(stored, frozen)
        self._model = _without_data(model, set(self.onnx_names.values()), base_dir)

    def _build(self, model: ModelProto, stored: Mapping[str, Stored]) -> Builder:
        """Write the program; `stored` then has the uses of initializers."""
        self.input_names = tuple(one.name for one in model.graph.input if one.name not in stored)
        self.output_names = tuple(one.name for one in model.graph.output)
        for one in model.graph.input:
            if not one.type.HasField("tensor_type"):
                raise OnnxModelError(reason=f"the input {one.name!r} is not a tensor")
            element_type(one.type.tensor_type.elem_type, f"the input {one.name!r}")
        for name, key in state_keys(stored, _OWN_NAMES).items():
            stored[name].key = key
        functions = {(domain_of(one.domain), one.name, one.overload): one for one in model.functions}
        builder = Builder(functions, stored, CONTROL)
        opsets = read_opsets(model.opset_import, "the model")
        self._program = builder.build(model.graph, self.input_names, opsets, self._types)
        return builder

    def _hold(self, stored: Mapping[str, Stored], frozen: Collection[str]) -> None:
        """Make parameters and buffers of the initializers."""
        unknown = sorted(set(frozen) - stored.keys())
        if unknown:
            raise OnnxModelError(reason=f"frozen names initializers that the model does not have: {unknown}")
        self.onnx_names = {}
        for name, one in stored.items():
            holder, leaf = place_of(self, one.key)
            kind = _kind_of(name, one, name in frozen)
            if kind == "weight":
                assert one.data is not None
                holder.register_parameter(leaf, nn.Parameter(one.data, requires_grad=name not in frozen))
            else:
                holder.register_buffer(leaf, one.data, persistent=kind == "buffer")
            if kind != "constant":
                self.onnx_names[one.key] = name

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_modules"] = {name: one for name, one in self._modules.items() if name != "_program"}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        model = to_model_proto(self)
        weights = [self.onnx_names[key] for key, _ in self.named_parameters()]
        self._build(model, _initializers(model, weights, None))
        self._program.train(self.training)

    def forward(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        """Compute the graph.

        Args:
            inputs: tensors, in the order of `input_names`.
            named: the rest of them, by name.

        Returns:
            The graph's outputs, in order.

        Raises:
            TypeError: an input is missing, or there is none of a name.
        """
        if named or len(inputs) != len(self.input_names):
            inputs = self._bind(inputs, named)
        return self._program(self, *inputs)

    def _bind(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        rest = self.input_names[len(inputs) :]
        if len(inputs) > len(self.input_names) or set(named) != set(rest):
            raise TypeError(
                f"the model takes the inputs {', '.join(self.input_names) or 'none'}; got {len(inputs)} in order"
                + (f" and {', '.join(sorted(named))}" if named else "")
            )
        return (*inputs, *(named[name] for name in rest))


def _kind_of(name: str, one: Stored, frozen: bool) -> str:
    """Return the kind of an initializer: "weight"; "buffer", which the state dict has too; or "constant"."""
    if not one.dtype.is_floating_point:
        return "constant"
    special = one.uses & {"statistic", "setting"}
    if special and one.weight and "data" in one.uses and not frozen:
        role = "a statistic" if "statistic" in special else "a setting such as a scale"
        raise OnnxModelError(
            reason=f"the initializer {name!r} is both a weight and {role}: training would change it. "
            "Exporters share initializers of equal values in eval mode; export with dynamo=True, or with "
            "training=torch.onnx.TrainingMode.TRAINING, which shares none. Or name it in `frozen` to keep its value"
        )
    if "statistic" in one.uses:
        return "buffer"
    if "setting" in one.uses:
        if one.weight and not one.shape and not frozen:  # then the file or the caller said that it is a weight
            raise OnnxModelError(
                reason=f"the weight {name!r} is a setting, such as a bound of Clip, which is not trained; "
                "name it in `frozen` to keep its value"
            )
        return "constant"
    if one.weight:
        return "weight"
    return "buffer" if one.shape else "constant"


def _initializers(model: ModelProto, scalars: Collection[str], base_dir: Path | None) -> dict[str, Stored]:
    kinds = {
        one.name: entry.value for one in model.graph.value_info for entry in one.metadata_props if entry.key == _KIND
    }
    found: dict[str, Stored] = {}
    for tensor in model.graph.initializer:
        if tensor.name in found or not tensor.name:
            raise OnnxModelError(reason=f"the initializer {tensor.name!r} occurs twice or has no name")
        data = read_tensor(tensor, base_dir)
        kind = kinds.get(tensor.name)
        said = kind == "PARAMETER" if kind else data.dim() > 0 or tensor.name in scalars
        weight = said and data.is_floating_point()
        found[tensor.name] = Stored("", data, data.dtype, tuple(data.shape), weight)
    unknown = sorted(set(scalars) - {name for name, one in found.items() if one.weight})
    if unknown:
        raise OnnxModelError(reason=f"scalars names weights that the model does not have: {unknown}")
    return found


def _without_data(model: ModelProto, names: Collection[str], base_dir: Path | None) -> ModelProto:
    """Return a copy in which some initializers have no elements, but the field for them; it has the data of others."""
    kept = ModelProto()
    kept.CopyFrom(model)
    for tensor in kept.graph.initializer:
        if tensor.name not in names:
            take_in(tensor, base_dir)
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            continue
        if tensor.HasField("raw_data"):
            tensor.raw_data = b""
            continue
        for field in ("float_data", "double_data", "int32_data"):
            tensor.ClearField(field)
    return kept


def to_model_proto(module: OnnxModule) -> ModelProto:
    """Return the file that a module was made of, with the parameters and buffers that it has now.

    Only elements of initializers change; those that were in files of their own are inside.
    """
    model = ModelProto()
    model.CopyFrom(module._model)
    keys = {name: key for key, name in module.onnx_names.items()}
    for tensor in model.graph.initializer:
        if tensor.name in keys:
            write_tensor(tensor, tensor_of(module, keys[tensor.name]))
    return model
