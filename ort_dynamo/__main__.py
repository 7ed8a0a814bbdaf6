"""Command line: python -m ort_dynamo COMMAND."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

from ort_dynamo.commands import cache, demo, doctor, explain, operators, passes, topics
from ort_dynamo.commands.script import ProgramRaisedError
from ort_dynamo.errors import OrtDynamoError
from ort_dynamo.options.spelling import nearest

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        summary: one line for --help.
        add_arguments: declares its arguments. Neither this nor importing its module may import torch: --help is fast.
        run: does it, and returns the exit status.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: dict[str, Command] = {
    "cache": Command(cache.SUMMARY, cache.add_arguments, cache.run),
    "demo": Command(demo.SUMMARY, demo.add_arguments, demo.run),
    "doctor": Command(doctor.SUMMARY, doctor.add_arguments, doctor.run),
    "explain": Command(explain.SUMMARY, explain.add_arguments, explain.run),
    "help": Command(topics.SUMMARY, topics.add_arguments, topics.run),
    "operators": Command(operators.SUMMARY, operators.add_arguments, operators.run),
    "passes": Command(passes.SUMMARY, passes.add_arguments, passes.run),
}
"""Subcommand -> its command; a new one is a line here."""


class _Parser(argparse.ArgumentParser):
    """Ends its message about an unknown command, action or option with the nearest one."""

    def error(self, message: str) -> NoReturn:
        """Print usage and the message, and exit with status 2."""
        given, chosen, choices = message.partition("(choose from")
        if chosen and (quoted := re.search("invalid choice: '(.+)'", given)):
            message += nearest(quoted[1], re.findall(r"[\w-]+", choices))
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown one is an error with the usage of the command that got it."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = re.findall(r"--[\w-]+", self.format_help())
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0].partition('=')[0], known)}")
        return parsed, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: the command line after the program's name; None takes sys.argv's.

    Returns:
        The exit status: 0 for success, 1 when the command ran and found something wrong, 2 when it could not run.

    Raises:
        SystemExit: with status 2 and usage on stderr for bad arguments, with 0 for --help.
        Exception: any of a program that the command runs.
    """
    parser = _Parser(
        prog="python -m ort_dynamo",
        description='PyTorch training on ONNX Runtime: torch.compile(model, backend="ort_train").',
        epilog="New here? python -m ort_dynamo help first_training shows a first program, and help lists all guides.",
    )
    parser.add_argument("--version", action="version", version=f"ort_dynamo {version('ort-dynamo')}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
    parsed = parser.parse_args(arguments)
    try:
        status = COMMANDS[parsed.command].run(parsed)
        if sys.stdout is not None:  # None if the caller has closed it
            sys.stdout.flush()  # a reader that has gone is noticed here, not at exit
        return status
    except ProgramRaisedError as raised:
        ended = raised.error
    except OrtDynamoError as error:
        print(f"{parser.prog} {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return 0
    raise ended  # here, so that no other error is its context


if __name__ == "__main__":
    sys.exit(main())
