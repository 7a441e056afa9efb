#!/usr/bin/env bash
# userland.sh ROOT: installs the wheels of ROOT/wheels in the system in ROOT, as README.md says, and has `kvferry doctor` move
# blocks there, which must go over the RDMA device. For a machine of scripts/rdma-vm, on whose disk nothing of it stays.
set -euo pipefail
root="$1"
for folder in proc sys dev; do mount --rbind "/$folder" "$root/$folder"; done
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root chroot "$root" "$@"; }
inside sh -c '. /etc/os-release; echo "$PRETTY_NAME"; python3 --version; dpkg-query -W libc6 libibverbs1'
inside python3 -m venv /opt/kvferry
inside sh -c 'exec /opt/kvferry/bin/pip install --quiet --no-index --find-links /wheels /wheels/kvferry*.whl'
inside /opt/kvferry/bin/kvferry doctor --json --timeout 400 --config '{"port": 0}' >"$root/found" || true
inside python3 - <<'PYTHON'
import json
import sys

wanted = {"rdma": "used", "transfer-rdma": "moved", "locked-memory": "unlimited"}
found = {finding["id"]: finding for finding in json.load(open("/found"))["findings"]}
for name in ("ucx", *wanted):
    print(name, found[name]["case"], *found[name]["evidence"], sep="\n  ")
wrong = [name for name, case in wanted.items() if found[name]["case"] != case]
if not any("/opt/kvferry" in line and "taken" in line for line in found["ucx"]["evidence"]):
    wrong.append("ucx")
sys.exit(f"not as wanted: {', '.join(wrong)}" if wrong else 0)
PYTHON
