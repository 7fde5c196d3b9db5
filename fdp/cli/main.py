"""The ``fdp`` command line: its commands, error messages and exit codes.

    fdp                             print a short tour
    fdp train                       train privately with the defaults, on the sources of Python's standard library
    fdp advise --epsilon 3          recommend settings for a budget, a time and this machine
    fdp search --lr 2e-3,4e-3       choose settings by held-out loss, with the choice in the budget
    fdp epsilon --help              compute the epsilon of a mechanism, without training
    fdp plan --world 8              estimate memory, traffic and flops of a step on machines you do not have
    fdp compare ranks=1 ranks=4     run two configurations and show the first stage at which they differ
    fdp inspect models/tiny         show leaves, uses, rules, blocks and memory of a model
    fdp generate runs/notes --prompt "The"    generate text from a trained model
    fdp report runs/notes           write a page about a run, or about several side by side
    fdp ledger                      list what was spent on which data
    fdp statement runs/first        write the privacy statement of a run

Exit code 0: done; 1: a bug in fdp, with a traceback, or a lost rank; 2: a mistake in the input, explained in one
paragraph on stderr; 3: ``compare`` found a difference; 4: the loss of ``train`` diverged; 130: interrupted; 141:
the reader of its output is gone. With ``--json`` the last line of stdout is one JSON object: the result, or
``{"error": ...}``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fdp.cli.advise import advise_command
from fdp.cli.allocator import keep_freed_memory
from fdp.cli.compare import compare_command
from fdp.cli.epsilon import epsilon_command
from fdp.cli.flag_names import name_flag
from fdp.cli.formatting import package_version
from fdp.cli.generate import generate_command
from fdp.cli.inspect import inspect_command
from fdp.cli.ledger import ledger_command
from fdp.cli.other_names import answer, answer_command
from fdp.cli.plan import plan_command
from fdp.cli.report import report_command
from fdp.cli.search import search_command
from fdp.cli.statement import statement_command
from fdp.cli.tour import TOUR
from fdp.cli.train import train_command
from fdp.cli.waiting_threads import limit_spinning

# The error that typer raises for a mistake on the command line; only its subclass has a public name.
_UsageError: Any = typer.BadParameter.__bases__[0]

_KINDS = {"integer": "a whole number", "number": "a number", "float": "a number"}
"""Kinds of values by the word with which typer refuses another."""

_CHOICES = re.compile(r" is not one of ('.*')")
_NO_COMMAND = re.compile(r"No such command '(.*)'")
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")

# Set before torch is imported: it logs a stack of addresses when another process is gone; fdp says which one it is.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
keep_freed_memory()
limit_spinning()

app = typer.Typer(
    help="Functional, differentially private, fully sharded training on PyTorch.",
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("advise")(advise_command)
app.command("search")(search_command)
app.command("epsilon")(epsilon_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.command("inspect")(inspect_command)
app.command("generate")(generate_command)
app.command("report")(report_command)
app.command("ledger")(ledger_command)
app.command("statement")(statement_command)


def _show_version(value: bool) -> None:
    if value:
        print(f"fdp {package_version('fdp')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    call: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    if call.invoked_subcommand is None:
        print(TOUR)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; see the module docstring for the exit codes."""
    words = _add_values(list(sys.argv[1:] if arguments is None else arguments))
    try:
        code = app(args=words, prog_name="fdp", standalone_mode=False)
    except (ValueError, OSError) as error:
        _explain(error, words)
        code = 2
    except RuntimeError as error:
        if type(error).__name__ != "LostRank":
            raise
        _explain(error, words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for threads that wait for the lost rank
    except _UsageError as error:
        from fdp.parallel import launch

        launch.withdraw(f"{error.format_message()}")
        _explain(error, words)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code or 0)


def _add_values(words: list[str]) -> list[str]:
    """Add the value that an option stands for alone: ``--offload all``, ``--wandb fdp``."""
    alone, added = {"--offload": "all", "--wandb": "fdp"}, []
    for word, after in zip(words, [*words[1:], "--"]):
        added += [word, alone[word]] if word in alone and after.startswith("-") else [word]
    return added


def _message(error: Exception, words: Sequence[str]) -> str:
    """Return an error in the words of the command line: its flags, also for names that other tools use."""
    flags = _flags_of(words)
    if (option := getattr(error, "option_name", None)) is not None and (known := answer(option, flags)):
        return known
    message = getattr(error, "format_message", error.__str__)()
    if (found := _NO_COMMAND.match(message)) and (known := answer_command(found[1])):
        return known
    if isinstance(error, typer.BadParameter) and (known := _explain_value(error, words)):
        return known
    if found := _EXTRA.match(message):
        return _explain_extra(found[1], flags)
    return name_flag(message, flags)


def _explain_extra(words: str, flags: set[str]) -> str:
    """Return what to do with words that belong to no option."""
    said = f"expected every value after the name of its option, got {words} without one"
    if "--data" in flags:
        return f"{said}; give data with --data, a model with --model"
    return f"{said}; put a value with spaces in quotes"


def _explain_value(error: Any, words: Sequence[str]) -> str | None:
    """Return what an option expects if it is missing, or its value is no number or no known name; else None."""
    option = error.param
    flag = next((flag for flag in getattr(option, "opts", ()) if flag.startswith("--")), None)
    if flag is None and "Missing" in error.format_message():
        name = option.metavar or option.name.upper()
        return f"{name}: expected it on the command line, got none; add it ({option.help.rstrip('.')})"
    if flag is None:
        return None
    if "Missing" in error.format_message():
        return f"{flag}: expected it on the command line, got none; add {flag} ({option.help.rstrip('.')})"
    kind = next((kind for word, kind in _KINDS.items() if word in error.message), None)
    if found := _CHOICES.search(error.message):
        kind = f"one of {found[1].replace(chr(39), '')}"
    given = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    given += [after for word, after in pairwise(words) if word == flag]
    return f"{flag}: expected {kind}, got {given[-1]!r}" if kind and given else None


def _flags_of(words: Sequence[str]) -> set[str]:
    """Return the flags of the command that the words call."""
    commands: Any = getattr(typer.main.get_command(app), "commands", {})
    command = next((commands[word] for word in words if word in commands), None)
    return {flag for option in command.params for flag in option.opts} if command is not None else set()


def _explain(error: Exception, words: Sequence[str]) -> None:
    """Print a mistake on stderr, and as JSON if that was asked for; raise an error that is a bug."""
    from fdp.parallel import launch  # here, since both import torch, which takes seconds
    from fdp.types import FdpError

    if isinstance(error, ValueError) and not isinstance(error, FdpError):
        raise error
    message = _message(error, words)
    if launch.rank() > 0 and getattr(error, "everywhere", False):
        time.sleep(
            3
        )  # every rank raised it and rank 0 prints it: if another rank ended first, torchrun would stop rank 0
        return
    message = message if launch.rank() == 0 else f"rank {launch.rank()}: {message}"
    console = Console(stderr=True)
    paragraph = Text("fdp: ", style="bold red") + Text(message, style="red")
    console.print(paragraph, soft_wrap=not console.is_terminal)  # one line in a log, so that it can be searched
    if "--json" in words:
        print(json.dumps({"error": message}))
