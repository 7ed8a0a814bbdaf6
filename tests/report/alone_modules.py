"""The summary's table of modules adds up to the nodes, and tells models apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from alone_summary import Branching, Wide, calls_a_helper
from torch import Tensor, nn

import ort_dynamo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu() + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean((2, 3))))


def test_a_conv_net_is_told_by_its_modules_and_each_reason_once() -> None:
    torch.compile(Net(), backend="ort_train")(torch.randn(2, 3, 16, 16)).sum().backward()
    found = ort_dynamo.summary()
    text = str(found)
    assert len(text.splitlines()) <= 25
    assert "modules of Net:\n  stem (Conv2d): " in text
    assert "  blocks.0-5 (6 x Block): " in text
    assert "  head (Linear): " in text
    by_choice = text.partition("in torch by choice (placement):\n")[2].splitlines()
    reasons = [line.rpartition(": ")[2] for line in by_choice[:-1]]
    assert len(reasons) == len(set(reasons)) == len({entry.partition(": ")[2] for entry in found.chosen})
    assert by_choice[-1].strip().startswith('Set options={"placement": "onnxruntime"}')
    assert "1 x random numbers of dropout" in text
    assert "ort_dynamo.bernoulli.default" in found.by_design


def test_the_modules_add_up_to_the_nodes() -> None:
    torch.compile(Net(), backend="ort_train")(torch.randn(2, 3, 16, 16)).sum().backward()
    found = ort_dynamo.summary()
    assert sum(one.native for one in found.modules) == found.native.total()
    assert sum(one.chosen for one in found.modules) == found.chosen.total()
    assert sum(one.by_design for one in found.modules) == found.by_design.total()
    assert sum(one.eager for one in found.modules) == found.eager_nodes
    assert {one.model for one in found.modules} == {"Net"}
    assert ("blocks.3.conv", "Conv2d") in {(one.path, one.kind) for one in found.modules}


class Wrapper(nn.Module):
    """Looks up in the module inside the attributes that it lacks, as peft's models do."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def test_modules_of_one_with_its_own_getattr_have_their_paths() -> None:
    model = Wrapper(Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    torch.compile(model, backend="ort_train")(torch.randn(2, 4)).sum().backward()
    paths = {one.path for one in ort_dynamo.summary().modules}
    assert paths <= {name for name, _ in model.named_modules()}
    assert "inside.inside.0" in paths


def rows(found: ort_dynamo.Summary) -> Counter[str]:
    """Add up the rows of the table of modules, and the headings that have numbers of their own."""
    text = str(found).splitlines()
    begin = next(index for index, line in enumerate(text) if line.startswith("modules"))
    words = ("in ONNX Runtime", "in torch by choice", "in torch by design", "in eager (fallback)")
    added = Counter[str]()
    for line in text[begin:]:
        if line.startswith(words) or line == "graph breaks:":
            break
        for word in words:
            added.update({word: sum(int(number) for number in re.findall(rf"(\d+) {re.escape(word)}", line))})
    return +added


def branching() -> None:
    model = torch.compile(Branching(), backend="ort_train")
    for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3)):
        model(x * 100).sum().backward()


def branching_in_place() -> None:
    model = Branching()
    model.compile(backend="ort_train")
    model(-torch.ones(2, 3) * 100).sum().backward()
    model(torch.ones(2, 3) * 100).sum().backward()


def conv_net() -> None:
    torch.compile(Net(), backend="ort_train")(torch.randn(2, 3, 16, 16)).sum().backward()


def models_and_a_function() -> None:
    for width in (2, 3, 4, 5, 6):
        torch.compile(nn.Sequential(nn.Linear(3, width)), backend="ort_train")(torch.ones(1, 3)).sum().backward()
    conv_net()
    torch.compile(Wide(3), backend="ort_train")(torch.ones(1, 3))
    branching()
    torch.compile(calls_a_helper, backend="ort_train")(torch.ones(2))


def a_step_around_models() -> None:
    first, second = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def step(x: Tensor) -> Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        y = y * 2
        torch._dynamo.graph_break()
        return (second(y) * 2).sum()

    torch.compile(step, backend="ort_train")(torch.ones(2, 3)).backward()


@pytest.mark.parametrize(
    "program", [branching, branching_in_place, conv_net, models_and_a_function, a_step_around_models]
)
def test_the_rows_of_the_modules_add_up_to_the_nodes(program: Callable[[], None]) -> None:
    program()
    found = ort_dynamo.summary()
    expected = {
        "in ONNX Runtime": found.native.total(),
        "in torch by choice": found.chosen.total(),
        "in torch by design": found.by_design.total(),
        "in eager (fallback)": found.eager_nodes,
    }
    assert rows(found) == +Counter(expected), str(found)


@pytest.mark.parametrize("run", [branching, branching_in_place])
def test_the_rest_of_a_forward_after_breaks_is_of_its_model(run: Callable[[], None]) -> None:
    run()
    found = ort_dynamo.summary()
    assert {one.model for one in found.modules} == {"Branching"}
    assert {one.name.partition(" ")[0] for one in found.breaks} == {"Branching.forward"}


def test_two_models_of_one_class_have_numbers() -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Sequential(nn.Linear(3, 2))]
    for model in models:
        compiled = torch.compile(model, backend="ort_train")
        compiled(torch.ones(1, 3))
        with torch.no_grad():
            compiled(torch.ones(5, 3))
    found = ort_dynamo.summary()
    text = str(found)
    assert found.compiles == 4
    assert {(one.model, one.number) for one in found.modules} == {("Sequential", 1), ("Sequential", 2)}
    assert [line for line in text.splitlines() if line.startswith("modules")] == [
        "modules of Sequential 1:",
        "modules of Sequential 2:",
    ]
    assert "ReLU" in text.partition("modules of Sequential 2:")[0]
    assert "ReLU" not in text.partition("modules of Sequential 2:")[2]


def test_many_models_of_one_class_share_a_heading() -> None:
    for width in range(2, 7):
        torch.compile(nn.Sequential(nn.Linear(width, 2)), backend="ort_train")(torch.ones(1, width))
    headings = [line for line in str(ort_dynamo.summary()).splitlines() if line.startswith("modules")]
    assert headings == ["modules of 5 x Sequential:"]
