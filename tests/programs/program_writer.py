"""Writes programs: a seed and a mode give one, whose every line eager takes and which rounding does not decide.

A hunt through many of them, which shrinks those that fail:

    python tests/programs/hunt.py --mode training --seeds 0:1000 --jobs 2 --out found.txt

A seed gives the same program on each machine that computes alike. `program_layers.py` and `program_operations.py` hold
the ingredients, `program_comparison.py` the comparison and its tolerances.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import program_dtypes  # noqa: F401 (its ingredients)
import program_layers
import program_operations
import program_sequences  # noqa: F401
from program_comparison import SETTINGS, Baseline, Case, baseline
from program_draft import INGREDIENTS, Draft, Row
from program_refusals import refused
from program_text import BACKWARDS, LOSSES, Input, Line, Program
from torch import Tensor

__all__ = ["write_case"]

_LARGEST = 6000  # elements of a value
_WIDEST = 50.0  # the bound of a value's numbers
_ATTEMPTS = 400  # at lines of one program

_DTYPES = {"float32": 20, "float64": 2, "bfloat16": 1.5, "float16": 1}
"""The dtype of a program -> its weight."""

_BATCHES = ((), (2, 5), (3, 1), (2, 0), (0, 2), (1, 1))
"""The batch sizes of the calls; () are those of the mode."""

_CHANNELS = program_layers.CHANNELS

_OF_NETWORKS = ("convolution", "batch_norm", "activation", "view", "copy", "arithmetic", "concatenation", "decoder")
"""The ingredients of programs in which most faults of layouts and aliases were found."""

_OF_SEQUENCES = (
    "recurrent_cell",
    "recurrent_steps",
    "attention_layer",
    "masked_attention",
    "linear",
    "layer_norm",
    "cast",
)

_KINDS = {"image": 10, "signal": 2, "volume": 1, "vector": 3, "tokens": 4}
"""The shape of the first input -> its weight."""

_RECOMPUTING = ("budget", "sections")
"""The settings that save other tensors than eager does."""


def write_case(seed: int, mode: str, setting: str | None = None) -> tuple[Case, Baseline]:
    """Write a program that can be compared, with its baseline.

    Args:
        setting: a key of `SETTINGS`; by default the seed chooses.
    """
    choose = random.Random(f"{mode} {seed}")
    chosen = choose.choices([*SETTINGS], (6, 2, 1, 1, 1, 1))[0]
    setting = setting or chosen
    batches = choose.choices(_BATCHES, (12, 1, 1, 1, 1, 1))[0]
    while True:
        case = Case(_Writer(choose, mode, batches).write(), mode, setting, batches)
        if setting in _RECOMPUTING and ".data" in case.program.after:
            # Autograd does not see the write. Whether a gradient follows it depends on which tensors are saved.
            case = replace(case, program=replace(case.program, after=""))
        known = baseline(case)
        if setting in _RECOMPUTING and known.eager.raised and case.program.after:
            # Eager refuses a backward whose saved tensor is written. Recomputation does not read that tensor.
            case = replace(case, program=replace(case.program, after=""))
            known = baseline(case)
        if known.conditioned and _is_comparable(case.program, known):
            return case, known


def _is_comparable(program: Program, known: Baseline) -> bool:
    """Drop programs whose own writes eager refuses in the backward: compiled, each line reads a copy."""
    raised = known.eager.raised
    return not raised or raised.stage == "forward" or bool(program.after) or program.backward == "refused"


class _Writer:
    def __init__(self, choose: random.Random, mode: str, batches: tuple[int, ...]) -> None:
        self._choose = choose
        self._mode = mode
        self._batches = batches
        self._values: Mapping[str, Tensor] = {}
        self._made = 0
        training = choose.random() < (0.4 if mode == "inference" else 0.75)
        kind = choose.choices([*_KINDS], [*_KINDS.values()])[0]
        self._ingredients = _some_ingredients(choose, _OF_SEQUENCES if kind in ("vector", "tokens") else _OF_NETWORKS)
        self._program = Program(
            inputs=self._inputs(kind),
            training=training,
            channels_last=choose.random() < 0.1,
            loss=choose.choice([*LOSSES]),
            backward="once" if mode == "inference" else choose.choices([*BACKWARDS], (20, 1, 1))[0],
            dtype=choose.choices([*_DTYPES], [*_DTYPES.values()])[0],
        )

    def write(self) -> Program:
        self._accept(self._program)
        wanted, attempts = self._choose.randint(4, 13), 0
        writes = self._choose.random() < 0.35
        while len(self._program.body) < wanted and attempts < _ATTEMPTS:
            if self._choose.random() < 0.06:
                self._write_region()
            else:
                attempts += 1
                self._write_line("", writes)
        if self._choose.random() < 0.08:
            self._program = _in_one_region(self._program, "autocast 0")
        finished = self._finished()
        return self._with_refused_line(finished) if self._choose.random() < 0.04 else finished

    def _inputs(self, kind: str) -> tuple[Input, ...]:
        choose = self._choose
        height = choose.choice((4, 6, 8, 8, 8, 5, 7, 12, 1))
        width = choose.choice((height, height, 8, 5))
        channels = choose.choice(_CHANNELS)
        image = {
            "image": (None, channels, height, width),
            "signal": (None, channels, choose.choice((8, 12, 7))),
            "volume": (None, channels, 4, choose.choice((4, 5)), 4),
            "vector": (None, choose.choice((6, 10, 1))),
            "tokens": (None, choose.choice((4, 5, 7, None)), choose.choice((4, 8))),
        }[kind]
        found = [self._input("x0", image)]
        more = [(None, 10), (None, channels, 1, 1), (1, channels, height, width), (channels, 1, 1)]
        more += [(None, choose.choice(_CHANNELS), height, width), image, (None, 0), (1,), ()]
        for index in range(choose.choice((0, 1, 1, 2))):
            found.append(self._input(f"x{index + 1}", choose.choice(more)))
        return tuple(found)

    def _input(self, name: str, shape: tuple[int | None, ...]) -> Input:
        choose = self._choose
        layout = "contiguous"
        if choose.random() < 0.25 and shape:
            layout = choose.choice(["transposed", "sliced", "expanded"] + ["channels_last"] * 3 * (len(shape) == 4))
        if name != "x0" and choose.random() < 0.2:
            layout = choose.choice(("integers", "integers", "mask"))
        floating = layout not in ("integers", "mask")
        differentiable = floating and self._mode != "inference" and choose.random() < 0.6
        return Input(name, shape, layout, differentiable, copied=differentiable and choose.random() < 0.4)

    def _write_region(self) -> None:
        kinds = (
            ("checkpoint", "autocast")
            if self._mode == "inference"
            else ("checkpoint", "checkpoint", "no_grad", "autocast")
        )
        region = f"{self._choose.choice(kinds)} {len(self._program.body)}"
        for _ in range(self._choose.randint(2, 6)):
            self._write_line(region, False)

    def _write_line(self, region: str, writes: bool) -> None:
        draft = Draft(self._choose, self._values, self._program.parts)
        name = draft.recent([*self._values])
        value = self._values[name]
        if not region and value.is_floating_point() and self._choose.random() < (0.2 if writes else 0.01):
            to_buffer = self._choose.random() < 0.2
            write = program_operations.write_to_buffer if to_buffer else program_operations.write
            self._accept(self._program.with_line(Line(write(draft, name, value)), draft.parts))
            return
        fitting = [row for row in self._ingredients if row.takes(value)]
        written = draft.weighted(fitting).write(draft, name, value) if fitting else None
        if written is None:
            return
        text, count = written if isinstance(written, tuple) else (written, 1)
        made = tuple(f"v{self._made + index}" for index in range(count))
        if self._accept(self._program.with_line(Line(f"{', '.join(made)} = {text}", made, region), draft.parts)):
            self._made += count

    def _sink_reads(self, name: str) -> str:
        """Read a value in one of the last lines, so that it is alive while others are made, and no result."""
        new = f"v{self._made}"
        line = Line(f"{new} = {self._choose.choice(_LATE).format(name)}", (new,))
        value = self._values[name]
        if value.dim() < 2 or not value.is_floating_point() or not self._accept(self._program.with_line(line, {})):
            return name
        self._made += 1
        return new

    def _accept(self, program: Program) -> bool:
        """Take a longer program if eager does and its values stay small."""
        found = Case(program, self._mode, batches=self._batches).observe(everything=True)
        values = {name: value for name, value in found.tensors.items() if name != "self"}
        try:
            if found.raised or not all(_is_sound(value) for value in values.values()):
                return False
        except RuntimeError:  # torch refuses to read a view after a write to its base
            return False
        self._program, self._values = program, values
        return True

    def _finished(self) -> Program:
        choose = self._choose
        read = {name for line in self._program.body for name in line.reads()}
        unread = [name for name in self._values if name not in read]
        count = choose.choice((1, 2, 2, 3, 3, 4))
        results = choose.sample(unread, min(count, len(unread)))
        while not results or (len(results) < count and choose.random() < 0.5):
            results.append(choose.choice([*self._values]))
        if choose.random() < 0.6:
            results = [self._sink_reads(name) for name in results]
        after = ""
        if choose.random() < (0.3 if self._mode == "training" else 0.05):
            result = f"results[{choose.randrange(len(results))}]"
            after = f"{result}{choose.choice(('.data.clamp_(0, 0.1)', '.data.zero_()', '.mul_(2)', '.data.add_(1)'))}"
        choose.shuffle(results)
        program = replace(self._program, results=tuple(results), after=after)
        # AOTAutograd drops random numbers that nothing reads, and so later ones are others.
        return (program.without_unread() if program.draws else program).pruned()

    def _with_refused_line(self, program: Program) -> Program:
        """Read a result in a line that eager refuses."""
        values = {name: value for name, value in self._values.items() if name in program.results}
        draft = Draft(self._choose, values, program.parts)
        name = draft.pick([*values])
        line = Line(f"v{self._made} = {refused(draft, name, values[name])}", (f"v{self._made}",))
        return replace(program, body=(*program.body, line), results=(*program.results, f"v{self._made}"), after="")


_LATE = ("{}.mean(-1)", "{}.sum(1)", "{}.flatten(1).mean(1)", "{} * 2", "{}.cos()", "{}.amax(-1)", "{} + 1")


def _some_ingredients(choose: random.Random, mostly: tuple[str, ...]) -> list[Row]:
    """Leave out half of the ingredients: a program of all kinds goes deep into none."""
    share = choose.choice((0.0, 0.3, 0.9))
    always = {"activation", "view", *(mostly if choose.random() < 0.6 else ())}
    return [row for row in INGREDIENTS if row.write.__name__ in always or row.integers or choose.random() < share]


def _in_one_region(program: Program, region: str) -> Program:
    return replace(program, body=tuple(replace(line, region=line.region or region) for line in program.body))


def _is_sound(value: Tensor) -> bool:
    small = value.numel() <= _LARGEST and value.dim() < 6 and not value.is_complex()
    return small and (not value.numel() or bool(value.double().abs().max() < _WIDEST))  # False for NaN
