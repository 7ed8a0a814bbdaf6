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
    tests: str  # a regular expression for node ids
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
        tests=r"tests/lowering/ops/test_loss\.py::test_binary_cross_entropy_equals_eager\[.*\]",
        versions=(("torch", r"2\.1[12]\..*"),),
    ),
    Known(
        where="torch 2.12.1",
        what="gradients of a compiled graph that returns an expanded tensor",
        why="AOTAutograd copies the tangent into expanded memory, and fails; so it does under `aot_eager`.",
        tests=r"tests/test_backend\.py::test_inputs_and_views_as_outputs\[views of results\]",
        versions=(("torch", r"2\.12\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="the gradient of `nll_loss` called by hand, with a gradient of one element for several targets",
        why="The fake tensor call refuses it, before any backend.",
        tests=r"tests/lowering/ops/test_nll\.py::test_the_gradient_of_one_sample_reads_the_first_target\[.*several.*\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="`quantile` in one graph",
        why="Dynamo ends the graph at `aten.equal`, which this torch calls in it.",
        tests=r"tests/lowering/ops/test_order_statistics\.py::test_quantiles_and_gradients_equal_eager\[.*\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="gradients of `aminmax` and `narrow_copy`, losses of mixed dtypes, and "
        "`_scaled_dot_product_fused_attention_overrideable`",
        why="Eager itself has none, or raises, in this torch.",
        tests=r"tests/lowering/ops/(test_reduction\.py::test_extrema_of_all_equal_eager\[aminmax\]"
        r"|test_views\.py::test_copies_of_views_equal_eager\[narrow-.*\]"
        r"|test_loss\.py::test_loss_of_mixed_dtypes_equals_eager"
        r"|test_attention\.py::test_attention_operators_of_other_devices_equal_the_formula\[overrideable-.*\])",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="gradients of a module whose parameters are frozen and thawed between calls",
        why="AOTAutograd gives none to some that train; so it does under `aot_eager`.",
        tests=r"tests/test_semantics\.py::test_gradients\[of_a_frozen_part\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="Mixtral of transformers 5.0",
        why="The fake call of `torch._grouped_mm`, which that transformers makes on a CPU, raises, before any backend.",
        tests=r"tests/test_architectures\.py::test_a_training_step_equals_eager\[mixtral\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="torch 2.11.0",
        what="the final states of an LSTM that trains have an axis of one too many",
        why="So they have under `aot_eager`. Mended since by a formula of our own, and seen to pass.",
        tests=r"tests/lowering/ops/test_recurrent\.py::test_layers_that_train_equal_eager\[LSTM\]",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="pytest 8.3.0",
        what="tests that run in a process of their own",
        why="They imported a helper that the oldest pytest does not find. Mended since, and seen to pass.",
        tests=r"tests/report/test_alone\.py::.*",
        versions=(("torch", r"2\.11\..*"),),
    ),
    Known(
        where="onnx 1.18.0",
        what="tests of cast propagation in bfloat16",
        why="They compare with onnx's reference evaluator, which computes bfloat16 as uint16 in this release. "
        "The pass is not at fault.",
        tests=r"tests/passes/onnx/cast_propagation/test_propagate_casts_(operators\.py::.*-BFLOAT16\]"
        r"|properties\.py::.*)",
        versions=(("onnx", r"1\.18\..*"),),
    ),
    Known(
        where="onnx 1.18.0",
        what="two tests that compare models by their text",
        why="This release prints no values of a float16 initializer that a pass has made.",
        tests=r"tests/passes/onnx/cast_propagation/test_propagate_casts\.py::test_a(n_initializer_beside|_constant_that).*",
        versions=(("onnx", r"1\.18\..*"),),
    ),
    Known(
        where="any",
        what="the tests of this page",
        why="They compare it with the records, which the run was making. Cells leave them out by now.",
        tests=r"tests/ci/test_versions\.py::.*",
        versions=(),
    ),
)
