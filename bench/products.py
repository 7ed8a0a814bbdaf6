"""The matmuls of a training step in eager, alone: the part of it that no compiler removes.

A compiler can save the time that a step takes beyond its matmuls. Operands have the sizes and strides of the step's,
random numbers, and are shared by products whose operands are alike; results go to memory that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["Layout", "MatrixProducts", "Product", "products_of"]


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of an operand."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tensor.stride())

    @staticmethod
    def contiguous(*sizes: int) -> Layout:
        return Layout.of(torch.empty(sizes, device="meta"))

    @property
    def transposed(self) -> Layout:
        """The layout of a batch of matrices, transposed."""
        batch, rows, columns = self.sizes
        return Layout((batch, columns, rows), (self.strides[0], self.strides[2], self.strides[1]))


@dataclass(frozen=True)
class Product:
    """One call.

    Attributes:
        kind: an operator of aten with an overload `out`: mm, bmm, addmm or baddbmm.
        operands: its tensors, in order.
    """

    kind: str
    operands: tuple[Layout, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the result."""
        left, right = self.operands[-2:]
        return *left.sizes[:-1], right.sizes[-1]

    @property
    def multiplications(self) -> int:
        """The number of scalar multiplications."""
        result = torch.Size(self.sizes).numel()
        return result * self.operands[-1].sizes[-2]


class MatrixProducts:
    """A call runs all products once, in order. All is float32."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = tuple(products)
        inputs: dict[tuple[int, Layout], Tensor] = {}
        outputs: dict[tuple[int, ...], Tensor] = {}
        self._calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]] = []
        for product in self.products:
            operands = []
            for place, layout in enumerate(product.operands):
                if (place, layout) not in inputs:
                    inputs[place, layout] = torch.empty_strided(layout.sizes, layout.strides).normal_()
                operands.append(inputs[place, layout])
            result = outputs.setdefault(product.sizes, torch.empty(product.sizes))
            self._calls.append((getattr(aten, product.kind).out, tuple(operands), result))

    def __call__(self) -> None:
        with torch.no_grad():
            for function, operands, result in self._calls:
                function(*operands, out=result)


def products_of(step: Callable[[], object]) -> MatrixProducts:
    """Run a step once in eager and give its products, those of its gradients included.

    A fused attention stands for the six products of its formula, two of them forward, whether or not it saves half of
    the work of a causal one or computes one twice. Convolutions do not count, though some are products.
    """
    recorder = _Recorder()
    with recorder:
        step()
    return MatrixProducts(recorder.products)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket.__name__
        if kind in ("mm", "bmm", "addmm", "baddbmm"):
            self.products.append(Product(kind, tuple(map(Layout.of, args))))
        elif kind in _ATTENTIONS:
            self.products.extend(_ATTENTIONS[kind](*args))
        return func(*args, **(kwargs or {}))


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Iterator[Product]:
    q, k, v, scores = _operands(query, key, value)
    yield Product("bmm", (q, k.transposed))  # S = Q K'
    yield Product("bmm", (scores, v))  # O = P V


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Iterator[Product]:
    q, k, v, scores = _operands(query, key, value)
    do = Layout.contiguous(*q.sizes[:-1], v.sizes[-1])
    yield Product("bmm", (scores.transposed, do))  # dV = P' dO
    yield Product("bmm", (do, v.transposed))  # dP = dO V'
    yield Product("bmm", (scores, k))  # dQ = dS K
    yield Product("bmm", (scores.transposed, q))  # dK = dS' Q


def _operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Layout, Layout, Layout, Layout]:
    """Query, key and value with all heads of a batch in one dimension, and the scores."""
    batch, heads, rows, width = query.shape
    columns = key.shape[2]
    q, k, v = ((batch * heads, n, w) for n, w in ((rows, width), (columns, width), (columns, value.shape[3])))
    return *map(Layout.contiguous, *zip(q, k, v, strict=True)), Layout.contiguous(batch * heads, rows, columns)


_ATTENTIONS: dict[str, Callable[..., Iterator[Product]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _backward,
}
