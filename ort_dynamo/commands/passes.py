"""python -m ort_dynamo passes: the passes on ONNX models, from the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ort_dynamo.errors import ModelFileError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PASSES", "SUMMARY", "ModelPass", "add_arguments", "run"]

SUMMARY = "List the passes on ONNX models, or apply one to a model file."


class ModelPass(NamedTuple):
    """A pass that the command line offers.

    Attributes:
        class_name: its class in ort_dynamo.passes.onnx.
        summary: one line.
        add_arguments: declares its parameters.
        parameters: the class's keyword arguments from the parsed ones.
    """

    class_name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    parameters: Callable[[argparse.Namespace], dict[str, Any]] = lambda arguments: {}


def _cast_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        type=str.lower,
        choices=("none", "insert_and_reduce", "flood_fill"),
        default="flood_fill",
        help="the strategy of ONNX Runtime's PropagateCastOps (default: %(default)s)",
    )
    parser.add_argument(
        "--level",
        type=int,
        choices=(-1, 0, 1, 2),
        default=1,
        help="the operators that casts may cross: more at each level; -1 is off (default: %(default)s)",
    )
    parser.add_argument("--allow", metavar="OP,OP", default="", help="more operator types that casts may cross")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16"), help="the narrow dtype (default: both, one after the other)"
    )
    parser.add_argument(
        "--allow-layer-norm-mod-precision", action="store_true", help="let casts cross layer normalizations"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="narrow only operators that have a kernel for this device"
    )


def _cast_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    import onnx_ir as ir

    target = None
    if arguments.device:
        from ort_dynamo.runtime.installed.providers import find_target

        target = find_target(arguments.device)
    return {
        "strategy": arguments.strategy,
        "level": arguments.level,
        "allow": tuple(name for name in arguments.allow.split(",") if name),
        "dtype": ir.DataType[arguments.dtype.upper()] if arguments.dtype else None,
        "allow_layer_norm_mod_precision": arguments.allow_layer_norm_mod_precision,
        "target": target,
    }


PASSES: dict[str, ModelPass] = {
    "propagate-casts": ModelPass(
        "PropagateCasts",
        "Move casts between float32 and float16 or bfloat16 to where they cost least; cancel those that meet.",
        _cast_arguments,
        _cast_parameters,
    ),
    "fold-casts": ModelPass("FoldCasts", "Merge two casts in a row into one."),
    "fuse-cross-entropy-gradient": ModelPass(
        "FuseCrossEntropyGradient",
        "Compute the gradient of a cross-entropy without a one-hot matrix.",
    ),
    "fuse-row-sum": ModelPass("FuseRowSum", "Replace a sum over leading axes by a matmul with ones."),
    "transpose-once": ModelPass("TransposeOnce", "Let a matmul with a transposed left operand read a transposed copy."),
    "take-shapes-early": ModelPass("TakeShapesEarly", "Read the shape of a cast's input, not of its result."),
    "remove-unread-nodes": ModelPass("RemoveUnreadNodes", "Remove dead nodes."),
    "separate-outputs": ModelPass("SeparateOutputs", "Give every graph output a value of its own."),
}
"""Name on the command line -> the pass; passes that need the lowering's metadata or another model are left out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="list the passes, with a description of each")
    apply = actions.add_parser("apply", help="apply a pass to a model file")
    passes = apply.add_subparsers(title="passes", dest="name", metavar="PASS", required=True)
    for name, entry in PASSES.items():
        subparser = passes.add_parser(name, help=entry.summary, description=entry.summary)
        subparser.add_argument("input", metavar="IN.onnx", type=Path, help="the model file; external data is read too")
        subparser.add_argument("output", metavar="OUT.onnx", type=Path, help="the file to write; may be IN.onnx")
        subparser.add_argument("--inline", action="store_true", help="inline the model's functions first")
        entry.add_arguments(subparser)


def run(arguments: argparse.Namespace) -> int:
    """List the passes, or apply one.

    Returns:
        0.

    Raises:
        ModelFileError: the model cannot be read or written.
    """
    if arguments.action == "list":
        width = max(map(len, PASSES))
        print("\n".join(f"{name:<{width}}  {entry.summary}" for name, entry in PASSES.items()))
        return 0

    from onnx_ir.passes.common import InlinePass

    from ort_dynamo.passes import onnx as passes

    entry = PASSES[arguments.name]
    pass_: ir.passes.InPlacePass = getattr(passes, entry.class_name)(**entry.parameters(arguments))
    model = _load(arguments.input)
    if arguments.inline:
        InlinePass()(model)
    elif model.functions:
        print(f"{arguments.name}: the bodies of the model's functions do not change; --inline inlines them first")
    if isinstance(pass_, passes.PropagateCasts):
        said = str(pass_.propagate(model))
    else:
        said = "the model was rewritten" if pass_(model).modified else "nothing to do"
    _save(model, arguments.output)
    print(f"{arguments.name}: {said}")
    return 0


def _load(path: Path) -> ir.Model:
    import onnx_ir as ir
    from google.protobuf.message import DecodeError

    try:
        model = ir.load(path)
        for tensor in _external_tensors(model):
            tensor.numpy()  # a memory map: missing data is found here, before anything is written
    except (OSError, DecodeError, ValueError) as error:
        raise ModelFileError(what="read", path=path, error=error) from error
    return model


def _save(model: ir.Model, path: Path) -> None:
    """Write the model beside `path` first, so that a failure leaves the old file."""
    import onnx_ir as ir

    data = f"{path.name}.data" if _external_tensors(model) else None
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        ir.save(model, temporary, format="protobuf", external_data=data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ModelFileError(what="write", path=path, error=error) from error


def _external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    import onnx_ir as ir

    graphs = [model.graph, *model.graph.subgraphs()]
    constants = (value.const_value for graph in graphs for value in graph.initializers.values())
    return [tensor for tensor in constants if isinstance(tensor, ir.ExternalTensor)]
