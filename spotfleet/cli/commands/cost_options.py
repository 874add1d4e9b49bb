"""Options and help of the commands about money: `cost`, `offers`, `catalog`, `simulate`. Light imports, as in `app.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from spotfleet.cli import completion
from spotfleet.cli.options import CostOutput, Format, Output, SimulationOutput, call

catalog = typer.Typer(invoke_without_command=True, help="Show the sources and the age of the known prices.",
                      context_settings={"help_option_names": ["-h", "--help"]})


def register(app: typer.Typer) -> None:
    app.command()(cost)
    app.command("cost-report", hidden=True)(cost)
    app.command()(offers)
    app.add_typer(catalog, name="catalog")
    app.command()(simulate)


def cost(
    fleets: Annotated[list[str] | None, typer.Argument(
        metavar="FLEET", show_default=False, autocompletion=completion.fleets, help=(
        "Which; may be left out when there is only one."))] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Every fleet made here, also those that are down.",
                                             )] = False,
    since: Annotated[str, typer.Option("--since", metavar="WHEN", show_default=False,
                                       help="Only from then on: 7d, 36h, 2026-11-22, 2026-11-22T14:30 (UTC).")] = "",
    until: Annotated[str, typer.Option("--until", metavar="WHEN", show_default=False,
                                       help="Only before then; as --since.")] = "",
    by: Annotated[str, typer.Option("--by", metavar="host|group|pool|day|job|fleet", show_default=False,
                                    help="One line for each of these.")] = "",
    output: Annotated[CostOutput, typer.Option("-o", "--output", help=(
        "html: a report with charts, one file that needs nothing else."))] = CostOutput.TABLE,
    file: Annotated[str, typer.Option("--output-file", metavar="FILE", show_default=False,
                                      help="Write there; default: stdout, and for html on a terminal FLEET-cost.html.",
                                      )] = "",
    reconcile: Annotated[str, typer.Option("--reconcile", metavar="EXPORT.csv", show_default=False, help=(
        "Compare with the cloud's bill: an AWS Cost and Usage Report or Data Export, CSV, plain or gzip."))] = "",
) -> None:
    """Show what fleets cost, and what on demand would cost.

    Machines at the prices of each moment, disks, public addresses, and an estimate of traffic between zones.
    """
    call("cost", "cost_of", fleets or [], everything=everything, since=since, until=until, by=by, output=output.value,
         file=file, reconcile=reconcile)


def offers(
    gpus: Annotated[str, typer.Option("--gpus", metavar="NAME[:COUNT]", show_default=False,
                                      help="A100:8, or A100 for any number of them.")] = "",
    instance_type: Annotated[str, typer.Option("-t", "--instance-type", metavar="TYPE", show_default=False,
                                               help="g5.xlarge, t3.medium ...")] = "",
    infra: Annotated[str, typer.Option("--infra", metavar="PROVIDER[/REGION[/ZONE]]", show_default=False,
                                       help="Only there: aws, gcp/us-central1 ...")] = "",
    spot: Annotated[bool | None, typer.Option("--spot/--on-demand", show_default=False,
                                              help="Only this market; default: whichever costs less.")] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Every zone and type, also CPUs.")] = False,
    live: Annotated[bool | None, typer.Option("--live/--no-live", show_default=False, help=(
        "Ask providers for prices of now, or nobody; default: those that are set up here."))] = None,
    output: Format = Output.TABLE,
) -> None:
    """List offers with prices, cheapest useful hour first.

    A useful hour costs price x (1 + (boot + repeated) / expected lifetime) / GPUs.
    """
    call("offers", "show", gpus=gpus, instance_type=instance_type, infra=infra, spot=spot, everything=everything,
         live=live, as_json=output is Output.JSON)


@catalog.callback()
def catalog_(ctx: typer.Context, output: Format = Output.TABLE) -> None:
    """Show the sources and the age of the known prices."""
    if ctx.invoked_subcommand is None:
        call("catalog", "show", as_json=output is Output.JSON)


@catalog.command()
def update(
    provider: Annotated[list[str] | None, typer.Option("--provider", metavar="aws|gcp|azure", show_default=False,
                                                       help="Only this one; may be said again.")] = None,
    output: Format = Output.TABLE,
) -> None:
    """Fetch today's prices from the providers' own APIs.

    They are stored in SPOTFLEET_HOME/catalog and used instead of the packaged ones. What a fleet has cost does not
    change.
    """
    call("catalog", "update", provider or [], as_json=output is Output.JSON)


def simulate(
    file: Annotated[str, typer.Argument(metavar="FLEET.yaml", help="The fleet file.", show_default=False)],
    more: Annotated[list[str] | None, typer.Argument(metavar="[FILE...]", show_default=False, hidden=True)] = None,
    trace: Annotated[list[str] | None, typer.Option("--trace", metavar="FILE...", show_default=False, help=(
        "Records of a spot market: what could be held, or what it cost. Several are pools of one fleet."))] = None,
    work: Annotated[str, typer.Option("--work", metavar="TIME", show_default=False, help=(
        "So long at full target, such as 48h; default: the fleet file's."))] = "",
    deadline: Annotated[str, typer.Option("--deadline", metavar="TIME", show_default=False, help=(
        "To be done within it; default: the fleet file's, or none."))] = "",
    every: Annotated[str, typer.Option("--every", metavar="TIME", show_default=False, help=(
        "A window begins each so often; default: 4h."))] = "",
    windows: Annotated[int | None, typer.Option("--windows", metavar="N", min=1, show_default=False, help=(
        "So many windows instead, evenly spread over the records."))] = None,
    each: Annotated[bool, typer.Option("--each", help="Each record is a market of its own, not a pool.")] = False,
    hosts: Annotated[int | None, typer.Option("--hosts", metavar="N", min=1, show_default=False, help=(
        "Default: the fleet file's target."))] = None,
    boot: Annotated[str, typer.Option("--boot", metavar="TIME", show_default=False, help=(
        "From a launch until a host works, paid; default: the median of this fleet's boots, or else 3m."))] = "",
    notice: Annotated[str, typer.Option("--notice", metavar="TIME", help="Before a host is taken.")] = "2m",
    price: Annotated[str, typer.Option("--price", metavar="USD", show_default=False, help=(
        "Of a spot host per hour; default: the record's, or the catalog's."))] = "",
    on_demand_price: Annotated[str, typer.Option("--on-demand-price", metavar="USD", show_default=False, help=(
        "Of a host on demand per hour; default: as --price."))] = "",
    polarity: Annotated[str, typer.Option("--polarity", metavar="available|unavailable", show_default=False, help=(
        "What 1 means in a record of 0 and 1; default: what its format says."))] = "",
    output: Annotated[SimulationOutput, typer.Option("-o", "--output")] = SimulationOutput.TABLE,
) -> None:
    """Replay recorded spot markets: what would it cost?

    With our policy and with others. Runs the dispatcher's own planning code with a simulated clock; docs/simulate.md.
    """
    call("simulate", "run", file, traces=[*(trace or []), *(more or [])], output=output.value, polarity=polarity,
         work=work, deadline=deadline, every=every, boot=boot, notice=notice, windows=windows or 0, hosts=hosts or 0,
         each=each, price=price, on_demand_price=on_demand_price)
