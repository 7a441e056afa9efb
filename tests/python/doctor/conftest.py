"""What tests of `kvferry doctor` have in common."""

from __future__ import annotations

import json

import pytest
from doctor_command import Told, doctor
from lab.common import free_port


@pytest.fixture(scope="session")
def here() -> Told:
    """This machine as it is, with the transfers, and a port that is free."""
    # The doctor's agents leave an engine's file alone: this one could not be written.
    variables = {"KVFERRY_METRICS_FILE": "/no/such/folder/metrics.prom"}
    return doctor("--transfers", "--config", json.dumps({"port": free_port()}), **variables)
