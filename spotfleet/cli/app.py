"""Commands, options and help. What a command does is in `change.py` and `look.py`, imported when it runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from spotfleet import __version__
from spotfleet.errors import SpotfleetError

INTERRUPTED, TERMINATED = 130, 143  # as shells say it

app = typer.Typer(
    name="spotfleet", no_args_is_help=True, add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train deep-learning models on spot machines of any cloud, cheaply and without losing work.",
    epilog="To begin: `spotfleet up FILE`, `spotfleet train SCRIPT.py`, `spotfleet status`, `spotfleet down`.",
)
chaos = typer.Typer(no_args_is_help=True, help="Interrupt hosts on purpose.",
                    context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(chaos, name="chaos")


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class CostOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


Name = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet; may be left out when there is only one.",
                                     show_default=False)]
Cluster = Annotated[str, typer.Option("-c", "--cluster", metavar="FLEET", show_default=False,
                                      help="The fleet; may be left out when there is only one.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
Format = Annotated[Output, typer.Option("-o", "--output", help="json: for programs.")]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Go on until interrupted.")]
Host = Annotated[str, typer.Argument(help="A host's name or address, as `status` shows them.", show_default=False)]


def run(argv: list[str]) -> int:
    """Run one command line; the exit code. Errors are told in two lines and never as a traceback."""
    try:
        code = app(args=argv, standalone_mode=False) or 0
        if code == INTERRUPTED:  # newer typer has swallowed it
            raise KeyboardInterrupt
        return code
    except SpotfleetError as error:
        _tell(str(error), error.hint)
        return error.exit_code
    except typer.Exit as leave:
        return leave.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return TERMINATED if _signals else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: `| head`
        return 1
    except OSError as error:
        home = os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet"
        _tell(str(error), f"look at that path and who may write there; spotfleet keeps its own files in {home}")
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # of the option parser
            raise
        context = getattr(error, "ctx", None)
        _tell(error.format_message(), f"{context.command_path} --help" if context else "")
        return 2


_signals: list[int] = []  # that asked this process to end


def heed_sigterm() -> None:
    """As after Ctrl-C, a command says what it leaves and what goes on with it."""

    def terminate(number: int, _frame: object) -> None:
        _signals.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)


def _tell(message: str, hint: str) -> None:
    print(f"error: {message}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr)


def _call(module: str, function: str, *values: Any, **options: Any) -> None:
    getattr(importlib.import_module(f"spotfleet.cli.{module}"), function)(*values, **options)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"spotfleet {__version__}")
        raise typer.Exit


@app.callback()
def _top(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                               help="Show the version.")] = False) -> None:
    pass


@app.command()
def up(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The fleet file (YAML).", show_default=False)],
    dryrun: Annotated[bool, typer.Option("--dryrun", "--dry-run", "--plan", help="Only show the plan.")] = False,
    yes: Yes = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION",
                                          help="How long to wait for nodes.min hosts, such as 90s.")] = "10m",
) -> None:
    """Bring a fleet up, or change the size of a running one.

    A small fleet file:  {name: digits, nodes: {min: 2, target: 3}, resources: {instance_type: cpu.small}}
    """
    _call("change", "up", file, dryrun=dryrun, yes=yes, timeout=timeout)


@app.command()
def attach(
    fleet: Annotated[str, typer.Argument(metavar="FLEET", show_default=False,
                                         help="Its name; may be left out when the account has only one.")] = "",
    provider: Annotated[str, typer.Option("--provider", "--infra", metavar="NAME", help="Where it runs.")] = "local",
) -> None:
    """Work from this machine with a fleet that another one has made.

    It is found by its tags, with the credentials of the account.
    """
    _call("attach", "attach", fleet, provider)


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False,
                                          help="A Python script; without it, the fleet file's `run`.")] = "",
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False,
                                                     help="For the script; after `--` even those that look like ours.",
                                                     )] = None,
    cluster: Cluster = "",
    detach: Annotated[bool, typer.Option("-d", "--detach", "--detach-run", help="Return at once.")] = False,
    down: Annotated[bool, typer.Option("--down", help="End the fleet after the job, also with this machine off.",
                                       )] = False,
    np: Annotated[str, typer.Option("--np", metavar="MIN:MAX", show_default=False,
                                    help="Workers; default: every slot, from nodes.min to nodes.max hosts.")] = "",
    spares: Annotated[int, typer.Option("--spares", metavar="N", min=0, show_default=False,
                                        help="Warm workers that only wait to replace a lost one.")] = 0,
    resize_policy: Annotated[str, typer.Option("--resize-policy", metavar="POLICY", show_default=False,
                                               help="keep-global-batch, scale-lr or none; see docs/resizing.md.")] = "",
    growth: Annotated[str, typer.Option("--growth", metavar="EPOCH:WORKERS,...", show_default=False,
                                        help="So many workers from each epoch on: 0:2,30:4,60:8.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Queue the job when MIN workers cannot start now.")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", show_default=False,
                                                  help="A variable for the job; K alone takes yours.")] = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", metavar="K", show_default=False,
                                                     help="A secret variable, taken from your environment.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the job; default: the script's.",
                                             show_default=False)] = "",
) -> None:
    """Run a script on the fleet and show rank 0's output.

    The working directory is shipped when it has changed.
    Ctrl-C leaves the job running. Options of spotfleet may also stand after SCRIPT, up to a `--`.
    """
    _call("change", "train", cluster, script, args or [], detach=detach, down=down, np=np, wait=wait, env=env or [],
          secret=secret or [], name_of_job=name, spares=spares, resize_policy=resize_policy, growth=growth)


@app.command()
def status(fleet: Name = "", watch: Watch = False, output: Format = Output.TABLE) -> None:
    """What the fleet, its hosts and its jobs do, and what they wait for."""
    _call("look", "status", fleet, watch=watch, as_json=output is Output.JSON)


@app.command()
def hosts(fleet: Name = "", output: Format = Output.TABLE) -> None:
    """The hosts that are up, one `address:slots` a line.

    That is what a Horovod host-discovery script prints.
   """
    _call("look", "hosts", fleet, as_json=output is Output.JSON)


@app.command()
def jobs(fleet: Name = "", output: Format = Output.TABLE) -> None:
    """The jobs of the fleet."""
    _call("look", "jobs", fleet, as_json=output is Output.JSON)


@app.command()
def events(
    fleet: Name = "", watch: Watch = False,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also each change of a price and each report of "
                                                                  "progress.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Everything that happened, oldest first, in UTC.

    With -o json every event with all its fields: a list, or when watching one object a line.
    """
    _call("look", "events", fleet, watch=watch, as_json=output is Output.JSON, everything=everything)


