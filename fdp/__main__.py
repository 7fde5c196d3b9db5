"""``python -m fdp``: the same as the ``fdp`` command."""

from fdp.cli.entry import main

if __name__ == "__main__":
    main()
