"""Commands, options and help. The code of a command is in `commands/`, imported when it runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from spotfleet.cli import completion, habits
from spotfleet.cli.commands import cost_options
from spotfleet.cli.options import (
    TAIL,
    CheckpointDir,
    Cluster,
    ConvertedOutput,
    Cpus,
    Discover,
    EngineFlag,
    EngineValue,
    Env,
    EnvFile,
    Everywhere,
    Format,
    FromTerraform,
    Gpus,
    Grace,
    Group,
    Host,
    IdleMinutes,
    Infra,
    InstanceType,
    Interrupted,
    MaxRestarts,
    Memory,
    Name,
    Nics,
    NoRetry,
    NumNodes,
    OnHost,
    Output,
    Priority,
    ResumeArgs,
    Retry,
    Tailed,
    UseSpot,
    Watch,
    Yes,
    call,
)
from spotfleet.cli.ray import options as ray_options
from spotfleet.errors import SpotfleetError
from spotfleet.version import __version__

INTERRUPTED, TERMINATED = 130, 143  # as in shells

app = typer.Typer(
    name="spotfleet", no_args_is_help=True, add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train PyTorch models on spot machines. Providers: local (a cloud emulated on this machine), ssh (machines "
         "that you have), aws and gcp (tested against emulations of these clouds, never on the real ones).",
    epilog="To begin: `spotfleet up FILE`, `spotfleet train SCRIPT.py`, `spotfleet status`, `spotfleet down`.",
)
chaos = typer.Typer(no_args_is_help=True, help="Interrupt hosts on purpose, to see training go on.",
                    context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(chaos, name="chaos")
image = typer.Typer(no_args_is_help=True, help="Build, list and remove ready images, from which hosts start fast.",
                    context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(image, name="image")
app.add_typer(ray_options.ray, name="ray")


def run(argv: list[str]) -> int:
    """Run one command line and return the exit code. Errors are printed in two lines and never as a traceback."""
    try:
        code = app(args=argv, standalone_mode=False) or 0
        if code == INTERRUPTED:  # newer typer catches the exception and returns this
            raise KeyboardInterrupt
        return code
    except SpotfleetError as error:
        _print_error(str(error), error.hint)
        return error.exit_code
    except typer.Exit as leave:
        return leave.exit_code
    except (typer.Abort, KeyboardInterrupt, Interrupted) as leave:
        if not isinstance(leave, Interrupted):
            print("interrupted", file=sys.stderr)
        return TERMINATED if _signals else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has closed the pipe: `| head`
        return 1
    except OSError as error:
        home = os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet"
        _print_error(str(error), f"look at that path and who may write there; spotfleet keeps its own files in {home}")
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # not an error of the option parser
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        context = getattr(error, "ctx", None)
        instead = habits.hint(argv, error.format_message())
        _print_error(error.format_message(), instead or (f"{context.command_path} --help" if context else ""))
        return 2


_signals: list[int] = []  # received SIGTERM signals


def handle_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C: a command prints what it leaves behind and how to continue."""

    def terminate(number: int, _frame: object) -> None:
        _signals.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)


def _print_error(message: str, hint: str) -> None:
    """Print the message wrapped at spaces, and the hint unwrapped, since it may hold a command to copy."""
    from spotfleet.cli.tables import columns, flow  # not loaded for --help
    from spotfleet.words import harmless_lines

    indented = harmless_lines(message).replace("\n", "\n  ")  # no line of it looks like one of ours
    print(flow(f"error: {indented}", columns(sys.stderr)) + (f"\nhint: {harmless_lines(hint)}" if hint else ""),
          file=sys.stderr)


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
    infra: Infra = "", env: Env = None, from_terraform: FromTerraform = "", discover: Discover = "",
) -> None:
    """Start a fleet, or change the size of a running one.

    A small fleet file:  {name: digits, nodes: {min: 2, target: 3}, resources: {instance_type: cpu.small}}
    """
    call("write", "up", file, dryrun=dryrun, yes=yes, timeout=timeout, infra=infra, env=env or [],
         from_terraform=from_terraform, discover=discover)


