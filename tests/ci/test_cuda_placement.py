"""Tests of reading a model's placement off ONNX Runtime's log."""

from __future__ import annotations

from cuda_placement import read_log

WHOLE = """\
2026-01-01 [V:onnxruntime:, session_state.cc:1280 VerifyEachNodeIsAssignedToAnEp] Node placements
2026-01-01 [V:onnxruntime:, session_state.cc:1283 VerifyEachNodeIsAssignedToAnEp]  All nodes placed on [CUDAExecutionProvider]. Number of nodes: 7
"""  # noqa: E501

COPIES = """\
2026-01-01 [W:onnxruntime:, transformer_memcpy.cc:111 ApplyImpl] 1 Memcpy nodes are added to the graph g for CUDAExecutionProvider. It might have negative impact on performance (including unable to run CUDA graph).
"""  # noqa: E501

PARTLY = """\
2026-01-01 [V:onnxruntime:, session_state.cc:1280 VerifyEachNodeIsAssignedToAnEp] Node placements
2026-01-01 [V:onnxruntime:, session_state.cc:1288 VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [CPUExecutionProvider]. Number of nodes: 1
2026-01-01 [V:onnxruntime:, session_state.cc:1290 VerifyEachNodeIsAssignedToAnEp]   BitwiseAnd (and)
2026-01-01 [V:onnxruntime:, session_state.cc:1288 VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [CUDAExecutionProvider]. Number of nodes: 2
2026-01-01 [V:onnxruntime:, session_state.cc:1290 VerifyEachNodeIsAssignedToAnEp]   MemcpyToHost (Memcpy)
2026-01-01 [V:onnxruntime:, session_state.cc:1290 VerifyEachNodeIsAssignedToAnEp]   Relu (relu)
"""  # noqa: E501


def test_a_model_that_is_whole_on_cuda() -> None:
    found = read_log(WHOLE)
    assert (found.cuda, dict(found.cpu), found.copies) == (7, {}, 0)
    assert found.is_whole


def test_a_node_on_the_cpu_and_a_copy_are_seen() -> None:
    found = read_log(COPIES + PARTLY)
    assert (found.cuda, dict(found.cpu), found.copies) == (2, {"BitwiseAnd": 1}, 1)
    assert not found.is_whole


def test_a_copy_is_seen_where_all_nodes_are_on_cuda() -> None:
    """The provider does not list them then."""
    found = read_log(COPIES + WHOLE)
    assert (found.cuda, dict(found.cpu), found.copies) == (7, {}, 1)
    assert not found.is_whole


def test_arithmetic_of_sizes_may_be_on_the_cpu() -> None:
    found = read_log(PARTLY.replace("BitwiseAnd (and)", "Squeeze (size)").replace("MemcpyToHost (Memcpy)", "Add (sum)"))
    assert (found.cuda, dict(found.cpu), found.copies) == (2, {"Squeeze": 1}, 0)
    assert found.is_whole


def test_log_without_a_placement_is_not_whole() -> None:
    assert not read_log("ImportError: libcudart.so.13").is_whole
    assert not read_log(WHOLE.replace("CUDA", "CPU")).is_whole
