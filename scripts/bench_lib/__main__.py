"""Entry point: `python -m bench_lib`, run by scripts/bench."""

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
