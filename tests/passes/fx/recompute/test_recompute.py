"""The recomputation policies: a joint graph in, tags out; and beside each match its nearest non-match."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import assert_tags, recomputed, saved_bytes, weight
from run_twice import run_twice
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ort_dynamo.fx_testing import assert_fx_untouched
from ort_dynamo.graph.marks import DECIDED_BY, RECOMPUTE
from ort_dynamo.options.groups import RecomputeOptions
from ort_dynamo.options.plan_grammar import read_plans
from ort_dynamo.passes.fx.analysis.layers import find_layers
from ort_dynamo.passes.fx.analysis.plans import plan_rows
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, can_recompute, is_random, must_recompute
from ort_dynamo.passes.fx.recompute.recompute_attention_dropout import RecomputeAttentionDropout
from ort_dynamo.passes.fx.recompute.recompute_gelu import RecomputeGelu
from ort_dynamo.passes.fx.recompute.recompute_layers import RecomputeLayers
from ort_dynamo.passes.fx.recompute.recompute_to_budget import RecomputeToBudget
from ort_dynamo.passes.pipelines import recompute_passes

Capture = Callable[..., GraphModule]


# -- GELU --------------------------------------------------------------------------------------------------------


def test_a_gelu_that_a_product_reads_is_recomputed(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) @ w).sum(), weight(2, 3), weight(3, 4))
    assert_tags(
        RecomputeGelu(),
        gm,
        """
        gelu = aten.gelu.default(primals_1)  # f32[2, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(gelu, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )


def test_views_of_a_recomputed_gelu_are_not_saved_in_its_place(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) @ w).sum(), weight(2, 2, 3), weight(3, 4))
    assert_tags(
        RecomputeGelu(),
        gm,
        """
        gelu = aten.gelu.default(primals_1)  # f32[2, 2, 3] | MUST_RECOMPUTE
        view = aten.view.default(gelu, [4, 3])  # f32[4, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(view, primals_2)  # f32[4, 4]
        _unsafe_view = aten._unsafe_view.default(mm, [2, 2, 4])  # f32[2, 2, 4]
        sum = aten.sum.default(_unsafe_view)  # f32[]
        """,
    )


def test_a_gelu_that_no_matmul_reads_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) * w).sum(), weight(2, 3), weight(2, 3))
    assert_fx_untouched(RecomputeGelu(), gm)


def test_the_tanh_gelu_spelled_out_is_recomputed(joint_graph: Capture) -> None:
    def new_gelu(x: Tensor, w: Tensor) -> Tensor:
        inner = 0.7978845608 * (x + 0.044715 * x**3)
        return ((0.5 * x * (1 + torch.tanh(inner))) @ w).sum()

    gm = joint_graph(new_gelu, weight(2, 3), weight(3, 4))
    assert_tags(
        RecomputeGelu(),
        gm,
        """
        pow = aten.pow.Tensor_Scalar(primals_1, 3)  # f32[2, 3] | MUST_RECOMPUTE
        mul = aten.mul.Tensor(pow, 0.044715)  # f32[2, 3] | MUST_RECOMPUTE
        add = aten.add.Tensor(primals_1, mul)  # f32[2, 3] | MUST_RECOMPUTE
        mul_1 = aten.mul.Tensor(add, 0.7978845608)  # f32[2, 3] | MUST_RECOMPUTE
        mul_2 = aten.mul.Tensor(primals_1, 0.5)  # f32[2, 3] | MUST_RECOMPUTE
        tanh = aten.tanh.default(mul_1)  # f32[2, 3] | MUST_RECOMPUTE
        add_1 = aten.add.Tensor(tanh, 1)  # f32[2, 3] | MUST_RECOMPUTE
        mul_3 = aten.mul.Tensor(mul_2, add_1)  # f32[2, 3] | MUST_RECOMPUTE
        mm = aten.mm.default(mul_3, primals_2)  # f32[2, 4]
        sum = aten.sum.default(mm)  # f32[]
        """,
    )


def test_a_gate_of_two_inputs_is_not_a_gelu(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, y, w: ((torch.tanh(x) * y) @ w).sum(), weight(2, 3), weight(2, 3), weight(3, 4))
    assert_fx_untouched(RecomputeGelu(), gm)


# -- attention dropout -------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(1, 2), -1)
    return (F.dropout(weights, 0.5) @ v).sum()


