"""bench/cuda_floor.py counts a model's launches and bytes, and a lower bound of them."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import pytest
import torch

cuda_floor = pytest.importorskip("bench.cuda_floor", reason="bench is importable under `python -m pytest` only")

Moved = cuda_floor.Moved
N = 8 * 16 * 4  # bytes of a float32 tensor of (8, 16)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>\n{text}')


def test_nodes_between_two_products_are_one_kernel_at_least() -> None:
    model = parsed(
        """
        g (float[8, 16] x, float[16, 16] w, float[16] b) => (float[8, 16] y) {
            h = MatMul(x, w)
            s = Add(h, b)
            flat = Constant<value_ints: ints = [128]>()
            r = Reshape(s, flat)
            e = Erf(r)
            two = Constant<value_ints: ints = [8, 16]>()
            back = Reshape(e, two)
            p = Mul(back, s)
            y = com.microsoft.FusedMatMul <transB: int = 1> (p, w)
        }
        """
    )
    kinds, floor, unknown = cuda_floor.moved(model)
    assert unknown == 0
    assert kinds == {"products": Moved(2, 4 * N + 2 * 16 * 16 * 4), "arithmetic": Moved(3, (2 + 2 + 3) * N + 16 * 4)}
    assert floor == Moved(1, 2 * N + 16 * 4)


def test_a_tensor_that_a_later_product_separates_is_read_again() -> None:
    model = parsed(
        """
        g (float[8, 16] x, float[16, 16] w) => (float[8, 16] y) {
            a = Neg(x)
            h = MatMul(a, w)
            y = Add(a, h)
        }
        """
    )
    _, floor, _ = cuda_floor.moved(model)
    assert floor == Moved(2, 2 * N + 3 * N)


def test_symbolic_sizes_are_not_counted() -> None:
    kinds, _, unknown = cuda_floor.moved(parsed("g (float[n, 16] x) => (float[n, 16] y) { y = Neg(x) }"))
    assert (kinds, unknown) == ({}, 1)


def test_a_training_step_is_counted_without_a_device(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the step ran")

    monkeypatch.setattr(torch.Tensor, "backward", refused)
    assert cuda_floor.main(["gpt", "--scale", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for role in ("forward", "backward"):
        launches = {kernels: int(count) for _, graph, kernels, count, *_ in cells if graph == role}
        assert launches["products"] >= 7  # torch runs those whose results only it reads
        assert launches["**floor of these**"] < launches["all but products and torch's"]
        assert "nodes of unknown size" not in launches


def test_an_unknown_model_is_an_error_that_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cuda_floor.main(["mlp", "nothing"])
    assert ended.value.code == 2
    assert "there is no model nothing: choose of " in capsys.readouterr().err
