"""Checks the text of a kernel before Python sees it, so that a text from elsewhere cannot run anything on the host.

Triton's front end is Python: it imports a module and calls the functions that the kernel's expressions name. An entry
of a cache may come from another machine (`torch.compiler.load_cache_artifacts`), and its text is as little trusted as
its model. A text passes if it consists of three imports and one function whose expressions name nothing but its own
variables and the functions of Triton that are listed here. `KernelSource.text` is printed from the checked syntax tree,
without comments, so that no declaration of an encoding can make it another text.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = ["KernelSource", "KernelSourceError", "checked_source"]

_HEADER = """# coding: utf-8
import triton
import triton.language as tl
from triton.language.extra import libdevice
"""

_IMPORTS = frozenset(_HEADER.splitlines()[1:])


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LANGUAGE = _names("""
    abs arange argmax argmin assume atomic_add bfloat16 broadcast broadcast_to cast cdiv ceil clamp constexpr cos
    cumprod cumsum debug_barrier device_assert div_rn dot erf exp exp2 expand_dims fdiv flip float16 float32 float64
    floor fma full gather histogram int1 int16 int32 int64 int8 interleave join load log log2 max max_constancy
    max_contiguous maximum min minimum multiple_of num_programs permute program_id PropagateNan range ravel reshape
    rsqrt sigmoid sin softmax split sqrt sqrt_rn static_assert static_range store sum trans uint16 uint32 uint64 uint8
    umulhi view where xor_sum zeros zeros_like
""")
"""Names of triton.language. Functions that take other functions, files, or code of another language are not there."""

_LIBDEVICE = _names("""
    abs acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh cospi div_rn erf erfc erfcinv erfcx erfinv
    exp exp10 exp2 expm1 finitef float_as_int floor fma fmod hypot int_as_float isfinited isinf isnan ldexp lgamma
    llrint log log10 log1p log2 logb nearbyint nextafter norm3d norm4d normcdf normcdfinv pow rcp_rn remainder rint
    round rsqrt rsqrt_rn saturatef signbit sin sinh sinpi sqrt sqrt_rn tan tanh tgamma trunc
""")
_MODULES = {"tl": _LANGUAGE, "libdevice": _LIBDEVICE, "tl.PropagateNan": frozenset({"ALL", "NONE"})}
_ATTRIBUTES = frozenset({"dtype", "element_ty", "shape", "to"})
_BUILTINS = frozenset({"abs", "bool", "float", "int", "len", "max", "min", "range"})
_RESERVED = frozenset({"libdevice", "tl", "triton"}) | _BUILTINS

_NODES = (
    # statements
    *(ast.AnnAssign, ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.If, ast.Pass),
    # expressions, whose parts are looked at below where they name something
    *(ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.IfExp, ast.List, ast.Name),
    *(ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword),
    *(ast.boolop, ast.cmpop, ast.expr_context, ast.operator, ast.unaryop),
)


class KernelSourceError(ValueError):
    """A text is not a kernel that may be compiled; the message has the reason."""


@dataclass(frozen=True)
class KernelSource:
    """A module that may be imported with Triton.

    Attributes:
        text: the source of the module.
        parameters: the parameters of the kernel, in order.
    """

    text: str
    parameters: tuple[str, ...]


def checked_source(source: str, name: str) -> KernelSource:
    """Check that a text has one kernel and nothing else.

    Args:
        source: a module: imports of triton, triton.language as tl and libdevice, and one function under `triton.jit`.
        name: the name of that function.

    Raises:
        KernelSourceError: the text has something else.
    """
    try:
        module = ast.parse(source)
        body = [one for one in module.body if not _is_text(one) and ast.unparse(one) not in _IMPORTS]
        if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
            raise KernelSourceError("the module is not the three imports and one function")
        return KernelSource(f"{_HEADER}\n\n{ast.unparse(body[0])}\n", _parameters(body[0], name))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, KernelSourceError):
            raise
        raise KernelSourceError(f"Python cannot read it: {type(error).__name__}: {error}") from error


def _parameters(function: ast.FunctionDef, name: str) -> tuple[str, ...]:
    if function.name != name:
        raise KernelSourceError(f"its function is {function.name}, not {name}")
    if [ast.unparse(one) for one in function.decorator_list] != ["triton.jit"]:
        raise KernelSourceError("its function is not under triton.jit alone")
    given = function.args
    others = (given.posonlyargs, given.vararg, given.kwonlyargs, given.kwarg, given.defaults, function.returns)
    if any(others) or any(one.annotation for one in given.args) or getattr(function, "type_params", None):
        raise KernelSourceError("its parameters are not mere names")
    parameters = [one.arg for one in given.args]
    written = {one.id for one in _nodes(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    variables = {*parameters, *written}
    for reserved in variables & _RESERVED:
        raise KernelSourceError(f"it gives {reserved} another meaning")
    called = {id(node.func) for node in _nodes(function) if isinstance(node, ast.Call)}
    modules = {id(node.value) for node in _nodes(function) if isinstance(node, ast.Attribute)}
    for node in _nodes(function):
        if not isinstance(node, _NODES):
            raise KernelSourceError(f"line {getattr(node, 'lineno', '?')} holds {type(node).__name__}")
        if isinstance(node, ast.Attribute):
            _check_attribute(node)
        elif isinstance(node, ast.Name):
            is_named = (
                node.id in variables
                or (node.id in _BUILTINS and id(node) in called)
                or (node.id in _MODULES and id(node) in modules)
            )
            if not is_named:
                raise KernelSourceError(f"line {node.lineno} names {node.id}")
        elif isinstance(node, ast.Call):
            _check_call(node)
    return tuple(parameters)


def _check_attribute(node: ast.Attribute) -> None:
    allowed = _MODULES.get(ast.unparse(node.value), _ATTRIBUTES)
    if node.attr not in allowed or not isinstance(node.ctx, ast.Load):
        raise KernelSourceError(f"line {node.lineno} names {ast.unparse(node)}")


def _check_call(node: ast.Call) -> None:
    function = node.func
    is_method = isinstance(function, ast.Attribute) and (
        ast.unparse(function.value) in _MODULES or function.attr == "to"
    )
    is_builtin = isinstance(function, ast.Name) and function.id in _BUILTINS
    if not (is_method or is_builtin) or any((one.arg or "_").startswith("_") for one in node.keywords):
        raise KernelSourceError(f"line {node.lineno} calls {ast.unparse(function)}")


def _nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """Everything below the function's statements."""
    return [node for statement in function.body for node in ast.walk(statement)]


def _is_text(statement: ast.stmt) -> bool:
    """Check whether a statement is a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