@app.command()
def launch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The fleet file, or a task file of SkyPilot.",
                                         show_default=False)],
    cluster: Annotated[str, typer.Option("-c", "--cluster", metavar="NAME", show_default=False,
                                         help="The fleet's name, instead of the file's.")] = "",
    down: Annotated[bool, typer.Option("--down", help="End the fleet after the job.")] = False,
    detach: Annotated[bool, typer.Option("-d", "--detach", "--detach-run", help="Return once the job is submitted.",
                                         )] = False,
    yes: Yes = False, env: Env = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", metavar="K", show_default=False,
                                                     help="A secret variable, taken from your environment.")] = None,
    dryrun: Annotated[bool, typer.Option("--dryrun", "--dry-run", help="Only show the plan.")] = False,
    infra: Infra = "", gpus: Gpus = "", num_nodes: NumNodes = 0, cpus: Cpus = "", memory: Memory = "",
    instance_type: InstanceType = "", use_spot: UseSpot = None, idle: IdleMinutes = 0, env_file: EnvFile = None,
    retry: Retry = False,
) -> None:
    """Start a fleet, run the file's `setup` and `run`, and show the output.

    The same as `up` and then `train` without a script. The fleet stays, unless --down.
    """
    call("launchers.launch", "launch", file, cluster=cluster, down=down, detach=detach, yes=yes, env=env or [],
         secret=secret or [], dryrun=dryrun, infra=infra, num_nodes=num_nodes, env_file=env_file, retry=retry,
         resources={"accelerators": gpus, "cpus": cpus, "memory": memory, "instance_type": instance_type,
                    "use_spot": use_spot, "autostop": {"idle_minutes": idle} if idle else None})


@app.command(context_settings={"allow_interspersed_args": False})
def horovodrun(
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", show_default=False)] = None,
    num_proc: Annotated[int, typer.Option("-np", "--num-proc", min=1, show_default=False,
                                          help="Workers; with --min-np, those that must be there to begin.")] = 1,
    min_np: Annotated[int, typer.Option("--min-np", "--min-num-proc", show_default=False)] = 0,
    max_np: Annotated[int, typer.Option("--max-np", "--max-num-proc", show_default=False)] = 0,
    slots: Annotated[int, typer.Option("--slots", "--slots-per-host", show_default=False,
                                       help="Of a host that names none.")] = 0,
    hosts: Annotated[str, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...", show_default=False)] = "",
    hostfile: Annotated[Path | None, typer.Option("-hostfile", "--hostfile", show_default=False)] = None,
    script: Annotated[Path | None, typer.Option("--host-discovery-script", show_default=False)] = None,
    reset_limit: Annotated[int, typer.Option("--reset-limit", show_default=False)] = 0,
    elastic_timeout: Annotated[float, typer.Option("--elastic-timeout", "--start-timeout",
                                                   help="Seconds until -np workers must be there.")] = 600.0,
    timeline: Annotated[Path | None, typer.Option("--timeline-filename", show_default=False,
                                                  help="The fleet's events, for Chrome's tracing.")] = None,
    output: Annotated[Path | None, typer.Option("--output-filename", metavar="DIR", show_default=False,
                                                help="Each rank's output, in DIR/rank.N/stdout.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose")] = False,
    ssh_port: Annotated[int, typer.Option("-p", "--ssh-port", show_default=False)] = 0,
    identity: Annotated[str, typer.Option("-i", "--ssh-identity-file", show_default=False)] = "",
    dispatcher: Annotated[str, typer.Option("--dispatcher", metavar="HOST", show_default=False,
                                            help="The machine that runs no workers; default: this one.")] = "",
    gloo: Annotated[bool, typer.Option("--gloo", hidden=True)] = False,
    engine: EngineFlag = False, tuning: EngineValue = None, nics: Nics = "",
) -> None:
    """Run a script on machines over SSH, with horovodrun's flags.

    horovodrun -np 8 --min-np 4 --max-np 12 --host-discovery-script discover.sh --slots 4 python train.py
    """
    call("launchers.horovodrun", "main", words or [], num_proc=num_proc, min_num_proc=min_np, max_num_proc=max_np,
         slots=slots, hosts=hosts, hostfile=hostfile, script=script, reset_limit=reset_limit,
         elastic_timeout_s=elastic_timeout, timeline=timeline, verbose=verbose, output=output, ssh_port=ssh_port,
         identity_file=identity, dispatcher=dispatcher, engine=engine or bool(tuning), nics=bool(nics))


@app.command()
def convert(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", show_default=False, help=(
        "A cluster file of Ray, a file of dstack, a hostfile, or a host-discovery script."))] = None,
    hosts: Annotated[str, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...", show_default=False,
                                       help="Hosts as horovodrun takes them.")] = "",
    slots: Annotated[int, typer.Option("--slots", show_default=False, help="Of a host that names none.")] = 0,
    output: Annotated[ConvertedOutput, typer.Option("-o", "--output", help="-: a fleet file (YAML).",
                                                    )] = ConvertedOutput.YAML,
) -> None:
    """Print a fleet file for a file of another program.

    Lines on stderr name what it could not take along. A task file of SkyPilot needs no conversion.
    """
    call("launchers.convert", "convert", file, hosts=hosts, slots=slots, as_json=output is ConvertedOutput.JSON)


