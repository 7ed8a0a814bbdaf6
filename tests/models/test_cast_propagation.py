"""The options of cast propagation reach the compiled graphs, and the default changes no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    half = torch.relu(x.half())
    return half.float().transpose(0, 1).reshape(-1).half() * 2


def casts(folder: Path) -> int:
    (path,) = folder.glob("*.onnx")
    return sum(node.op_type == "Cast" for node in onnx.load(path).graph.node)


def compiled(x: torch.Tensor, folder: Path, **options: Any) -> tuple[torch.Tensor, int]:
    torch._dynamo.reset()
    run = torch.compile(there_and_back, backend="ort_train", options={"save_onnx": folder, **options})
    return run(x), casts(folder)


def test_casts_that_meet_over_data_movement_are_gone(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    result, count = compiled(x, tmp_path / "default")
    kept, more = compiled(x, tmp_path / "off", cast_strategy={"level": -1})
    assert count < more
    assert torch.equal(result, kept)
    assert torch.equal(result, there_and_back(x))


@pytest.mark.parametrize("strategy", [{"level": 0}, {"strategy": "NONE"}, {"strategy": "NONE", "level": 2}])
def test_settings_that_allow_no_movement_leave_them(tmp_path: Path, strategy: dict[str, Any]) -> None:
    x = torch.randn(3, 4)
    _, off = compiled(x, tmp_path / "off", cast_strategy={"level": -1})
    assert compiled(x, tmp_path / "kept", cast_strategy=strategy)[1] == off
    _, default = compiled(x, tmp_path / "default")
    allowed = {**strategy, "allow": ["Transpose", "Reshape"]}
    assert compiled(x, tmp_path / "allowed", cast_strategy=allowed)[1] == (off if "strategy" in strategy else default)


def test_a_misspelt_operator_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"cannot be 'Reshap': expected .* \(did you mean 'Reshape'\?\)"):
        compiled(torch.randn(3, 4), tmp_path, cast_strategy={"allow": ["Gelu", "BiasGelu", "Unique", "Reshap"]})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_trains_to_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Unflatten(1, (4, 4)),
        torch.nn.Softmax(-1), torch.nn.Flatten(), torch.nn.Linear(16, 4),
    )  # fmt: skip
    x, found = torch.randn(5, 8), []
    for level in (1, -1):
        torch._dynamo.reset()
        model.zero_grad()
        run = torch.compile(model, backend="ort_train", options={"cast_strategy": {"level": level}})
        with torch.autocast("cpu", dtype=dtype):
            loss = run(x).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 7
    assert all(torch.equal(mine, plain) for mine, plain in zip(*found, strict=True))
