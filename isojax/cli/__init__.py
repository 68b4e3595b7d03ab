"""The command `isojax`. Exit codes: 0, 1 when something differs, 2 when it was refused."""

import sys


def main() -> None:
    """Entry point of the command."""
    from isojax.cli.app import app
    from isojax.errors import IsojaxError

    try:
        app()
    except IsojaxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
