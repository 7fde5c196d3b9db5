"""``fdp``: the commands, their errors and their exit codes.

    fdp train                       a private run with the defaults, on the data that Python brings along
    fdp epsilon --help              what a mechanism costs, without training
    fdp plan --world 8              memory, traffic and flops of a step on machines one does not have
    fdp compare ranks=1 ranks=4     two configurations, stage by stage: where they first differ
    fdp inspect models/tiny         leaves, uses, rules, blocks and memory of a model one brings along

Exit code 0: done; 1: a fault of fdp itself, with a traceback, or another rank is gone; 2: a mistake in what it was
given, explained in one paragraph on stderr; 3: ``compare`` found a difference; 130: interrupted. With ``--json`` the
last line of stdout is one JSON object: the result, or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fdp.cli import version_of
from fdp.cli.compare import compare_command
from fdp.cli.epsilon import epsilon_command
from fdp.cli.inspect import inspect_command
from fdp.cli.plan import plan_command
from fdp.cli.train import train_command

# What typer raises for a mistake on the command line; only its subclass has a public name.
_UsageError: Any = typer.BadParameter.__bases__[0]

# Before torch is imported: what it logs when another process is gone is a stack of addresses. fdp says which one it is.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

app = typer.Typer(
    help="Functional, differentially private, fully sharded training on PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("epsilon")(epsilon_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.command("inspect")(inspect_command)


def _show_version(value: bool) -> None:
    if value:
        print(f"fdp {version_of('fdp')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, or 2 with the mistake explained on stderr."""
    words = _offload_all(list(sys.argv[1:] if arguments is None else arguments))
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
        os._exit(1)  # threads that wait for the lost rank would be waited for
    except _UsageError as error:
        from fdp.parallel import launch

        launch.withdraw(f"{error.format_message()}")
        _explain(error, words)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code or 0)


def _offload_all(words: list[str]) -> list[str]:
    """``--offload`` with nothing after it is ``--offload all``."""
    full = []
    for word, after in zip(words, [*words[1:], "--"]):
        full += [word, "all"] if word == "--offload" and after.startswith("-") else [word]
    return full


def _explain(error: Exception, words: Sequence[str]) -> None:
    from fdp.parallel import launch  # here, since they bring torch along, which takes seconds
    from fdp.types import FdpError

    if isinstance(error, ValueError) and not isinstance(error, FdpError):
        raise error
    message = getattr(error, "format_message", error.__str__)()
    if not message:  # no command was given: the help is on the screen
        return
    if launch.rank() > 0 and getattr(error, "everywhere", False):
        time.sleep(3)  # every rank raised it and the first one says it: torchrun would stop it when another ends
        return
    message = message if launch.rank() == 0 else f"rank {launch.rank()}: {message}"
    console = Console(stderr=True)
    paragraph = Text("fdp: ", style="bold red") + Text(message, style="red")
    console.print(paragraph, soft_wrap=not console.is_terminal)  # in a log, one line that can be searched
    if "--json" in words:
        print(json.dumps({"error": message}))
