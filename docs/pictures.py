"""Draws the pictures of the pages: `python docs/pictures.py [FOLDER [NAME …]]`, by default all, into docs/_static.

Two of them are drawn from compiled models (`layer`, `memory`) and depend on the versions of torch and ONNX Runtime.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.sax.saxutils import escape

TORCH, SESSION, OURS, PLAIN, INNER, GONE = "torch", "session", "ours", "plain", "inner", "gone"
_FILLS = {
    TORCH: ("#fde4cf", "#b4540a"),
    SESSION: ("#d3e5fb", "#1b5aa6"),
    OURS: ("#dff2df", "#2b7a2b"),
    PLAIN: ("#eef0f3", "#5b6470"),
    INNER: ("#ffffff", "#1b5aa6"),
    GONE: ("#ffffff", "#9aa2ad"),
}
_WIDTH = 400
"""Pixels; a phone shows a picture of this width nearly in its own size."""


class Picture:
    """An SVG with boxes, arrows and texts."""

    def __init__(self, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, sans-serif" role="img">\n'
            f"<title>{escape(title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#3b424c"/></marker></defs>\n'
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n'
        )
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        anchor: str = "middle",
        color: str = "#1b1f24",
        **more: str,
    ) -> None:
        """Write one line whose baseline is at y."""
        rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{rest}>'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, w: float, h: float, kind: str, *lines: str, size: int = 14) -> None:
        """Draw a box with centred lines."""
        fill, edge = _FILLS[kind]
        dashed = ' stroke-dasharray="4 3"' if kind == GONE else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{edge}"{dashed}/>'
        )
        top = y + h / 2 - (len(lines) - 1) * (size + 3) / 2 + size * 0.35
        color = "#5b6470" if kind == GONE else "#1b1f24"
        for index, line in enumerate(lines):
            self.text(x + w / 2, top + index * (size + 3), line, size, color=color)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through points that ends in an arrow."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="#3b424c" stroke-width="1.5"{dash} marker-end="url(#head)"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1, dash: str = "none") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"/>'
        )

    def legend(self, y: float, *entries: tuple[str, str]) -> None:
        """Explain colours, in one row."""
        x = 12.0
        for kind, words in entries:
            self.box(x, y, 16, 16, kind)
            self.text(x + 21, y + 13, words, 13, "start")
            x += 36 + 7.8 * len(words)

    def svg(self) -> str:
        """Return the file's text."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


def pipeline() -> Picture:
    """Return the steps from Python to sessions."""
    picture = Picture(660, "From a Python function to sessions of ONNX Runtime")
    picture.box(70, 10, 260, 34, PLAIN, "your model: Python")
    picture.arrow((200, 44), (200, 78))
    picture.text(210, 65, "Dynamo", 14, "start")
    picture.box(70, 78, 260, 34, TORCH, "graph of torch functions")
    picture.arrow((200, 112), (200, 146))
    picture.text(210, 133, "AOTAutograd", 14, "start")
    picture.box(70, 146, 260, 52, TORCH, "joint graph of ATen operators:", "forward and backward in one")
    picture.arrow((200, 198), (200, 232))
    picture.text(210, 219, "passes on FX graphs", 14, "start")
    picture.box(70, 232, 260, 52, OURS, "joint graph with marks:", "run in torch, recompute")
    picture.arrow((140, 284), (100, 324))
    picture.arrow((260, 284), (300, 324))
    picture.text(200, 310, "cut")
    for x, name in ((10, "forward graph"), (210, "backward graph")):
        picture.box(x, 324, 180, 34, OURS, name)
        picture.arrow((x + 90, 358), (x + 90, 392))
        picture.box(x, 392, 180, 52, OURS, "islands, and operators", "that torch runs")
        picture.arrow((x + 90, 444), (x + 90, 478))
        picture.box(x, 478, 180, 34, OURS, "ONNX models")
        picture.arrow((x + 90, 512), (x + 90, 560))
        picture.box(x, 560, 180, 34, SESSION, "sessions")
    picture.text(200, 379, "segment")
    picture.text(200, 465, "lower each island")
    picture.text(200, 531, "passes on ONNX,")
    picture.text(200, 548, "optimizers")
    picture.arrow((190, 577), (209, 577), dashed=True)
    picture.text(200, 612, "saved tensors pass from the forward to the backward", 13)
    picture.legend(632, (PLAIN, "yours"), (TORCH, "torch"), (OURS, "ort_dynamo"), (SESSION, "ONNX Runtime"))
    return picture


