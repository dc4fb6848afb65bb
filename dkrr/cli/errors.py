"""How a command ends: one line and a hint on stderr, an exit code, and a traceback only with ``--verbose``."""

from __future__ import annotations

import errno
import logging
import sys
import traceback
from typing import Any, NoReturn

import click

from dkrr.errors import DkrrError, StoreError
from dkrr.store.interruption import interrupted_error, resumable

__all__ = ["Command", "CommandGroup", "resumable"]

_VERBOSE = "dkrr.verbose"


def _set_verbose(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_VERBOSE] = True  # shared by a command and the groups above it
        _show_log(logging.DEBUG)


def _show_log(level: int) -> None:
    logger = logging.getLogger("dkrr")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _verbose_option() -> click.Option:
    return click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_verbose,
        help="Show the log, and the traceback of an error.",
    )


class Command(click.Command):
    """A command that knows ``--verbose``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_verbose_option())


class CommandGroup(click.Group):
    """A group whose commands end with the exit code of their error.

    The errors are met here and not in ``main()``: below ``dask krr`` another program's ``main()`` runs.
    """

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_verbose_option())

    def invoke(self, ctx: click.Context) -> Any:
        try:
            from dkrr.store.files import full_disk

            with full_disk("."):
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:  # before or after the part that knows how to stop: while modules are loaded, say
            error = interrupted_error()
            _end(ctx, error, error.message, error.hint, error.exit_code)
        except DkrrError as exc:
            _end(ctx, exc, exc.message, exc.hint, exc.exit_code)
        except Exception as exc:
            if isinstance(exc, OSError) and exc.errno == errno.EPIPE:
                raise  # the reader of our output left; click ends quietly
            if isinstance(exc, OSError) and exc.strerror:
                if not exc.filename:
                    _end(ctx, exc, exc.strerror, "", 1)
                hint = "check the path, and who may read and write there"
                _end(ctx, exc, f"{exc.strerror} ({exc.filename})", hint, StoreError.exit_code)
            lines = str(exc).splitlines() or [""]
            hint = "this is a defect of dkrr; --verbose shows the traceback"
            _end(ctx, exc, f"{type(exc).__name__}: {lines[0]}", hint, 1)


def _end(ctx: click.Context, error: BaseException, message: str, hint: str, code: int) -> NoReturn:
    if ctx.meta.get(_VERBOSE):
        traceback.print_exception(error, file=sys.stderr)
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    ctx.exit(code)
