"""Output in streams that cannot encode it, or that nobody reads, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PROTECT = "from fdp.cli.output_streams import flush_streams, protect_streams; protect_streams(); "


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, *words], env=ENVIRONMENT | variables, capture_output=True, check=False)


def test_a_command_writes_ascii_where_its_stream_cannot_encode(tmp_path: Path) -> None:
    folder = tmp_path / "one→two…"
    done = run("-m", "fdp", "ledger", "--ledger", str(folder), PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii").startswith(f"{tmp_path}/one->two.../ledger.jsonl")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_characters_of_fdp_become_readable_ascii_and_others_are_escaped(stream: str) -> None:
    text = "3.5 → 3.1 …, 1 ± 2, 2 \N{MULTIPLICATION SIGN} 3, ╭─┬╮│ é ξ"
    done = run("-c", f"import sys; {PROTECT}print({text!r}, file=sys.{stream})", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert getattr(done, stream) == b"3.5 -> 3.1 ..., 1 +/- 2, 2 x 3, +-++| \\xe9 \\u03be\n"


def test_a_stream_that_can_encode_a_character_writes_it() -> None:
    done = run("-c", f"{PROTECT}print('→ é')", PYTHONIOENCODING="utf-8")
    assert done.stdout.decode() == "→ é\n"


def test_a_path_is_written_as_its_bytes_in_a_locale_that_cannot_decode_it() -> None:
    done = run("-c", f"import sys; {PROTECT}print(sys.argv[1])", "é", **C_LOCALE)
    assert done.stdout.decode() == "é\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_command_quietly(unbuffered: str) -> None:
    words = [sys.executable, "-m", "fdp", "epsilon", "--help"]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_pipe_that_is_closed_elsewhere_is_no_end() -> None:
    code = "import os; r, w = os.pipe(); os.close(r); "
    done = run("-c", f"{code}{PROTECT}os.write(w, b'x')")
    assert done.returncode == 1
    assert b"BrokenPipeError" in done.stderr


def test_streams_of_a_test_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from fdp.cli.output_streams import flush_streams, protect_streams

    before = sys.stdout
    protect_streams()
    flush_streams()
    assert sys.stdout is before