def test_dropout_between_softmax_and_values_is_recomputed_from_the_saved_mask(joint_graph: Capture) -> None:
    gm = joint_graph(attention, weight(2, 3, 4), weight(2, 3, 4), weight(2, 3, 4))
    joint = JointGraph(gm)
    before = joint.cut(()).nbytes
    assert_tags(
        RecomputeAttentionDropout(),
        gm,
        """
        transpose = aten.transpose.int(primals_1, 1, 2)  # f32[2, 4, 3] strides (12, 1, 4)
        expand = aten.expand.default(primals_2, [2, 3, 4])  # f32[2, 3, 4]
        view = aten.view.default(expand, [2, 3, 4])  # f32[2, 3, 4]
        expand_1 = aten.expand.default(transpose, [2, 4, 3])  # f32[2, 4, 3] strides (12, 1, 4)
        view_1 = aten.view.default(expand_1, [2, 4, 3])  # f32[2, 4, 3] strides (12, 1, 4)
        bmm = aten.bmm.default(view, view_1)  # f32[2, 3, 3]
        view_2 = aten.view.default(bmm, [2, 3, 3])  # f32[2, 3, 3]
        _softmax = aten._softmax.default(view_2, -1, False)  # f32[2, 3, 3]
        bernoulli = ort_dynamo.bernoulli.default([2, 3, 3], [9, 3, 1], 0.5)
            # bool[2, 3, 3] | MUST_SAVE | random
        _to_copy = aten._to_copy.default(bernoulli, dtype=f32)  # f32[2, 3, 3] | MUST_RECOMPUTE
        div = aten.div.Tensor(_to_copy, 0.5)  # f32[2, 3, 3] | MUST_RECOMPUTE
        mul = aten.mul.Tensor(_softmax, div)  # f32[2, 3, 3] | MUST_RECOMPUTE
        expand_2 = aten.expand.default(mul, [2, 3, 3])  # f32[2, 3, 3] | MUST_RECOMPUTE
        view_3 = aten.view.default(expand_2, [2, 3, 3])  # f32[2, 3, 3] | MUST_RECOMPUTE
        expand_3 = aten.expand.default(primals_3, [2, 3, 4])  # f32[2, 3, 4]
        view_4 = aten.view.default(expand_3, [2, 3, 4])  # f32[2, 3, 4]
        bmm_1 = aten.bmm.default(view_3, view_4)  # f32[2, 3, 4]
        view_5 = aten.view.default(bmm_1, [2, 3, 4])  # f32[2, 3, 4]
        sum = aten.sum.default(view_5)  # f32[]
        """,
    )
    kept = joint.cut([node for node in joint.forward if must_recompute(node)])
    assert before - kept.nbytes == 2 * 3 * 3 * 4  # the dropped weights, float32


def test_dropout_that_no_softmax_feeds_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, v: (F.dropout(x.exp(), 0.5) @ v).sum(), weight(2, 3, 3), weight(2, 3, 4))
    assert_fx_untouched(RecomputeAttentionDropout(), gm)


# -- layers ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block that keeps several tensors."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_all_layers_but_the_last_save_only_their_inputs(joint_graph: Capture) -> None:
    gm = joint_graph(Stack(Block(), Block(), Block()), torch.randn(5, 4))
    assert [layer.name.split(".", 1)[1] for layer in find_layers(JointGraph(gm))] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    assert_tags(
        RecomputeLayers(),
        gm,
        """
        native_layer_norm = aten.native_layer_norm.default(primals_3, [4], primals_1, primals_2, 1e-05)
            # MUST_RECOMPUTE
        getitem = native_layer_norm[0]  # f32[5, 4] | MUST_RECOMPUTE
        getitem_1 = native_layer_norm[1]  # f32[5, 1] | MUST_RECOMPUTE
        getitem_2 = native_layer_norm[2]  # f32[5, 1] | MUST_RECOMPUTE
        t = aten.t.default(primals_4)  # f32[4, 8] strides (1, 4) | MUST_RECOMPUTE
        addmm = aten.addmm.default(primals_5, getitem, t)  # f32[5, 8] | MUST_RECOMPUTE
        tanh = aten.tanh.default(addmm)  # f32[5, 8] | MUST_RECOMPUTE
        t_1 = aten.t.default(primals_6)  # f32[8, 4] strides (1, 8) | MUST_RECOMPUTE
        addmm_1 = aten.addmm.default(primals_7, tanh, t_1)  # f32[5, 4] | MUST_RECOMPUTE
        add = aten.add.Tensor(primals_3, addmm_1)  # f32[5, 4] | MUST_SAVE
        native_layer_norm_1 = aten.native_layer_norm.default(add, [4], primals_8, primals_9, 1e-05)
            # MUST_RECOMPUTE
        getitem_3 = native_layer_norm_1[0]  # f32[5, 4] | MUST_RECOMPUTE
        getitem_4 = native_layer_norm_1[1]  # f32[5, 1] | MUST_RECOMPUTE
        getitem_5 = native_layer_norm_1[2]  # f32[5, 1] | MUST_RECOMPUTE
        t_2 = aten.t.default(primals_10)  # f32[4, 8] strides (1, 4) | MUST_RECOMPUTE
        addmm_2 = aten.addmm.default(primals_11, getitem_3, t_2)  # f32[5, 8] | MUST_RECOMPUTE
        tanh_1 = aten.tanh.default(addmm_2)  # f32[5, 8] | MUST_RECOMPUTE
        t_3 = aten.t.default(primals_12)  # f32[8, 4] strides (1, 8) | MUST_RECOMPUTE
        addmm_3 = aten.addmm.default(primals_13, tanh_1, t_3)  # f32[5, 4] | MUST_RECOMPUTE
        add_1 = aten.add.Tensor(add, addmm_3)  # f32[5, 4] | MUST_SAVE
        native_layer_norm_2 = aten.native_layer_norm.default(add_1, [4], primals_14, primals_15, 1e-05)
        getitem_6 = native_layer_norm_2[0]  # f32[5, 4]
        getitem_7 = native_layer_norm_2[1]  # f32[5, 1]
        getitem_8 = native_layer_norm_2[2]  # f32[5, 1]
        t_4 = aten.t.default(primals_16)  # f32[4, 8] strides (1, 4)
        addmm_4 = aten.addmm.default(primals_17, getitem_6, t_4)  # f32[5, 8]
        tanh_2 = aten.tanh.default(addmm_4)  # f32[5, 8]
        t_5 = aten.t.default(primals_18)  # f32[8, 4] strides (1, 8)
        addmm_5 = aten.addmm.default(primals_19, tanh_2, t_5)  # f32[5, 4]
        add_2 = aten.add.Tensor(add_1, addmm_5)  # f32[5, 4]
        sum = aten.sum.default(add_2)  # f32[]
        """,
    )
    kept = JointGraph(gm).cut([n for n in JointGraph(gm).forward if must_recompute(n)]).saved
    assert [k.nodes[0].name for k in kept] == ["add", "add_1", "getitem_6", "getitem_7", "getitem_8", "tanh_2"]


