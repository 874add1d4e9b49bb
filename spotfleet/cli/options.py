"""Arguments and options of several commands, and the lazy import of a command's code."""

from __future__ import annotations

import importlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from spotfleet.cli import completion


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after the command has printed what continues it."""


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class ConvertedOutput(StrEnum):
    YAML = "-"
    JSON = "json"


class CostOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


class SimulationOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    HTML = "html"


Name = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet; may be left out when there is only one.",
                                     show_default=False, autocompletion=completion.fleets)]
Cluster = Annotated[str, typer.Option("-c", "--cluster", metavar="FLEET", show_default=False,
                                      autocompletion=completion.fleets,
                                      help="The fleet; may be left out when there is only one.")]
Infra = Annotated[str, typer.Option("--infra", metavar="PROVIDER[/REGION[/ZONE]]", show_default=False,
                                    help="Where, instead of the file's; needed where it names no provider.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", show_default=False,
                                               help="A variable, over the file's; K alone takes yours.")]
FromTerraform = Annotated[str, typer.Option("--from-terraform", metavar="DIR|FILE|-", show_default=False, help=(
    "The base that Terraform made: its folder, or the JSON of `terraform output`."))]
Discover = Annotated[str, typer.Option("--discover", metavar="NAME", show_default=False,
                                       help="The base of this name, found in the account by its tag.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
Format = Annotated[Output, typer.Option("-o", "--output", help="json: for programs.")]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Go on until interrupted.")]
Host = Annotated[str, typer.Argument(help="A host's name or address, as `status` shows them.", show_default=False,
                                     autocompletion=completion.hosts)]

Everywhere = Annotated[bool, typer.Option("--all", help="Every worker host.")]
OnHost = Annotated[str, typer.Option("--host", metavar="HOST", show_default=False, autocompletion=completion.hosts,
                                     help="w0, w1 ..., a host's name or address; default: the dispatcher's machine.")]
CheckpointDir = Annotated[str, typer.Option("--checkpoint-dir", metavar="DIR", show_default=False,
                                            help="The folder of its own checkpoints, or a pattern such as '*.pt': "
                                                 "these files follow it to new hosts.")]
ResumeArgs = Annotated[str, typer.Option("--resume-args", metavar="ARGS", show_default=False,
                                         help="Added to the command once a checkpoint exists.")]
MaxRestarts = Annotated[int, typer.Option("--max-restarts", metavar="N", min=0, show_default=False,
                                          help="Starts after failures of its own; lost hosts do not count.")]
Grace = Annotated[str, typer.Option("--grace", metavar="DURATION",
                                    help="From SIGTERM to SIGKILL when all processes start anew.")]
Priority = Annotated[int, typer.Option("--priority", metavar="N", min=-1000, max=1000,
                                       help="The highest gets hosts first, and those of lower ones that can start "
                                            "again or shrink.")]
Group = Annotated[str, typer.Option("--group", metavar="GROUP", show_default=False,
                                    help="Use hosts of this group of the fleet file.")]
NoRetry = Annotated[bool, typer.Option("--no-retry", help="The loss of a host fails the job.")]
# Sizes of `launch`, as `sky launch` takes them.
Gpus = Annotated[str, typer.Option("--gpus", metavar="NAME:COUNT", show_default=False,
                                   help="GPUs of each host, over the file's `resources`.")]
NumNodes = Annotated[int, typer.Option("--num-nodes", min=0, metavar="N", show_default=False,
                                       help="Hosts, instead of the file's.")]
Cpus = Annotated[str, typer.Option("--cpus", metavar="N[+]", show_default=False, help="Of each host.")]
Memory = Annotated[str, typer.Option("--memory", metavar="GIB[+]", show_default=False, help="Of each host.")]
InstanceType = Annotated[str, typer.Option("-t", "--instance-type", metavar="TYPE", show_default=False,
                                           help="Of each host.")]
UseSpot = Annotated[bool | None, typer.Option("--use-spot/--no-use-spot", show_default=False,
                                              help="Spot machines, or on demand; over the file's.")]
IdleMinutes = Annotated[int, typer.Option("-i", "--idle-minutes-to-autostop", min=0, metavar="N", show_default=False,
                                          help="End the fleet after so many minutes without a job.")]
EnvFile = Annotated[Path | None, typer.Option("--env-file", metavar="FILE", show_default=False,
                                              help="Variables, a line NAME=VALUE each.")]
Retry = Annotated[bool, typer.Option("-r", "--retry-until-up", help="Wait without a limit for the first hosts.")]
# Flags of horovodrun that set MPI or the engine of Horovod. They are accepted, with a note.
EngineFlag = Annotated[bool, typer.Option(
    "--mpi", "--jsrun", "--tcp", "--disable-cache", "--hierarchical-allreduce", "--hierarchical-allgather",
    "--torus-allreduce", "--autotune", "--timeline-mark-cycles", "--no-stall-check", "--mpi-threads-disable",
    "--log-with-timestamp", "--prefix-output-with-timestamp", hidden=True)]
EngineValue = Annotated[list[str] | None, typer.Option(
    "--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--log-level", "--gloo-timeout-seconds",
    "--num-nccl-streams", "--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds",
    "--autotune-log-file", "--mpi-args", "--binding-args", "--thread-affinity", hidden=True)]
Nics = Annotated[str, typer.Option("--network-interface", "--network-interfaces", "--nics", hidden=True)]
TAIL = "spotfleet.tail"  # key in a context: the words after `--`


class Tailed(TyperCommand):
    """Command that keeps the words after `--` apart, for another program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[TAIL], args = args[at + 1:], args[:at]
        return super().parse_args(ctx, args)


def call(module: str, function: str, *values: Any, **options: Any) -> None:
    """Import a module of `commands`, or of the folder in its name, and call its function."""
    folder = "" if "." in module else "commands."
    getattr(importlib.import_module(f"spotfleet.cli.{folder}{module}"), function)(*values, **options)
