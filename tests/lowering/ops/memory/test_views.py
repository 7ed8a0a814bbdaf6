"""Reshapes, permutations, slices and joins."""

import onnx
import pytest
import torch

from ort_dynamo.testing import assert_like_eager


def r(*sizes):
    return torch.randn(*sizes, requires_grad=True)


def n(*sizes):
    return torch.arange(int(torch.tensor(sizes).prod())).reshape(sizes)


# name -> (function, shape). Every function is run on floats with gradients, on int64, and with symbolic sizes.
VIEWS = {
    "view": (lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]), (2, 3, 4)),
    "view split": (lambda x: x.view(x.shape[0], x.shape[1], 2, 2), (2, 3, 4)),
    "view heads": (lambda x: x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2) * 2, (2, 3, 4)),
    "view all": (lambda x: x.reshape(-1), (2, 3, 4)),
    "view shuffled": (lambda x: x.view(x.shape[1], x.shape[0], x.shape[2]), (2, 3, 4)),
    "view ones": (lambda x: x.view(1, x.shape[0], 1, -1), (2, 3, 4)),
    "reshape of a permutation": (lambda x: x.permute(2, 0, 1).reshape(x.shape[2], -1), (2, 3, 4)),
    "flatten": (lambda x: (x.flatten(1), x.flatten(0, 1), x.flatten()), (2, 3, 4)),
    "unflatten": (lambda x: x.unflatten(2, (2, 2)), (2, 3, 4)),
    "permute": (lambda x: (x.permute(2, 0, 1), x.permute(0, -1, 1), x.permute(0, 1, 2)), (2, 3, 4)),
    "transpose": (lambda x: (x.transpose(0, -1), x.mT, x.transpose(1, 1)), (2, 3, 4)),
    "movedim": (lambda x: (x.movedim(0, 2), x.swapaxes(0, 1)), (2, 3, 4)),
    "t": (lambda x: x.t() * 2, (3, 4)),
    "unsqueeze": (lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x[:, None]), (3, 4)),
    "squeeze": (lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze((-1, 1)), x.squeeze(-1)), (3, 1, 4, 1)),
    "expand": (
        lambda x: (x.expand(5, 3, 1, 4), x.expand(-1, 2, -1), x.expand(3, 1, 4), x.expand(3, x.shape[0], 4)),
        (3, 1, 4),
    ),
    "broadcast": (lambda x: torch.broadcast_to(x, (2, 3, 4)), (3, 1)),
    "repeat": (
        lambda x: (x.repeat(2, 1), x.repeat(2, 3, 2), x.repeat(1, 1), x.tile((2,)), x.repeat(x.shape[0], 1)),
        (3, 4),
    ),
    "repeat of ones": (lambda x: x.repeat(3, 2), (1, 1)),
    "slice": (lambda x: (x[1:], x[:, :2], x[:, 1:-1], x[:-1], x[:], x[-2:], x[::2], x[:, 3:1], x[5:]), (4, 5)),
    "slice to a symbol": (lambda x: (x[:, : x.shape[0]], x[x.shape[1] - 3 :]), (4, 5)),
    "narrow": (lambda x: x.narrow(1, 1, 2), (4, 5)),
    "select": (lambda x: (x[0], x[-1], x[:, 2], x.select(1, -2), x[1, 2]), (4, 5)),
    "select a symbol": (lambda x: x[x.shape[0] - 1], (4, 5)),
    "split": (lambda x: x.split(2, 1), (3, 5)),
    "split one": (lambda x: x.split(7, 1), (3, 5)),
    "split and use some": (lambda x: (lambda p: p[0] * p[2])(x.split([2, 1, 2], -1)), (3, 5)),
    "split into symbols": (lambda x: x.split([x.shape[0], x.shape[1] - x.shape[0]], 1), (3, 5)),
    "chunk": (lambda x: (*x.chunk(2, 1), *x.chunk(3)), (3, 4)),
    "unbind": (lambda x: x.unbind(1), (4, 3)),
    "unbind and use some": (lambda x: x.unbind(1)[1], (4, 3)),
    "heads of a joint projection": (
        lambda x: [p * 2 for p in x.view(x.shape[0], x.shape[1], 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)],
        (2, 3, 12),
    ),
    "cat": (lambda x: (torch.cat([x, x * 2]), torch.cat([x, x[:, :1]], -1), torch.cat([x])), (3, 4)),
    "cat with nothing": (lambda x: torch.cat([x.new_empty(0), x, x[:0]]), (3, 4)),
    "stack": (lambda x: (torch.stack([x, x * 2]), torch.stack([x, x], -1), torch.stack([x], 1)), (3, 4)),
    "hstack": (lambda x: (torch.hstack([x, x]), torch.vstack([x, x]), torch.dstack([x, x])), (3, 4)),
    "diagonal": (
        lambda x: (x.diagonal() * 2, x.diagonal(1, 0, 1) * 2, x.diagonal(-2, -1, 0) * 2, x.diagonal(0, 1, 2) * 2),
        (4, 3, 5),
    ),
    "flip": (lambda x: (x.flip(0), x.flip(0, 1), x.flip(-1)), (3, 4)),
    "roll": (lambda x: (x.roll(1, 0), x.roll((1, -2), (0, 1)), x.roll(3)), (3, 4)),
    "rotation": (lambda x: torch.rot90(x), (3, 4)),
    "pixel shuffle": (lambda x: torch.nn.functional.pixel_shuffle(x, 2), (2, 8, 3, 2)),
    "pixel unshuffle": (lambda x: torch.nn.functional.pixel_unshuffle(x, 2), (2, 2, 4, 6)),
    "channel shuffle": (lambda x: torch.nn.functional.channel_shuffle(x, 2), (2, 4, 3, 3)),
    "meshgrid": (lambda x: torch.meshgrid(x, x * 2, indexing="ij"), (4,)),
    "repeat interleave": (lambda x: x.repeat_interleave(2, 1), (3, 4)),
    "rotate half": (lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1), (2, 3, 4)),
    "as a number": (lambda x: (x.view(()), x.expand(2, 1).squeeze()[1], x.reshape(1, 1).squeeze()), (1,)),
}
STATIC = ("expand", "broadcast", "unflatten")
cases = pytest.mark.parametrize(("function", "shape"), VIEWS.values(), ids=VIEWS.keys())


