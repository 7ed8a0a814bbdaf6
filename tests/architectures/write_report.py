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

Each model type of transformers as a tiny, untrained model with a head, a loss and random inputs. One training step compiled with
`ort_train` is compared with eager: loss, outputs, every gradient, buffers. Sizes are symbolic if the inputs have a length, and a
second step has another length. Dropout is on. No weights are downloaded: the test is of the architecture. Made by

    python tests/architectures/sweep.py --results FILE
    python tests/architectures/write_report.py FILE …

| word | meaning |
|---|---|
| same | within 1e-4 of eager, relative to the largest entry |
| rounding | further from eager, but as close to the same step in float64 as eager is |
| undecided | eager itself chooses other key points or boxes in float64 |
| ill-conditioned | as far from float64 as eager's step with weights disturbed by 1e-7: one rounding decides about a ReLU or a maximum |
| not comparable | torch's own tracing without a compiler (`aot_eager`) is not right either: it drops random ops whose result nobody reads, so later ones get other numbers |
| different, failed, crashed, too slow | faults of `ort_train` that need an explanation |
| not built | we found no small configuration or no inputs that work in eager |
"""  # noqa: E501
_BY_HAND = """\
## Other libraries

Compared once in the same way, training step and evaluation, with a script that is not in the repository (onnxruntime 1.31.1,
diffusers 0.42.1):

| models | result |
|---|---|
| diffusers: UNet2DModel, UNet2DConditionModel (also as in SDXL), UNet3DConditionModel, AutoencoderKL, VQModel, DiT, PixArt, SD3, Flux, Wan | same; no node in eager |
| diffusers: QwenImage, Lumina 2 | same; their rotary embeddings are complex numbers and run in eager |
| torch.nn alone: TransformerEncoder, loops of LSTMCell and GRUCell, small LeNet, AlexNet and VGG, 3-D convolutions, a GAN's generator, spectral and weight norm, a VAE | same |
| 147 models of timm and torchvision, two or four images of 64 to 96 pixels | no node in eager; evaluation the same in all that ran; training step: 116 same, 10 rounding, 5 ill-conditioned, 12 with differences (below), 4 did not run in eager, or not in this script |

In 12 deep convolutional nets (among them DLA, Xception, NASNet, RepVGG, GoogLeNet) some gradients differ by 1e-3 to 1e-2 of their
largest entry. For all but NASNet and PNASNet we compared four or eight inputs each. Eager's own gradients, or those with weights
disturbed by 1e-7, are as far from float64's, about as often.

Single models of transformers:

- VITS is ill-conditioned: with its weights disturbed by 1e-7, eager's own gradients change as much as ours differ. In float64 it
  would get other random numbers.
- CLAP differs where eager is wrong ([BatchNorm](../reference/numerics.md)).
- Informer drops rows in the order of a `topk` that need not be sorted; torch does not define that order.
- UDOP fails in Dynamo, under every backend.
- EfficientLoFTR fails under `aot_eager`, with which ours would be compared.

Some modules run in eager under every backend, because Dynamo makes no graph of them: nn.LSTM, nn.GRU and nn.RNN (see its option
`allow_rnn`), and nn.Transformer with a mask and without `is_causal`, which compares the mask with a causal one by `.item()`.
"""  # noqa: E501
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


def _in_a_sentence(result: dict[str, Any]) -> str:
    total = Counter(record["kind"] for record in result["records"])
    native = sum("eager" in record and not record["eager"] for record in result["records"])
    built = len(result["records"]) - total["not built"]
    return (
        f"With {result['runtime']}, {total['same']} of {built} types are the same, and {native} have no node in eager."
    )


def _totals(results: list[dict[str, Any]]) -> list[str]:
    lines = [_in_a_sentence(result) for result in results]
    lines += ["", f"| on | tried | {' | '.join(_KINDS)} | without a node in eager |", "|" + "---|" * (len(_KINDS) + 3)]
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
    lines = ["## Operators in eager", "", "| overload | reason | in |", "|---|---|---|"]
    for text, types in sorted(found.items()):
        overload, _, reason = text.partition(": ")
        lines.append(f"| `{overload}` | {reason} | {', '.join(sorted(types))} |")
    return lines if found else [*lines[:2], "Nothing."]


def _rest(results: list[dict[str, Any]]) -> list[str]:
    lines = ['## Other results than "same"', ""]
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
    lines = ['## Types with the result "same"', ""]
    for result in results:
        heads = sorted(record["head"] for record in result["records"] if record["kind"] == "same")
        lines.append(f"{result['runtime']}: {', '.join(heads)}.\n")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
