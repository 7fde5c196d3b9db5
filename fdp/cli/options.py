"""Command-line options, each declared once as a field of a frozen dataclass (a "group").

    @dataclass(frozen=True)
    class PrivacyOptions:
        panel: ClassVar[str] = "Privacy"
        epsilon: Annotated[float | None, Flag("Privacy budget.", default_text="8")] = None

    @expand_groups                                      # the command takes one option per field
    def train_command(privacy: PrivacyOptions) -> None: ...

    >>> build(PrivacyOptions, {"epsilon": 3})           # from a file; a mistake names the flag
    >>> to_dict(privacy)                                # {"epsilon": 3.0}

A field that is itself a group contributes the options of that group. ``panel`` is the heading in ``--help``. A
group with ``key_prefix = "kfac_"`` and a field ``damping`` has the option ``--kfac-damping``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

Group = TypeVar("Group")

TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    list: "a list of texts",
}
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Effect(Enum):
    """The part of a run that an option changes."""

    RESULT = "the result"
    KFAC_RESULT = "the result with K-FAC, else only how it is computed"
    EXECUTION = "how a run is computed, saved or shown"


class Range(Enum):
    """The numbers an option accepts, in the words of the error."""

    COUNT = "a whole number of at least 1"
    POSITIVE = "a finite number above 0"
    NOT_NEGATIVE = "a finite number of 0 or more"
    PROBABILITY = "a number between 0 and 1"

    def holds(self, value: float) -> bool:
        """Return True if the value is in the range."""
        match self:
            case Range.COUNT:
                return value >= 1
            case Range.POSITIVE:
                return 0 < value < math.inf
            case Range.NOT_NEGATIVE:
                return 0 <= value < math.inf
            case Range.PROBABILITY:
                return 0 < value < 1


class Flag(NamedTuple):
    """The declaration of an option, beside its name, type and default.

    ``default_text`` says what a default of None stands for. ``needs`` is a condition without which the option does
    nothing. ``name`` replaces the name made from the field. ``range`` is checked by :func:`check_ranges`. ``complete``
    are names that a shell completes; ``paths`` completes paths too. ``word_for_none`` is a word that may be given for
    the default of None.
    """

    help: str
    default_text: str | None = None
    name: str | None = None
    effect: Effect = Effect.RESULT
    needs: Enum | None = None
    range: Range | None = None
    complete: tuple[str, ...] = ()
    paths: bool = False
    word_for_none: str | None = None


def type_name(kind: type) -> str:
    """Return a type in the words of an error message."""
    return TYPE_NAMES.get(kind, kind.__name__)


class OptionField(NamedTuple):
    """An option of a group. ``key`` is its name in ``config.json``: ``kfac_damping`` for ``--kfac-damping``."""

    key: str
    name: str
    type: Any
    default: Any
    flag: Flag
    panel: str | None

    @property
    def value_type(self) -> type:
        """The type of a value that is given: ``int`` for ``int | None``."""
        return next(kind for kind in get_args(self.type) or (self.type,) if kind is not NoneType)

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter that ``typer`` understands."""
        shown = self.flag.default_text or True if self.default is None else True
        option = typer.Option(
            self.name,
            help=self.flag.help,
            rich_help_panel=self.panel,
            show_default=shown,
            autocompletion=self.complete if self.flag.complete or self.flag.paths else None,
            **self._parser(),
        )
        default = inspect.Parameter.empty if self.default is MISSING else self.default
        annotation = Annotated[self.type, option]
        return inspect.Parameter(self.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def _parser(self) -> dict[str, Any]:
        """Return what ``typer`` needs to read a number, or the word that stands for None."""
        word = self.flag.word_for_none
        if word is None:
            return {}

        def parse(text: str) -> Any:
            return None if text == word else parse_value(text, self.value_type, where=self.name, name=self.name)

        return {"parser": parse, "metavar": f"{self.value_type.__name__.upper()}|{word}"}

    def complete(self, incomplete: str) -> list[str]:
        """Return what a shell may complete ``incomplete`` to: names of the option's values, and paths."""
        names = [name for name in self.flag.complete if name.startswith(incomplete)]
        if not self.flag.paths:
            return names
        head, slash, _ = incomplete.rpartition("/")
        folder = Path(head + slash or ".")
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        shown = [f"{head}{slash}{each.name}{'/' * each.is_dir()}" for each in found if not each.name.startswith(".")]
        return names + [path for path in shown if path.startswith(incomplete)]

    def check(self, value: Any) -> Any:
        """Return ``value`` with the option's type, or raise an error that names the option."""
        kind = self.value_type
        if get_origin(kind) is list and isinstance(value, list) and all(isinstance(each, str) for each in value):
            return value
        kind = get_origin(kind) or kind
        if (value is None or value == self.flag.word_for_none) and NoneType in get_args(self.type):
            return None
        if kind is float and type(value) is int:
            return float(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise _mistake(f"{self.name}: expected {type_name(kind)}, got {value!r}")
        return value


@functools.cache
def _hints_of(group: type) -> dict[str, Any]:
    """Return the types of a group's fields, which are evaluated from text, with their flags."""
    return get_type_hints(group, include_extras=True)


@functools.cache
def options_of(group: type) -> dict[str, OptionField]:
    """Return the options of a group, and of the groups inside it, by key and in order."""
    hints = _hints_of(group)
    prefix, panel = getattr(group, "key_prefix", ""), getattr(group, "panel", None)
    found: dict[str, OptionField] = {}
    for field in fields(group):
        if is_dataclass(hints[field.name]):
            inner = options_of(hints[field.name])
            assert not found.keys() & inner.keys(), f"{group.__name__}.{field.name}: options declared twice"
            found |= inner
            continue
        key, (kind, flag) = prefix + field.name, get_args(hints[field.name])
        name = flag.name or f"--{key.replace('_', '-')}"
        found[key] = OptionField(key, name, kind, field.default, flag, panel)
    return found


def build(group: type[Group], values: Mapping[str, Any]) -> Group:
    """Make a group from values by key; what is left out has its default.

    A key that is not an option, a value of the wrong type and a missing value are errors that name the option.
    """
    known = options_of(group)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
            raise _mistake(f"{key}: expected the name of an option, got {key!r}; {hint}")
    for key, option in known.items():
        if option.default is MISSING and key not in values:
            raise _mistake(f"{option.name}: expected {type_name(option.value_type)}, got nothing")
    return _assemble(group, {key: known[key].check(value) for key, value in values.items()})


def to_dict(options: Any) -> dict[str, Any]:
    """Return the values of a group by key: the inverse of :func:`build`."""
    hints, prefix = _hints_of(type(options)), getattr(options, "key_prefix", "")
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        found |= to_dict(value) if is_dataclass(hints[field.name]) else {prefix + field.name: value}
    return found


def to_words(options: Any, *, always: Collection[str] = ()) -> list[str]:
    """Return the words of a command line that gives these options; a default is left out unless ``always`` has it."""
    values, words = to_dict(options), []
    for key, option in options_of(type(options)).items():
        if values[key] != option.default or (key in always and values[key] not in (None, False)):
            each = values[key] if isinstance(values[key], list) else [values[key]]
            words += [option.name if value is True else f"{option.name}={value}" for value in each]
    return words


def check_ranges(options: Any) -> None:
    """Raise an error that names the option if a number is outside the range it is declared with."""
    values = to_dict(options)
    for key, option in options_of(type(options)).items():
        value, allowed = values[key], option.flag.range
        if allowed is not None and value is not None and not allowed.holds(value):
            raise _mistake(f"{option.name}: expected {allowed.value}, got {value:g}")


def parse_value(text: str, kind: type, *, where: str, name: str) -> Any:
    """Convert the text of ``name=text`` to ``kind``; ``where`` begins the error."""
    try:
        return TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        shown = type_name(kind) if where == name else f"{name}={type_name(kind)}"
        raise _mistake(f"{where}: expected {shown}, got {text!r}") from None


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter that is a group by the options of the group.

    ``typer`` sees one parameter per option; ``command`` is called with the groups made from their values.
    """
    signature = inspect.signature(command, eval_str=True)
    hints = {name: each.annotation for name, each in signature.parameters.items()}
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = [each for name, each in signature.parameters.items() if name not in groups]
    parameters += [option.parameter() for group in groups.values() for option in options_of(group).values()]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        assembled = {name: _assemble(group, values) for name, group in groups.items()}
        command(**{name: values[name] for name in signature.parameters if name not in groups}, **assembled)

    setattr(expanded, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return expanded


def _assemble(group: type[Group], values: Mapping[str, Any]) -> Group:
    hints, prefix = _hints_of(group), getattr(group, "key_prefix", "")
    arguments: dict[str, Any] = {}
    for field in fields(group):  # pyright: ignore[reportArgumentType]
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _assemble(hints[field.name], values)
        elif prefix + field.name in values:
            arguments[field.name] = values[prefix + field.name]
    return group(**arguments)


def _mistake(message: str) -> Exception:
    from fdp.types import FdpError  # here, since it imports torch, which takes seconds

    return FdpError(message)
