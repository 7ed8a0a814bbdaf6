"""python -m ort_dynamo passes: the passes on ONNX models, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ort_dynamo.commands.external_data import external_tensors, read_external_data
from ort_dynamo.errors import ModelFileError

if TYPE_CHECKING:
    import onnx
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
    "expand-short-runs": ModelPass(
        "ExpandShortRuns",
        "Expand an operand before a broadcast over a few elements at a time.",
    ),
    "fold-casts": ModelPass("FoldCasts", "Merge two casts in a row into one."),
    "fuse-cross-entropy-gradient": ModelPass(
        "FuseCrossEntropyGradient",
        "Compute the gradient of a cross-entropy without a one-hot matrix.",
    ),
    "fuse-row-sum": ModelPass("FuseRowSum", "Replace a sum over leading axes by a matmul with ones."),
    "join-pads": ModelPass("JoinPads", "Replace a sum of padded tensors that fill an axis by their Concat."),
    "merge-transposes": ModelPass("MergeTransposes", "Replace Transposes that undo each other by one Reshape."),
    "multiply-small-matrices": ModelPass(
        "MultiplySmallMatrices", "Replace a matmul of many small matrices by products of elements and their sums."
    ),
    "sum-small-blocks": ModelPass("SumSmallBlocks", "Sum the rows of many small blocks as the last dimension."),
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

    from ort_dynamo.passes import onnx as passes

    entry = PASSES[arguments.name]
    pass_: ir.passes.InPlacePass = getattr(passes, entry.class_name)(**entry.parameters(arguments))
    proto = _read(arguments.input)
    model, files = _load(proto, arguments.input, inline=arguments.inline)
    if model.functions:
        print(f"{arguments.name}: the bodies of the model's functions do not change; --inline inlines them first")
    with _valid(proto, arguments.input):
        if isinstance(pass_, passes.PropagateCasts):
            said = str(pass_.propagate(model))
        else:
            said = "the model was rewritten" if pass_(model).modified else "nothing to do"
        _save(model, arguments.output, () if _is_same(arguments.input, arguments.output) else files)
    print(f"{arguments.name}: {said}")
    return 0


def _read(path: Path) -> onnx.ModelProto:
    """Read a model without its external data, and check its nodes and depth."""
    import onnx
    from google.protobuf.message import DecodeError

    from ort_dynamo.graph.model_limits import check_limits

    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
        if not proto.HasField("graph"):
            raise ValueError("the file holds no model")
        check_limits(proto)
    except (OSError, DecodeError, ValueError) as error:
        raise ModelFileError(what="read", path=path, error=error) from error
    return proto


def _is_same(path: Path, other: Path) -> bool:
    """Check whether two paths lead to one file."""
    return other.exists() and path.samefile(other)


def _load(proto: onnx.ModelProto, path: Path, *, inline: bool) -> tuple[ir.Model, Collection[Path]]:
    """Make the model of its proto, with its external data, all of which has to be in the model's folder.

    Returns:
        The model, and the files that the data is in.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    try:
        model = ir.from_proto(proto)
        # An absolute path, since onnx_ir reads any file if the folder is "".
        files = read_external_data(model, path.absolute().parent)
        model.graph.sort()  # a pass that follows values would not end in a cycle
        for function in model.functions.values():
            function.sort()
        _check_references(model.graph)
        if inline:
            InlinePass()(model)
    except Exception as error:  # onnx_ir lets pass the errors of any type that an invalid model leads to
        raise ModelFileError(what="read", path=path, error=_innermost(error)) from error
    return model, files


def _check_references(graph: ir.Graph) -> None:
    """Raise ValueError for an attribute that refers to a function's in a graph that is in no function."""
    for node in graph.all_nodes():
        for name, attribute in node.attributes.items():
            if attribute.is_ref():
                raise ValueError(f"the attribute {name!r} of node {node.name!r} refers to a function's")


def _innermost(error: BaseException) -> BaseException:
    """Return the error that others were raised from: those of onnx_ir hold a whole graph each."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextlib.contextmanager
def _valid(proto: onnx.ModelProto, path: Path) -> Iterator[None]:
    """Raise ModelFileError for an error about a model that onnx finds invalid: passes take valid ones only."""
    import onnx

    try:
        yield
    except ModelFileError:
        raise
    except Exception as error:
        try:
            onnx.checker.check_model(proto, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as reason:
            raise ModelFileError(what="read", path=path, error=reason) from error
        raise


def _save(model: ir.Model, path: Path, reads: Collection[Path]) -> None:
    """Write the model into a folder beside `path` first, so that a failure leaves the old files.

    Args:
        model: the model.
        path: its file; external data becomes one file beside it.
        reads: the files that another model has its data in, which are not written over.
    """
    import onnx_ir as ir

    data = f"{path.name}.data" if external_tensors(model) else None
    written = [name for name in (data, path.name) if name is not None]  # the model last: it needs the data
    used = {one.resolve() for one in reads}
    for place in (path.parent / name for name in written):
        if place.resolve() in used:
            reason = f"the model that was read has its data in {place}; give the result another name"
            raise ModelFileError(what="write", path=path, error=ValueError(reason))
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            ir.save(model, Path(folder, path.name), format="protobuf", external_data=data)
            for name in written:
                Path(folder, name).replace(path.parent / name)
    except (OSError, ir.serde.SerdeError) as error:
        raise ModelFileError(what="write", path=path, error=_innermost(error)) from error
