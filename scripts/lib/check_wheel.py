"""Checks what is inside a wheel: `check_wheel.py WHEEL VERSION`. Runs in .deps/release."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

# What manylinux2014 lets a wheel find on any system, less the C++ library, which is inside.
FOUND_EVERYWHERE = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
FOUND_EVERYWHERE |= {"ld-linux-aarch64.so.1", "libgcc_s.so.1", "libutil.so.1"}


def problems(wheel: Path, version: str) -> list[str]:
    """What is wrong with the wheel, a line each."""
    found: list[str] = []
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    info = f"kvferry-{version}.dist-info"
    tags = re.findall(r"manylinux\w*", wheel.name)
    if not any(tag.startswith(("manylinux2014", "manylinux_2_17")) for tag in tags):
        found.append(f"{wheel.name} has no tag of manylinux2014 in its name")
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    )
    text = " ".join(shown.stdout.split())
    if shown.returncode != 0 or "manylinux_2_17" not in text:
        found.append(f"auditwheel says: {text} {shown.stderr}")

    (library,) = [name for name in names if name.endswith(".so")]
    elf = ELFFile(io.BytesIO(archive.read(library)))
    dynamic = elf.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    if needed - FOUND_EVERYWHERE:
        found.append(f"{library} needs {', '.join(sorted(needed - FOUND_EVERYWHERE))}, which a system may lack")

    metadata = archive.read(f"{info}/METADATA").decode()
    if f"\nVersion: {version}\n" not in metadata:
        found.append(f"METADATA does not say version {version}")
    header = archive.read("kvferry/kvferry.h").decode()
    if f'#define KVF_VERSION "{version}"\n' not in header:
        found.append(f"kvferry.h does not say version {version}")
    for licence in ("LICENSE", "THIRD-PARTY.txt"):
        if not any(name.startswith(f"{info}/licenses/") and name.endswith(licence) for name in names):
            found.append(f"{licence} is not among the licences")

    sboms = [name for name in names if name.startswith(f"{info}/sboms/")]
    if len(sboms) != 1:
        return [*found, f"expected one bill of materials, found {sboms}"]
    sbom = archive.read(sboms[0]).decode()
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(sbom):
        found.append(f"{sboms[0]} is not as the CycloneDX schema says: {error}")
    bill = json.loads(sbom)
    if (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) != ("kvferry", version):
        found.append(f"{sboms[0]} is about something else")
    parts = {component["name"] for component in bill["components"]}
    if missing := {"libzmq", "libc++", "rust-std", "snow", "zmq"} - parts:
        found.append(f"{sboms[0]} lacks {', '.join(sorted(missing))}")
    if "file:" in sbom or str(Path(__file__).resolve().parents[2]) in sbom:
        found.append(f"{sboms[0]} has paths of the machine that made it")
    return found


def main() -> int:
    """The command line."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    wheel, version = Path(sys.argv[1]), sys.argv[2]
    found = problems(wheel, version)
    for problem in found:
        print(f"{wheel.name}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
