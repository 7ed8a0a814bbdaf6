"""Readers of input from elsewhere. Each one gets a damaged input, and may only read it or refuse it with its error."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import random
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from fuzz_mutations import damage_bytes, damage_json, damage_model, damage_value, odd_array, rename_value
from google.protobuf.message import DecodeError
from old_checkpoints import trainer_state
from test_mutated_files import MODELS
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo import ORTTrainer, optim
from ort_dynamo.__main__ import main
from ort_dynamo.cache.entry import EntryError, pack, read_entry, read_header
from ort_dynamo.commands.passes import PASSES
from ort_dynamo.compilation.compiler import build_spec
from ort_dynamo.errors import CheckpointFileError, InvalidOptionError, OnnxModelError, OrtDynamoError
from ort_dynamo.graph.fused_op import fused_ops_from_json
from ort_dynamo.lowering.build_island import build_island
from ort_dynamo.onnx_module import OnnxModule, to_model_proto
from ort_dynamo.options.groups import Options
from ort_dynamo.options.plan_grammar import read_plans
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.training import ORTModule, checkpoint
from ort_dynamo.training.checkpointing.sealed_file import write_sealed
from ort_dynamo.training.ortmodule.experimental.json_config import load_from_json

__all__ = ["TARGETS"]

SECRET = b"SECRET-OF-ANOTHER-FOLDER" * 100


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Give a folder for a case to work in; anything beside it, or of it and elsewhere, is a way out."""
    with tempfile.TemporaryDirectory() as outside:
        (Path(outside) / "secret").write_bytes(SECRET)
        inside = Path(outside) / "inside"
        inside.mkdir()
        (inside / "link").symlink_to("../secret")
        before = os.getcwd()
        os.chdir(inside)
        try:
            yield inside
        finally:
            os.chdir(before)
        assert sorted(os.listdir(outside)) == ["inside", "secret"], f"files outside of the folder: {outside}"
        assert not (inside / "escaped").exists(), "a name was run by a shell"


CASTS = """<ir_version: 10, opset_import: ["" : 20]>
g (float16[n, 4] x, float16[4, 4] z) => (float16[n, 4] y, float[4] s, int64[2] shape, float[4, 4] m, float16[4, 4] p)
<float[4] w = {1, 2, 3, 4}, int64[1] axes = {0}> {
    a = Cast <to = 1> (x) b = Add (a, w) c = Neg (b) d = Cast <to = 10> (c) y = Identity (d) e = Exp (d)
    t = Transpose <perm = [1, 0]> (b) m = MatMul (t, b) s = ReduceSum <keepdims = 0> (b, axes)
    shape = Shape (a) f = Cast <to = 1> (z) g = MatMul (f, f) h = Cast <to = 10> (g) i = Cast <to = 1> (h)
    j = Cast <to = 10> (i) p = Add (j, j)
}"""
"""A model that passes rewrite."""


def a_model(rng: random.Random) -> tuple[bytes, tuple[int, ...]]:
    """Return the bytes of a damaged model, and the shape of its input."""
    name = rng.choice(sorted(MODELS))
    model = MODELS[name][0]()
    return _damaged(model, rng), MODELS[name][1]


def _damaged(model: onnx.ModelProto, rng: random.Random) -> bytes:
    if rng.random() < 0.75:
        damage_model(model, rng)
        return model.SerializeToString()
    return damage_bytes(model.SerializeToString(), rng)


def read_onnx_module(rng: random.Random) -> str:
    """Make a module of a model, and run it."""
    content, shape = a_model(rng)
    with folder() as inside:
        try:
            model = onnx.ModelProto.FromString(content)
        except DecodeError:
            return "no protobuf"
        try:
            module = OnnxModule(model, base_dir=rng.choice((None, inside))).eval()
        except OnnxModelError:
            return "refused"
        to_model_proto(module)
        held = b"".join(one.numpy(force=True).tobytes() for one in module.state_dict().values() if one.dim())
        assert SECRET[:24] not in held
        kinds = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
        dtypes = {7: torch.int64, 9: torch.bool}
        inputs = [torch.ones(shape, dtype=dtypes.get(kinds[name], torch.float32)) for name in module.input_names]
        try:
            with torch.no_grad():
                module(*inputs)
        except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError):  # torch's, about these inputs
            return "read"
    return "read and run"


def _is_valid(path: str) -> bool:
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, DecodeError, RuntimeError, ValueError):
        return False
    return True


