"""Finds the minimum cut of a directed graph (Dinic, "Algorithm for solution of a problem of maximum flow", 1970)."""

from __future__ import annotations

from collections import deque

__all__ = ["SINK", "SOURCE", "FlowNetwork"]

SOURCE, SINK = 0, 1


class FlowNetwork:
    """Vertices are ints, SOURCE and SINK among them; capacities are ints, None where an edge can never be cut."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # vertex -> the indices of its edges
        self._head: list[int] = []  # edge -> the vertex it leads to; edge ^ 1 is its reverse
        self._room: list[float] = []  # edge -> capacity that is left; finite ones are exact ints

    def vertex(self) -> int:
        """Add a vertex."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, tail: int, head: int, capacity: int | None) -> None:
        """Add an edge from `tail` to `head`."""
        for start, end, room in ((tail, head, float("inf") if capacity is None else capacity), (head, tail, 0)):
            self._edges[start].append(len(self._head))
            self._head.append(end)
            self._room.append(room)

    def source_side(self) -> set[int]:
        """Find the largest set of vertices with SOURCE and without SINK that a minimum cut separates from the rest.

        The edges out of the set cost least; among sets that cost the same, this one contains all others. At least one
        edge of every path from SOURCE to SINK must have a capacity.
        """
        while (level := self._levels())[SINK] >= 0:
            following = [0] * len(self._edges)
            while self._augment(level, following):
                pass
        reaching, queue = {SINK}, deque([SINK])
        while queue:  # nodes that still reach SINK; all others can be on the source's side for the same price
            for edge in self._edges[queue.popleft()]:
                if self._room[edge ^ 1] > 0 and self._head[edge] not in reaching:
                    reaching.add(self._head[edge])
                    queue.append(self._head[edge])
        return set(range(len(self._edges))) - reaching

    def _levels(self) -> list[int]:
        """Vertex -> its distance from SOURCE, in edges with residual capacity; -1 if there is no path."""
        level = [-1] * len(self._edges)
        level[SOURCE] = 0
        queue = deque([SOURCE])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                if self._room[edge] > 0 and level[self._head[edge]] < 0:
                    level[self._head[edge]] = level[vertex] + 1
                    queue.append(self._head[edge])
        return level

    def _augment(self, level: list[int], following: list[int]) -> bool:
        """Fill one shortest path; `following` counts the edges of each vertex that lead nowhere any more."""
        path: list[int] = []
        vertex = SOURCE
        while vertex != SINK:
            edges = self._edges[vertex]
            while following[vertex] < len(edges):
                edge = edges[following[vertex]]
                if self._room[edge] > 0 and level[self._head[edge]] == level[vertex] + 1:
                    break
                following[vertex] += 1
            else:
                if not path:
                    return False
                vertex = self._head[path.pop() ^ 1]
                following[vertex] += 1
                continue
            path.append(edge)
            vertex = self._head[edge]
        flow = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= flow
            self._room[edge ^ 1] += flow
        return True
