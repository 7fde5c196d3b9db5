"""``fdp generate``: text from a model that fdp trained, or from any folder of ``transformers``.

    fdp generate runs/notes --prompt "The patient" --tokens 60
    fdp generate models/tiny --prompt "Once" --temperature 0 --json
    fdp generate runs/search --prompt "The"             # from the run that fdp search chose

Text that is generated from the exported parameters is covered by the budget of the run, as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from fdp.cli.options import Flag, expand_groups

if TYPE_CHECKING:
    from fdp.data.text import Tokenizer
    from fdp.model import Model
    from fdp.types import Tree


@dataclass(frozen=True)
class GenerateOptions:
    """The prompt, and how the text goes on."""

    prompt: Annotated[str, Flag("The beginning of the text.")]
    tokens: Annotated[int, Flag("Tokens to generate, at most.")] = 100
    temperature: Annotated[float, Flag("0 takes the most likely token each time; 1 draws as the model says.")] = 0.8
    top_p: Annotated[float, Flag("Draw among the most likely tokens of this total probability.")] = 1.0
    tokenizer: Annotated[
        str | None, Flag("A folder with a tokenizer, or bytes.", default_text="that of the run, or of the folder")
    ] = None
    seed: Annotated[int | None, Flag("Repeat a text.", default_text="entropy of the operating system")] = None
    as_json: Annotated[bool, Flag("Print one JSON object.", name="--json")] = False


@expand_groups
def generate_command(
    run: Annotated[Path, Argument(help="The folder of a finished run or search, or a model folder of transformers.")],
    options: GenerateOptions,
) -> None:
    """Generate text from a trained model."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    import torch

    from fdp import keys
    from fdp.run.forward import forward_weights
    from fdp.run.generate import Decoding, check_decoding, decode, generate, window_of

    check_decoding(Decoding(options.tokens, options.temperature, options.top_p))
    model, params, tokenizer = open_model(run, options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = forward_weights(model, params, dtype=torch.float32, device=device, sharding=None)
    assert model.context is not None
    window = window_of({"tokens": torch.zeros(1, model.context + 1, dtype=torch.int64)})
    how = Decoding(options.tokens, options.temperature, options.top_p, tokenizer.vocab_size, tokenizer.end)
    prompt = tokenizer.encode(options.prompt)
    found = generate(weights, prompt, window, how, key=keys.key(options.seed))
    text = decode(tokenizer, found)
    if options.as_json:
        print(json.dumps({"text": text, "prompt": options.prompt, "tokens": len(found) - len(prompt)}))
    else:
        print(text)


def open_model(path: Path, options: GenerateOptions) -> tuple[Model, Tree, Tokenizer]:
    """Return the model in the folder of a run, a search or ``transformers``, its parameters and its tokenizer."""
    from fdp.cli.check_data import TOKENIZER_FILES
    from fdp.data import text
    from fdp.foreign.hub import hugging_face
    from fdp.run.run_folder import SEARCH_RESULT, chosen_run
    from fdp.types import FdpError

    if (path / SEARCH_RESULT).is_file():
        path = chosen_run(path) or path
    settings = _settings(path)
    folder = path if settings is None else path / "model"
    if settings is not None and settings.get("prefix") is not None:
        raise FdpError(
            f"{path}: expected a run that trained the model itself, got one that trained a prefix; generate with "
            f"transformers: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("
            f"{settings['model']!r}), {str(folder)!r}).generate(...)"
        )
    if settings is not None and (path / "model.safetensors").is_file():
        return _open_preset(path, settings, options.tokenizer)
    if not (folder / "config.json").is_file():
        raise FdpError(
            f"{path}: expected the folder of a finished run, with model.safetensors or model/, or a folder of "
            "transformers, got neither; if the run was interrupted, the command that began it resumes it"
        )
    name = options.tokenizer or (None if settings is None else settings.get("tokenizer"))
    if name is None and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise FdpError(
            f"{folder}: expected a tokenizer in the folder, got none; name its folder with --tokenizer, or give "
            "--tokenizer bytes if the model reads bytes"
        )
    tokenizer = text.BYTES if name == "bytes" else text.load_tokenizer(folder if name is None else name)
    length = len(tokenizer.encode(options.prompt)) + options.tokens  # a shorter window is as good, and faster
    longest = hugging_face.load_model(folder).context
    context = max(2, length) if longest is None else max(2, min(length, longest))
    model, params = hugging_face.load(folder, context=context)
    return _check_language(path, model), params, tokenizer


def _open_preset(path: Path, settings: dict[str, Any], given: str | None) -> tuple[Model, Tree, Tokenizer]:
    from fdp import keys, models
    from fdp.data import text
    from fdp.storage.safetensors import import_safetensors

    model = models.build(settings["model"], context=settings.get("context"))
    _check_language(path, model)
    name = given or settings.get("tokenizer")
    tokenizer = text.BYTES if name in (None, "bytes") else text.load_tokenizer(name)
    return model, import_safetensors(path / "model.safetensors", like=model.init(keys.key(0))), tokenizer


def _check_language(path: Path, model: Model) -> Model:
    from fdp.types import FdpError

    if model.vocab_size is None or model.context is None:
        raise FdpError(
            f"{path}: expected a language model to generate text, got the classifier {model.name}; name the run of a "
            "language model"
        )
    return model


def _settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of a run; None for a folder that is not a run's."""
    from fdp.run.run_folder import is_run_folder, read_run_folder
    from fdp.types import FdpError

    if not path.is_dir():
        raise FdpError(
            f"{path}: expected the folder of a run, or of a model of transformers, got no folder there; name the --out "
            "of the run, by default a folder in runs/"
        )
    return read_run_folder(path).settings if is_run_folder(path) else None