@cases
def test_value_and_gradient_equal_eager(function, shape):
    assert_like_eager(function, r(*shape))


@cases
def test_integers_equal_eager(function, shape):
    assert_like_eager(function, n(*shape), gradients=False)


@cases
def test_symbolic_sizes_equal_eager(function, shape):
    assert_like_eager(function, r(*shape), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_entries_of_a_short_last_dimension_are_read_from_one_transposed_tensor(dynamic, tmp_path):
    def area(boxes):
        left, top, right, bottom = boxes.unbind(-1)
        return (right - left) * (bottom - boxes[..., 1]) + boxes[..., 2] - top

    options = {"save_onnx": str(tmp_path)}
    compiled = torch.compile(area, backend="ort_train", dynamic=dynamic, options=options)
    boxes = torch.randn(30, 150, 4)
    torch.testing.assert_close(compiled(boxes), area(boxes), rtol=0, atol=0)
    (file,) = tmp_path.glob("*.onnx")
    operators = [node.op_type for node in onnx.load(file).graph.node]
    assert operators.count("Transpose") == 1
    assert operators.count("Gather") == 4
    turned = boxes.mT.contiguous().mT
    torch.testing.assert_close(compiled(turned), area(turned), rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 2, 32, 33])
@pytest.mark.parametrize("dynamic", [False, True])
def test_entries_that_are_repeated_equal_eager(count, dynamic):
    x = torch.randn(70, 90, requires_grad=True)
    for function in (
        lambda x: x.repeat_interleave(count, -1),
        lambda x: x[..., None].expand(-1, -1, count) * 2,
        lambda x: x.t()[:, :, None].expand(2, 90, 70, count).sum(0).exp(),
    ):
        assert_like_eager(function, x, dynamic=dynamic)


