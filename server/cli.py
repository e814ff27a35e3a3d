"""The `loraplex` command. Heavy imports wait until something is served, so that help and errors are instant."""

import os
import signal
import sys
from collections.abc import Sequence

HELP = """\
usage: loraplex serve MODEL_DIR [flags]   serve a model and its LoRA adapters over the OpenAI HTTP API
       loraplex serve --help              all flags, grouped, with their defaults
       loraplex adapter --help            look at adapter folders, rewrite them
       loraplex bench --help              measure a server, or the engine alone
       loraplex --version                 version
       loraplex help                      this text
"""
COMMANDS = ("serve", "adapter", "bench", "help", "-h", "--help", "--version")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 it failed, 2 the command line was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    match command:
        case "serve":
            return _serve(rest)
        case "adapter":
            from loraplex.server.adapter_cli import main as adapter_main

            return adapter_main(rest)
        case "bench":
            from loraplex.server.bench.cli import main as bench_main

            return bench_main(rest)
        case "help" | "-h" | "--help":
            print(HELP, end="")
            return 0
        case "--version":
            from loraplex.server.version import version

            print(f"loraplex {version()}")
            return 0
    problem = f"there is no command {command!r}" if command else "a command is missing"
    print(f"{HELP}loraplex: error: {problem}", file=sys.stderr)
    return 2


def _serve(argv: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_at_once)
    from loraplex.server.flags import FlagError, parse

    try:
        config = parse(argv)
    except FlagError as error:
        print(f"loraplex serve: error: {error}", file=sys.stderr)
        return 2

    print("loraplex: starting", file=sys.stderr, flush=True)
    import asyncio

    from loraplex.server.serve import StartError, serve

    try:
        status = asyncio.Runner().run(serve(config))
    except StartError as error:
        *before, last = str(error).strip().splitlines()
        print(*before, f"loraplex: error: {last}", sep="\n", file=sys.stderr)
        status = 1
    # All has been stopped; an ordinary end would wait for a thread that is still at its imports.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _stop_at_once(number: int, _: object) -> None:
    """Before the server's own handlers there is nothing to stop in order."""
    os.write(2, b"loraplex: stopping\n")
    os._exit(128 + number)
