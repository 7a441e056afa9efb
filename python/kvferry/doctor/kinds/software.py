"""Findings about what is installed and configured: the library, vLLM and UCX."""

from __future__ import annotations

from .case import Case, Kind

_GET_UCX = (
    "install the wheel kvferry-ucx (scripts/build-ucx makes it), or run `pip install libucx-cu12`, which has no RDMA, "
    "or install UCX 1.18 or newer on the system, or name a libucp.so.0 in KVFERRY_UCX_LIB"
)
_UNREADABLE = Case("not applicable", "libkvferry or UCX is missing or cannot be used, so this cannot be looked at.")

SOFTWARE: dict[str, Kind] = {
    "library": Kind(
        "libkvferry",
        "Loads the library, in a process of its own.",
        {
            "loaded": Case("ok", "The library is loaded and fits the Python package."),
            "missing": Case(
                "problem",
                "The library cannot be loaded, so that nothing of kvferry works.",
                "install the wheel that scripts/build-wheel makes on a machine like this one, or set "
                "KVFERRY_LIBRARY to the libkvferry.so of this release",
            ),
        },
    ),
    "options": Kind(
        "connector options",
        "Checks the value of every variable KVFERRY_* that is an option of kvferry, as the vLLM connector does.",
        {
            "good": Case("ok", "The environment's options have the right form."),
            "bad": Case(
                "problem",
                "An option in the environment is refused; an engine would not start. The other findings leave it out.",
                "correct or unset the variables that the evidence names",
            ),
            "unknown": Case("not applicable", "libkvferry is missing, so the environment's options were not checked."),
        },
    ),
    "vllm": Kind(
        "vLLM",
        "Looks for the installed vLLM and for the plug-in entry point of kvferry, without importing vLLM.",
        {
            "absent": Case("not applicable", "This Python has no vLLM; kvferry serves other hosts too."),
            "served": Case("ok", "The connector is written for this release of vLLM."),
            "other": Case(
                "warning",
                "The connector is not written for this release of vLLM.",
                "use a release that docs/vllm.md names; with another one, run its tests first (scripts/test)",
            ),
            "unregistered": Case(
                "warning",
                "vLLM does not find the connector by its name, because the package's entry point is not installed.",
                'install the wheel, or add "kv_connector_module_path": "kvferry.vllm" to --kv-transfer-config',
            ),
        },
    ),
    "ucx": Kind(
        "UCX",
        "Every libucp that kvferry comes by, in the order in which it tries them, and why it takes the one it takes.",
        {
            "chosen": Case("ok", "A usable UCX is found."),
            "missing": Case("problem", "There is no usable UCX.", _GET_UCX),
            "nixl-only": Case(
                "ok",
                "The plug-in for NIXL takes the UCX inside NIXL's wheel. There is no other, which only the Python API "
                "and the vLLM connector need.",
            ),
            "misnamed": Case(
                "problem",
                "The UCX that is named cannot be used, and nothing else is tried where one is named.",
                "correct or unset KVFERRY_UCX_LIB (or the option ucx_lib)",
            ),
            "in-the-way": Case(
                "problem",
                "A UCX that is too old is loaded in the process already; a second one beside it would disturb it.",
                "update what loads it (the evidence has its path), or name a newer libucp.so.0 in KVFERRY_UCX_LIB",
            ),
            "crashed": Case(
                "problem",
                "The process that opened UCX died, or did not answer in time.",
                "use another UCX: install the wheel kvferry-ucx, and name its libucp.so.0 in KVFERRY_UCX_LIB",
            ),
            "unknown": _UNREADABLE,
        },
    ),
    "ucx-versions": Kind(
        "one UCX in the process",
        "Whether a second UCX is loaded beside the one in use, as LD_PRELOAD or another package may have it.",
        {
            "one": Case("ok", "There is one UCX in the process."),
            "several": Case(
                "problem",
                "Several UCX are loaded in one process. Both hook memory calls: that can hang or crash it.",
                "have one: unset KVFERRY_UCX_LIB (kvferry then takes the one that is loaded already), or name the "
                "loaded file in it, or take the other out of LD_PRELOAD",
            ),
            "unknown": _UNREADABLE,
        },
    ),
    "ucx-settings": Kind(
        "UCX settings",
        "Variables UCX_* of the environment that the UCX in use does not know.",
        {
            "known": Case("ok", "UCX knows every UCX_ variable of the environment."),
            "unknown-names": Case(
                "warning",
                "UCX ignores a variable of the environment: it is misspelt, or belongs to a transport whose module "
                "is not loaded here.",
                "correct the name or unset it: {names}",
            ),
            "unknown": _UNREADABLE,
        },
    ),
    "transports": Kind(
        "transports",
        "The transports and devices that UCX has for an agent in this environment, and which of the machine's are off.",
        {
            "found": Case("ok", "UCX has what this machine offers."),
            "restricted": Case(
                "warning",
                "Settings switch off transports that this machine has; the evidence says what that costs.",
                "unset {settings}, or add {lost}",
            ),
            "no-network": Case(
                "problem",
                "UCX has neither TCP nor RDMA here, and messages between engines need one of them, on one host too.",
                "have a network interface that is up (`ip link set lo up` will do on one host), and let UCX use "
                "tcp: unset {settings}",
            ),
            "no-wireup": Case(
                "problem",
                "Of RDMA only RC is allowed, which cannot set up a connection by itself: it needs UD for that.",
                "in UCX_TLS, write rc in place of rc_verbs or rc_mlx5, which brings UD along, or add ud",
            ),
            "no-copies": Case(
                "warning",
                "This UCX has no transport cma, without which bytes between engines of this host go by messages.",
                "where the finding `same-host` is ok, use a UCX that has the module libuct_cma (the wheel kvferry-ucx)",
            ),
            "none": Case(
                "problem",
                "UCX has no transport that the settings allow, so that no agent starts.",
                "unset {settings}: this machine has {available}",
            ),
            "failed": Case(
                "problem",
                "UCX cannot make a context.",
                "follow the error's text, and unset the UCX_ variables of the environment one by one",
            ),
            "unknown": _UNREADABLE,
        },
    ),
    "network-devices": Kind(
        "network devices",
        "Which network devices UCX uses, and why. By default it gets all but interfaces that software for containers "
        "makes (docker0, br-*, virbr0, cni0, flannel and others, unless the default route uses them): their addresses "
        "are the same on every host, so a host that connects to another's reaches itself.",
        {
            "all": Case("ok", "UCX uses every network device."),
            "some": Case("ok", "UCX uses some of the network devices; the evidence says why not the others."),
            "repeating": Case(
                "warning",
                "UCX uses a device whose address other hosts may have too. Then engines on different hosts do not "
                "reach each other.",
                "name the device that leads to the other hosts in UCX_NET_DEVICES, in place of {names}",
            ),
            "unknown": Case("not applicable", "UCX has no network device, or could not be asked."),
        },
    ),
}
