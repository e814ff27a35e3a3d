"""`loraplex bench`: load on a server over HTTP, or on the engine alone."""

import sys
from collections.abc import Sequence

HELP = """\
usage: loraplex bench serve --base-url URL [flags]      load on any server of the OpenAI HTTP API
       loraplex bench offline MODEL_DIR [flags]         the engine alone: decode, prefill and first token by batch size
       loraplex bench serve|offline --help              all flags
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 measured, 1 something failed, 2 wrong usage."""
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    match command:
        case "serve":
            from loraplex.server.bench.serve import main as serve_main

            return serve_main(rest)
        case "offline":
            from loraplex.server.bench.offline import main as offline_main

            return offline_main(rest)
        case "help" | "-h" | "--help":
            print(HELP, end="")
            return 0
    problem = f"there is no command {command!r}" if command else "a command is missing"
    print(f"{HELP}loraplex bench: error: {problem}", file=sys.stderr)
    return 2
