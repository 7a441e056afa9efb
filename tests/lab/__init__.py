"""The test harness: engines, servers, networks and faults for the commands in `scripts` and the tests."""