ISLANDS = {"island_0": ["addmm", "gelu", "_to_copy", "div"], "island_1": ["mm", "add", "mul"]}
"""The operators of each island in the picture, without views; tests/docs/test_pictures.py compiles the model."""

IN_TORCH = ["bernoulli", "_fft_r2c", "view_as_real"]
"""The operators around them."""


def islands() -> Picture:
    """Return the forward graph of `dropout(linear(fft(gelu(linear(x))).real))`."""
    picture = Picture(640, "A forward graph with two islands, and torch's operators around them")
    picture.text(12, 24, "h = gelu(self.a(x))", 13, "start", font_family="monospace")
    picture.text(12, 42, "h = torch.fft.fft(h).real", 13, "start", font_family="monospace")
    picture.text(12, 60, "return dropout(self.b(h), 0.1)", 13, "start", font_family="monospace")
    picture.box(30, 80, 140, 34, PLAIN, "x, parameters")
    picture.box(222, 76, 168, 52, TORCH, "bernoulli:", "random mask of dropout", size=13)
    picture.box(10, 152, 380, 140, SESSION)
    picture.text(200, 172, "island 0: one session", font_weight="bold")
    for x, first, second in ((30, "addmm", "gelu"), (236, "_to_copy", "div")):
        picture.box(x, 184, 140, 34, INNER, first)
        picture.box(x, 246, 140, 34, INNER, second)
        picture.arrow((x + 70, 218), (x + 70, 245))
    picture.arrow((100, 114), (100, 183))
    picture.arrow((306, 128), (306, 183))
    picture.arrow((100, 280), (100, 322))
    picture.box(10, 323, 236, 52, TORCH, "_fft_r2c, view_as_real:", "complex numbers stay in torch", size=13)
    picture.box(10, 412, 380, 140, SESSION)
    picture.text(200, 432, "island 1: one session", font_weight="bold")
    picture.box(30, 444, 140, 34, INNER, "mm")
    picture.box(30, 506, 140, 34, INNER, "add")
    picture.box(236, 506, 140, 34, INNER, "mul")
    picture.arrow((100, 375), (100, 443))
    picture.arrow((100, 478), (100, 505))
    picture.arrow((170, 523), (235, 523))
    picture.arrow((306, 280), (306, 505))
    picture.arrow((306, 540), (306, 570))
    picture.box(236, 571, 140, 30, PLAIN, "result")
    picture.text(12, 590, "Views are not shown.", 13, "start")
    picture.legend(614, (TORCH, "torch"), (SESSION, "ONNX Runtime"), (PLAIN, "your program"))
    return picture


def layer() -> Picture:
    """Return the forward of a transformer's MLP under autocast, as it is lowered and as it runs."""
    before, after = _layer_models()
    types = [[node.op_type for node in model.graph.node] for model in (before, after)]
    matches = {
        left + at: right + at
        for left, right, size in difflib.SequenceMatcher(None, *types, autojunk=False).get_matching_blocks()
        for at in range(size)
    }
    picture = Picture(54 + 26 * len(types[0]), "One layer before and after the passes")
    for x, words, model in ((98, "as lowered", before), (302, "as it runs", after)):
        picture.text(x, 22, words, 15, font_weight="bold")
        picture.text(x, 40, f"{len(model.graph.node)} nodes", 13)
    for row, node in enumerate(before.graph.node):
        y = 50 + 26 * row
        stays = row in matches
        picture.box(8, y, 180, 22, SESSION if stays else GONE, _label(node), size=13)
        if stays:
            picture.arrow((188, y + 11), (211, y + 11))
            picture.box(212, y, 180, 22, SESSION, _label(after.graph.node[matches[row]]), size=13)
    return picture