@app.command()
def check(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PROVIDER] [FILE]", show_default=False, help=(
        "Only this provider; exactly for this fleet file. With --policy: laptop, dispatcher or host."))] = None,
    policy: Annotated[bool, typer.Option("--policy", help="Print the IAM policy (JSON) of the user of `up`, of the "
                                                          "dispatcher, or of hosts.")] = False,
    output: Format = Output.TABLE, from_terraform: FromTerraform = "", discover: Discover = "",
) -> None:
    """Check whether a fleet can be made.

    Checks credentials, permissions, quotas, networks and images, and changes nothing. Exit code 3 if a person must
    act first; each line says how.
    """
    call("check", "check", words or [], policy=policy, as_json=output is Output.JSON,
         from_terraform=from_terraform, discover=discover)


@app.command()
def attach(
    fleet: Annotated[str, typer.Argument(metavar="FLEET", show_default=False,
                                         help="Its name; may be left out when the account has only one.")] = "",
    provider: Annotated[str, typer.Option("--provider", "--infra", metavar="NAME", show_default=False,
                                          help="Where it runs; default: as the file says, else local.")] = "",
    file: Annotated[Path | None, typer.Option("--file", metavar="FLEET.yaml", show_default=False,
                                              help="The fleet's file: machines over SSH are found by it.")] = None,
) -> None:
    """Use a fleet here that another machine made.

    It is found by its tags, with the credentials of the account; machines over SSH by the fleet's file.
    """
    call("attach", "attach", fleet, provider, file)


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
    slots: Annotated[int | None, typer.Option("--slots", metavar="N", min=1, show_default=False,
                                              help="Take at most N slots, so that other jobs find room.")] = None,
    priority: Priority = 0,
    group: Group = "",
    resize_policy: Annotated[str, typer.Option("--resize-policy", metavar="POLICY", show_default=False,
                                               help="keep-global-batch, scale-lr or none; see docs/resizing.md.")] = "",
    growth: Annotated[str, typer.Option("--growth", metavar="EPOCH:WORKERS,...", show_default=False,
                                        help="The number of workers from each epoch on: 0:2,30:4,60:8.")] = "",
    deadline: Annotated[str, typer.Option("--deadline", metavar="DURATION", show_default=False,
                                          help="Finish within this time, at minimum cost: 60h.")] = "",
    work: Annotated[str, typer.Option("--work", metavar="WORK", show_default=False,
                                      help='The amount of work: 48h with all hosts, or "100000 steps".')] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Accept the job although the provider has no capacity "
                                                "for MIN workers now. Jobs wait for busy hosts in any case.")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", show_default=False,
                                                  help="A variable for the job; K alone takes yours.")] = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", metavar="K", show_default=False,
                                                     help="A secret variable, taken from your environment.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the job; default: the script's.",
                                             show_default=False)] = "",
    launcher: Annotated[str, typer.Option("--launcher", metavar="KIND", show_default=False,
                                          help="elastic, torchrun or command; default: as the script shows.")] = "",
    checkpoint_dir: CheckpointDir = "", resume_args: ResumeArgs = "", max_restarts: MaxRestarts = 0,
    grace: Grace = "30s", no_retry: NoRetry = False,
    verify: Annotated[bool, typer.Option("--verify", help="Do not train: run the script's first steps on this machine, "
                                         "undisturbed and through kills, a notice, a join and a restore, and compare "
                                         "every bit.")] = False,
) -> None:
    """Run a script on the fleet and show rank 0's output.

    The working directory is shipped when it has changed.
    Ctrl-C leaves the job running. Options of spotfleet may also stand after SCRIPT, up to a `--`.
    """
    if verify:
        return call("verify", "verify", script, args or [], np=np, env=env or [])
    call("write", "train", cluster, script, args or [], detach=detach, down=down, np=np, wait=wait, env=env or [],
         secret=secret or [], name_of_job=name, spares=spares, slots=slots or 0, priority=priority,
         resize_policy=resize_policy, growth=growth, deadline=deadline, work=work, group=group,
         restarts=(launcher, checkpoint_dir, resume_args, max_restarts, grace, no_retry))


