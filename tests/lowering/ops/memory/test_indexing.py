"""Reading and writing at positions that index tensors name."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager, eager_reasons

aten = torch.ops.aten
t = torch.tensor
FEW, GRID = t([0, 2, 2]), t([[1], [-1]])


def r(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


READS = {
    "first dimension": lambda x, i, j: x[i],
    "last dimension": lambda x, i, j: x[..., i],
    "middle dimension, two-dimensional index": lambda x, i, j: x[:, j],
    "number": lambda x, i, j: aten.index(x, [None, i[1]]),
    "first two": lambda x, i, j: x[i, j],
    "last two": lambda x, i, j: x[:, i, j],
    "all three": lambda x, i, j: x[i, j, i + 1],
    "with a gap": lambda x, i, j: x[i, :, j],
    "gap and negative": lambda x, i, j: x[i - 3, :, j - 1],
    "int32": lambda x, i, j: x[i.int()],
    "range": lambda x, i, j: x[torch.arange(3), i],
    "list": lambda x, i, j: x[[0, 3], :, [1, 2]],
    "with slices": lambda x, i, j: x[1:, i, ::2],
    "with a new dimension": lambda x, i, j: x[i, None, 1:3],
    "unchecked": lambda x, i, j: aten._unsafe_index(x, [None, i, j]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", READS)
def test_indexing_and_gradient_equal_eager(name, dynamic):
    assert_like_eager(READS[name], r(5, 4, 6), FEW, GRID, dynamic=dynamic)


@pytest.mark.parametrize("index", [t([4]), t([-5])])
def test_an_index_outside_its_dimension_raises(index):
    # Merged with the other index it would land inside the tensor.
    compiled = torch.compile(lambda x, i: x[t([1]), i], backend="ort_train")
    with pytest.raises(Exception, match=r"indices|index"):
        compiled(torch.randn(5, 4), index)


WRITES = {
    "first dimension": (lambda x, v: x.index_put((t([0, 3]),), v), (2, 4, 6)),
    "broadcast values": (lambda x, v: x.index_put((t([0, -2]),), v), (6,)),
    "one value": (lambda x, v: x.index_put((t([[0, 3], [1, 2]]),), v), (1,)),
    "middle dimension": (lambda x, v: aten.index_put(x, [None, t([0, 3])], v), (5, 2, 6)),
    "last two": (lambda x, v: aten.index_put(x, [None, t([0, 3]), GRID], v), (5, 2, 2)),
    "first two": (lambda x, v: x.index_put((t([0, 3]), GRID), v), (2, 2, 6)),
    "all three": (lambda x, v: x.index_put((t([0, 3]), GRID, t([0, 1])), v), (2, 1)),
    "with a gap": (lambda x, v: aten.index_put(x, [t([0, 3]), None, GRID], v), (2, 2, 4)),
    "int32": (lambda x, v: x.index_put((t([0, 3], dtype=torch.int32),), v), (2, 4, 6)),
    "unchecked": (lambda x, v: aten._unsafe_index_put(x, [None, t([0, 3])], v), (5, 2, 6)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_writing_and_gradients_equal_eager(name, dynamic):
    function, sizes = WRITES[name]
    assert_like_eager(function, r(5, 4, 6), r(*sizes), dynamic=dynamic)


SUMS = {
    "first dimension": (lambda x, v: x.index_put((FEW,), v, accumulate=True), (3, 4, 6)),
    "broadcast values": (lambda x, v: x.index_put((FEW,), v, accumulate=True), (4, 1)),
    "middle dimension": (lambda x, v: aten.index_put(x, [None, FEW], v, True), (5, 3, 1)),
    "first two": (lambda x, v: x.index_put((FEW, t([1, 3, -1])), v, accumulate=True), (3, 6)),
    "last two": (lambda x, v: aten.index_put(x, [None, FEW, GRID], v, True), (5, 2, 3)),
    "all three": (lambda x, v: x.index_put((FEW, GRID, FEW), v, accumulate=True), (2, 3)),
    "with a gap": (lambda x, v: aten.index_put(x, [FEW, None, GRID], v, True), (2, 3, 4)),
    "unchecked": (lambda x, v: aten._unsafe_index_put(x, [FEW], v, True), (3, 4, 6)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_adding_at_repeated_places_equals_eager(name, dynamic):
    function, sizes = SUMS[name]
    assert_like_eager(function, r(5, 4, 6), r(*sizes), dynamic=dynamic)


def test_many_collisions_are_summed_alike_in_every_run():
    x, index, values = torch.zeros(7, 33), torch.randint(7, (3000,)), torch.randn(3000, 33)
    compiled = torch.compile(lambda x, i, v: x.index_put((i,), v, accumulate=True), backend="ort_train")
    runs = [compiled(x, index, values) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    torch.testing.assert_close(runs[0], x.index_add(0, index, values), rtol=1e-4, atol=1e-4)


def test_assignments_equal_eager():
    def function(x, v, mask):
        x = x * 1
        x[FEW[:2]] = v
        x[:, 1] += 1
        x[1:3, GRID, :2] = 0
        x[x > 1] = 1
        x[mask] = -1
        return x

    assert_like_eager(function, r(5, 4, 6), r(4, 6), torch.rand(5, 4) > 0.5)
    assert_like_eager(function, r(5, 4, 6), r(4, 6), torch.rand(5, 4) > 0.5, dynamic=True)


MASKED = {
    "first dimensions": lambda x, m, v: aten.index_put(x, [m], v[0, 0]),
    "kept dimension of one": lambda x, m, v: aten.index_put(x, [m], v[:1, 0]),
    "last dimensions": lambda x, m, v: aten.index_put(x.permute(2, 0, 1), [None, m], v[0, 0][:, None]),
    "added": lambda x, m, v: aten.index_put(x, [m], v[0, 0], True),
    "bytes": lambda x, m, v: aten.index_put(x, [m.to(torch.uint8)], v[0, 0]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.filterwarnings("ignore:.*dtype torch.uint8 is now deprecated:UserWarning")
def test_writing_one_row_at_a_mask_equals_eager(name, dynamic):
    args = (torch.randn(5, 4, 6), torch.rand(5, 4) > 0.5, torch.randn(5, 4, 6))
    assert_like_eager(MASKED[name], *args, gradients=False, dynamic=dynamic)


MASK = t([[True, False, True, True], [False, True, False, False]])
AT_MASKS = {
    "a value each": (lambda x, v, m: x.index_put((m,), v), (4, 6)),
    "a value each, broadcast": (lambda x, v, m: x.index_put((m,), v), (4, 1)),
    "a value each, added": (lambda x, v, m: x.index_put((m,), v, accumulate=True), (4, 6)),
    "middle dimension": (lambda x, v, m: aten.index_put(x, [None, m[0]], v), (2, 3, 6)),
    "no place": (lambda x, v, m: x.index_put((m & ~m,), v), (0, 6)),
    "assigned": (lambda x, v, m: (x * 1).masked_fill(m[..., None], 0).index_put((m,), v), (4, 6)),
    "mask and numbers": (lambda x, v, m: x.index_put((m[:, 0], t([1])), v), (1, 6)),
    "mask and numbers, added": (lambda x, v, m: x.index_put((m[:, 1], t([1, 1])), v, accumulate=True), (2, 6)),
    "mask, gap, numbers": (lambda x, v, m: aten.index_put(x, [m[:, 0], None, t([5, -2])], v), (1, 4)),
    "later dimensions": (lambda x, v, m: aten.index_put(x, [None, m[0], FEW], v), (2, 3)),
    "later dimensions, added": (lambda x, v, m: aten.index_put(x, [None, m[0], FEW], v, True), (2, 3)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", AT_MASKS)
def test_writing_at_masks_equals_eager(name, dynamic):
    function, sizes = AT_MASKS[name]
    assert_like_eager(function, torch.randn(2, 4, 6), torch.randn(*sizes), MASK, gradients=False, dynamic=dynamic)


def test_values_of_another_number_than_the_mask_has_raise():
    compiled = torch.compile(lambda x, m, v: x.index_put((m,), v), backend="ort_train")
    for count in (3, 5):
        with pytest.raises(Exception, match=r"indices|index"):
            compiled(torch.randn(2, 4), MASK, torch.randn(count))


def test_a_mask_that_decides_the_size_stays_in_eager():
    compiled = torch.compile(lambda x, m: x[m] * 2, backend="ort_train")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x, MASK), x[MASK] * 2)
    assert any("depends on the data" in reason for reason in eager_reasons())


@pytest.mark.parametrize("dynamic", [False, True])
def test_index_select_take_and_put_equal_eager(dynamic):
    def function(x, i, v):
        return (
            x.index_select(-1, i),
            x.index_select(0, i[0]),
            x.take(i - 4),
            x.put(i, v, accumulate=True),
            x.put(i[:2], v[:2]),
        )

    assert_like_eager(function, r(5, 4, 6), FEW, r(3), dynamic=dynamic)


DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexing_of_every_dtype_equals_eager(dtype):
    def function(x, i, j):
        reads = x[i], x[:, i], x[i, i], x.index_select(1, i), x.take(i), x.index_put((j,), x[:2])
        sums = x.index_put((i,), x[:3], accumulate=True), x.put(i, x[0, :3], accumulate=True)
        return (*reads, *sums, x.index_put((x > 0,), x[0, 0], accumulate=True))

    x = torch.randint(0, 2, (4, 6)).bool() if dtype == torch.bool else torch.arange(24).reshape(4, 6).to(dtype)
    assert_like_eager(function, x, FEW, t([0, 3]), gradients=False)


def test_no_places_and_numbers_equal_eager():
    none = torch.empty(0, dtype=torch.int64)

    def function(x, s, i):
        return (
            x[i],
            x[:, i],
            x.index_select(1, i),
            x.take(i),
            x.index_put((i,), x[:0]),
            x.index_put((i,), x[:0], accumulate=True),
            s.index_select(0, t(0)),
            s.take(t(0)),
        )

    assert_like_eager(function, r(4, 6), t(3.0, requires_grad=True), none)


def test_indexing_of_a_transposed_tensor_equals_eager():
    x = torch.randn(6, 4).t().requires_grad_()
    assert_like_eager(lambda x, i: (x[i], x[:, i], x[i, i], x.index_put((i[:2],), x[:2])), x, FEW)


@pytest.mark.parametrize("dynamic", [False, True])
def test_single_entries_equal_eager(dynamic):
    places = torch.randint(-7, 7, (4, 3))

    def read(x, i):
        return x[i[:, :1], i], x[..., i], x[..., i[0]], x[0][i], x.take(i), x.index_select(-1, i[0] + 7)

    assert_like_eager(read, r(8, 15), places, dynamic=dynamic)
    assert_like_eager(lambda x, i: (x[:, i], x.take(i[:0]), x[:, i[0, :0]]), r(8, 15), places, dynamic=dynamic)
    assert_like_eager(lambda x, i: (x[..., i], x.index_select(1, i[0] + 7)), torch.rand(0, 15), places, gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [lambda x, i, j: x[i, j], lambda x, i, j: x.index_put((i, j), torch.tensor(-1.0))])
@pytest.mark.parametrize("far", [2**62, -(2**62), 5, -6])
def test_an_index_far_outside_does_not_come_back_inside(function, far, dynamic):
    x, i, j = torch.arange(20.0).view(5, 4), torch.tensor([far, 0]), torch.tensor([0, 1])
    run = torch.compile(function, backend="ort_train", dynamic=dynamic)
    torch.testing.assert_close(run(x, i % 5, j), function(x, i % 5, j))
    with pytest.raises(IndexError):
        run(x, i, j)


def test_one_value_by_a_mask_is_written_to_all_positions():
    def write(x, mask, y, chosen):
        x = x.clone()
        x[mask] = y[chosen]
        return x

    x, y = torch.zeros(4), torch.arange(1.0, 5.0)
    three, one, none = torch.tensor([1, 0, 1, 1]) > 0, torch.tensor([0, 1, 0, 0]) > 0, torch.zeros(4) > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(write, backend="ort_train")
        for mask, chosen in ((three, three), (three, one), (one, one), (none, one), (none, none)):
            torch.testing.assert_close(run(x, mask, y, chosen), write(x, mask, y, chosen))
        with pytest.raises(IndexError):
            run(x, one, y, three)
