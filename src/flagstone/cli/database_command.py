"""Where a command takes its database from: before the command, after it, or as its first argument.

`flagstone --path P stats`, `flagstone stats --path P` and `flagstone stats P` are the same. The first argument is the
database if none is named otherwise and there is one argument more than the command needs; `flagstone get P KEY` works
like that, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from flagstone.cli.context import Invocation
from flagstone.errors import InvalidRequest

_METAVAR: Final = "[DATABASE]"
_PATH: Final = typer.Option(
    "--path", "-p", help="The database; also before the command, or as its first argument."
)


def with_path(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option `--path`, unless it has one."""
    signature = inspect.signature(command, eval_str=True)
    if "path" in signature.parameters:
        return command

    @wraps(command)
    def run(context: typer.Context, *args: Any, database: str | None = None, **kwargs: Any) -> None:
        call = context.obj
        if database is not None and isinstance(call, Invocation):
            if call.path_given and database != call.path:
                raise InvalidRequest(
                    f"two databases are named, {call.path!r} and {database!r}; name one of them"
                )
            context.obj = replace(call, path=database, path_given=True)
        command(context, *args, **kwargs)

    option = inspect.Parameter(
        "database", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, _PATH]
    )
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


class DatabaseCommand(TyperCommand):
    """A command about a database, which its first argument may name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        call = ctx.obj
        if isinstance(call, Invocation) and not ctx.resilient_parsing:
            tokens = [_Token(each) for each in args]
            first = self._database(ctx, tokens, call)
            if first is not None:
                ctx.obj = replace(call, path=str(first), path_given=True)
                args = [str(each) for each in tokens if each is not first]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        options, *arguments = super().collect_usage_pieces(ctx)
        return [options, _METAVAR, *arguments]

    def _database(self, ctx: Any, tokens: list[_Token], call: Invocation) -> _Token | None:
        """The token that names the database, if it is the first argument."""
        parser = type(self.make_parser(ctx))(ctx)
        parser.ignore_unknown_options = True  # parsing all of it reports them
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option":
                parameter.add_to_parser(parser, ctx)
        options, given, _ = parser.parse_args(args=list(tokens))
        if call.path_given or options.get("database") or options.get("path") or not given:
            return None
        taken = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        if call.path is None:
            extra = len(given) > sum(parameter.required for parameter in taken)
        else:  # named by the environment
            extra = len(given) == len(taken) + 1 and all(parameter.nargs == 1 for parameter in taken)
        first = given[0]
        return first if extra and isinstance(first, _Token) else None


class _Token(str):
    """An argument with an identity: an equal one is another argument."""

    __slots__ = ()