def test_as_many_layers_as_asked_for_are_recomputed_from_the_first(joint_graph: Capture) -> None:
    gm = joint_graph(Stack(Block(), Block(), Block()), torch.randn(5, 4))
    assert run_twice(RecomputeLayers(count=1), gm)
    first = ("native_layer_norm", "getitem", "getitem_1", "getitem_2", "t", "addmm", "tanh", "t_1", "addmm_1")
    assert tuple(recomputed(gm)) == first


def test_too_great_a_count_is_lowered_with_a_warning(joint_graph: Capture) -> None:
    gm = joint_graph(Stack(Block(), Block()), torch.randn(5, 4))
    with pytest.warns(UserWarning, match="layers:7 is asked for; of the 2 layers found, the first 1"):
        RecomputeLayers(count=7)(gm)


def test_layers_are_found_in_a_function_without_modules(joint_graph: Capture) -> None:
    def network(x: Tensor, *weights: Tensor) -> Tensor:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + torch.tanh(torch.tanh(x @ up) @ down)
        return x.sum()

    gm = joint_graph(network, torch.randn(5, 4), *(weight(4, 4) for _ in range(6)))
    names = [layer.name for layer in find_layers(JointGraph(gm))]
    assert names == ["nodes mm to add", "nodes mm_2 to add_1", "nodes mm_4 to add_2"]


def test_one_module_applied_many_times_is_as_many_layers(joint_graph: Capture) -> None:
    block = Block()
    gm = joint_graph(Stack(*[block] * 3), torch.randn(5, 4))
    assert len(find_layers(JointGraph(gm))) == 3


