"""The entry point of ``fdp``: import the command line, which takes a moment, and run it.

Ctrl-C while the modules are imported ends with one line and exit code 130, as for a shell, and not with a traceback.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in ``sys.argv`` and exit; see :mod:`fdp.cli.main` for the exit codes."""
    try:
        from fdp.cli.output_streams import flush_streams, protect_streams

        protect_streams()
        from fdp.cli.main import main as run
    except KeyboardInterrupt:
        print("fdp: interrupted", file=sys.stderr)
        sys.exit(130)
    try:
        run()
    finally:
        flush_streams()