def test_indices_that_are_repeated_for_each_entry_of_a_row_equal_eager():
    rows, x = torch.randint(500, (300,)), torch.randn(300, 16, requires_grad=True)
    assert_like_eager(
        lambda x, rows: x.new_zeros(500, 16).scatter_add(0, rows[:, None].expand(-1, 16), x), x, rows, dynamic=False
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int16], ids=str)
def test_every_dtype_equals_eager(dtype):
    def function(x):
        return (
            x.view(-1),
            x.t(),
            x.expand(2, 3, 4),
            x.repeat(2, 1),
            x[1:],
            x[0],
            *x.split([1, 3], 1),
            *x.unbind(),
            torch.cat([x, x]),
            torch.stack([x, x]),
            x.diagonal(),
            x.unfold(1, 2, 1),
            x.flip(0),
            x[:, None],
            x[None].squeeze(0),
        )

    assert_like_eager(function, (n(3, 4) % 3).to(dtype), gradients=False)


@pytest.mark.parametrize("name", ["view all", "flatten", "permute", "slice", "cat", "expand empty"])
def test_empty_tensors_equal_eager(name):
    function = VIEWS.get(name, (lambda x: (x.expand(4, *x.shape), x[:, :1], x.repeat(2, 1, 1)),))[0]
    assert_like_eager(function, r(*((2, 0, 4) if name != "expand" else (0, 1, 4))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_element_expanded_to_none_leaves_none(dynamic):
    def function(x, i):
        joined = torch.cat([x.cos().expand(x.shape[0], 0, x.shape[2]), x], 1) * 2
        return joined, x.index_select(1, i).sum(1), x.bool().expand(-1, 0, -1).sum(1) + x.sum(1)

    assert_like_eager(function, r(3, 1, 4), torch.empty(0, dtype=torch.int64), dynamic=dynamic)


def test_views_of_a_number_equal_eager():
    x = torch.tensor(2.0, requires_grad=True)
    assert_like_eager(
        lambda x: (
            x.view(1, 1),
            x.expand(2, 3),
            x.unsqueeze(0),
            x.squeeze(),
            x.reshape(-1),
            x.t(),
            x.repeat(3),
            torch.stack([x, x]),
        ),
        x,
    )


def test_cat_promotes_like_eager():
    assert_like_eager(
        lambda a, b, c: torch.cat([a, b, c]), torch.randn(2).half(), torch.arange(3), torch.randn(2), gradients=False
    )


def rotated(x):
    """A rotary embedding of all columns, as models write it that may rotate some of them only."""
    turned, rest = x[..., :6], x[..., 6:]
    halves = torch.cat([-turned[..., 3:], turned[..., :3]], -1)
    return torch.cat([turned * 2 + halves * 3, rest], -1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_cat_with_nothing_equals_eager(dynamic):
    assert_like_eager(rotated, r(5, 6), dynamic=dynamic)
    assert_like_eager(lambda x, y: (torch.cat([x, y]), torch.cat([y, y])), r(2, 3), r(0, 3), dynamic=dynamic)
    half = torch.ones(2, 3).half()
    assert_like_eager(lambda x, y: torch.cat([x, y]), half, torch.ones(0, 3), gradients=False, dynamic=dynamic)


def test_cat_with_nothing_copies_nothing(tmp_path):
    function = torch.compile(
        lambda x: torch.cat([x.neg(), x[2:]]), backend="ort_train", options={"save_onnx": tmp_path}
    )
    x = torch.randn(2, 3)
    assert function(x).equal(x.neg())
    operators = {node.op_type for path in tmp_path.rglob("*.onnx") for node in onnx.load(path).graph.node}
    assert "Neg" in operators
    assert "Concat" not in operators


def test_gradients_of_slices_of_one_tensor_add_up():
    assert_like_eager(lambda x: (x[1:] * 2, x[:-1] * 3, x[::2] * 5, x[0] * 7, x[:, 1:3] * x[:, 2:4]), r(5, 6))


def test_unfold_equals_eager():
    assert_like_eager(lambda x: (x.unfold(1, 3, 2) * 2, x.unfold(0, 2, 1) * 3, x.unfold(-1, 7, 1) * 2), r(4, 7))


COPIES = {
    "narrow": lambda x: (torch.narrow_copy(x, 1, 2, 3), torch.narrow_copy(x, -1, 3, 3), torch.narrow_copy(x, 0, 1, 0)),
    "permute": lambda x: (torch.permute_copy(x, (1, 0)), torch.transpose_copy(x, 0, 1), torch.t_copy(x)),
    "unbind": lambda x: torch.unbind_copy(x, 1)[::2],
    "others": lambda x: (
        torch.slice_copy(x, 1, 1, 5, 2),
        torch.select_copy(x, 0, 1),
        torch.diagonal_copy(x, 1),
        torch.unfold_copy(x, 1, 2, 2),
        torch.expand_copy(x, (2, 4, 6)),
        torch.view_copy(x, (24,)),
        torch.squeeze_copy(torch.unsqueeze_copy(x, 1)),
        *torch.split_copy(x, 2),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_views_equal_eager(name, dynamic):
    assert_like_eager(COPIES[name], r(4, 6), dynamic=dynamic)


def test_writing_into_views_equals_eager():
    def function(x):
        y = x * 1
        y[0] = 5
        y[:, 1].mul_(2)
        y[1:, 2:] += 3
        y.diagonal().add_(1)
        return y

    assert_like_eager(function, r(4, 5))


def test_outputs_that_are_views_of_inputs_equal_eager():
    assert_like_eager(lambda x: (x.t(), x[1:], x * 2, x.view(-1)), r(3, 4))


def test_permutations_of_permutations_equal_eager():
    def function(x):
        y = x.permute(1, 2, 0) * 2
        return (
            y.permute(2, 0, 1),
            y.permute(1, 0, 2).transpose(0, 2),
            y.mT.mT,
            x.mT.mT + 1,
            x.permute(2, 1, 0).transpose(0, 1),
        )

    assert_like_eager(function, r(2, 3, 4))
    assert_like_eager(function, torch.randn(2, 4, 3).mT.requires_grad_())


def test_memory_that_is_read_negated_equals_eager():
    number = torch.view_as_complex(torch.randn(4, 2))
    outside = torch._neg_view(torch.arange(4.0))  # contiguous, with the bit that negates it
    compiled = torch.compile(lambda x, z: (x * 2, z.conj().imag * 2), backend="ort_train")
    for found, wanted in zip(compiled(outside, number), (outside * 2, number.conj().imag * 2), strict=True):
        assert torch.equal(found, wanted)


def test_windows_of_nothing_equal_eager():
    def function(x, y):
        return torch.unfold_copy(x, 1, 0, 7), torch.unfold_copy(y, 0, 0, 2), x.t().unfold(0, 0, 1) + 1

    assert_like_eager(function, torch.randn(1, 0), torch.randn(3, 2), gradients=False)


def test_a_symbolic_size_that_torch_takes_for_one_is_squeezed():
    def function(x):
        y = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 8))
        blocks = y.reshape(y.shape[0] // 8, 8, -1)
        return blocks.squeeze(0).exp(), blocks.squeeze().sin(), blocks[None].squeeze((0, 1)).cos()

    for size in (5, 7, 8, 9):
        assert_like_eager(function, torch.randn(size, 3), gradients=False, dynamic=True)


def test_sizes_that_only_a_computed_value_has_are_read_from_it():
    x = torch.randn(7, 4, requires_grad=True)
    assert_like_eager(lambda x: (x[2:] @ x[2:].t()).trace(), x, dynamic=True)


def test_reshapes_to_sizes_that_may_be_zero_equal_eager():
    function = lambda x: torch.einsum("ij,kj->ik", x[2:], x[2:]) * 2  # noqa: E731
    run = torch.compile(function, backend="ort_train", dynamic=True, options={"placement": "onnxruntime"})
    for rows in (7, 2, 3):
        x = torch.randn(rows, 4, requires_grad=True)
        copy = x.detach().clone().requires_grad_()
        run(x).sum().backward()
        function(copy).sum().backward()
        torch.testing.assert_close(x.grad, copy.grad)
