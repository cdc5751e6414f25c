"""The command line. The only module that imports typer; ``import rankwire`` does not load it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from rankwire import __version__
from rankwire.errors import ConfigurationError
from rankwire.launch.run import run as run_ranks
from rankwire.launch.run_options import (
    ExitCode,
    FailureRules,
    JobHosts,
    OnFailure,
    Program,
    RunOptions,
    role_of,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; the entry point of ``rankwire`` and ``python -m rankwire``."""
    try:
        app(prog_name="rankwire")
    except ConfigurationError as error:
        print(f"rankwire: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rankwire {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Rank-addressed RPC, messaging and collectives between the processes of a training job."""


def _option(*names: str, **how: Any) -> Any:
    return typer.Option(*names, **{"metavar": "N", **how})


_Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module.")
]
_Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS", help="Passed to the script, including options. A lone `:` ends them."
    ),
]
_Ranks = Annotated[int, _option("-n", "--ranks", min=1, help="How many ranks on this host.")]
_Role = Annotated[
    str | None,
    _option(
        "--name",
        metavar="ROLE",
        help="The role of these ranks, ROLE/0, ROLE/1 and so on. Default: the program's name.",
    ),
]
_IsModule = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
]
_Nodes = Annotated[int, _option("--nnodes", min=1, help="How many hosts, one launcher on each.")]
_Node = Annotated[int, _option("--node-rank", min=0, help="Which host this is, from 0.")]
_Master = Annotated[
    str | None,
    _option(
        metavar="HOST:PORT", help="The address of node 0 as all hosts reach it, with a free port."
    ),
]
_SecretFile = Annotated[
    Path | None,
    _option(
        metavar="FILE",
        help="A file with the job's secret, the same on all hosts, that only you can read."
        " Default on several hosts: RANKWIRE_SECRET_FILE.",
    ),
]
_TlsDir = Annotated[
    Path | None,
    _option(
        "--tls",
        metavar="DIR",
        help="Use TLS on all hosts, with the files that `rankwire certificates` made."
        " Default on several hosts: RANKWIRE_TLS_DIR.",
    ),
]
_Restarts = Annotated[
    int, _option(min=0, help="After a failure, restart all ranks, at most N times.")
]
_OnFailure = Annotated[
    OnFailure,
    typer.Option(
        help="When a rank fails: stop the others; let them continue without it; or restart"
        " that rank alone, which joins the same world again."
    ),
]
_MaxRestarts = Annotated[
    int,
    _option(
        min=0,
        help="With --on-failure restart: restarts of each rank; one more failure ends the job.",
    ),
]
_ExitCode = Annotated[
    ExitCode,
    typer.Option(
        help="The exit code of the job: that of any rank that fails, the first of them; or that"
        " of rank 0, whatever happens to the others, unless the job is stopped before it ends."
    ),
]
_Debugged = Annotated[
    int | None,
    _option(
        "--debug-rank",
        min=0,
        metavar="R",
        help="Give this rank the terminal, for breakpoint(). Operations of all ranks without a"
        " timeout of their own then have no limit.",
    ),
]
_Grace = Annotated[
    float, _option(min=0.0, metavar="SECONDS", help="From the request to stop until SIGKILL.")
]
_HasPrefix = Annotated[
    bool, typer.Option("--prefix/--no-prefix", help="Begin each line with its rank.")
]
_LogDir = Annotated[
    Path | None, _option(metavar="DIR", help="Write each rank's output to DIR/rank_N.log as well.")
]


# The first positional argument is the program; all arguments after it go to the program.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    program: _Script,
    arguments: _Arguments = None,
    *,
    ranks: _Ranks,
    role: _Role = None,
    is_module: _IsModule = False,
    nodes: _Nodes = 1,
    node: _Node = 0,
    master: _Master = None,
    secret_file: _SecretFile = None,
    tls_dir: _TlsDir = None,
    restarts: _Restarts = 0,
    on_failure: _OnFailure = OnFailure.STOP,
    max_restarts: _MaxRestarts = FailureRules.max_restarts,
    exit_code: _ExitCode = FailureRules.exit_code,
    debugged: _Debugged = None,
    grace: _Grace = RunOptions.grace,
    has_prefix: _HasPrefix = True,
    log_dir: _LogDir = None,
) -> None:
    """Start a Python program as N ranks on this host, and stop all when one fails.

    Example: `rankwire run -n 4 train.py --epochs 3`

    Several programs in one world are separated by `:`, as with mpiexec, each with its own -n,
    --name, -m and arguments; all other options come first: `rankwire run -n 1 trainer.py : -n 2
    --name rollout rollout.py`. Rank 0 is `trainer/0`, ranks 1 and 2 are `rollout/0` and
    `rollout/1`.

    On several hosts, run the same line on each, with its own node rank:
    `rankwire run -n 4 --nnodes 2 --node-rank 0 --master host0:29400 --secret-file job.secret
    train.py`. Ranks are numbered by node.

    In the program, `rankwire.connect()` joins the world. RANKWIRE_RANK and RANKWIRE_WORLD_SIZE tell
    each rank its number and how many there are, RANKWIRE_RESTART_COUNT how many times it was
    started before; ranks get the job's secret by file descriptor.

    When a rank fails, the others get SIGTERM, and SIGKILL after the grace, unless --on-failure says
    otherwise. The exit code is that of the rank that failed first, unless --exit-code says rank0; a
    restarted rank has not failed if its last process exits with 0. Ctrl-C interrupts all ranks, a
    second one kills them.
    """
    first, *later = _split(arguments or [])
    options = RunOptions(
        [_program(program, first, ranks, role, is_module), *map(_parse_program, later)],
        JobHosts(nodes, node, master),
        _named_by("RANKWIRE_SECRET_FILE", secret_file, nodes),
        _named_by("RANKWIRE_TLS_DIR", tls_dir, nodes),
        FailureRules(restarts, on_failure, max_restarts, exit_code),
        debugged,
        grace,
        has_prefix,
        log_dir,
    )
    raise typer.Exit(run_ranks(options))


