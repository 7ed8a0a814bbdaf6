"""The models of one compile join into one model, which computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.saving.one_model import join_models
from ort_dynamo.testing import patch_facts


class Viewing(nn.Module):
    """Gives views of its results and of its inputs, and saves some for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(self.fc(x))
        split = self.out(hidden.view(-1, 2, 4))
        return split.transpose(1, 2), x.t(), hidden.unsqueeze(1).expand(-1, 3, -1), split[:, 0].reshape(-1)


def compile_and_save(
    model: nn.Module, folder: Path, *args: Tensor, dynamic: bool | None = False, **more: str
) -> tuple[Path, list[Tensor]]:
    options = {"save_onnx": str(folder), **more}
    compiled = torch.compile(model, backend="ort_train", options=options, dynamic=dynamic)
    outputs = list(compiled(*args))
    sum(output.sum() for output in outputs if output.requires_grad).backward()  # type: ignore[union-attr]
    (path,) = folder.glob("*.json")
    return path, outputs


@pytest.mark.parametrize("stage", ["lowered", "rewritten", "optimized"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_model_computes_results_updates_and_gradients(stage: str, dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Viewing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(5, 6)
    path, outputs = compile_and_save(model, tmp_path, x, dynamic=dynamic)
    joined = ir.to_proto(join_models(path, stage))
    onnx.checker.check_model(joined)
    assert not [node for node in joined.graph.node if node.domain == "org.pytorch.aten"]
    feeds: dict[str, Any] = {name: value.numpy() for name, value in before.items()} | {"x": x.numpy()}
    feeds |= {f"output_{i}.grad": np.ones(o.shape, np.float32) for i, o in enumerate(outputs) if o.requires_grad}
    found = run(joined, feeds)
    for index, output in enumerate(outputs):
        np.testing.assert_allclose(found[f"output_{index}"], output.detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, buffer in model.named_buffers():
        np.testing.assert_allclose(found[f"{name}.updated"], buffer.numpy(), rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[f"{name}.grad"], parameter.grad.numpy(), rtol=1e-3, atol=1e-4)


def run(joined: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """Run a joined model on those of the feeds that it reads, of which "x" has the sizes; gives its outputs by name."""
    session = onnxruntime.InferenceSession(joined.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = [one.name for one in session.get_inputs()]
    feeds = feeds | {name: np.asarray(feeds["x"].shape[int(name[-1])]) for name in wanted if ".size." in name}
    assert set(wanted) <= feeds.keys(), set(wanted) - feeds.keys()
    results = session.run(None, {name: feeds[name] for name in wanted})
    return dict(zip([one.name for one in session.get_outputs()], results, strict=True))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slices": lambda h: (h[1:6:2], h[:, -2:], h[-3:-1], h[:, 1]),
    "select": lambda h: (h[1], h[-1, 2:], h[0, 0]),
    "unbind": lambda h: h.t().unbind(),
    "chunk": lambda h: h.chunk(3, 1),
    "split": lambda h: h.split([1, 3], 1),
    "squeeze": lambda h: (h[:, :1].squeeze(), h.view(1, -1, 1, 4).squeeze((0, 2)), h[:, :1].squeeze(0)),
    "diagonal": lambda h: (h[:4].diagonal(), h[:4].diagonal(1)),
    "unfold": lambda h: (h[:7].unfold(0, 3, 2),),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_between_sessions_become_onnx_nodes(name: str, dynamic: bool, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return VIEWS[name](self.fc(x))

    x, model = torch.randn(8, 6), Model()
    path, outputs = compile_and_save(model, tmp_path, x, dynamic=dynamic)
    joined = ir.to_proto(join_models(path, "rewritten", backward=False))
    onnx.checker.check_model(joined, full_check=True)
    found = run(joined, {"x": x.numpy(), **{name: one.detach().numpy() for name, one in model.named_parameters()}})
    for index, output in enumerate(outputs):
        np.testing.assert_allclose(found[f"output_{index}"], output.detach().numpy(), rtol=1e-5, atol=1e-6)


SIZES: dict[str, Callable[[int], int]] = {
    "round": lambda n: round(n / 2),
    "ceil": lambda n: math.ceil(n / 4),
    "floor": lambda n: math.floor(n * 0.3) + 1,
    "trunc": lambda n: int(n * 0.7),
    "product": lambda n: int(n * 0.7 * 10) // 12,
    "root": lambda n: int(n**0.5) + 1,
    "power": lambda n: (n - 7) ** 2 + 1,
    "modulo": lambda n: n % 5 + 1,
    "floor division of a negative number": lambda n: 9 + (3 - n) // 4,
    "extremes": lambda n: min(max(n - 6, 2), n - 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_arithmetic_on_sizes_becomes_onnx_nodes(name: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x[: SIZES[name](x.shape[0])].sin(),)

    model, sizes = Model(), (9, 7, 10, 12)
    compiled = torch.compile(model, backend="ort_train", options={"save_onnx": str(tmp_path)}, dynamic=True)
    compiled(torch.randn(sizes[0], 3))
    (path,) = tmp_path.glob("*.json")
    joined = ir.to_proto(join_models(path, "rewritten", backward=False))
    onnx.checker.check_model(joined, full_check=True)
    assert not [node for node in joined.graph.node if node.domain == "org.pytorch.aten"]
    for size in sizes:
        x = torch.randn(size, 3)
        np.testing.assert_allclose(run(joined, {"x": x.numpy()})["output_0"], model(x)[0].numpy(), rtol=1e-5, atol=1e-6)


def test_sizes_that_a_backward_reads_are_those_of_the_forward(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (F.cross_entropy(self.fc(x)[:, :-1].reshape(-1, 4), y[:, 1:].reshape(-1)),)

    model, x, y = Loss(), torch.randn(3, 5, 6), torch.randint(4, (3, 5))
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x, axis)
        torch._dynamo.mark_dynamic(y, axis)
    path, (loss,) = compile_and_save(model, tmp_path, x, y, dynamic=None)
    joined = ir.to_proto(join_models(path, "rewritten"))
    onnx.checker.check_model(joined, full_check=True)
    feeds: dict[str, Any] = {name: one.detach().numpy() for name, one in model.named_parameters()}
    found = run(joined, feeds | {"x": x.numpy(), "y": y.numpy(), "output_0.grad": np.ones((), np.float32)})
    np.testing.assert_allclose(found["output_0"], loss.detach().numpy(), rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[f"{name}.grad"], parameter.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_equal_sizes_that_a_backward_reads_are_those_of_the_forward(tmp_path: Path) -> None:
    class Pooled(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (super().forward(x),)

    model = Pooled(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 2))
    x = torch.randn(2, 3, 8, 8)
    path, (output,) = compile_and_save(model, tmp_path, x, dynamic=True, placement="onnxruntime")
    joined = ir.to_proto(join_models(path, "rewritten"))
    feeds: dict[str, Any] = {name: one.detach().numpy() for name, one in model.named_parameters()}
    found = run(joined, feeds | {"x": x.numpy(), "output_0.grad": np.ones((2, 2), np.float32)})
    np.testing.assert_allclose(found["output_0"], output.detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[f"{name}.grad"], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_the_forward_alone_has_no_saved_tensors(tmp_path: Path) -> None:
    path, outputs = compile_and_save(Viewing(), tmp_path, torch.randn(5, 6))
    joined = ir.to_proto(join_models(str(path), "rewritten", backward=False))
    onnx.checker.check_model(joined)
    buffers = [f"norm.{name}.updated" for name in ("running_mean", "running_var", "num_batches_tracked")]
    expected = {*buffers, *(f"output_{index}" for index in range(len(outputs)))}
    assert {value.name for value in joined.graph.output} == expected
    assert "output_0.grad" not in {value.name for value in joined.graph.input}
    for value in joined.graph.output:
        assert value.type.tensor_type.HasField("shape")


def test_operators_in_torch_stay_visible(tmp_path: Path) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return (torch.fft.fft(self.fc(x)).real * 2,)

    path, _ = compile_and_save(Complex(), tmp_path, torch.randn(5, 6))
    joined = ir.to_proto(join_models(path, "rewritten"))
    onnx.checker.check_model(joined)
    called = {
        a.s.decode() for n in joined.graph.node if n.op_type == "ATen" for a in n.attribute if a.name == "operator"
    }
    assert "_fft_r2c" in called


def test_equal_gradients_and_those_that_come_in_have_names(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.first, self.second, self.third = (nn.Parameter(torch.randn(3, 4)) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            return self.fc(x).tanh() + self.first, (self.second + self.third).exp()

    model, x = Sums(), torch.randn(3, 4)
    path, outputs = compile_and_save(model, tmp_path, x)
    feeds = {name: value.detach().numpy() for name, value in model.named_parameters()} | {"x": x.numpy()}
    feeds |= {f"output_{i}.grad": np.ones(o.shape, np.float32) for i, o in enumerate(outputs)}
    found = run(ir.to_proto(join_models(path, "rewritten")), feeds)
    assert set(found) == {"output_0", "output_1", *(f"{name}.grad" for name, _ in model.named_parameters())}
    for name, value in model.named_parameters():
        np.testing.assert_allclose(found[f"{name}.grad"], value.grad, rtol=1e-5, atol=1e-6)


def test_complex_constants_are_in_the_model(tmp_path: Path) -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (torch.view_as_real(x.exp() * torch.tensor([1j, 2, 3])),)

    path, _ = compile_and_save(Turned(), tmp_path, torch.randn(5, 3, requires_grad=True))
    joined = join_models(path, "rewritten")
    onnx.checker.check_model(ir.to_proto(joined))
    constants = [value.const_value for value in joined.graph.initializers.values() if value.const_value is not None]
    (found,) = (constant.numpy() for constant in constants if constant.dtype == ir.DataType.COMPLEX64)
    np.testing.assert_array_equal(found, [1j, 2, 3])


def test_numbers_that_a_session_takes_as_rows_are_scalars_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return ((x.reshape(x.shape[0] // 2, 2, -1).softmax(-1) * x.shape[0]).exp(),)

    patch_facts(monkeypatch, keeps_sizes_on_host=True)  # as on CUDA
    path, (output,) = compile_and_save(Halves(), tmp_path, x := torch.randn(6, 4, requires_grad=True), dynamic=True)
    assert '"number": "rows"' in path.read_text()
    joined = ir.to_proto(join_models(path, "rewritten", backward=False))
    onnx.checker.check_model(joined, full_check=True)
    found = run(joined, {"x": x.detach().numpy()})
    np.testing.assert_allclose(found["output_0"], output.detach().numpy(), rtol=1e-5)


def test_two_islands_that_share_a_model_keep_their_names(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            half = torch.fft.fft(self.first(x)).real
            return (torch.fft.fft(self.second(half)).real,)

    path, _ = compile_and_save(Twice(), tmp_path, torch.randn(4, 4))
    joined = ir.to_proto(join_models(path, "rewritten"))
    onnx.checker.check_model(joined)
    made = [name for node in joined.graph.node for name in node.output if name]
    assert len(made) == len(set(made))
    assert {"first.weight", "second.weight"} <= {value.name for value in joined.graph.input}


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    path, _ = compile_and_save(Viewing(), tmp_path, torch.randn(5, 6))
    for model in tmp_path.glob("*.onnx"):
        model.unlink()
    with pytest.raises(FileNotFoundError):
        join_models(path, "rewritten")


def test_a_wrong_stage_and_a_folder_are_refused_with_the_choices(tmp_path: Path) -> None:
    (tmp_path / "Model-1.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="stage='final': expected 'lowered', 'rewritten' or 'optimized'"):
        join_models(tmp_path / "Model-1.json", "final")
    with pytest.raises(InvalidArgumentError, match=r"the \.json file of a compile; this folder has: Model-1\.json"):
        join_models(str(tmp_path), "rewritten")
    (tmp_path / "forward.onnx").write_bytes(b"\x08\xef")
    for other in ("Model-1.json", "forward.onnx"):
        with pytest.raises(InvalidArgumentError, match=rf"{other}': expected the \.json file of a compile\."):
            join_models(tmp_path / other, "rewritten")
