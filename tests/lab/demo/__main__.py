"""Entry point: `python -m lab.demo`, run by scripts/demo."""

import sys

from lab.demo.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
