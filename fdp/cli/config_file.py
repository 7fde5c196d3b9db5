"""``--config run.toml``: the settings of ``fdp train`` in a file.

    epsilon = 3                          # every option by its name, - or _ alike
    batch-size = 256
    [kfac]                               # or in sections: model, data, privacy, training, kfac, compute, ranks, output
    damping = 0.1

A flag on the command line replaces the file's value, and also the file's value of an option that excludes it:
``--epsilon 3`` replaces ``noise_multiplier = 1``. Every run saves its settings in full as ``config.toml``.

    >>> values = read_config(Path("run.toml"))              # {"epsilon": 3, "batch_size": 256, "kfac_damping": 0.1}
    >>> options = build(TrainOptions, merge(values, {"steps": 100}))
    >>> print(config_text(to_dict(options)))
"""

from __future__ import annotations

import difflib
import json
import math
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from fdp.cli.options import OptionField, options_of
from fdp.cli.train_options import DataOptions, ModelOptions, TrainOptions

EXCLUSIVE = (("steps", "epochs"), ("epsilon", "noise_multiplier"))
"""Options of which only one may be given, on the command line or in a file."""
ADAPTERS = ("lora", "lora_alpha", "lora_targets", "prefix", "train_only")
REPLACED = {
    "steps": ("epochs",),
    "epochs": ("steps",),
    "epsilon": ("noise_multiplier",),
    "noise_multiplier": ("epsilon",),
    "prefix": ADAPTERS,
    "train_only": ADAPTERS,
    "lora": ("prefix", "train_only"),
    "nproc": ("mesh",),
}
"""Settings of a file that do not hold beside a flag: ``--prefix`` replaces ``lora``."""
WIDTH = 118


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a file by key; raise an error that names file and key if one is not an option."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _mistake(
            f"--config: expected a TOML file, got {path}, which does not exist; fdp train --show-config prints one"
        ) from None
    except IsADirectoryError:
        raise _mistake(f"--config: expected a TOML file, got a folder; did you mean {path / 'config.toml'}?") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        hint = "; a run's settings are in its config.toml" if path.suffix == ".json" else ""
        raise _mistake(f"--config {path}: expected a TOML file, got an error when reading: {error}{hint}") from None
    values: dict[str, Any] = {}
    for name, value in content.items():
        found = _read_section(path, name, value) if isinstance(value, dict) else {_find_key(path, name): value}
        if twice := values.keys() & found.keys():
            raise _mistake(f"--config {path}: expected every option once, got {', '.join(sorted(twice))} twice")
        values |= found
    for key, value in values.items():
        try:
            options_of(TrainOptions)[key].check(value)
        except ValueError as error:
            raise _mistake(f"--config {path}, {key}: {error}") from None
    check_exclusive(values, f"--config {path}")
    return values


def check_exclusive(values: Mapping[str, Any], where: str) -> None:
    """Raise if two options are given that say the same thing in two ways; ``where`` begins the error."""
    for group in EXCLUSIVE:
        given = [options_of(TrainOptions)[key].name for key in group if values.get(key) is not None]
        if len(given) > 1:
            raise _mistake(f"{where}: expected either {' or '.join(given)}, got both; leave one out")


def merge(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file with those given on the command line, which replace what they exclude."""
    replaced = {other for key in given for other in REPLACED.get(key, ())}
    return {key: value for key, value in file.items() if key not in replaced} | dict(given)


def config_text(settings: Mapping[str, Any], *, heading: str = "", saved: bool = False) -> str:
    """Return every setting with its help as a TOML file, in the order and under the headings of ``--help``.

    Options that are not set are comments. So are ``steps`` if they follow from ``epochs``, the model and the data if
    they are those of the run to ``extend``, and, if ``saved``, the ``out`` of the run that saves the file: whoever
    repeats the run needs another one.
    """
    fixed = {key for group in (ModelOptions, DataOptions) for key in options_of(group)} if settings["extend"] else set()
    lines, panel = [f"# {line}".rstrip() for line in _wrap(heading)], None
    for key, option in options_of(TrainOptions).items():
        if option.panel != panel:
            panel = option.panel
            lines += ["", f"# ---- {panel} ----"]
        lines += ["", *(f"# {line}" for line in textwrap.wrap(_help(option), WIDTH - 2))]
        value = settings[key]
        if key in fixed:
            lines.append(f"# {key}: that of the run in extend")
        elif key == "steps" and settings["epochs"] is not None:
            lines.append(f"# steps = {value}    (follows from epochs)")
        elif key == "out" and saved:
            lines.append("# out =")
        elif (text := _toml_value(value)) is None:
            lines.append(f"# {key} =")
        else:
            lines.append(f"{key} = {text}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _wrap(heading: str) -> list[str]:
    """Return the lines of a heading; a path in it is not broken, so that its command can be copied."""
    return textwrap.wrap(heading, WIDTH - 2, break_long_words=False, break_on_hyphens=False)


def settle(file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, if any, and of the command line; ``nproc`` has a mesh by default."""
    check_exclusive(given, "command line")
    settings = merge({} if file is None else read_config(file), given)
    count = settings.get("nproc") or 1
    return settings if count == 1 else {"mesh": f"shard={count}"} | settings


def sections() -> dict[str, type]:
    """Return the groups of options by the names of their sections."""
    hints = get_type_hints(TrainOptions, include_extras=True)
    return {field.name: hints[field.name] for field in fields(TrainOptions) if is_dataclass(hints[field.name])}


def _read_section(path: Path, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    groups = sections()
    if name not in groups:
        raise _mistake(f"--config {path}: expected a section of {', '.join(groups)}, got [{name}]{_near(name, groups)}")
    known, prefix = options_of(groups[name]), getattr(groups[name], "key_prefix", "")
    found: dict[str, Any] = {}
    for word, value in content.items():
        key = word.replace("-", "_")
        key = prefix + key if prefix + key in known else key
        key = key if key in known else _find_key(path, word)
        if key not in known:
            home = next(section for section, group in groups.items() if key in options_of(group))
            raise _mistake(f"--config {path}: expected {word} in the section [{home}], got it in [{name}]")
        found[key] = value
    return found


def _find_key(path: Path, name: str) -> str:
    known = options_of(TrainOptions)
    by_name = {option.name.removeprefix("--").replace("-", "_"): key for key, option in known.items()}
    key = name.replace("-", "_")
    if key in known or key in by_name:
        return key if key in known else by_name[key]
    raise _mistake(f"--config {path}: expected the name of an option, got {name!r}{_near(key, known)}")


def _near(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; fdp train --show-config lists all of them"


def _help(option: OptionField) -> str:
    default = option.flag.default_text if option.default is None else _toml_value(option.default)
    return option.flag.help if default is None else f"{option.flag.help} Default: {default}."


def _toml_value(value: Any) -> str | None:
    """Return a value in TOML; None if TOML cannot express it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if value is None:
        return None
    if isinstance(value, list):
        parts = [_toml_value(each) for each in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    text = str(value)
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # a file name that is not Unicode
        return None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _mistake(message: str) -> Exception:
    from fdp.types import FdpError  # here, since it imports torch, which takes seconds

    return FdpError(message)
