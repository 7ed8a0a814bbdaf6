"""A kernel's text is checked before anything imports it: a printer's code passes, code with side effects does not."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from fused_examples import BFLOAT16, EXAMPLES

from ort_dynamo.runtime.kernels.kernel_source import KernelSourceError, checked_source

HEAD = """import triton
import triton.language as tl
from triton.language.extra import libdevice


"""


def kernel(*lines: str, head: str = HEAD, decorator: str = "@triton.jit", parameters: str = "in0, out0, s0") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"{head}{decorator}\ndef k({parameters}):\n{body}"


@pytest.mark.parametrize("make", EXAMPLES, ids=lambda make: make.__name__)
def test_the_examples_pass_unchanged(make) -> None:
    op = make(BFLOAT16)
    checked = checked_source(op.source, op.name)
    assert ast.dump(ast.parse(checked.text)) == ast.dump(ast.parse(op.source))
    names = [f"in{index}" for index in range(len(op.inputs))] + [f"out{index}" for index in range(len(op.outputs))]
    assert checked.parameters == (*names, "s0")


@pytest.mark.parametrize(
    "lines",
    [
        ("BLOCK: tl.constexpr = 1024", "i = tl.arange(0, BLOCK)", "tl.store(out0 + i, i)"),
        ("t = tl.zeros([1024], tl.float32)", "for r in range(0, 4096, 1024):", "    t += tl.load(in0 + r)"),
        ("for r in tl.range(0, s0, 64, num_stages=1):", "    tl.store(out0, r)"),
        ("if s0 > 4:", "    tl.store(out0, s0)", "else:", "    pass"),
        ('x = tl.load(in0, eviction_policy="evict_last")', 'tl.store(out0, x if s0 else float("-inf"))'),
        ("a, b = tl.split(in0)", "m = ~(a < b) & (not s0) | (s0 != 1)", "tl.store(out0, -a, m)"),
        ("tl.store(out0, in0.to(out0.dtype.element_ty))",),
        ("m = tl.maximum(in0, 0.0, propagate_nan=tl.PropagateNan.ALL)", "tl.store(out0, m[:, None])"),
        ('"""Adds."""', "tl.store(out0, libdevice.tanh(in0))"),
    ],
)
def test_kernel_code_passes(lines: tuple[str, ...]) -> None:
    checked = checked_source(kernel(*lines), "k")
    assert ast.dump(ast.parse(checked.text)) == ast.dump(ast.parse(kernel(*lines)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os", "holds Import"),
        ("os.system('true')", "calls os.system"),
        ("tl.core.os.system('true')", r"calls tl\.core"),
        ("tl.math.exp(in0)", r"calls tl\.math"),
        ("tl.extra.cuda.libdevice.exp(in0)", r"calls tl\.extra"),
        ("x = tl.core", r"names tl\.core"),
        ("x = tl", "names tl"),
        ("x = libdevice", "names libdevice"),
        ("libdevice.core.builtin(in0)", r"calls libdevice\.core"),
        ("triton.runtime.driver(in0)", r"calls triton\.runtime"),
        ("tl.inline_asm_elementwise('trap;', '', [], tl.int32, True, 1)", "names tl.inline_asm_elementwise"),
        ("tl.extern_elementwise('', '/tmp/a.bc', [in0], {}, True)", "names tl.extern_elementwise"),
        ("tl.reduce(in0, 0, print)", r"names tl\.reduce"),
        ("print(in0)", "calls print"),
        ("open('/tmp/a', 'w')", "calls open"),
        ("x = open", "names open"),
        ("x = range", "names range"),
        ("__import__('os')", "calls __import__"),
        ("eval('1')", "calls eval"),
        ("getattr(tl, 'core')", "calls getattr"),
        ("x = in0.__class__", r"names in0\.__class__"),
        ("x = (1).__class__.__mro__", "names"),
        ("x = ''.format(1)", "calls"),
        ("in0.dtype()", r"calls in0\.dtype"),
        ("(tl.load)(in0)(1)", r"calls tl\.load\(in0\)"),
        ("[tl.load][0](in0)", r"calls \[tl\.load\]\[0\]"),
        ("in0(1)", "calls in0"),
        ("tl.load(in0, _semantic=s0)", r"calls tl\.load"),
        ("tl.load(**in0)", r"calls tl\.load"),
        ("tl.load(*in0)", "holds Starred"),
        ("x = lambda: 1", "holds Lambda"),
        ("x = [i for i in in0]", "holds ListComp"),
        ("x = f'{in0}'", "holds JoinedStr"),
        ("x = (y := 1)", "holds NamedExpr"),
        ("x = {1: 2}", "holds Dict"),
        ("def f(): pass", "holds FunctionDef"),
        ("class A: pass", "holds ClassDef"),
        ("global x", "holds Global"),
        ("del in0", "holds Delete"),
        ("raise in0", "holds Raise"),
        ("with in0: pass", "holds With"),
        ("while 1: pass", "holds While"),
        ("return in0", "holds Return"),
        ("tl.load = in0", r"names tl\.load"),
        ("tl = in0", "gives tl another meaning"),
        ("for range in in0: pass", "gives range another meaning"),
        ("x = unknown + 1", "names unknown"),
    ],
)
def test_code_that_could_run_anything_else_is_refused(line: str, said: str) -> None:
    with pytest.raises(KernelSourceError, match=said):
        checked_source(kernel(line), "k")


PASS = "pass"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (kernel(PASS, head=HEAD + "import os\n"), "not the three imports"),
        (kernel(PASS, head=HEAD + "print(1)\n"), "not the three imports"),
        (kernel(PASS, head="from triton import *\n"), "not the three imports"),
        (kernel(PASS, head="import os as triton\n"), "not the three imports"),
        (kernel(PASS, head="import triton.language.core as tl\n"), "not the three imports"),
        (kernel(PASS) + "x = 1\n", "not the three imports"),
        (HEAD, "not the three imports"),
        (HEAD + "class k: pass\n", "not the three imports"),
        (HEAD + "async def k(): pass\n", "not the three imports"),
        (kernel(PASS, decorator="@print"), "under triton.jit alone"),
        (kernel(PASS, decorator="@print\n@triton.jit"), "under triton.jit alone"),
        (kernel(PASS, decorator="@triton.jit(do_not_specialize=[])"), "under triton.jit alone"),
        (kernel(PASS, decorator=""), "under triton.jit alone"),
        (kernel(PASS, parameters="in0=print(1)"), "mere names"),
        (kernel(PASS, parameters="in0: print(1)"), "mere names"),
        (kernel(PASS, parameters="*in0"), "mere names"),
        (kernel(PASS, parameters="in0, /"), "mere names"),
        (kernel(PASS, parameters="*, in0"), "mere names"),
        (kernel(PASS, parameters="in0, tl"), "gives tl another meaning"),
        (kernel(PASS).replace("):", ") -> print(1):"), "mere names"),
        (kernel(PASS).replace("def k", "def other"), "its function is other, not k"),
        ("def k(:", "Python cannot read it: SyntaxError"),
        ("\0", "Python cannot read it"),
        (kernel("x = " + "(" * 5000 + "1" + ")" * 5000), "Python cannot read it"),
    ],
)
def test_a_module_is_three_imports_and_a_kernel(source: str, said: str) -> None:
    with pytest.raises(KernelSourceError, match=said):
        checked_source(source, "k")


@pytest.mark.parametrize("line", ["# coding: utf-7", '"""', ""])
def test_no_encoding_makes_it_another_text(line: str, tmp_path: Path) -> None:
    hidden = '#+AAo-open("ran", "w")'  # in UTF-7 a line's end, and then a call
    end = line if line == '"""' else ""
    source = f"{line}\n# coding: utf-7\n{hidden}\n{end}\n" + kernel(PASS)
    checked = checked_source(source, "k")
    path = tmp_path / "text.py"
    path.write_text(checked.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("text", path)
    assert spec is not None
    assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    assert spec.loader.get_source("text") == checked.text
    assert "open" not in checked.text


def test_a_text_in_utf_7_would_have_run() -> None:
    """Shows that the test above looks at something."""
    assert ast.dump(ast.parse(b'# coding: utf-7\n#+AAo-open("ran", "w")\n')).count("open") == 1
