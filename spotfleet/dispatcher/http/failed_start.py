"""Server of a dispatcher that cannot start: it answers each request with the reason, until the process starts again."""

from __future__ import annotations

import asyncio
import errno
import logging

from aiohttp import web

from spotfleet.dispatcher.http.auth import bearer, identify
from spotfleet.errors import SpotfleetError
from spotfleet.transport.boot import DispatcherBoot, server_tls

log = logging.getLogger(__name__)
EXPLAIN_S = 10.0  # then the process ends, and its machine starts it again
HINT = ("hosts train on meanwhile, until `orphan_after` ends them (an hour by default); its log lies in its home as "
        "dispatcher.log; it starts again by itself, and `spotfleet status` shows when it has")


async def explain(boot: DispatcherBoot, address: str, port: int, error: BaseException) -> None:
    """Answer requests for EXPLAIN_S; return at once where no other reason than the address keeps us from listening."""
    what = str(error) if isinstance(error, SpotfleetError) else f"{type(error).__name__}: {error}"
    log.error("the dispatcher cannot start: %s", what, exc_info=error)
    hint = "; ".join(filter(None, [getattr(error, "hint", ""), HINT]))

    async def refuse(request: web.Request) -> web.StreamResponse:
        caller = identify(bearer(request.headers.get("Authorization", "")), boot.admin_token, boot.fleet_secret)
        if caller is None or not caller.is_admin:
            raise web.HTTPServiceUnavailable(text="")  # an agent tries again
        said = {"error": f"the dispatcher cannot start: {what}", "hint": hint, "kind": "DispatcherUnreachable"}
        return web.json_response(said, status=503)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port, ssl_context=server_tls(boot)).start()
        await asyncio.sleep(EXPLAIN_S)
    except OSError as trouble:
        if trouble.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise
        log.error("the reason cannot be given to callers: %s", trouble)
    finally:
        await runner.cleanup()
