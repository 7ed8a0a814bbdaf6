"""Finds the groups of nodes of a graph that become one kernel each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from ort_dynamo.graph.fused_op import POINTERS, Size
from ort_dynamo.passes.onnx.analysis.constants import number_of
from ort_dynamo.passes.onnx.analysis.host_values import host_nodes, is_host_number, is_of_sizes
from ort_dynamo.passes.onnx.analysis.shapes import behind
from ort_dynamo.passes.onnx.fused_kernels.arithmetic import computes, needs_kernel
from ort_dynamo.passes.onnx.fused_kernels.cluster import Cluster, joined_space
from ort_dynamo.passes.onnx.fused_kernels.column_sums import summed_axes
from ort_dynamo.passes.onnx.fused_kernels.computed_shapes import shape_sources
from ort_dynamo.passes.onnx.fused_kernels.group import MOVES, Group
from ort_dynamo.passes.onnx.fused_kernels.group_kernel import kernel_of
from ort_dynamo.passes.onnx.fused_kernels.kernel import MOST_LONG, product
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError
from ort_dynamo.passes.onnx.fused_kernels.pieces import share_of
from ort_dynamo.passes.onnx.fused_kernels.repeated import Shared, read_by, repeated
from ort_dynamo.passes.onnx.fused_kernels.row_operators import reduced_axes
from ort_dynamo.passes.onnx.fused_kernels.sizes import ValueSizes
from ort_dynamo.passes.onnx.fused_kernels.triton_spaces import DTYPES

__all__ = ["find_groups"]

MOST_INPUTS, MOST_OUTPUTS, MOST_NODES = 12, 6, 64
"""Limits of a kernel: more do not fit a thread's registers. Narrow inputs have a limit of their own."""

_MOST_NARROW = 12
_NARROW = 16
"""Ratio of the elements of a kernel's largest tensor to a narrow input's, such as a value for each row or column."""

_MOST_SIBLINGS = 16
"""Maximum number of readers of a tensor for which each pair is tried."""

_SMALL = 1 << 20
"""Elements of a tensor that a device reads in the time of a launch."""

_INDICES = (ir.DataType.INT32, ir.DataType.INT64)
_ADDED = (ir.DataType.DOUBLE, ir.DataType.FLOAT)

_COPIES = frozenset({"Concat", "Expand", "Gather", "Slice", "Split", "Transpose"})
"""Operators of MOVES for which a session copies its data; for the others it copies nothing."""

_FREE = MOVES - _COPIES


def find_groups(
    graph: ir.Graph, sizes: ValueSizes, finishing: Sequence[Sequence[ir.Node]] | None = None
) -> list[Group]:
    """Return the groups that become one kernel each: at least two nodes that compute, or one that needs a kernel.

    A node joins the groups that compute its inputs if they have the same points, or rows, and if no path leaves the
    group and returns. Then groups that read the same tensor are merged, and small ones that read the same kernel's.

    Args:
        graph: the graph; its values have types and shapes, as far as they are known.
        sizes: reads the shapes.
        finishing: the partial sums of each kernel. If there are any, no other sums over rows join.
    """
    found = _Search(graph, sizes, finishing)
    found.join_finishing()
    found.join_producers()
    found.join_siblings()
    found.join_small_siblings()
    return found.groups()


