"""Check that a program can compute the steps that depend on sums over rows when it has added all rows."""

from __future__ import annotations

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import ColumnSum, Counter, Kernel, Load, Store, Total, read_by
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError

__all__ = ["check_totals"]


def check_totals(kernel: Kernel) -> None:
    """Refuse results per row that depend on totals, and results per column that do not.

    Raises:
        CannotFuseError: the kernel has such a step or such an output.
    """
    rows = len(kernel.row_loops)
    if not kernel.columns:
        return
    if any(_is_misplaced(kernel, store) for store in kernel.stores):
        raise CannotFuseError("an output per column depends on no sum over rows, or an output per row depends on one")
    if not any(kernel.late):
        return
    if kernel.has_row_numbers or kernel.row_count == Size():
        raise CannotFuseError("a step reads a sum over rows, and the kernel also reduces along rows or has one row")
    needed, left = set[int](), [number for number, is_late in enumerate(kernel.late) if is_late]
    while left:
        number = left.pop()
        step = kernel.steps[number]
        if isinstance(step, Total):
            if kernel.late[step.argument]:
                raise CannotFuseError("a sum over rows depends on another sum over rows")
            continue
        if isinstance(step, Load | Counter) and any(size.factor for size in step.strides[:rows]):
            raise CannotFuseError("a step that depends on a sum over rows reads a value per row")
        if isinstance(step, Load) and (step.only or step.places):
            raise CannotFuseError("a step that depends on a sum over rows loads conditionally or by an index")
        left += [one for one in read_by(step) if one not in needed]
        needed.update(read_by(step))


def _is_misplaced(kernel: Kernel, store: Store | ColumnSum) -> bool:
    """Check for an output with a value per row that depends on totals, or a value per column that does not."""
    is_late = kernel.late[store.step]
    if isinstance(store, ColumnSum):
        return is_late
    both = zip(store.strides, kernel.row_loops, strict=False)
    has_rows = any(stride.factor and count != Size() for stride, count in both)
    return is_late == has_rows and (is_late or kernel.row_count != Size())
