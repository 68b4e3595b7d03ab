import contextlib
import io
import sys
from unittest import mock

import pytest

from isojax import cli


@pytest.fixture(scope="session")
def isojax():
    """Runs the command: exit code, stdout, stderr."""

    def run(*args):
        out, err, code = io.StringIO(), io.StringIO(), 0
        command = mock.patch.object(sys, "argv", ["isojax", *map(str, args)])
        with command, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as stopped:
                code = stopped.code or 0
        return code, out.getvalue(), err.getvalue()

    return run
