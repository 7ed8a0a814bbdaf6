"""Writes docs/internals/architectures.md from the results of sweep.py.

python tests/architectures/write_report.py stock.json training.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/internals/architectures.md"

_INTRODUCTION = """\
# Architectures under ort_train

Model types of transformers, each as a tiny, untrained model with a head, a loss and random inputs: one training step
compiled with `ort_train` against eager (loss, outputs, every gradient, buffers), with symbolic sizes where the inputs
have a length, and a second step at another length. Dropout is on. Weights are not downloaded, so what is tested is the
architecture. Made by

    python tests/architectures/sweep.py --results FILE
    python tests/architectures/write_report.py FILE …

*Same* differ from eager by at most 1e-4 of the largest entry; *rounding* by more, but are about as near to the same
step in float64 as eager is. *Undecided* are models in which eager itself, in float64, takes other key points or boxes.
*Ill-conditioned* are those that differ no more from the step in float64 than eager's step with weights disturbed by
1e-7 does: where one rounding decides about a ReLU or a maximum. *Not comparable* are those that `aot_eager`, torch's
own tracing without a compiler behind it, does not get right either: it leaves out random draws whose result nobody
reads, so that later ones are others. *Different*, *failed*, *crashed* and *too slow* are ours to explain. For what is
*not built* no tiny configuration or no inputs were found that work in eager.
"""
_BY_HAND = """\
## Beside transformers

Compared once in the same way, training step and evaluation, by a script that is not kept (onnxruntime 1.31.1,
diffusers 0.42.1), all the same: UNet2DModel, UNet2DConditionModel (also as in SDXL), UNet3DConditionModel,
AutoencoderKL, VQModel, DiT, PixArt, SD3, Flux and Wan, no node of which stays in eager; QwenImage and Lumina 2, whose
rotary embeddings are complex numbers, which do. Networks of torch.nn alone: TransformerEncoder, loops of LSTMCell and
GRUCell, LeNet, AlexNet and VGG in small, 3-D convolutions, a GAN's generator, spectral and weight norm, a VAE.

147 models of timm and torchvision, two or four images of 64 to 96 pixels: no node in eager; evaluation the same in all
that ran; the training step the same in 116, rounding in 10, ill-conditioned in 5. In 12 deep convolutional nets
(among them DLA, Xception, NASNet, RepVGG, GoogLeNet) some gradients differ by 1e-3 to 1e-2 of their largest entry.
All but NASNet and PNASNet were looked at over four or eight inputs each: eager's own gradients there, or those with
weights disturbed by 1e-7, are as far from float64's, about as often. 4 did not run in eager, or not in this script.

VITS is ill-conditioned: with its weights disturbed by 1e-7, eager's own gradients change as much as ours differ, and in
float64 it would draw other numbers. CLAP differs where eager is wrong ([BatchNorm](../reference/numerics.md)). Informer
drops out rows in the order of a `topk` that need not be sorted, in which torch leaves the order open. UDOP fails under
every backend, in Dynamo, and EfficientLoFTR under `aot_eager`, with which ours was to be compared.

Dynamo itself makes no graph of nn.LSTM, nn.GRU and nn.RNN (its option `allow_rnn`), nor of nn.Transformer with a mask
and no `is_causal`, which it compares with a causal one by `.item()`: they run in eager under every backend.
"""
_KINDS = (
    "same",
    "rounding",
    "undecided",
    "ill-conditioned",
    "not comparable",
    "different",
    "failed",
    "crashed",
    "too slow",
    "not built",
)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    lines = [
        _INTRODUCTION,
        *_totals(results),
        "",
        *_eager(results),
        "",
        *_rest(results),
        *_static(results),
        "",
        _BY_HAND,
        *_types(results),
    ]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    return 0


def _about(result: dict[str, Any]) -> str:
    return f"{result['runtime']}, torch {result['torch']}, transformers {result['transformers']}"


def _totals(results: list[dict[str, Any]]) -> list[str]:
    lines = [f"| on | tried | {' | '.join(_KINDS)} | without a node in eager |", "|" + "---|" * (len(_KINDS) + 3)]
    for result in results:
        records = result["records"]
        total = Counter(record["kind"] for record in records)
        native = sum("eager" in record and not record["eager"] for record in records)
        cells = [_about(result), len(records), *(total[kind] for kind in _KINDS), native]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _eager(results: list[dict[str, Any]]) -> list[str]:
    found: dict[str, set[str]] = defaultdict(set)
    for result in results:
        for record in result["records"]:
            for text in record.get("eager", ()):
                found[text].add(record["model_type"])
    lines = ["## What stays in eager", "", "| overload | reason | in |", "|---|---|---|"]
    for text, types in sorted(found.items()):
        overload, _, reason = text.partition(": ")
        lines.append(f"| `{overload}` | {reason} | {', '.join(sorted(types))} |")
    return lines if found else [*lines[:2], "Nothing."]


def _rest(results: list[dict[str, Any]]) -> list[str]:
    lines = ["## What is not the same", ""]
    for kind in _KINDS[1:]:
        for result in results:
            named = sorted(record["model_type"] for record in result["records"] if record["kind"] == kind)
            if named:
                lines.append(f"- {kind} ({result['runtime']}): {', '.join(named)}")
    return lines


def _static(results: list[dict[str, Any]]) -> list[str]:
    """Types that Dynamo cannot trace with symbolic sizes."""
    named = {r["model_type"] for result in results for r in result["records"] if r.get("inputs", "").endswith("static")}
    return [f"- with static sizes only, as Dynamo itself fails otherwise: {', '.join(sorted(named))}"] if named else []


def _types(results: list[dict[str, Any]]) -> list[str]:
    lines = ["## What is the same", ""]
    for result in results:
        heads = sorted(record["head"] for record in result["records"] if record["kind"] == "same")
        lines.append(f"{result['runtime']}: {', '.join(heads)}.\n")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
