"""An entry unpacks to the built island, and invalid entries are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.cache.entry import EntryError, pack, read_entry, read_header
from ort_dynamo.compilation.compiler import build_spec
from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildSpec, BuiltGraph
from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.lowering.build_island import build_island
from ort_dynamo.options.groups import Options
from ort_dynamo.runtime.installed.providers import find_target

KEY = "ab" * 32


def spec(role: str = "forward") -> BuildSpec:
    return build_spec(Options(), find_target("cpu"), torch.device("cpu"), role)


def built(role: str = "forward") -> BuiltGraph:
    gm = make_fx(lambda x, i: (x.t().relu()[i].sum(-1) > 0,), tracing_mode="fake")(torch.ones(2, 3), torch.tensor([1]))
    gm.graph.output_node().meta.pop("val", None)
    return build_island(gm, spec(role), "test")


def unpack(data: bytes, key: str, name: str, by: BuildSpec) -> BuiltGraph:
    return read_entry(data, key).built(name, by.session, in_order=by.in_order)


def resealed(data: bytes, model: bytes | None = None, **changes: Any) -> bytes:
    """An entry with other fields in its header, or another model, and a right checksum."""
    header, content = read_header(data)
    header |= changes
    spelled = json.dumps({name: value for name, value in header.items() if value is not ...}).encode()
    body = struct.pack("<Q", len(spelled)) + spelled + (bytes(content) if model is None else model)
    return data[:8] + hashlib.sha256(body).digest() + body


def test_an_input_that_the_model_lacks_stays_one_that_it_lacks() -> None:
    gm = make_fx(lambda x, y: (x.relu(),), tracing_mode="fake")(torch.ones(2), torch.ones(3))
    gm.graph.output_node().meta.pop("val", None)
    before = build_island(gm, spec(), "test")
    assert [one.is_read for one in before.inputs] == [True, False]
    assert unpack(pack(before, KEY), KEY, "test", spec()) == before


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_packed_island_unpacks_to_an_equal_one(role: str) -> None:
    before = built(role)
    after = unpack(pack(before, KEY), KEY, "another", spec(role))
    assert after == dataclasses.replace(before, name="another")
    assert after.record.nodes == before.record.nodes
    assert after.record.seconds == before.record.seconds
    assert [one.name for one in after.record.passes] == [one.name for one in before.record.passes]


def fused() -> BuiltGraph:
    """A graph with a fused kernel."""
    gm = make_fx(lambda x: (x.sin().exp() * x,), tracing_mode="fake")(torch.ones(2, 3))
    gm.graph.output_node().meta.pop("val", None)
    target = dataclasses.replace(find_target("cpu"), fuses_kernels=True)
    by = build_spec(Options(), target, torch.device("cpu"), "inference")
    return build_island(gm, by, "test")


def test_fused_kernels_come_back_with_their_functions() -> None:
    before = fused()
    (kernel,) = before.kernels
    (function,) = onnx.ModelProto.FromString(before.model).functions
    assert (function.domain, function.name) == (DOMAIN, kernel.name)
    assert unpack(pack(before, KEY), KEY, before.name, spec("inference")) == before


def test_a_function_without_a_kernel_and_a_kernel_without_a_function_are_refused() -> None:
    whole, other = pack(fused(), KEY), onnx.ModelProto.FromString(fused().model)
    with pytest.raises(EntryError, match="functions and its kernels do not match"):
        read_entry(resealed(whole, kernels="[]"), KEY)
    other.functions[0].name = "another"
    with pytest.raises(EntryError, match="functions and its kernels do not match"):
        read_entry(resealed(whole, model=other.SerializeToString()), KEY)
    for text in ("", "{}", "[1]", '[{"name": "a"}]', json.dumps([{"inputs": 1}])):
        with pytest.raises(EntryError):
            read_entry(resealed(whole, kernels=text), KEY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a; import os"),
        ("name", "\uff53in"),
        ("name", "a" * 201),
        ("name", ["a"]),
        ("inputs", 1),
        ("inputs", [2**64]),
        ("inputs", [True]),
        ("outputs", {"dtype": 1}),
        ("symbols", [[0, -2]]),
        ("symbols", [0]),
        ("count", {"factor": -1, "symbols": []}),
        ("count", {"factor": 1, "symbols": "0"}),
        ("per_program", 0),
        ("num_warps", 10**6),
        ("num_warps", "4"),
        ("source", 1),
        ("surprise", 1),
    ],
)
def test_a_kernel_that_no_build_writes_is_refused(field: str, value: Any) -> None:
    whole = pack(fused(), KEY)
    (kernel,) = json.loads(read_header(whole)[0]["kernels"])
    for ops in ([{**kernel, field: value}], [kernel, kernel]):
        with pytest.raises(EntryError, match="its kernels are invalid"):
            read_entry(resealed(whole, kernels=json.dumps(ops)), KEY)


def test_a_function_refers_to_no_file() -> None:
    model = onnx.ModelProto.FromString(fused().model)
    tensor = onnx.helper.make_tensor("far", onnx.TensorProto.FLOAT, [1], bytes(4), raw=True)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    model.functions[0].node.append(onnx.helper.make_node("Constant", [], ["far"], value=tensor))
    with pytest.raises(EntryError, match="another file"):
        read_entry(resealed(pack(fused(), KEY), model=model.SerializeToString()), KEY)


def test_every_way_to_cross_comes_back() -> None:
    x = ValueSpec(torch.bool, (1, 0), strides=(3, 9))
    model = ir.to_proto(ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 20]> g (bool[2, 3] x) => (int64 n) {}'))
    rows = ValueSpec(torch.int64, is_number=True, is_read=False, as_rows=True)
    one = dataclasses.replace(
        built(), model=model.SerializeToString(), inputs=(x, rows), outputs=(ValueSpec(torch.int64, is_number=True),)
    )
    after = unpack(pack(one, KEY), KEY, one.name, spec())
    assert (after.inputs, after.outputs) == (one.inputs, one.outputs)


def test_no_flip_of_a_byte_goes_unnoticed() -> None:
    whole = pack(built(), KEY)
    chosen = random.Random(0)
    for place in [*range(64), *(chosen.randrange(len(whole)) for _ in range(500))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chosen.randrange(8)
        with pytest.raises(EntryError):
            unpack(bytes(damaged), KEY, "test", spec())


def test_no_truncation_goes_unnoticed() -> None:
    whole = pack(built(), KEY)
    for length in {*range(80), *range(0, len(whole), 97)}:
        with pytest.raises(EntryError):
            unpack(whole[:length], KEY, "test", spec())
    with pytest.raises(EntryError):
        unpack(whole + b"\0", KEY, "test", spec())


def test_an_entry_of_another_key_is_refused() -> None:
    with pytest.raises(EntryError, match="it is the entry of 'abab"):
        unpack(pack(built(), KEY), "cd" * 32, "test", spec())


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": "x"},
        {"inputs": ...},
        {"inputs": []},
        {"inputs": [["float32", [], False]]},
        {"inputs": [["float32", [0, 0], False, []], ["int64", [], False, []]]},
        {"inputs": [["complex64", [], False, []], ["int64", [], False, []]]},
        {"inputs": [["float64", [], False, []], ["int64", [], False, []]]},
        {"inputs": [["float32", [], 1, []], ["int64", [], False, []]]},
        {"outputs": [["bool", [], False, [-1]]]},
        {"outputs": [["bool", [], False, ["1"]]]},
        {"outputs": [["bool", [], False, [2**70]]]},
        {"optimization": "extended"},
        {"optimization": ["all"]},
        {"dtypes": ["FLOAT", "REAL"]},
        {"dtypes": {"FLOAT": 1}},
        {"origins": {"node": -1}},
        {"origins": {"node": True}},
        {"origins": [1]},
        {"nodes": None},
        {"passes": [["name", 1.0]]},
        {"passes": [[1, 1.0, True]]},
        {"seconds": {"lower": "long"}},
        {"seconds": {"lower": 10**400}},
        {"seconds": {"lower": float("nan")}},
        {"passes": [["name", 10**400, True, 1, 2, []]]},
        {"passes": [["name", 1.0, True, -1, 2, []]]},
        {"inputs": [[[], [], False, [], True], ["int64", [], False, [], True]]},
        {"inputs": [[{}, [], False, [], True], ["int64", [], False, [], True]]},
        {"dtypes": [["FLOAT"]]},
    ],
    ids=str,
)
def test_a_header_that_no_build_writes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EntryError):
        unpack(resealed(pack(built(), KEY), **changes), KEY, "test", spec())


def test_resealing_changes_nothing_by_itself() -> None:
    one = built()
    assert unpack(resealed(pack(one, KEY)), KEY, "test", spec()) == one


def external(tensor: onnx.TensorProto) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../secret")


def in_an_initializer(graph: onnx.GraphProto) -> None:
    external(graph.initializer.add(name="w", data_type=1, dims=[1]))


def in_a_constant(graph: onnx.GraphProto) -> None:
    node = graph.node.add(op_type="Constant", output=["w"])
    external(node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t)


def in_a_branch(graph: onnx.GraphProto) -> None:
    node = graph.node.add(op_type="If", input=["c"], output=["w"])
    in_a_constant(node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g)


def in_a_sparse_initializer(graph: onnx.GraphProto) -> None:
    external(graph.sparse_initializer.add().values)


@pytest.mark.parametrize("place", [in_an_initializer, in_a_constant, in_a_branch, in_a_sparse_initializer])
def test_a_model_with_data_elsewhere_is_refused(place: Any) -> None:
    one = built()
    model = onnx.ModelProto.FromString(one.model)
    place(model.graph)
    with pytest.raises(EntryError, match="data in another file"):
        unpack(resealed(pack(one, KEY), model=model.SerializeToString()), KEY, "test", spec())


@pytest.mark.parametrize("model", [b"\xff" * 9, b"PK\x03\x04", b"\x80\x04\x95(posix.system)", b""])
def test_bytes_that_are_no_such_model_are_refused(model: bytes) -> None:
    with pytest.raises(EntryError):
        unpack(resealed(pack(built(), KEY), model=model), KEY, "test", spec())


@pytest.mark.parametrize("data", [b"", b"ORTDYN", b"\x80\x04\x95", bytes(1000), b"ORTDYN\x01\n" + bytes(100)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(EntryError):
        unpack(data, KEY, "test", spec())