@app.command("run", cls=Tailed)
def run_command(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", show_default=False)] = None,
    cluster: Cluster = "",
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="TASK.yaml", show_default=False,
                                              help="A task file, for its `run` and `setup`.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", "--num-nodes", metavar="N", min=1,
                                       help="Hosts that start it together, one process each.")] = 1,
    each: Annotated[bool, typer.Option("--each", help="On every host, each by itself.")] = False,
    detach: Annotated[bool, typer.Option("-d", "--detach", "--detach-run", help="Return at once.")] = False,
    down: Annotated[bool, typer.Option("--down", help="End the fleet after the job.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Accept the job although the provider has no capacity now.",
                                       )] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", show_default=False,
                                                  help="A variable for the job; K alone takes yours.")] = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", metavar="K", show_default=False,
                                                     help="A secret variable, taken from your environment.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the job.", show_default=False)] = "",
    priority: Priority = 0,
    group: Group = "",
    checkpoint_dir: CheckpointDir = "", resume_args: ResumeArgs = "", max_restarts: MaxRestarts = 0,
    grace: Grace = "30s", no_retry: NoRetry = False,
) -> None:
    """Run any command on the fleet as a job, and show rank 0's output.

    The working directory is shipped when it has changed. When a host is lost, all processes are ended and started anew.
    Exit code: that of the process that failed.
    """
    call("write", "run", cluster, words or [], ctx.meta.get(TAIL), file=file, nodes=nodes, each=each, detach=detach,
         down=down, wait=wait, env=env or [], secret=secret or [], name_of_job=name, priority=priority, group=group,
         restarts=("", checkpoint_dir, resume_args, max_restarts, grace, no_retry))


@app.command()
def status(
    fleet: Name = "", watch: Watch = False,
    everything: Annotated[bool, typer.Option("-a", "--all", help="A line for each fleet made here, also for those that "
                                                                 "are down.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Show the fleet, its hosts and its jobs, with reasons."""
    call("read", "status", fleet, watch=watch, everything=everything, as_json=output is Output.JSON)


@app.command()
def page(
    fleet: Name = "",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it, or only print its address.")] = True,
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, show_default=False,
                                      help="On 127.0.0.1; default: a free one.")] = 0,
    allow_actions: Annotated[bool, typer.Option("--allow-actions", help="Let the page cancel jobs and drain hosts.",
                                                )] = False,
) -> None:
    """Show the fleet live in the browser, until Ctrl-C.

    Whoever has the printed address can read, from this machine alone. Nothing is loaded from elsewhere.
    """
    call("page.command", "page", fleet, port=port, browser=browser, may_act=allow_actions)


@app.command()
def metrics(
    fleet: Name = "",
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print lines for prometheus.yml instead.")] = False,
) -> None:
    """Print the fleet's metrics once, as OpenMetrics text.

    With --prometheus it prints how Prometheus reads them, with a token that opens nothing else.
    """
    call("page.command", "metrics", fleet, prometheus=prometheus)


@app.command()
def hosts(fleet: Name = "", output: Format = Output.TABLE) -> None:
    """List the hosts that are up, as `address:slots` lines.

    That is what a Horovod host-discovery script prints.
    """
    call("read", "hosts", fleet, as_json=output is Output.JSON)


@app.command()
def jobs(
    fleet: Name = "",
    prune: Annotated[bool, typer.Option("--prune", help="Remove logs, checkpoints and outputs of jobs that have ended "
                                                        "from the dispatcher's disk.")] = False,
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1,
                                      help="With --prune: leave the newest N that have ended.")] = 100,
    yes: Yes = False, output: Format = Output.TABLE,
) -> None:
    """List the jobs of the fleet, or remove the files of old ones.

    --prune first shows what it will remove, and which outputs were never copied. Events and cost of all jobs stay.
    """
    if prune:
        return call("write", "prune", fleet, keep=keep, yes=yes, as_json=output is Output.JSON)
    call("read", "jobs", fleet, as_json=output is Output.JSON)


@app.command()
def queue(fleet: Name = "", output: Format = Output.TABLE) -> None:
    """List running and waiting jobs in their order.

    Waiting ones get hosts by `--priority`, then in the order of submission.
    """
    call("read", "queue", fleet, as_json=output is Output.JSON)


