"""Runs the app on a socket until a signal: says when it is ready, lets requests finish when told to stop.

Used by programs only: it takes over the process's SIGTERM and SIGINT.
"""

import asyncio
import math
import os
import signal
import socket
from collections.abc import Sequence

import uvicorn

from cupaged.engine.async_engine import AsyncEngine
from cupaged.server.app import create_app

IDLE_CONNECTION_S = (
    75  # more than clients and load balancers keep one, so that they close it, not we under them
)
SLOW_READER_S = 5  # after the last request has ended, for clients that have not read everything


def bind(host: str, port: int) -> socket.socket:
    """Reserve the port without listening, so that nobody connects before there is a model."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    if os.name == "posix":  # elsewhere it would let two servers share the port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    engine: AsyncEngine,
    listener: socket.socket,
    *,
    model_names: Sequence[str],
    api_key: str | None = None,
    shutdown_timeout: float,
) -> None:
    """Serve until SIGTERM or SIGINT, then as AsyncEngine.shutdown says; a second SIGINT ends at once."""
    config = uvicorn.Config(
        create_app(engine, model_names, api_key),
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=math.ceil(shutdown_timeout) + SLOW_READER_S,
    )
    server = _Server(config, engine, shutdown_timeout)
    # uvicorn raises a signal again when it has stopped; this handler takes it, so the exit code stays 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn, with the engine's drain beside the connections'."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._engine.shutdown(self._shutdown_timeout))
        closing = asyncio.ensure_future(super().shutdown(sockets))
        while not closing.done() and not self.force_exit:
            await asyncio.wait([closing], timeout=0.1)
        if self.force_exit:
            # From Python 3.12 on, uvicorn then still waits for the connections, so their streams must end.
            await self._engine.shutdown(0)
            await asyncio.wait([closing], timeout=1)
            closing.cancel()
        else:
            await closing
        await draining