@app.command()
def doctor(
    *,
    ranks: Annotated[int, _option("-n", "--ranks", min=2, help="How many ranks to start.")] = 2,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print all values as JSON instead of a table.")
    ] = False,
    megabytes: Annotated[
        int, typer.Option(min=1, metavar="MB", help="Size of large messages in MiB.")
    ] = 64,
) -> None:
    """Start N ranks here and print how they reach each other, how fast, and what to change.

    For a world on several hosts, start the same module with the launcher of your choice:
    `rankwire run -n 4 --nnodes 2 ... -m rankwire.launch.doctor`, or
    `mpiexec -n 8 python -m rankwire.launch.doctor`.

    `copy` is a Unix socket with large messages in a single copy. The exit code is 1 if something
    does not work, else 0.
    """
    command = ["-m", "rankwire.launch.doctor", "--nbytes", str(megabytes << 20)]
    if sys.stdout.isatty():  # the ranks write to a pipe
        os.environ.setdefault("FORCE_COLOR", "1")
        os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    program = Program(command + ["--json"] * is_json, ranks)
    options = RunOptions([program], has_prefix=False)
    raise typer.Exit(run_ranks(options))


@app.command()
def certificates(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Created with access for you only; must not exist."),
    ],
    *,
    ranks: Annotated[int, _option("-n", "--ranks", min=1, help="How many ranks on all hosts.")],
    days: Annotated[
        float, typer.Option(metavar="D", help="How long they are valid; longer than the job runs.")
    ] = 30.0,
) -> None:
    """Make the certificates of one job, for `rankwire run --tls DIR`.

    One for launchers and one for each rank, signed by an authority of this job alone, whose key is
    not kept. Make new ones for each job. Needs the extra `rankwire[tls]`.
    """
    # Loads cryptography, which is optional.
    from rankwire.launch.certificates import make_certificates

    make_certificates(folder, ranks, days=days)
    typer.echo(
        f"{folder}: certificates of a launcher and {ranks} rank{'s'[: ranks > 1]},"
        f" valid for {days:g} days\n"
        "Copy to each host, into a folder that only you can read:\n"
        "  ca.pem, launcher.pem, launcher.key\n"
        "  rank-N.pem, rank-N.key of each rank N of that host (ranks are numbered by node)\n"
        f"Then start there: rankwire run --tls {folder} ...\n"
        f"or with another launcher: RANKWIRE_TLS_DIR={folder}"
    )


# Parses what follows a ``:``. An unknown option is taken for the program.
_later = typer.Typer(add_completion=False)


@_later.command(
    add_help_option=False,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def _parse_later(
    program: _Script,
    arguments: _Arguments = None,
    *,
    ranks: _Ranks,
    role: _Role = None,
    is_module: _IsModule = False,
) -> Program:
    if program.startswith("-") and not Path(program).is_file():
        raise ConfigurationError(
            f"{program} is no option of a program after `:`, which has -n, --name and -m; options"
            " of the whole job come before the first program"
        )
    return _program(program, arguments or [], ranks, role, is_module)


def _parse_program(words: list[str]) -> Program:
    command = typer.main.get_command(_later)
    return cast(Program, command.main(words, "rankwire run ... :", standalone_mode=False))


def _split(arguments: list[str]) -> list[list[str]]:
    """Return the arguments of the first program, and the words of each later one."""
    parts: list[list[str]] = [[]]
    for word in arguments:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _program(
    program: str, arguments: list[str], ranks: int, role: str | None, is_module: bool
) -> Program:
    command = [*_interpreter_arguments(program, is_module), *arguments]
    name = program.rpartition(".")[2] if is_module else Path(program).stem
    return Program(command, ranks, role_of(name) if role is None else role)


def _interpreter_arguments(program: str, is_module: bool) -> list[str]:
    if is_module:
        return ["-m", program]
    if Path(program).is_file():
        return ["--", program]  # its name may begin with a dash
    hint = ""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(program) is not None:
            hint = f"; to run the module, write -m {program}"
    raise ConfigurationError(f"no script {program!r}{hint}")


def _named_by(variable: str, given: Path | None, nodes: int) -> Path | None:
    named = os.environ.get(variable) if nodes > 1 and given is None else None
    return Path(named) if named else given