@app.command()
def events(
    fleet: Name = "", watch: Watch = False,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also price changes and progress reports.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """List everything that happened, oldest first, in UTC.

    With -o json every event with all its fields: a list, or when watching one object a line.
    """
    call("read", "events", fleet, watch=watch, as_json=output is Output.JSON, everything=everything)


@app.command()
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Default: the newest.", show_default=False,
                                             autocompletion=completion.jobs)] = "",
    cluster: Cluster = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, metavar="N", help="Whose output.")] = 0,
    worker: Annotated[str, typer.Option("--worker", metavar="HOST/SLOT/INCARNATION", show_default=False,
                                        help="One process, as in `status -o json`.")] = "",
    everything: Annotated[bool, typer.Option("-a", "--all", help="Every rank; a line starts with its rank.")] = False,
    tail: Annotated[int | None, typer.Option("-n", "--tail", min=0, metavar="N", show_default=False,
                                             help="Only the last N lines so far.")] = None,
    since: Annotated[str, typer.Option("--since", metavar="DURATION", show_default=False,
                                       help="Only the output of the last 10m, 2h ...")] = "",
    setup: Annotated[bool, typer.Option("--setup", help="What `setup` printed, on each host.")] = False,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="With --setup: on one.",
                                      show_default=False)] = "",
) -> None:
    """Print the output of a job, also after the fleet's end."""
    call("read", "logs", cluster, job, follow=follow, rank=rank, worker=worker, everything=everything, tail=tail,
         since=since, setup=setup, host=host)


@app.command()
def outputs(
    job: Annotated[str, typer.Argument(help="As `jobs` shows it.", show_default=False,
                                       autocompletion=completion.jobs)],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where they go, by worker.")] = "outputs",
    cluster: Cluster = "",
) -> None:
    """Copy the files here that a job wrote to SPOTFLEET_OUTPUT."""
    call("read", "outputs", cluster, job, folder)


cost_options.register(app)


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="As `jobs` shows it.", show_default=False,
                                       autocompletion=completion.jobs)] = "", cluster: Cluster = "",
    everything: Annotated[bool, typer.Option("-a", "--all", help="All jobs of the fleet that have not ended.")] = False,
) -> None:
    """End a job; the fleet stays."""
    call("write", "cancel", cluster, job, everything=everything)


@app.command()
def drain(host: Host = "", cluster: Cluster = "") -> None:
    """Release a host without losing work; it is replaced."""
    call("write", "drain", cluster, host)