def _label(node: Any) -> str:
    module, _, rest = node.name.partition("/")
    return f"{module}: {node.op_type}" if rest and module.islower() else node.op_type


def _layer_models() -> tuple[Any, Any]:
    import onnx
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.LayerNorm(64), nn.GELU()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))

    with TemporaryDirectory() as folder, torch.autocast("cpu", torch.bfloat16):
        torch.compile(Layer(), backend="ort_train", options={"save_onnx": folder})(torch.randn(2, 16, 64))
        lowered, optimized = (
            onnx.load(str(next(Path(folder, stage).glob("forward-*.onnx")))) for stage in ("lowered", "optimized")
        )
    return lowered, optimized


def memory() -> Picture:
    """Bytes alive over one training step of a transformer, with and without a memory budget."""
    curves = {"no budget": _alive({}), "memory_budget=0.4": _alive({"memory_budget": 0.4})}
    colors = {"no budget": "#b4540a", "memory_budget=0.4": "#1b5aa6"}
    longest = max(curve[-1][0] for curve, _ in curves.values())
    highest = max(nbytes for curve, _ in curves.values() for _, nbytes in curve)
    left, right, top, bottom = 52, 390, 60, 290
    picture = Picture(352, "Memory over one training step")
    for index, (name, (curve, _)) in enumerate(curves.items()):
        peak = max(nbytes for _, nbytes in curve)
        y = 22 + 20 * index
        picture.line([(14, y - 5), (38, y - 5)], colors[name], 3)
        picture.text(46, y, f"{name}: peak {peak / 1e6:.0f} MB", 14, "start")
    for megabytes in range(0, int(highest / 1e6) + 10, 10):
        y = bottom - (bottom - top) * megabytes * 1e6 / highest
        if y >= top - 8:
            picture.line([(left, y), (right, y)], "#d9dde2")
            picture.text(left - 6, y + 5, str(megabytes), 13, "end")
    for name, (curve, cut) in curves.items():
        steps = [(left, float(bottom))]
        for time, nbytes in curve:
            x, y = left + (right - left) * time / longest, bottom - (bottom - top) * nbytes / highest
            steps += [(x, steps[-1][1]), (x, y)]
        picture.line(steps, colors[name], 2)
        x = left + (right - left) * cut / longest
        picture.line([(x, top), (x, bottom)], colors[name], 1, "4 4")
    picture.text(12, 58, "MB", 13, "start")
    picture.text(left + 54, bottom + 20, "forward", 14)
    picture.text(right - 90, bottom + 20, "backward", 14)
    picture.text(200, bottom + 44, "estimated time of the operators, in their order", 13)
    return picture


def _alive(options: dict[str, Any]) -> tuple[list[tuple[float, int]], float]:
    """(time, bytes alive) after each operator of a step, and the time at which the backward begins."""
    import torch
    from stages import watch
    from torch import nn

    from ort_dynamo.passes.fx.analysis.memory import alive_bytes
    from ort_dynamo.passes.fx.analysis.saved_tensors import time_of

    one = nn.TransformerEncoderLayer(128, 4, 512, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(one, 4, enable_nested_tensor=False)
    seen = watch(model, (torch.randn(8, 128, 128),), options)
    found: list[tuple[float, int]] = []
    time = cut = 0.0
    for role, alive in zip(("forward", "backward"), alive_bytes(*seen.graphs.values()), strict=True):
        cut = time
        calls = (node for node in seen.graphs[role].graph.nodes if node.op == "call_function")
        for node, nbytes in zip(calls, alive[1:], strict=True):
            time += time_of(node)
            found.append((time, nbytes))
    return found, cut


PICTURES: dict[str, Callable[[], Picture]] = {
    "pipeline": pipeline,
    "islands": islands,
    "layer": layer,
    "memory": memory,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "_static"
    for name in sys.argv[2:] or PICTURES:
        (folder / f"{name}.svg").write_text(PICTURES[name]().svg())
