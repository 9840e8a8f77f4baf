"""python -m cupaged.serve MODEL: an OpenAI-compatible HTTP server.

Says on stderr how it divides the memory, loads the model, opens the port, prints one line when it is ready,
and stops on SIGTERM or Ctrl-C once the requests in flight have finished.
"""

import argparse
import os
import signal
import sys
from importlib.util import find_spec

from cupaged.config import EngineConfig
from cupaged.flags import add_engine_flags, engine_config, say_loading, show_log

_SERVE_EXTRA = ("msgspec", "starlette", "uvicorn")


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, EngineConfig]:
    """Parse the command line; what is wrong with it ends the program with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m cupaged.serve", description=__doc__, allow_abbrev=False)
    add_engine_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="INT", help="0 = any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model (default: MODEL)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="refuse requests to /v1 that do not bring it")
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="for requests in flight when told to stop (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.port <= 65535:
        parser.error(f"argument --port: {args.port} is not in 0..65535")
    if not 0 <= args.shutdown_timeout < 1e6:
        parser.error(f"argument --shutdown-timeout: {args.shutdown_timeout} is not in 0..1000000")
    if args.api_key == "":
        parser.error("argument --api-key: is empty; leave it out for a server without a key")
    try:
        return args, engine_config(args)
    except ValueError as error:
        parser.error(str(error))


def main(argv: list[str] | None = None) -> int:
    """Run the server; the exit code is 0 after a signal, 1 if it could not start."""
    args, config = parse_args(argv)
    missing = [name for name in _SERVE_EXTRA if find_spec(name) is None]
    if missing:
        print(f"error: the server needs {', '.join(missing)}: pip install 'cupaged[serve]'", file=sys.stderr)
        return 1
    # Not sys.exit: an exception is lost if the signal comes inside one of the compiler's callbacks.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    from cupaged.engine.async_engine import AsyncEngine
    from cupaged.engine.llm_engine import LLMEngine
    from cupaged.server.runner import bind, serve

    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        print(f"error: cannot listen on {args.host} port {args.port}: {error}", file=sys.stderr)
        return 1
    say_loading(config)
    show_log()
    try:
        engine = LLMEngine(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    serve(
        AsyncEngine(engine),
        listener,
        model_names=args.served_model_name or [config.model],
        api_key=args.api_key,
        shutdown_timeout=args.shutdown_timeout,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
