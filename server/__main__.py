"""`python -m loraplex.server MODEL_DIR …` is `loraplex serve MODEL_DIR …`."""

import sys

from loraplex.server.cli import COMMANDS, main

if __name__ == "__main__":
    argv = sys.argv[1:]
    sys.exit(main(argv if argv[:1] and argv[0] in COMMANDS else ["serve", *argv]))