def test_a_decoder_has_layers_though_the_encoders_result_lives_through_all_of_them(joint_graph: Capture) -> None:
    def decoder(x: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
        memory = torch.tanh(memory @ weights[0])
        for w in weights[1:]:
            x = x + torch.tanh(torch.tanh(x @ w) @ memory) @ w
        return x.sum()

    gm = joint_graph(decoder, weight(4, 4), weight(4, 4), *(weight(4, 4) for _ in range(5)))
    assert len(find_layers(JointGraph(gm))) == 3  # the first of the four reads an input, which lives anyway


def test_a_graph_without_layers_says_so(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (torch.tanh(x @ w)).sum(), weight(2, 3), weight(3, 4))
    with pytest.warns(UserWarning, match="recomputing layers changes nothing: "):
        result = RecomputeLayers()(gm)
    assert result is not None
    assert not result.modified


def test_linear_modules_in_a_row_are_not_layers(joint_graph: Capture) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find_layers(JointGraph(joint_graph(lambda x: net(x).sum(), torch.randn(2, 4)))) == []


# -- budget ------------------------------------------------------------------------------------------------------


def test_a_budget_of_one_recomputes_nothing(joint_graph: Capture) -> None:
    gm = joint_graph(Stack(Block(), Block()), torch.randn(5, 4))
    assert_fx_untouched(RecomputeToBudget(1.0), gm)


def test_more_budget_never_means_fewer_bytes_than_it_needs_nor_more_than_it_has(joint_graph: Capture) -> None:
    gm = joint_graph(Stack(Block(), Block(), Block()), torch.randn(5, 4))
    before = JointGraph(gm).cut(()).nbytes
    kept = []
    for tenths in range(11):
        RecomputeToBudget(tenths / 10)(gm)
        kept.append(saved_bytes(gm))
        assert kept[-1] <= tenths / 10 * before
        for node in gm.graph.nodes:
            for mark in (RECOMPUTE, DECIDED_BY):
                node.meta.pop(mark, None)
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert kept[-1] == before


def test_a_budget_in_bytes(joint_graph: Capture) -> None:
    gm = joint_graph(Stack(Block(), Block()), torch.randn(5, 4))
    assert saved_bytes(gm) > 200
    run_twice(RecomputeToBudget(200), gm)
    assert 0 < saved_bytes(gm) <= 200


def test_cheapest_operators_per_byte_are_recomputed_first(joint_graph: Capture) -> None:
    def network(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.exp(x @ w) @ w).exp().sum()

    gm = joint_graph(network, weight(64, 64), weight(64, 64))
    run_twice(RecomputeToBudget(0.7), gm)
    assert all("mm" not in name for name in recomputed(gm)), "a product costs more than a pointwise operator"


def test_random_operators_are_never_recomputed(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.dropout(x.tanh(), 0.5) @ w).sum(), weight(8, 8), weight(8, 8))
    run_twice(RecomputeToBudget(0.0), gm)
    assert "bernoulli_default" not in recomputed(gm)
    assert saved_bytes(gm) == 64


def test_attention_without_dropout_is_not_random_and_can_be_recomputed() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    for arguments, drawing in (((), False), ((0.0,), False), ((0.1,), True)):
        node = graph.call_function(attention, (query, query, query, *arguments))
        assert is_random(node) is drawing
        assert can_recompute(node) is not drawing
    assert is_random(graph.call_function(torch.ops.aten.native_dropout.default, (query, 0.0, True)))
    assert not is_random(graph.call_function(torch.ops.aten.exp.default, (query,)))


def test_tags_of_a_checkpoint_policy_stay(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (F.gelu(x) @ w).sum(), weight(2, 3), weight(3, 4))
    (gelu,) = (node for node in gm.graph.nodes if node.name == "gelu")
    gelu.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert_fx_untouched(RecomputeGelu(), gm)
    assert_fx_untouched(RecomputeToBudget(0.0), gm)


def test_tags_of_selective_checkpointing_stay_under_every_policy(joint_graph: Capture) -> None:
    def save_tanh(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        wanted = operator is torch.ops.aten.tanh.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, save_tanh)

    def network(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = checkpoint(lambda x, w=w: F.gelu(torch.tanh(x @ w)) @ w, x, use_reentrant=False, context_fn=context)
        return F.gelu(x).exp().sum()

    gm = joint_graph(network, weight(3, 4), weight(4, 4), weight(4, 4))
    before = {node.name: node.meta.get("recompute") for node in JointGraph(gm).forward}
    assert before["tanh"] is before["tanh_1"] is CheckpointPolicy.MUST_SAVE
    assert before["mm"] is before["gelu"] is before["mm_2"] is CheckpointPolicy.PREFER_RECOMPUTE
    assert before["gelu_2"] is before["exp"] is None
    plans = ",".join(str(row.plan) for row in plan_rows(JointGraph(gm)))
    options = RecomputeOptions(
        attn_dropout_recompute=True,
        gelu_recompute=True,
        transformer_layer_recompute=True,
        memory_budget=0.0,
        recompute_plan=read_plans(plans),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two checkpoints of two products each are no layers
        for pass_ in recompute_passes(options):
            pass_(gm)
    after = {node.name: node.meta.get("recompute") for node in JointGraph(gm).forward}
    assert {name: after[name] for name, policy in before.items() if policy is not None} == {
        name: policy for name, policy in before.items() if policy is not None
    }
    assert after["exp"] is CheckpointPolicy.MUST_RECOMPUTE


def test_saved_bytes_are_symbolic_where_shapes_are(joint_graph: Capture) -> None:
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    gm = joint_graph(Stack(Block(), Block()), x)
    (largest, *_) = sorted(JointGraph(gm).cut(()).saved, key=lambda k: -k.nbytes)
    assert largest.nbytes == 6 * 8 * 4
    assert str(largest.size).startswith("32*s")
