"""`python -m lab.bench [nixl|planning] OPTIONS`, for scripts/bench, scripts/bench-nixl and scripts/bench-planning."""

import sys
from importlib import import_module

MODULES = {"nixl": "plugin", "planning": "planning"}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    module = import_module(f"lab.bench.{MODULES.get(name, 'run')}")
    sys.exit(module.main(rest if name in MODULES else sys.argv[1:]))