def apply_pass(rng: random.Random) -> str:
    """Apply a pass to a model file by the command."""
    content = _damaged(onnx.parser.parse_model(CASTS), rng) if rng.random() < 0.6 else a_model(rng)[0]
    name = rng.choice((*sorted(PASSES), "propagate-casts"))
    with folder() as inside:
        (inside / "in.onnx").write_bytes(content)
        given = rng.choice((inside / "in.onnx", Path("in.onnx")))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            arguments = ["--inline"] if rng.random() < 0.4 else []
            if name == "propagate-casts":
                arguments += [
                    "--level",
                    rng.choice("012"),
                    "--strategy",
                    rng.choice(("insert_and_reduce", "flood_fill")),
                ]
            status = main(["passes", "apply", name, str(given), "out.onnx", *arguments])
        assert status in (0, 2)
        assert {*os.listdir(inside)} <= {"in.onnx", "link", "out.onnx", "out.onnx.data"}
        assert ("out.onnx" in os.listdir(inside)) == (status == 0)
        for path in inside.glob("out*"):
            assert SECRET[:24] not in path.read_bytes(), "a file of another folder was copied"
        if status == 0 and _is_valid("in.onnx"):
            onnx.checker.check_model("out.onnx")
    return "refused" if status else "applied"


@functools.cache
def _entry(role: str) -> bytes:
    gm = make_fx(lambda x, i: (x.t().relu()[i].sum(-1) > 0,), tracing_mode="fake")(torch.ones(2, 3), torch.tensor([1]))
    gm.graph.output_node().meta.pop("val", None)
    spec = build_spec(Options(), find_target("cpu"), torch.device("cpu"), role)
    return pack(build_island(gm, spec, "test"), "ab" * 32)


_KERNEL = {
    "name": "sin_1", "inputs": [1], "outputs": [{"dtype": 1, "shape": [{"factor": 2, "symbols": [0]}]}],
    "symbols": [[0, 1]], "count": {"factor": 6, "symbols": []}, "per_program": 1024, "source": "x", "num_warps": 4,
}  # fmt: skip


def read_cache_entry(rng: random.Random) -> str:
    """Read an entry of the cache: damaged, or damaged with a right checksum."""
    data = _entry("forward")
    header, model = read_header(data)
    kernels = json.dumps([_KERNEL])
    if rng.random() < 0.3:
        with contextlib.suppress(
            ValueError, TypeError, KeyError, RecursionError
        ):  # those that it is documented to raise
            fused_ops_from_json(damage_json([_KERNEL], rng))
    if rng.random() < 0.2:
        data = damage_bytes(data, rng)
    else:
        if rng.random() < 0.5:
            model = memoryview(damage_bytes(bytes(model), rng))
        if rng.random() < 0.2:
            header["kernels"] = kernels
        spelled = damage_json(header, rng).encode() if rng.random() < 0.8 else json.dumps(header).encode()
        body = struct.pack("<Q", len(spelled)) + spelled + bytes(model)
        data = data[:8] + hashlib.sha256(body).digest() + body
    try:
        read_entry(data, "ab" * 32)
    except EntryError:
        return "refused"
    return "read"


def _sealed(content: bytes) -> io.BytesIO:
    file = io.BytesIO()

    def write(target: Any) -> None:
        target.seek(512)
        target.write(content[512:])

    write_sealed(file, write)
    return file


def _checkpoint(rng: random.Random, state: dict[str, Any]) -> io.BytesIO | None:
    """Return the file of a state, with odd values in the places of others, or damaged bytes under a right seal."""
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 2))):
            state = damage_value(state, rng, odd_array)
    file = io.BytesIO()
    try:
        checkpoint.save_state(file, state, {"a": [1.5, (None, b"x")]}, True)
    except (TypeError, ValueError, AttributeError):
        return None  # the damage made a state that cannot be saved
    return _sealed(damage_bytes(file.getvalue(), rng, 512)) if rng.random() < 0.4 else file


def _states(rng: random.Random) -> list[dict[str, Any]]:
    """Return the state of a trainer, or those of two ranks that split them."""
    if rng.random() < 0.6:
        return [trainer_state()]
    zero = rng.choice((0, 1))
    states = [trainer_state(rank, 2, zero, 1 if zero else 2) for rank in (0, 1)]
    for state in states:
        state["partition_info"] = {
            name: {"original_dim": np.array(weight.shape), "megatron_row_partition": rng.choice((-1, 0, 1))}
            for name, weight in state["model"]["full_precision"].items()
        }
    return states