class _Search:
    def __init__(self, graph: ir.Graph, sizes: ValueSizes, finishing: Sequence[Sequence[ir.Node]] | None) -> None:
        self._in_parts, self._together = finishing is None, finishing or ()
        self._finishing = {node for nodes in self._together for node in nodes}
        self._sizes, self._nodes = sizes, list(graph)
        self._position = {node: position for position, node in enumerate(self._nodes)}
        self._kept = {value for value in graph.outputs if value is not None}
        self._of: dict[ir.Node, Cluster] = {}
        self._host = host_nodes(graph)
        for position, node in enumerate(self._nodes):
            cluster = self._of[node] = Cluster([node], 1 << position)
            for producer in self._producers(node):
                cluster.ancestors |= self._of[producer].bits | self._of[producer].ancestors
            is_read = any(output in self._kept or output.uses() for output in node.outputs)
            if is_read and node not in self._host and self._is_fusable(node):
                cluster.points, cluster.columns = self._space(node)
        for node in reversed(self._nodes):
            cluster = self._of[node]
            for producer in self._producers(node):
                self._of[producer].descendants |= cluster.bits | cluster.descendants

    def _producers(self, node: ir.Node) -> Iterator[ir.Node]:
        """Yield the nodes of this graph that a node or its subgraphs read from."""
        read = [*node.inputs]
        for attribute in node.attributes.values():
            if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
                read += [value for graph in graphs for inner in graph.all_nodes() for value in inner.inputs]
        for value in read:
            producer = None if value is None else value.producer()
            if producer is not None and producer in self._position and producer is not node:
                yield producer

    def _is_fusable(self, node: ir.Node) -> bool:
        values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
        if node.op_type in MOVES and not node.domain:
            data = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            if node.op_type != "Concat" and not self._has_known_shape(node):
                return False
            values = [value for value in (*data, *node.outputs) if value is not None]
        elif (axes := reduced_axes(node)) is not None:
            x = node.inputs[0]
            if x is None or self._sizes.find(x) is None or not 1 < self._width(x, axes).factor <= MOST_LONG:
                return False
            values = [
                v for v in (*node.inputs[: 1 if "Reduce" in node.op_type else None], *node.outputs) if v and v.name
            ]
        elif (summed := summed_axes(node)) is not None:
            x = node.inputs[0]
            if x is None or self._sizes.find(x) is None:
                return False
            rows, columns = product(self._sizes(x)[: summed.stop]), product(self._sizes(x)[summed.stop :])
            if columns.symbols or columns.factor < 2 or not rows.factor:
                return False
            if not self._in_parts and node not in self._finishing:
                return False
            values = [x, node.outputs[0]]
        elif node.op_type in ("GatherElements", "ScatterElements") and not node.domain:
            if not self._is_indexed_by_row(node):
                return False
        elif not computes(node):
            return False
        return all(self._is_taken(value) for value in values)

    def _has_known_shape(self, node: ir.Node) -> bool:
        """Check whether a node is given a constant shape, or one made of the shapes of tensors that kernels take."""
        sources = shape_sources(node)
        return sources is not None and all(
            self._sizes.find(one) is not None and one.dtype is not None and one.dtype.value in POINTERS
            for one in sources
        )

    def _is_indexed_by_row(self, node: ir.Node) -> bool:
        """Check whether GatherElements or ScatterElements has one index per row of an axis, and adds or sets floats."""
        data, indices = node.inputs[:2]
        if data is None or indices is None or self._sizes.find(data) is None or self._sizes.find(indices) is None:
            return False
        sizes, axis = list(self._sizes(data)), node.attributes.get_int("axis", 0)
        sizes[axis] = Size()
        if tuple(sizes) != self._sizes(indices) or indices.dtype not in _INDICES or data.dtype not in _ADDED:
            return False
        return node.attributes.get_string("reduction", "none") in ("none", "add")

    def _is_taken(self, value: ir.Value) -> bool:
        if value.producer() in self._host and is_of_sizes(value) and not is_host_number(value):
            return False  # on the host, and no argument of a launch
        shape = self._sizes.find(value)
        return value.dtype in DTYPES and shape is not None and all(size.factor for size in shape)

    def _width(self, x: ir.Value, axes: range) -> Size:
        width = product(self._sizes(x)[axes.start :])
        return Size(0) if width.symbols else width

    def _space(self, node: ir.Node) -> tuple[Size, tuple[Size, ...]]:
        axes, summed, x = reduced_axes(node), summed_axes(node), node.inputs[0]
        first = axes.start if axes is not None else None if summed is None else summed.stop
        if first is None or x is None:
            return self._sizes.count(node.outputs[0]), ()
        return self._sizes.count(x), self._sizes(x)[first:]

    # -- joining -------------------------------------------------------------------------------------------------------

    def join_finishing(self) -> None:
        """Join the sums of the parts that one kernel gives."""
        for first, *others in self._together:
            for other in others:
                self._try(self._of[first], self._of[other])

    def join_producers(self) -> None:
        """Join each node with the groups that make its inputs.

        A group that another input is made of joins after that one: until then a path leads through it.
        """
        for node in self._nodes:
            producers = list(self._producers(node))
            for producer in producers:
                self._try(self._of[producer], self._of[node])
            if any(self._of[later] is self._of[node] for later in producers[1:]):
                for producer in producers[:-1]:
                    self._try(self._of[producer], self._of[node])

        for node in self._nodes:  # a tensor of which the parts have become one group
            for producer in self._producers(node):
                if producer.op_type in _COPIES and not producer.domain:
                    self._try(self._of[producer], self._of[node])

    def join_siblings(self) -> None:
        """Join groups that read the same tensor."""
        readers: dict[ir.Value, list[ir.Node]] = {}
        for node in self._nodes:
            for value in node.inputs:
                if value is None or self._sizes.find(value) is None:
                    continue
                if self._of[node].points is not None and number_of(value) is None:
                    readers.setdefault(value, []).append(node)
        for value, nodes in readers.items():
            count = self._sizes.count(value)
            same = [node for node in nodes if self._of[node].points == count]
            for first, second in itertools.combinations(same[:_MOST_SIBLINGS], 2):
                self._try(self._of[first], self._of[second])

    def join_small_siblings(self) -> None:
        """Join small groups that read results of one group: a launch takes longer than their bytes."""
        readers: dict[Cluster, list[ir.Node]] = {}
        for node in self._nodes:
            points = self._of[node].points
            if points is not None and _usual_number(points) <= _SMALL:
                made = (behind(value, _FREE).producer() for value in node.inputs if value is not None)
                for cluster in dict.fromkeys(self._of[one] for one in made if one is not None and one in self._of):
                    if cluster.points is not None and cluster is not self._of[node]:
                        readers.setdefault(cluster, []).append(node)
        for nodes in readers.values():
            for first, second in itertools.combinations(nodes[:_MOST_SIBLINGS], 2):
                if self._of[first].points == self._of[second].points:
                    self._try(self._of[first], self._of[second])

    def _try(self, first: Cluster, second: Cluster) -> None:
        """Make one group of two, if that is a kernel and leaves the graph without a circle."""
        if first is second or first.points is None or second.points is None:
            return
        space = joined_space(first, second) or self._with_piece(first, second) or self._with_total(first, second)
        if space is None or self._has_way_around(first, second):
            return
        group = self._group(self._in_order([*first.nodes, *second.nodes]), space[1])
        if self._is_kernel(group):
            self._merge(first, second, *space)

    def _with_piece(self, piece: Cluster, whole: Cluster) -> tuple[Size, tuple[Size, ...]] | None:
        """Return the points and the columns of a group with one that makes a piece of its concatenation."""
        assert piece.points is not None
        assert whole.points is not None
        made = {output for node in piece.nodes for output in node.outputs}
        joins = [node for node in whole.nodes if node.op_type == "Concat"]
        shares = {share_of(node, value, self._sizes) for node in joins for value in node.inputs if value in made}
        fits = any(piece.points * Size(share.denominator) == whole.points * Size(share.numerator) for share in shares)
        return (whole.points, whole.columns) if fits and not piece.columns else None

    def _with_total(self, sums: Cluster, reader: Cluster) -> tuple[Size, tuple[Size, ...]] | None:
        """Return the points and the columns of a group that sums over rows with one that computes of the sums."""
        assert sums.points is not None
        width = product(sums.columns)
        if not sums.columns or reader.columns or reader.points != width:
            return None
        inside = set(sums.nodes)
        read = {producer for node in reader.nodes for producer in self._producers(node) if producer in inside}
        is_of_columns = all(self._sizes.count(node.outputs[0]) == width for node in read)
        return (sums.points, sums.columns) if read and is_of_columns else None

    def _has_way_around(self, first: Cluster, second: Cluster) -> bool:
        """Check whether a path between two clusters leads through a third."""
        return bool(first.descendants & second.ancestors or second.descendants & first.ancestors)

    def _merge(self, first: Cluster, second: Cluster, points: Size, columns: tuple[Size, ...]) -> None:
        both = first.bits | second.bits
        before, after = ((first.ancestors | second.ancestors) & ~both, (first.descendants | second.descendants) & ~both)
        # Who comes before, or after, only one of the two knows of the other one from now on.
        for cluster in self._at((first.descendants ^ second.descendants) & ~both):
            cluster.ancestors |= before | both
        for cluster in self._at((first.ancestors ^ second.ancestors) & ~both):
            cluster.descendants |= after | both
        first.bits, first.ancestors, first.descendants = both, before, after
        first.nodes += second.nodes
        first.points, first.columns = points, columns
        for node in second.nodes:
            self._of[node] = first

    def _at(self, bits: int) -> Iterator[Cluster]:
        """Yield the clusters that have these nodes, each once."""
        while bits:
            cluster = self._of[self._nodes[(bits & -bits).bit_length() - 1]]
            yield cluster
            bits &= ~cluster.bits

    # -- the resulting groups --------------------------------------------------------------------------------------

    def groups(self) -> list[Group]:
        """Return the groups, in the order of their last nodes."""
        chosen: list[Group] = []
        for cluster in dict.fromkeys(self._of.values()):
            nodes = self._without_edges(self._in_order(cluster.nodes))
            if cluster.points is not None and _pays(nodes):
                group = self._group(nodes, cluster.columns)
                alone = (self._group([node], ()) for node in nodes if needs_kernel(node))
                chosen += [group] if self._is_kernel(group) else filter(self._is_kernel, alone)
        chosen.sort(key=lambda group: self._position[group.nodes[-1]])
        return Shared(chosen, [self._repeated(group) for group in chosen], self._kept).groups(self._in_order)

    def _repeated(self, group: Group) -> frozenset[ir.Node]:
        """Return the arithmetic that a group recomputes, of fewer bytes than it would read."""
        for found in repeated(group.nodes, self._cost, self._may_repeat):
            more = self._group(self._in_order([*group.nodes, *found]), group.columns)
            if found and self._is_kernel(more):
                return found
        return frozenset()

    def _may_repeat(self, node: ir.Node) -> bool:
        return (
            node in self._position and self._of[node].points is not None and (node.op_type in _FREE or computes(node))
        )

    def _cost(self, value: ir.Value) -> int:
        """About the bytes of reading a value, and of writing it if kernels alone read it.

        A number on the host is an argument of a launch, which is free.
        """
        shape, node = self._sizes.find(value), value.producer()
        if shape is None or value.dtype is None or is_host_number(value):
            return 0
        is_there = node is None or value in self._kept or node not in self._position or self._of[node].points is None
        is_there = is_there or any(self._of[reader].points is None for reader, _ in value.uses() if reader in self._of)
        return int(_usual_number(product(shape)) * value.dtype.itemsize) * (1 if is_there else 2)

    def _is_kernel(self, group: Group) -> bool:
        if not self._is_within_limits(group):
            return False
        try:
            kernel_of(group, self._sizes, in_parts=self._in_parts)
        except CannotFuseError:
            return False
        return True

    def _is_within_limits(self, group: Group) -> bool:
        inputs, outputs = (list(map(self._count, values)) for values in (group.inputs, group.outputs))
        symbols, factor = max(inputs + outputs, default=(0, 0))
        narrow = sum(one[0] < symbols or one[1] * _NARROW <= factor for one in inputs)
        few = narrow <= _MOST_NARROW and len(inputs) - narrow <= MOST_INPUTS
        return few and len(outputs) <= MOST_OUTPUTS and len(group.nodes) <= MOST_NODES

    def _count(self, value: ir.Value) -> tuple[int, int]:
        """Give how many symbols are in the number of a value's elements, and its constant factor."""
        count = product(self._sizes.find(value) or ())  # no kernel reads a value of unknown shape
        return len(count.symbols), count.factor

    def _in_order(self, nodes: Iterable[ir.Node]) -> list[ir.Node]:
        return sorted(nodes, key=self._position.__getitem__)

    def _group(self, nodes: Sequence[ir.Node], columns: tuple[Size, ...]) -> Group:
        inside = frozenset(nodes)
        outputs = [value for node in nodes for value in node.outputs if self._is_read(value, inside)]
        return Group(tuple(nodes), tuple(read_by(nodes)), tuple(outputs), columns)

    def _is_read(self, value: ir.Value, inside: frozenset[ir.Node]) -> bool:
        """Check whether a node outside of `inside` reads a value, or the graph returns it."""
        return value in self._kept or any(node not in inside for node, _ in value.uses())

    def _without_edges(self, nodes: list[ir.Node]) -> list[ir.Node]:
        """Return the nodes but for reshapes of the group's inputs or outputs, which cost nothing outside."""
        inside = set(nodes)
        while True:
            edges = {
                node
                for node in inside
                if node.op_type in _FREE
                and (
                    not any(reader in inside for reader, _ in node.outputs[0].uses())
                    or (node.inputs[0] is not None and node.inputs[0].producer() not in inside)
                )
            }
            if not edges:
                return self._in_order(inside)
            inside -= edges


def _usual_number(size: Size) -> int:
    """Return a size, with a thousand for each symbol."""
    return size.factor * 1000 ** len(size.symbols)


def _pays(nodes: Sequence[ir.Node]) -> bool:
    """Check whether a fused kernel pays off.

    It has several nodes, or one that ONNX Runtime lacks or is slow at.
    """
    several = sum(node.op_type not in _FREE for node in nodes) > 1
    return several or any(needs_kernel(node) or summed_axes(node) is not None for node in nodes)
