"""Layer boundaries of every kind of network: by its modules, by the shape of its graph, and the nearest non-layers.

Each block is written once, as a function of its input and its weights. As a module it is one of numbered siblings; as a
function it says nothing about itself, and the graph alone must tell. The nearest non-match of a block is the same block
whose result is not all that the next one reads: it also gets what entered the block before, so no single tensor
separates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ort_dynamo.passes.fx.analysis.layers import find_layers
from ort_dynamo.passes.fx.analysis.operator_names import names_of
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, must_recompute
from ort_dynamo.passes.fx.analysis.views import is_view, maker_of
from ort_dynamo.passes.fx.recompute.recompute_layers import RecomputeLayers

Capture = Callable[..., GraphModule]
Weights = Sequence[Tensor]
Block = Callable[[Tensor, Weights, Tensor], Tensor]

WIDTH = 4
ATTENTION = ((WIDTH, WIDTH),) * 4
MLP = ((WIDTH, 8), (8, WIDTH))
NORM = ((WIDTH,), (WIDTH,))


def spelled_out(x: Tensor, weights: Weights, memory: Tensor | None = None) -> Tensor:
    read = x if memory is None else memory
    query, key, value = x @ weights[0], read @ weights[1], read @ weights[2]
    return torch.softmax(query @ key.transpose(-1, -2) / 2, -1) @ value @ weights[3]


def fused(x: Tensor, weights: Weights) -> Tensor:
    query, key, value = ((x @ w).unflatten(-1, (2, 2)).transpose(1, 2) for w in weights[:3])
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2) @ weights[3]


def mlp(x: Tensor, weights: Weights) -> Tensor:
    return F.gelu(x @ weights[0]) @ weights[1]


def gated_mlp(x: Tensor, weights: Weights) -> Tensor:
    return (F.silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]


def layer_norm(x: Tensor, weights: Weights) -> Tensor:
    return F.layer_norm(x, (WIDTH,), *weights)


def rms_norm(x: Tensor, weights: Weights) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights[0]


def pre_ln(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    x = x + spelled_out(layer_norm(x, w[:2]), w[2:6])
    return x + mlp(layer_norm(x, w[6:8]), w[8:])


def pre_ln_sdpa(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    x = x + fused(layer_norm(x, w[:2]), w[2:6])
    return x + mlp(layer_norm(x, w[6:8]), w[8:])


def post_ln(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    x = layer_norm(x + spelled_out(x, w[2:6]), w[:2])
    return layer_norm(x + mlp(x, w[8:]), w[6:8])


def post_ln_sdpa(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    x = layer_norm(x + fused(x, w[2:6]), w[:2])
    return layer_norm(x + mlp(x, w[8:]), w[6:8])


def llama(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    x = x + fused(rms_norm(x, w[:1]), w[1:5])
    return x + gated_mlp(rms_norm(x, w[5:6]), w[6:])


def gpt_j(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    normed = layer_norm(x, w[:2])
    return x + spelled_out(normed, w[2:6]) + mlp(normed, w[8:])


def neox(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    return x + fused(layer_norm(x, w[:2]), w[2:6]) + mlp(layer_norm(x, w[6:8]), w[8:])


def decoder(x: Tensor, w: Weights, memory: Tensor) -> Tensor:
    x = x + spelled_out(layer_norm(x, w[:2]), w[2:6])
    x = x + spelled_out(layer_norm(x, w[6:8]), w[8:12], memory)
    return x + mlp(x, w[12:])


def conv_block(x: Tensor, w: Weights, _: Tensor) -> Tensor:
    y = F.relu(F.batch_norm(F.conv2d(x, w[0], padding=1), None, None, *w[1:3], training=True))
    y = F.batch_norm(F.conv2d(y, w[3], padding=1), None, None, *w[4:6], training=True)
    return F.relu(x + y)


TRANSFORMER = (*NORM, *ATTENTION, *NORM, *MLP)
CONV = ((WIDTH, WIDTH, 3, 3), *NORM, (WIDTH, WIDTH, 3, 3), *NORM)
SELF = "MatMul MatMul MatMul MatMul Div Softmax MatMul"
FUSED = "MatMul MatMul MatMul Attention"
RMS = "Pow ReduceMean Add Rsqrt Mul Mul"


@dataclass(frozen=True)
class Case:
    """A block, shapes of its weights, its computations by name, and those that the backward does again."""

    block: Block
    shapes: tuple[tuple[int, ...], ...]
    computed: str
    again: str


CASES = {
    "pre-LN": Case(
        pre_ln,
        TRANSFORMER,
        f"LayerNormalization {SELF} MatMul Add LayerNormalization MatMul Gelu MatMul Add",
        f"LayerNormalization {SELF} MatMul Add LayerNormalization MatMul Gelu | Add",
    ),
    "pre-LN with SDPA": Case(
        pre_ln_sdpa,
        TRANSFORMER,
        f"LayerNormalization {FUSED} MatMul Add LayerNormalization MatMul Gelu MatMul Add",
        f"LayerNormalization {FUSED} MatMul Add LayerNormalization MatMul Gelu | Add",
    ),
    "post-LN": Case(
        post_ln,
        TRANSFORMER,
        f"{SELF} MatMul Add LayerNormalization MatMul Gelu MatMul Add LayerNormalization",
        f"{SELF} MatMul Add LayerNormalization MatMul Gelu MatMul Add LayerNormalization | LayerNormalization",
    ),
    "post-LN with SDPA": Case(
        post_ln_sdpa,
        TRANSFORMER,
        f"{FUSED} MatMul Add LayerNormalization MatMul Gelu MatMul Add LayerNormalization",
        f"{FUSED} MatMul Add LayerNormalization MatMul Gelu MatMul Add LayerNormalization | LayerNormalization",
    ),
    "RMSNorm and gate": Case(
        llama,
        ((WIDTH,), *ATTENTION, (WIDTH,), (WIDTH, 8), (WIDTH, 8), (8, WIDTH)),
        f"{RMS} {FUSED} MatMul Add {RMS} MatMul Swish MatMul Mul MatMul Add",
        f"{RMS} {FUSED} MatMul Add {RMS} MatMul Swish MatMul Mul | Add",
    ),
    "parallel with one norm": Case(
        gpt_j,
        TRANSFORMER,
        f"LayerNormalization {SELF} MatMul Add MatMul Gelu MatMul Add",
        f"LayerNormalization {SELF} MatMul Gelu | Add",
    ),
    "parallel with two norms": Case(
        neox,
        TRANSFORMER,
        f"LayerNormalization {FUSED} MatMul Add LayerNormalization MatMul Gelu MatMul Add",
        f"LayerNormalization {FUSED} LayerNormalization MatMul Gelu | Add",
    ),
    "decoder": Case(
        decoder,
        (*NORM, *ATTENTION, *NORM, *ATTENTION, *MLP),
        f"LayerNormalization {SELF} MatMul Add LayerNormalization {SELF} MatMul Add MatMul Gelu MatMul Add",
        f"LayerNormalization {SELF} MatMul Add LayerNormalization {SELF} MatMul Add MatMul Gelu | Add",
    ),
    "convolutions": Case(
        conv_block,
        CONV,
        "Conv BatchNormalization Relu Conv BatchNormalization Add Relu",
        "Conv BatchNormalization Relu Conv BatchNormalization | Relu",
    ),
}

COUNT = 3


def draw(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def inputs(name: str) -> tuple[Tensor, Tensor]:
    shape = (2, WIDTH, 6, 6) if name == "convolutions" else (2, 5, WIDTH)
    return torch.randn(shape, requires_grad=True), torch.randn(2, 7, WIDTH, requires_grad=True)


class Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.block = case.block
        self.weights = nn.ParameterList(nn.Parameter(weight.detach()) for weight in draw(case.shapes))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.block(x, list(self.weights), memory)


class OtherLayer(Layer):
    """The same under another class."""


class Network(nn.Module):
    """Layers under names; `skips` makes the graph's non-match."""

    def __init__(self, layers: dict[str, nn.Module], skips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.skips = skips

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return run(x, torch.tanh(memory), list(self.layers.values()), self.skips)


def run(x: Tensor, memory: Tensor, layers: Sequence[Callable[[Tensor, Tensor], Tensor]], skips: bool) -> Tensor:
    before = x = torch.tanh(x)
    for layer in layers:
        before, x = x, layer(x, memory) + before.sin() if skips else layer(x, memory)
    return x.square().sum()


def as_function(case: Case, skips: bool) -> Callable[..., Tensor]:
    size = len(case.shapes)

    def network(x: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
        parts = [weights[i : i + size] for i in range(0, len(weights), size)]
        layers = [lambda x, memory, part=part: case.block(x, part, memory) for part in parts]
        return run(x, torch.tanh(memory), layers, skips)

    return network


def text(gm: GraphModule) -> list[str]:
    """A line for each layer: its computations; after the pass, those that are recomputed and those that are saved."""
    joint = JointGraph(gm)
    cut = joint.cut([node for node in joint.forward if must_recompute(node)])
    if not cut.recomputed:
        return [_names(layer.nodes) for layer in find_layers(joint)]
    made = {maker_of(kept.nodes[0]) for kept in cut.saved}
    return [
        f"{_names(n for n in layer.nodes if n in cut.recomputed)} | {_names(n for n in layer.nodes if n in made)}"
        for layer in find_layers(joint)
    ]


def _names(nodes: Iterable[Node]) -> str:
    return " ".join(names_of(tuple(node for node in nodes if not is_view(node))))


def assert_layers(gm: GraphModule, case: Case) -> None:
    assert text(gm) == [case.computed] * COUNT
    RecomputeLayers()(gm)
    *inner, last = text(gm)
    assert inner == [case.again] * (COUNT - 1)
    assert last.startswith(" | "), "the last layer keeps everything"


def assert_no_layers(gm: GraphModule) -> None:
    assert len(find_layers(JointGraph(gm))) < 2
    with pytest.warns(UserWarning, match="recomputing layers changes nothing"):
        result = RecomputeLayers()(gm)
    assert result is not None
    assert not result.modified


@pytest.mark.parametrize("name", CASES)
def test_numbered_modules_are_layers(joint_graph: Capture, name: str) -> None:
    layers: dict[str, nn.Module] = {str(i): Layer(CASES[name]) for i in range(COUNT)}
    gm = joint_graph(Network(layers, skips=False), *inputs(name))
    found = [layer.name for layer in find_layers(JointGraph(gm))]
    assert [path.split(".", 1)[1] for path in found] == ["layers.0", "layers.1", "layers.2"]
    assert_layers(gm, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_numbered_modules_are_layers_even_where_no_single_tensor_separates_them(
    joint_graph: Capture, name: str
) -> None:
    layers: dict[str, nn.Module] = {str(i): Layer(CASES[name]) for i in range(COUNT)}
    gm = joint_graph(Network(layers, skips=True), *inputs(name))
    assert text(gm) == [CASES[name].computed] * COUNT


@pytest.mark.parametrize("name", CASES)
def test_modules_under_other_names_are_not_layers_by_their_names(joint_graph: Capture, name: str) -> None:
    layers: dict[str, nn.Module] = {path: Layer(CASES[name]) for path in ("first", "second", "third")}
    assert_no_layers(joint_graph(Network(layers, skips=True), *inputs(name)))


def test_numbered_modules_of_several_classes_are_not_layers(joint_graph: Capture) -> None:
    case = CASES["pre-LN"]
    assert_no_layers(joint_graph(Network({"0": Layer(case), "1": OtherLayer(case)}, skips=True), *inputs("pre-LN")))


@pytest.mark.parametrize("name", CASES)
def test_repeated_pieces_between_single_tensors_are_layers(joint_graph: Capture, name: str) -> None:
    case = CASES[name]
    gm = joint_graph(as_function(case, skips=False), *inputs(name), *draw(case.shapes * COUNT))
    assert_layers(gm, case)


@pytest.mark.parametrize("name", CASES)
def test_repeated_pieces_that_more_than_one_tensor_joins_are_not_layers(joint_graph: Capture, name: str) -> None:
    case = CASES[name]
    assert_no_layers(joint_graph(as_function(case, skips=True), *inputs(name), *draw(case.shapes * COUNT)))


def test_stages_of_blocks_are_layers_rather_than_their_blocks(joint_graph: Capture) -> None:
    case = CASES["convolutions"]

    class Stage(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(x, x)
            return x

    class ResNet(nn.Module):
        """layer1, layer2 and layer3, each of two blocks, with a convolution of stride 2 between."""

        def __init__(self, stages_are_called: bool) -> None:
            super().__init__()
            for i in range(1, COUNT + 1):
                self.add_module(f"layer{i}", Stage(Layer(case), Layer(case)))
            self.halve = nn.Conv2d(WIDTH, WIDTH, 1, stride=2)
            self.stages_are_called = stages_are_called

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            for i in range(1, COUNT + 1):
                stage = self.get_submodule(f"layer{i}")
                x = self.halve(stage(x) if self.stages_are_called else stage[1](stage[0](x, memory), memory))
            return x.square().sum()

    gm = joint_graph(ResNet(stages_are_called=True), *inputs("convolutions"))
    assert text(gm) == [f"{case.computed} {case.computed}"] * COUNT
    torch._dynamo.reset()
    # The nearest non-match: the stages are not called, so only their blocks are on the stack of modules.
    gm = joint_graph(ResNet(stages_are_called=False), *inputs("convolutions"))
    assert text(gm) == [case.computed] * 2 * COUNT


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer(CASES["pre-LN"]) for _ in range(COUNT))
        self.decoder = nn.ModuleList(Layer(CASES["decoder"]) for _ in range(COUNT))

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        for layer in self.encoder:
            source = layer(source, source)
        for layer in self.decoder:
            x = layer(x, source)
        return x.square().sum()


def test_an_encoder_and_a_decoder_have_their_own_layers(joint_graph: Capture) -> None:
    gm = joint_graph(EncoderDecoder(), *inputs("decoder"))
    assert text(gm) == [CASES["pre-LN"].computed] * COUNT + [CASES["decoder"].computed] * COUNT
    RecomputeLayers()(gm)
    assert text(gm)[:-1] == [CASES["pre-LN"].again] * COUNT + [CASES["decoder"].again] * (COUNT - 1)


def test_an_encoder_and_a_decoder_written_as_functions_have_their_own_layers(joint_graph: Capture) -> None:
    encode, decode = CASES["pre-LN"], CASES["decoder"]

    def network(x: Tensor, source: Tensor, *weights: Tensor) -> Tensor:
        rest, source = list(weights), torch.tanh(source)  # as an embedding would: graph inputs are always saved
        for _ in range(COUNT):
            part, rest = rest[: len(encode.shapes)], rest[len(encode.shapes) :]
            source = encode.block(source, part, source)
        x = torch.tanh(x)
        for _ in range(COUNT):
            part, rest = rest[: len(decode.shapes)], rest[len(decode.shapes) :]
            x = decode.block(x, part, source)
        return x.square().sum()

    gm = joint_graph(network, *inputs("decoder"), *draw((*encode.shapes * COUNT, *decode.shapes * COUNT)))
    assert text(gm) == [encode.computed] * COUNT + [decode.computed] * COUNT
