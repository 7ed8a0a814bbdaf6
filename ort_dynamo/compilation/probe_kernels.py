"""Probes fused kernels on the device before a program depends on them."""

from __future__ import annotations

import dataclasses
import functools
import logging

import onnx_ir as ir
import torch

from ort_dynamo.cache.disk import disk_cache
from ort_dynamo.cache.kernel_files import kernel_files
from ort_dynamo.graph.build import built_of
from ort_dynamo.graph.marks import STOPS
from ort_dynamo.options.groups import CacheOptions, SessionOptions
from ort_dynamo.passes.onnx.fuse_kernels import FuseKernels, fused_ops
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.kernels.dispatcher import real_kernels

__all__ = ["kernels_work"]

_log = logging.getLogger(__name__)

_MODEL = """<ir_version: 10, opset_import: ["" : 20]>
trial (float[1000, 7] a, float[64, 96] b, float[256, 80] c, float[96, 33] d, float[2, 20000] e, int64[2, 1] t,
       float[96] w, int64[50, 3] i, int64[300] k)
  => (float[1000, 7] flat, float[64, 96] rows, float[80] sums, float[80] roots, float[33] both, float[2, 1] picked,
      int64[50, 3] bits, int64[300] index)
  <int64[1] zero = {0}, int64[1] one = {1}, int64 even = {-2}, int64 none = {0}, int64 far = {-1}> {
  a1 = Cast<to=16>(a)  a2 = Cast<to=1>(a1)  a3 = Tanh(a2)  a4 = Mul(a3, a2)
  a5 = Erf(a2)  a6 = HardSigmoid<alpha=0.5, beta=0.5>(a5)  a7 = Mul(a4, a6)  a8 = Cast<to=16>(a7)  flat = Cast<to=1>(a8)
  b1 = Add(b, b)  rows = LayerNormalization<axis=-1>(b1, w, w)
  c1 = Mul(c, c)  sums = ReduceSum<keepdims=0>(c1, zero)  c2 = Add(sums, sums)  roots = Sqrt(c2)
  d1 = ReduceMean<keepdims=1>(d, one)  d2 = Mul(d, d1)  both = ReduceSum<keepdims=0>(d2, zero)
  m = ReduceMax<keepdims=1>(e, one)  e1 = Sub(e, m)  e2 = Exp(e1)  s = ReduceSum<keepdims=1>(e2, one)  l = Log(s)
  e3 = Sub(e1, l)  picked = GatherElements<axis=1>(e3, t)
  bits = BitwiseAnd(i, even)
  s1 = Shape<start=0, end=1>(k)  size = Squeeze(s1, zero)
  k1 = Less(k, none)  k2 = GreaterOrEqual(k, size)  k3 = Or(k1, k2)  index = Where(k3, far, k)
}"""
"""A kernel of each kind: pointwise, rows, sums over rows, arithmetic of sums, rows and sums, rows read block by block,
integers, an assertion with a number on the host."""

_ERROR = 2e-2
"""The largest error, relative to a result's largest number: the first result is rounded to bfloat16.

Integers have none.
"""


def kernels_work(options: CacheOptions) -> bool:
    """Check whether fused kernels run on the current device and give correct results; once per device.

    Args:
        options: the options with the folder of compiled kernels.
    """
    with real_kernels():
        return _work(torch.cuda.current_device(), options)


@functools.lru_cache(maxsize=64)
def _work(index: int, options: CacheOptions) -> bool:
    device = torch.device("cuda", index)
    try:
        said = _tried(find_target("cuda"), device, options)
    except Exception as error:  # pybind, CUDA and Triton raise their own classes; any of them is the answer
        said = f"{type(error).__name__}: {error}"
    if said:
        _log.warning("ort_train: fused kernels are off on %s; ONNX Runtime's own kernels run: %s", device, said)
    return not said


def _tried(target: Target, device: torch.device, options: CacheOptions) -> str:
    """Compare the kernels on a device with ONNX Runtime's on the CPU; gives the first fault, "" if there is none."""
    model = ir.from_onnx_text(_MODEL)
    for node in model.graph:
        if node.op_type == "Where":
            node.metadata_props[STOPS] = "1"
    FuseKernels()(model)
    settings = SessionOptions(graph_optimization="disable").resolved()
    built = built_of("trial of fused kernels", model, settings, fused_ops(model))
    random = torch.Generator().manual_seed(0)
    shapes = [(1000, 7), (64, 96), (256, 80), (96, 33), (2, 20000)]
    inputs = [torch.randn(shape, generator=random) for shape in shapes]
    inputs += [torch.tensor([[3], [-1]]), torch.randn(96, generator=random)]
    inputs += [torch.randint(-(1 << 62), 1 << 62, (50, 3), generator=random), torch.arange(300)]
    on_cpu = dataclasses.replace(built, kernels=())
    expected = open_graph(on_cpu, find_target("cpu"), torch.device("cpu"))(*inputs)
    store = kernel_files(disk_cache(options))
    found = open_graph(built, target, device, store)(*(one.to(device) for one in inputs))
    for name, ours, right in zip(
        ("flat", "rows", "sums", "roots", "both", "picked", "bits", "index"), found, expected, strict=True
    ):
        error = (ours.cpu() - right).abs().max().item()
        allowed = _ERROR if right.is_floating_point() else 0
        if not error <= allowed * right.abs().max().item():
            return f"the kernel {name!r} of the trial is off by {error:.3g}"
    return ""
