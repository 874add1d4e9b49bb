"""Commands and options of `spotfleet ray`; their code is in `command.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from spotfleet.cli.options import TAIL, Cluster, Format, Output, Priority, Tailed, call

SETTINGS = {"help_option_names": ["-h", "--help"]}
ray = typer.Typer(no_args_is_help=True, context_settings=SETTINGS,
                  help="Run Ray on the fleet: start a cluster, submit scripts to it, stop it (docs/ray.md).")
Driver = Annotated[str, typer.Argument(metavar="SCRIPT-ID", show_default=False,
                                       help="As `submit` and `status` show it: d1, d2 ...")]


@ray.command()
def start(
    cluster: Cluster = "",
    hosts: Annotated[str, typer.Option("--hosts", metavar="MIN:MAX", show_default=False,
                                       help="How many hosts Ray gets; default: all that other jobs leave.")] = "",
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=0, show_default=False,
                                      help="Refuse a fleet whose hosts have fewer GPUs.")] = 0,
    priority: Priority = 0,
    wait: Annotated[bool, typer.Option("--wait", help="Accept it although the provider has no capacity now.")] = False,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return before the cluster is up.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Start a Ray cluster: the head beside the dispatcher, and a raylet on each host.

    It is a job of the fleet, which never shares a host with another one.
    """
    call("ray.command", "start", cluster, hosts=hosts, gpus=gpus, priority=priority, wait=wait, detach=detach,
         as_json=output is Output.JSON)


@ray.command()
def status(fleet: Cluster = "", output: Format = Output.TABLE) -> None:
    """Show the head, the nodes by host, waiting requests and submitted scripts."""
    call("ray.command", "status", fleet, as_json=output is Output.JSON)


@ray.command(cls=Tailed, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def submit(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT.py [ARGS] | -- COMMAND", show_default=False,
                                                      )] = None,
    cluster: Cluster = "",
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return at once.")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", show_default=False,
                                                  help="A variable for the script; K alone takes yours.")] = None,
    output: Format = Output.TABLE,
) -> None:
    """Run a script on the head's machine, where ray.init() finds the cluster, and show its output.

    The working directory is shipped when it has changed. Ctrl-C leaves the script running. Exit code: the script's.
    `spotfleet down` brings home its log and the files that it writes to $SPOTFLEET_OUTPUT.
    """
    call("ray.command", "submit", cluster, [*(words or ()), *(ctx.meta.get(TAIL) or ())], detach=detach, env=env or [],
         as_json=output is Output.JSON)


@ray.command()
def logs(
    driver: Annotated[str, typer.Argument(metavar="SCRIPT-ID", show_default=False,
                                          help="As `submit` and `status` show it; default: the newest.")] = "",
    cluster: Cluster = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it has ended.")] = False,
) -> None:
    """Show the output of a submitted script."""
    call("ray.command", "logs", cluster, driver, follow=follow)


@ray.command()
def cancel(driver: Driver, cluster: Cluster = "") -> None:
    """End a submitted script."""
    call("ray.command", "cancel", cluster, driver)


@ray.command()
def stop(cluster: Cluster = "", output: Format = Output.TABLE) -> None:
    """End the Ray cluster with everything that runs on it. The fleet's hosts stay."""
    call("ray.command", "stop", cluster, as_json=output is Output.JSON)