@app.command()
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Default: the newest.", show_default=False)] = "",
    cluster: Cluster = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, metavar="N", help="Whose output.")] = 0,
    worker: Annotated[str, typer.Option("--worker", metavar="HOST/SLOT/INCARNATION", help="Of one process.",
                                        show_default=False)] = "",
) -> None:
    """The output of a job, also after the fleet's end."""
    _call("look", "logs", cluster, job, follow=follow, rank=rank, worker=worker)


@app.command()
def cost(fleet: Name = "", output: Annotated[CostOutput, typer.Option("-o", "--output")] = CostOutput.TABLE) -> None:
    """What the fleet has cost, and what it would have cost on demand."""
    _call("look", "cost", fleet, output=output.value)


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="As `jobs` shows it.", show_default=False)], cluster: Cluster = "",
) -> None:
    """End a job; the fleet stays."""
    _call("change", "cancel", cluster, job)


@app.command()
def drain(host: Host, cluster: Cluster = "") -> None:
    """Give a host back without losing work; the fleet replaces it."""
    _call("change", "drain", cluster, host)


@app.command()
def leaks(
    fix: Annotated[bool, typer.Option("--fix", help="End them.")] = False, yes: Yes = False,
    output: Format = Output.TABLE,
) -> None:
    """Find machines of the account that nothing accounts for.

    Those of other machines' fleets and those that are just starting are shown and left alone.
    Exit code 1 if there are leaks and they were not ended.
    """
    _call("leaks", "leaks", fix=fix, yes=yes, as_json=output is Output.JSON)


@app.command()
def revoke(
    host: Host, cluster: Cluster = "", yes: Yes = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="For the record.", show_default=False)] = "",
) -> None:
    """Trust a host no more: refuse it at once and for good, end it and replace it."""
    _call("revoke", "revoke", cluster, host, why=why, yes=yes)


@chaos.command()
def preempt(
    host: Host, cluster: Cluster = "",
    notice: Annotated[float, typer.Option("--notice", min=0, metavar="SECONDS", help="Warning before it goes.")] = 120,
) -> None:
    """Let the cloud take a host, after a notice."""
    _call("change", "interrupt", cluster, host, notice)


@chaos.command()
def kill(host: Host, cluster: Cluster = "") -> None:
    """Let the cloud take a host now, without a notice."""
    _call("change", "interrupt", cluster, host, None)


@app.command()
def down(
    fleet: Name = "", yes: Yes = False,
    discard: Annotated[bool, typer.Option("--discard", help="Give up results that cannot be brought home.")] = False,
) -> None:
    """Bring the results home and end every machine."""
    _call("change", "down", fleet, yes=yes, discard=discard)
