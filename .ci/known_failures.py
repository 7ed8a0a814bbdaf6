"""Known failures of some versions, with the reasons that docs/reference/versions.md gives."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A failure that is known, and the versions that have it."""

    where: str  # for the page
    what: str
    why: str
    tests: str  # a regular expression for node ids; files move between folders, and records of runs stay
    versions: tuple[tuple[str, str], ...]  # package, a regular expression for its version; all hold
    python: str = ".*"

    def holds(self, python: str, versions: dict[str, str], test: str) -> bool:
        """Tell whether this is why a test failed with some versions."""
        return (
            re.fullmatch(self.python, python) is not None
            and re.fullmatch(self.tests, test) is not None
            and all(re.fullmatch(pattern, versions.get(package, "none")) for package, pattern in self.versions)
        )


KNOWN: tuple[Known, ...] = (
    Known(
        where="torch 2.11.0, 2.12.1",
        what="`binary_cross_entropy` with a weight and symbolic sizes",
        why="Dynamo fails on it with fake tensors (`expected int at position 0, but got: SymInt`), before any backend.",
        tests=r"tests/(\w+/)*test_loss\.py::test_binary_cross_entropy_equals_eager\[.*\]",
        versions=(("torch", r"2\.1[12]\..*"),),
    ),
    Known(
        where="torch 2.12.1",
        what="gradients of a compiled graph that returns an expanded tensor",
        why="AOTAutograd copies the tangent into expanded memory and fails, with `aot_eager` too.",
        tests=r"tests/test_backend\.py::test_inputs_and_views_as_outputs\[views of results\]",
        versions=(("torch", r"2\.12\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="a direct call of the gradient operator of `nll_loss`, with a gradient of one element for several targets",
        why="The operator's call with fake tensors raises, before any backend.",
        tests=r"tests/(\w+/)*test_nll\.py::test_the_gradient_of_one_sample_reads_the_first_target\[.*several.*\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="`quantile` in one graph",
        why="In this torch it calls `aten.equal`, where Dynamo breaks the graph.",
        tests=r"tests/(\w+/)*test_order_statistics\.py::test_quantiles_and_gradients_equal_eager\[.*\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="gradients of `aminmax` and `narrow_copy`, losses of mixed dtypes, and "
        "`_scaled_dot_product_fused_attention_overrideable`",
        why="In this torch, eager mode has no gradient either, or raises.",
        tests=r"tests/(\w+/)*(test_reduction\.py::test_extrema_of_all_equal_eager\[aminmax\]"
        r"|test_views\.py::test_copies_of_views_equal_eager\[narrow-.*\]"
        r"|test_loss\.py::test_loss_of_mixed_dtypes_equals_eager"
        r"|test_attention\.py::test_attention_operators_of_other_devices_equal_the_formula\[overrideable-.*\])",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="gradients of a module whose `requires_grad` changes between calls",
        why="AOTAutograd returns no gradient for some trainable parameters, with `aot_eager` too.",
        tests=r"tests/(\w+/)*test_(semantics|gradients)\.py::test_gradients\[of_a_frozen_part\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="Mixtral of transformers 5.0",
        why="It calls `torch._grouped_mm` on a CPU. The call with fake tensors raises, before any backend.",
        tests=r"tests/(\w+/)*test_architectures\.py::test_a_training_step_equals_eager\[mixtral\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="the final states of an LSTM in training have an additional axis of size 1",
        why="The same with `aot_eager`. Fixed since: our own formula replaces torch's, and the test passes.",
        tests=r"tests/(\w+/)*test_recurrent\.py::test_layers_that_train_equal_eager\[LSTM\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="pytest 8.3.0",
        what="tests that run in a separate process",
        why="They imported a helper that this pytest does not find. Fixed since, and the tests pass.",
        tests=r"tests/(\w+/)*test_alone\.py::.*",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="onnx 1.18.0",
        what="tests of cast propagation in bfloat16",
        why="They compare with onnx's reference evaluator, which computes bfloat16 as uint16 in this release. "
        "The pass itself is right.",
        tests=r"tests/(\w+/)*test_propagate_casts_(operators\.py::.*-BFLOAT16\]"
        r"|properties\.py::.*)",
        versions=(("onnx", r"1\.18\..*"),),
    ),
    Known(
        where="onnx 1.18.0",
        what="two tests that compare models by their text",
        why="This release does not print the values of a float16 initializer that a pass created.",
        tests=r"tests/(\w+/)*test_propagate_casts\.py::test_a(n_initializer_beside|_constant_that).*",
        versions=(("onnx", r"1\.18\..*"),),
    ),
    Known(
        where="all versions",
        what="the tests of this page",
        why="They compare the page with the records while the run writes them. Runs leave these tests out now.",
        tests=r"tests/(\w+/)*test_versions\.py::.*",
        versions=(),
    ),
)