def read_checkpoint(rng: random.Random) -> str:
    """Load a checkpoint, of one file or of two."""
    files = [_checkpoint(rng, state) for state in _states(rng)]
    if None in files:
        return "not saved"
    try:
        loaded, _ = checkpoint.load_state(files)
    except (CheckpointFileError, AssertionError):
        return "refused"
    with contextlib.suppress(CheckpointFileError, AssertionError):
        checkpoint.aggregate_checkpoints(files, pytorch_format=rng.random() < 0.5)
    return _load_into_trainer(loaded, rng)


@functools.cache
def _trainer() -> ORTTrainer:
    desc = {"inputs": [("x", [2, 4])], "outputs": [("loss", [], True)]}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).square().mean()

    trainer = ORTTrainer(Model(), desc, optim.AdamConfig())
    trainer.train_step(torch.ones(2, 4))
    return trainer


def _load_into_trainer(loaded: Any, rng: random.Random) -> str:
    own = _trainer().state_dict()
    before = json.dumps(own, default=repr)
    given = {**own, **loaded} if rng.random() < 0.5 else damage_value(dict(own), rng, odd_array)
    try:
        _trainer().load_state_dict(given, strict=rng.random() < 0.5)
    except (RuntimeError, AssertionError):
        assert json.dumps(_trainer().state_dict(), default=repr) == before, "a refused state changed the trainer"
        return "refused by the trainer"
    _trainer().load_state_dict(own)
    return "loaded"


def read_json_config(rng: random.Random) -> str:
    """Configure an ORTModule, and read plans, by a JSON file."""
    config = {
        "PropagateCastOps": {"Strategy": "INSERT_AND_REDUCE", "Level": 1, "Allow": ["Relu"]},
        "DebugOptions": {"LogLevel": "WARNING", "SaveONNX": True, "ONNXPrefix": "my", "SaveONNXPath": "."},
        "UseStaticShape": False,
        "FallbackPolicy": ["FALLBACK_DISABLE"],
        "SkipCheck": ["SKIP_CHECK_DISABLED"],
        "OnnxOpsetVersion": 19,
    }
    with folder() as inside:
        (inside / "config.json").write_text(damage_json(config, rng), "utf-8", "surrogatepass")
        (inside / "plans.json").write_text(damage_json(["Gelu+:1:-1", "Relu+:0:2"], rng), "utf-8", "surrogatepass")
        with contextlib.suppress(InvalidOptionError):
            read_plans(str(inside / "plans.json"))
        try:
            load_from_json(_ortmodule(), str(inside / "config.json"))
        except (ValueError, KeyError, OSError):
            return "refused"
    return "configured"


@functools.cache
def _ortmodule() -> ORTModule:
    return ORTModule(nn.Linear(2, 2))


def train_onnx_model(rng: random.Random) -> str:
    """Take a training step of a model by ORTTrainer, which compiles it."""
    name = rng.choice(("perceptron", "shapes", "image"))
    model, shape = MODELS[name][0](), MODELS[name][1]
    nodes = model.graph.node
    nodes.add(op_type="ReduceMean", input=[model.graph.output[0].name], output=["loss"]).attribute.add(
        name="keepdims", type=onnx.AttributeProto.INT, i=0
    )
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("loss", 1, []))
    del model.graph.output[1:]
    if rng.random() < 0.5:
        damage_model(model, rng)
    for _ in range(rng.randrange(4)):
        rename_value(model, rng)
    inputs = [("x", list(shape))]
    try:
        desc = {"inputs": inputs, "outputs": [("loss", [], True)]}
        ORTTrainer(model, desc, optim.SGDConfig()).train_step(torch.ones(shape))
    except (OrtDynamoError, AssertionError):  # AssertionError: names of the description are missing
        return "refused"
    except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError) as error:
        if type(error).__module__.startswith("torch._dynamo"):
            return "refused by torch"
        raise
    return "trained"


def quietly(target: Callable[[random.Random], str], rng: random.Random) -> str:
    """Run one case without what it logs and warns."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return target(rng)


TARGETS: dict[str, Callable[[random.Random], str]] = {
    "onnx_module": read_onnx_module,
    "passes": apply_pass,
    "entry": read_cache_entry,
    "checkpoint": read_checkpoint,
    "json": read_json_config,
    "trainer": train_onnx_model,
}
