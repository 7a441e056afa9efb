"""Entry point: `python -m demo_lib`, run by scripts/demo."""

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
