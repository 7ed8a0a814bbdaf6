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

import program_layers
import program_operations
from program_comparison import SETTINGS, Baseline, Case, baseline
from program_draft import INGREDIENTS, Draft, Ingredient
from program_text import LOSSES, Input, Line, Program
from torch import Tensor

__all__ = ["write_case"]

_LARGEST = 6000  # elements of a value
_WIDEST = 50.0  # the bound of a value's numbers
_ATTEMPTS = 400  # at lines of one program

_CHANNELS = program_layers.CHANNELS

_OF_NETWORKS = ("convolution", "batch_norm", "activation", "view", "copy", "arithmetic", "concatenation", "decoder")
"""The ingredients of programs in which most faults of layouts and aliases were found."""


_RECOMPUTING = ("budget", "sections")
"""The settings that save other tensors than eager does."""


def write_case(seed: int, mode: str, setting: str | None = None) -> tuple[Case, Baseline]:
    """Write a program that can be compared, with its baseline.

    Args:
        setting: a key of `SETTINGS`; by default the seed chooses.
    """
    choose = random.Random(f"{mode} {seed}")
    chosen = choose.choices([*SETTINGS], (6, 2, 1, 1))[0]
    setting = setting or chosen
    while True:
        program = _Writer(choose, mode).write()
        if setting in _RECOMPUTING and ".data" in program.after:
            # Autograd does not see the write. Whether a gradient follows it depends on which tensors are saved.
            program = replace(program, after="")
        case = Case(program, mode, setting)
        known = baseline(case)
        if known.conditioned and not (known.eager.raised and not case.program.after):
            return case, known


class _Writer:
    def __init__(self, choose: random.Random, mode: str) -> None:
        self._choose = choose
        self._mode = mode
        self._values: Mapping[str, Tensor] = {}
        self._made = 0
        self._ingredients = _some_ingredients(choose)
        training = choose.random() < (0.4 if mode == "inference" else 0.75)
        self._program = Program(
            inputs=self._inputs(choose.choices(("image", "signal", "volume", "vector"), (12, 2, 1, 2))[0]),
            training=training,
            channels_last=choose.random() < 0.1,
            loss=choose.choice([*LOSSES]),
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
        return self._finished()

    def _inputs(self, kind: str) -> tuple[Input, ...]:
        choose = self._choose
        height = choose.choice((4, 6, 8, 8, 8, 5, 7, 12, 1))
        width = choose.choice((height, height, 8, 5))
        channels = choose.choice(_CHANNELS)
        image = {
            "image": (None, channels, height, width),
            "signal": (None, channels, choose.choice((8, 12, 7))),
            "volume": (None, channels, 4, choose.choice((4, 5)), 4),
            "vector": (None, choose.choice((6, 10))),
        }[kind]
        found = [self._input("x0", image)]
        more = [(None, 10), (None, channels, 1, 1), (1, channels, height, width), (channels, 1, 1)]
        more += [(None, choose.choice(_CHANNELS), height, width), image]
        for index in range(choose.choice((0, 1, 1, 2))):
            found.append(self._input(f"x{index + 1}", choose.choice(more)))
        return tuple(found)

    def _input(self, name: str, shape: tuple[int | None, ...]) -> Input:
        choose = self._choose
        layout = "contiguous"
        if choose.random() < 0.25:
            layout = choose.choice(["transposed", "sliced"] + ["channels_last"] * 3 * (len(shape) == 4))
        differentiable = self._mode != "inference" and choose.random() < 0.6
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
        draft = Draft(self._choose, self._values, len(self._program.parts))
        name = draft.recent([*self._values])
        value = self._values[name]
        if not region and self._choose.random() < (0.2 if writes else 0.01):
            to_buffer = self._choose.random() < 0.2
            write = program_operations.write_to_buffer if to_buffer else program_operations.write
            self._accept(self._program.with_line(Line(write(draft, name, value)), draft.parts))
            return
        fitting = [(function, weight) for weight, ranks, function in self._ingredients if value.dim() in ranks]
        functions, weights = zip(*fitting, strict=True)
        written = self._choose.choices(functions, weights)[0](draft, name, value)
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
        if self._values[name].dim() < 2 or not self._accept(self._program.with_line(line, {})):
            return name
        self._made += 1
        return new

    def _accept(self, program: Program) -> bool:
        """Take a longer program if eager does and its values stay small."""
        tried = Case(replace(program, results=("None",)), self._mode)
        found = tried.observe(everything=True)
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
        return replace(self._program, results=tuple(results), after=after).pruned()


_LATE = ("{}.mean(-1)", "{}.sum(1)", "{}.flatten(1).mean(1)", "{} * 2", "{}.cos()", "{}.amax(-1)", "{} + 1")


def _some_ingredients(choose: random.Random) -> list[tuple[float, frozenset[int], Ingredient]]:
    """Leave out half of the ingredients: a program of all kinds goes deep into none."""
    share = choose.choice((0.0, 0.3, 0.9))
    always = {"activation", "view", *(_OF_NETWORKS if choose.random() < 0.6 else ())}
    return [row for row in INGREDIENTS if row[2].__name__ in always or choose.random() < share]


def _in_one_region(program: Program, region: str) -> Program:
    return replace(program, body=tuple(replace(line, region=line.region or region) for line in program.body))


def _is_sound(value: Tensor) -> bool:
    small = value.numel() <= _LARGEST and value.numel() > 0 and value.is_floating_point() and value.dim() < 6
    return small and bool(value.abs().max() < _WIDEST)  # False for NaN
