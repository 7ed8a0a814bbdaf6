"""The minimum cut is the cheapest of all cuts."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from ort_dynamo.passes.onnx.cast_propagation.minimum_cut import SINK, SOURCE, FlowNetwork

INNER = (2, 3, 4, 5)
Edge = tuple[int, int, int | None]

edges = st.tuples(
    st.sampled_from((SOURCE, *INNER)),
    st.sampled_from((SINK, *INNER)),
    st.one_of(st.integers(0, 4), st.none()),
).filter(lambda edge: edge[0] != edge[1] and edge != (SOURCE, SINK, None))


def cost(side: set[int], network: list[Edge]) -> float:
    cut = [capacity for tail, head, capacity in network if tail in side and head not in side]
    return sum(float("inf") if capacity is None else capacity for capacity in cut)


@given(st.lists(edges, max_size=12))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_it_is_the_largest_of_the_cheapest(drawn: list[Edge]) -> None:
    subsets = chain.from_iterable(combinations(INNER, size) for size in range(len(INNER) + 1))
    sides = [{SOURCE, *subset} for subset in subsets]
    least = min(cost(side, drawn) for side in sides)
    if least == float("inf"):
        return  # such networks have no cut, and are never made
    network = FlowNetwork()
    assert tuple(network.vertex() for _ in INNER) == INNER
    for edge in drawn:
        network.edge(*edge)
    found = network.source_side()
    cheapest = [side for side in sides if cost(side, drawn) == least]
    assert found == set().union(*cheapest)
    assert found in cheapest
