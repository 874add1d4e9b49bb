"""The commands `page` and `metrics`."""

from __future__ import annotations

import threading
import webbrowser

from spotfleet.api import Fleet
from spotfleet.api.access.watch import FleetWatch, scrape_config
from spotfleet.cli.console import print_message, told_if_slow
from spotfleet.cli.page.feed import Feed
from spotfleet.cli.page.server import PageServer


def page(name: str, *, port: int, browser: bool, may_act: bool) -> None:
    fleet = Fleet(name)
    watch = FleetWatch(fleet)
    with told_if_slow(f"waiting for an answer from the dispatcher of fleet {fleet.name} ..."):
        watch.poll(None, 0.0)  # an error belongs here rather than into the page
    server = PageServer(Feed(watch.poll), watch, port, may_act=may_act)
    try:
        server.start()
        print(server.address, flush=True)
        print_message("it shows the fleet, and may cancel jobs and drain hosts, until Ctrl-C" if may_act else
                      "it shows the fleet until Ctrl-C, and changes nothing; with `--allow-actions` it may")
        if browser and not webbrowser.open(server.address_once):
            print_message(f"no browser was found here: open the address; from another machine first "
                          f"`ssh -L {server.port}:127.0.0.1:{server.port} THIS-MACHINE`")
        threading.Event().wait()
    except KeyboardInterrupt:
        print_message(f"\nthe page is closed; fleet {fleet.name} goes on")
    finally:
        server.close()


def metrics(name: str, *, prometheus: bool) -> None:
    fleet = Fleet(name)
    if prometheus:
        print(scrape_config(fleet), end="")
        print_message("put these lines into prometheus.yml; examples/grafana.json is a dashboard (docs/page.md)")
        return
    print(fleet.client.metrics(), end="")
