"""``fdp report``: one HTML page about a run, or about several side by side.

    fdp report runs/notes                           writes runs/notes/report.html
    fdp report runs/a runs/b --out compare.html
    fdp report runs/notes --json                    prints what the page shows

The page shows metrics of private data, which no budget covers: it has mode 0600 and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from fdp.report.contents import Contents, Setting
    from fdp.run.run_folder import RunFolder

POINTS = 400
"""Points of a curve on the page of one run."""
ALL_POINTS = 2400
"""Points of one figure's curves together, if there are many runs: this keeps a page below 1 MB."""
NAME = "report.html"


def report_command(
    runs: Annotated[list[Path], Argument(help="Folders of runs, finished or not.", show_default=False)],
    out: Annotated[
        Path | None,
        Option(help="The page to write.", show_default="report.html in the folder of a single run, else here"),
    ] = None,
    open_page: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print what the page shows as one JSON object; write the page only to an --out.")
    ] = False,
) -> None:
    """Write a page about a run, or several side by side. It shows metrics, which the budget does not cover."""
    import json

    from rich.console import Console

    from fdp.report.contents import as_json as all_as_json

    contents = [_named_apart(each, runs) for each in read_runs(runs)]
    path = None if as_json and out is None else write_page(contents, out)
    if as_json:
        print(json.dumps(all_as_json(contents) | {"out": None if path is None else str(path)}, allow_nan=False))
    elif path is not None:
        console = Console(highlight=False)
        console.print(f"{path}: metrics of private data, not covered by the budget; keep it where the data is")
    if open_page and path is not None:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def read_runs(folders: Sequence[Path]) -> list[Contents]:
    """Return what is shown of the runs in these folders."""
    from fdp.report.contents import read_contents
    from fdp.report.promise import statement_words
    from fdp.run.run_folder import read_run_folder

    points = max(40, min(POINTS, ALL_POINTS // len(folders)))
    found = [read_run_folder(folder) for folder in folders]
    return [
        read_contents(
            run,
            settings=settings_of(run),
            statement=statement_words(run),
            learning_rates=learning_rates(run),
            points=points,
        )
        for run in found
    ]


def write_page(runs: Sequence[Contents], out: Path | None) -> Path:
    """Write the page to ``out``, by default into the folder of a single run; replace only an earlier page."""
    from fdp.report.page import MARK, make_page
    from fdp.storage.private_files import disk_errors, write_private
    from fdp.types import FdpError

    path = out or (Path(runs[0].path, NAME) if len(runs) == 1 else Path(NAME))
    if path.is_dir():
        path = path / NAME
    if path.exists() and MARK.encode() not in path.read_bytes()[:200]:
        raise FdpError(f"--out: expected a new file or an earlier report, got {path}, which is neither; give another")
    if path.suffix.lower() not in (".html", ".htm"):
        raise FdpError(f"--out: expected a page, which is HTML, got {path}; give --out {path.with_suffix('.html')}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, make_page(runs))
    return path


def settings_of(run: RunFolder) -> list[Setting]:
    """Return the settings of a run with their flags and defaults; also those that this version does not have."""
    from fdp.cli.options import options_of
    from fdp.cli.train_options import TrainOptions
    from fdp.report.contents import Setting

    known, found = options_of(TrainOptions), []
    for key, value in run.settings.items():
        if (option := known.get(key)) is None:
            found.append(Setting(key, f"--{key.replace('_', '-')}", value, None, "of another version"))
            continue
        default = str(option.default) if isinstance(option.default, Path) else option.default
        found.append(Setting(key, option.name, value, default, option.panel or ""))
    return found


def learning_rates(run: RunFolder) -> list[float] | None:
    """Return the learning rate of every planned step, or None if this version does not read the settings."""
    import torch

    from fdp.cli.configure import make_schedule
    from fdp.cli.options import build, options_of
    from fdp.cli.train_options import TrainingOptions
    from fdp.types import FdpError

    known = options_of(TrainingOptions)
    try:
        rate = make_schedule(build(TrainingOptions, {key: run.settings[key] for key in known if key in run.settings}))
    except (FdpError, TypeError):
        return None
    return [float(rate(torch.tensor(step))) for step in range(int(run.settings["steps"]))]


def _named_apart(run: Contents, folders: Sequence[Path]) -> Contents:
    """Return the run named by its path if another folder has the same name."""
    names = [folder.resolve().name for folder in folders]
    return run._replace(name=run.path) if names.count(run.name) > 1 else run
