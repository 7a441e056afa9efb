"""The guide's table has every setting of the installed vLLM's NixlConnector."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm
from vllm import envs

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"


@pytest.mark.release
def test_every_setting_of_the_nixl_connector_is_in_the_table() -> None:
    folder = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1/nixl"
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    keys = set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', source))
    assert {"kv_lease_duration", "num_threads"} <= keys
    variables = {variable for variable in envs.environment_variables if variable.startswith("VLLM_NIXL_")}
    fields = set(re.findall(r"kv_transfer_config\.(kv_\w+|enable_\w+|engine_id)", source))
    assert variables
    assert fields
    rows = [line.split("|")[1] for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert keys | variables | fields <= listed, f"not in the table: {(keys | variables | fields) - listed}"