@app.command()
def leaks(
    fix: Annotated[bool, typer.Option("--fix", help="Terminate them.")] = False, yes: Yes = False,
    everywhere: Annotated[bool, typer.Option("--all-regions", help="Look in every region of a cloud's account, also "
                                                                   "where no fleet of this machine is.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Find orphaned machines and other leftovers.

    Machines of fleets that other laptops made, and machines that are just starting, are listed and never ended.
    Exit code 1 if there are leaks and they were not ended.
    """
    call("leaks", "leaks", fix=fix, yes=yes, as_json=output is Output.JSON, everywhere=everywhere)


@app.command(cls=Tailed, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def ssh(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[FLEET|FLEET-w0|HOST]", show_default=False,
                                          autocompletion=completion.machines,
                                          help="A fleet (its dispatcher's machine), or one of its hosts.")] = "",
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", show_default=False,
                                                      help="For ssh: options and a command.")] = None,
) -> None:
    """Open a shell on a machine of the fleet.

    Plain `ssh FLEET`, `ssh FLEET-w0`, scp and editors know the same names while the fleet is up.
    """
    call("shell", "ssh", target, [*(words or []), *ctx.meta.get(TAIL, [])])


@app.command("exec", cls=Tailed)
def execute(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[FLEET] -- COMMAND", show_default=False)] = None,
    everywhere: Everywhere = False, host: OnHost = "", cluster: Cluster = "",
    timeout: Annotated[str, typer.Option(metavar="DURATION", show_default=False,
                                         help="For each host, such as 90s; what runs there is ended too.")] = "",
    output: Format = Output.TABLE,
) -> None:
    """Run a command on one machine, or on all hosts.

    In the user's login shell; default: the dispatcher's machine.
    With --all each line of output starts with its host's name. Exit code: the first that is not 0; 255 for a host that
    cannot be entered, 124 for one that was not done in time.
    """
    call("shell", "execute", cluster, words or [], ctx.meta.get(TAIL), everywhere=everywhere, host=host,
          timeout=timeout, as_json=output is Output.JSON)


@app.command("rsync-up", cls=Tailed)
def rsync_up(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[FLEET] SRC DST", show_default=False)] = None,
    everywhere: Everywhere = False, host: OnHost = "", cluster: Cluster = "",
) -> None:
    """Copy files to a machine, or to all hosts.

    By rsync, or tar where there is none. As with rsync, SRC/ means its content; nothing is ignored, DST is relative to
    the home there. Words after `--` go to rsync: `-- --delete --exclude .git`.
    """
    call("shell", "rsync", cluster, words or [], ctx.meta.get(TAIL), everywhere=everywhere, host=host, upwards=True)


@app.command("rsync-down", cls=Tailed)
def rsync_down(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[FLEET] SRC DST", show_default=False)] = None,
    everywhere: Everywhere = False, host: OnHost = "", cluster: Cluster = "",
) -> None:
    """Copy files from a machine, or from all hosts.

    By rsync, or tar where there is none; with --all into DST/HOST each. SRC is relative to the home there, and SRC/
    means its content. Words after `--` go to rsync.
    """
    call("shell", "rsync", cluster, words or [], ctx.meta.get(TAIL), everywhere=everywhere, host=host, upwards=False)


@app.command("port-forward")
def port_forward(
    words: Annotated[list[str] | None, typer.Argument(metavar="[FLEET] PORT[:HOST:PORT]", show_default=False)] = None,
    host: OnHost = "", cluster: Cluster = "",
) -> None:
    """Forward local ports to a machine of the fleet.

    Until Ctrl-C. 8888 is the same port on both sides; 8080:80 is 80 there; 5432:db:5432 is a port of machine db.
    """
    call("shell", "port_forward", cluster, words or [], host)


@app.command()
def revoke(
    host: Host = "", cluster: Cluster = "", yes: Yes = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="For the record.", show_default=False)] = "",
) -> None:
    """Stop trusting a host: reject, end and replace it."""
    call("write", "revoke", cluster, host, why=why, yes=yes)


@chaos.command()
def preempt(
    host: Host = "", cluster: Cluster = "",
    notice: Annotated[float, typer.Option("--notice", min=0, metavar="SECONDS", help="Warning before it goes.")] = 120,
) -> None:
    """Interrupt a host after a notice."""
    call("write", "interrupt", cluster, host, notice)


@chaos.command()
def kill(host: Host = "", cluster: Cluster = "") -> None:
    """Interrupt a host now, without a notice."""
    call("write", "interrupt", cluster, host, None)


ImageCloud = Annotated[str, typer.Argument(metavar="PROVIDER", help="The cloud.", show_default=False)]
ImageFile = Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", show_default=False,
                                                help="A fleet file, for the section of its cloud.")]
ImageRegion = Annotated[str, typer.Option("--region", metavar="REGION", show_default=False,
                                          help="Default: the only region of the fleet file.")]


@image.command("build")
def image_build(
    provider: ImageCloud, file: ImageFile = None, region: ImageRegion = "",
    gpus: Annotated[bool, typer.Option("--gpus", help="For hosts with GPUs: with NVIDIA's driver.")] = False,
    folder: Annotated[Path | None, typer.Option("--folder", metavar="DIR", show_default=False,
                                                help="Only write Packer's files there.")] = None,
) -> None:
    """Build an image with Packer, on a machine of the cloud that it ends afterwards."""
    call("images.command", "build", provider, file, gpus=gpus, region=region, folder=folder)


@image.command("list")
def image_list(provider: ImageCloud, file: ImageFile = None, region: ImageRegion = "",
               output: Format = Output.TABLE) -> None:
    """List the images that `image build` made, and which are outdated."""
    call("images.command", "show", provider, file, region, as_json=output is Output.JSON)


@image.command("rm")
def image_rm(
    provider: ImageCloud,
    ids: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Ids or names.", show_default=False)],
    file: ImageFile = None, region: ImageRegion = "", yes: Yes = False,
) -> None:
    """Remove images and their disks."""
    call("images.command", "remove", provider, ids, file, region, yes=yes)


@app.command()
def down(
    fleet: Name = "", yes: Yes = False,
    discard: Annotated[bool, typer.Option("--discard", help="Give up results that cannot be copied here.")] = False,
    bring_checkpoints: Annotated[bool, typer.Option(
        "--bring-checkpoints", help="Copy also checkpoints that lie at `checkpoint.target`.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Copy the results here and end every machine.

    Everything else that the fleet created at its provider is removed too. An interrupted copy goes on where it stopped.
    """
    call("write", "down", fleet, yes=yes, discard=discard, bring_checkpoints=bring_checkpoints,
         as_json=output is Output.JSON)
