"""What the doctor can find: every finding, each of its outcomes, what it means, and what to do about it.

`docs/doctor.md` is written from this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

State = Literal["ok", "warning", "problem", "not applicable"]
STATES: tuple[State, ...] = ("ok", "warning", "problem", "not applicable")


class Case(NamedTuple):
    """One outcome of a finding. `remedy` may hold `{names}` that the finding fills in."""

    state: State
    meaning: str
    remedy: str = ""


class Kind(NamedTuple):
    """A finding: what is looked at, and the outcomes by name."""

    title: str
    looks_at: str
    cases: dict[str, Case]


@dataclass(frozen=True)
class Finding:
    """What was found. `evidence` are the facts that it rests on, a line each."""

    id: str
    case: str
    state: State
    title: str
    meaning: str
    evidence: list[str]
    remedy: str

    def as_map(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


_GET_UCX = (
    "install the wheel kvferry-ucx (scripts/build-ucx makes it), or run `pip install libucx-cu12`, which has no RDMA, "
    "or install UCX 1.18 or newer on the system, or name a libucp.so.0 in KVFERRY_UCX_LIB"
)
_UNREADABLE = Case("not applicable", "libkvferry or UCX is missing or cannot be used, so this cannot be looked at.")
_NO_LISTENER = "The engine of --config only loads (kv_role kv_consumer): it has no listener, and nobody asks it."
_UNTRIED = "or the key file cannot be used"


def _transfer(what: str, absent: str) -> dict[str, Case]:
    return {
        "moved": Case("ok", f"{what} moved blocks between two processes, and every byte was right."),
        "wrong": Case(
            "problem",
            "Bytes arrived that the other process does not have.",
            "do not use this path: report it with this output, and meanwhile set `verify` for the connector or "
            "switch the transport off (`transport`, UCX_TLS)",
        ),
        "failed": Case(
            "problem",
            "The transfer did not succeed; the evidence has the error.",
            "follow the error's text; the findings `ucx` and `transports` say what UCX has to work with",
        ),
        "absent": Case("not applicable", absent),
        "skipped": Case("not applicable", "Left out by --no-transfers."),
    }


KINDS: dict[str, Kind] = {
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
                "This UCX has no transport cma, without which bytes between engines of this host go by messages and "
                "streams.",
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
    "rdma": Kind(
        "RDMA",
        "RDMA devices (/sys/class/infiniband), their links, and whether UCX uses them.",
        {
            "none": Case("not applicable", "This machine has no RDMA device: bytes to other hosts go over TCP."),
            "used": Case("ok", "UCX uses an RDMA device that is up."),
            "down": Case(
                "warning",
                "There are RDMA devices, and none has a port that is up.",
                "bring a port up (`ip link`, cable, switch, subnet manager), or ignore this where TCP is meant",
            ),
            "hidden": Case(
                "problem",
                "An RDMA device is up, but its user-space files are not here, as in a container that was not given "
                "them.",
                "give the container /dev/infiniband (docker: --device /dev/infiniband; Kubernetes: the RDMA device "
                "plug-in) and let it lock memory (--ulimit memlock=-1)",
            ),
            "forbidden": Case(
                "problem",
                "An RDMA device is up, but this user may not open it.",
                "let this user read and write /dev/infiniband/uverbs* (a udev rule or a group)",
            ),
            "off": Case("problem", "Settings keep UCX from using an RDMA device that is up.", "unset {settings}"),
            "no-verbs": Case(
                "problem",
                "An RDMA device is up, and the UCX in use has no verbs: it was built without RDMA.",
                "install the wheel kvferry-ucx (scripts/build-ucx makes it), or name a libucp.so.0 that has verbs in "
                "KVFERRY_UCX_LIB",
            ),
            "no-libibverbs": Case(
                "problem",
                "An RDMA device is up, and UCX's module for verbs cannot be loaded.",
                "install what is missing (Debian, Ubuntu: libibverbs1 and ibverbs-providers; RHEL: libibverbs), "
                "or use a UCX that was made for this system (the wheel kvferry-ucx)",
            ),
            "no-provider": Case(
                "problem",
                "An RDMA device is up, and libibverbs does not see it: it has no provider for that device.",
                "install the providers (Debian, Ubuntu: ibverbs-providers; RHEL: libibverbs); a libibverbs that a "
                "Python package brought looks for them in another folder: use a UCX that takes the system's (the wheel "
                "kvferry-ucx)",
            ),
            "unused": Case(
                "problem",
                "An RDMA device is up, and UCX does not use it.",
                "look at what UCX says with UCX_LOG_LEVEL=debug",
            ),
            "unknown": Case(
                "not applicable",
                "libkvferry or UCX is missing or cannot be used, so it cannot be asked about the RDMA devices here.",
            ),
        },
    ),
    "gpu": Kind(
        "GPUs",
        "NVIDIA GPUs on the PCI bus, the CUDA driver, and whether UCX can move their memory.",
        {
            "none": Case("not applicable", "This machine shows no NVIDIA GPU: the cache is in host memory."),
            "used": Case("ok", "CUDA works, and UCX can move memory of GPUs."),
            "no-driver": Case(
                "problem",
                "There is a GPU, but CUDA's driver does not work in this process.",
                "install the NVIDIA driver; in a container, run it with the NVIDIA container runtime (docker: "
                "--gpus all)",
            ),
            "silent": Case(
                "problem",
                "There is a GPU, but CUDA's driver did not answer in time, or the process that asked it died.",
                "look at `nvidia-smi` and at the kernel's log (`dmesg`, Xid errors): a GPU that hangs needs a reset or "
                "the machine a restart; where the driver is only slow to start, give a longer --timeout",
            ),
            "no-transport": Case(
                "problem",
                "CUDA works, but this UCX cannot move memory of GPUs.",
                "use a UCX with CUDA (the wheel kvferry-ucx has it), and let UCX_TLS have cuda_copy and cuda_ipc",
            ),
            "unknown": Case(
                "not applicable",
                "libkvferry or UCX is missing or cannot be used, so it cannot be asked about the GPUs here.",
            ),
        },
    ),
    "gpu-rdma": Kind(
        "from GPU to RDMA",
        "How far each GPU is from its nearest RDMA device (PCI path and NUMA node), and whether the device may read "
        "GPU memory itself.",
        {
            "absent": Case("not applicable", "There is no pair of a GPU and an RDMA device that is up."),
            "near": Case(
                "ok",
                "RDMA devices may read GPU memory, and no GPU's nearest one is known to be behind another processor "
                "socket.",
            ),
            "far": Case(
                "warning",
                "A GPU's nearest RDMA device is behind another processor socket.",
                "give each engine the device beside its GPU (UCX_NET_DEVICES), or place the cards in other slots",
            ),
            "no-peer-memory": Case(
                "warning",
                "RDMA devices may not read GPU memory themselves: there is neither nvidia_peermem nor DMA-BUF (Linux "
                "5.12 or newer with the open GPU kernel modules). Bytes then go by way of host memory.",
                "load the module: `modprobe nvidia_peermem`; or use Linux 5.12 or newer with the open GPU kernel "
                "modules",
            ),
        },
    ),
    "same-host": Kind(
        "copies between processes",
        "Tries process_vm_readv between two processes of which neither is the other's parent, as two engines are.",
        {
            "allowed": Case("ok", "A process may copy another one's memory: the fast path within a host."),
            "yama": Case(
                "warning",
                "Yama lets no process read one that is not its child, so that bytes between engines of this host go by "
                "messages.",
                "`sysctl kernel.yama.ptrace_scope=0` on the host (from 3 it can be lowered only by a restart of the "
                "host), or, where it is 1 or 2, give the engines CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE)",
            ),
            "seccomp": Case(
                "warning",
                "A seccomp filter refuses process_vm_readv, so that bytes between engines of this host go by messages.",
                "give the container CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE, whose profile then allows it) or a "
                "seccomp profile that allows process_vm_readv and process_vm_writev",
            ),
            "refused": Case(
                "warning",
                "process_vm_readv does not work between two processes here, so that bytes between engines of this host "
                "go by messages.",
                "run both engines as one user, in one PID and user namespace, and without a security module "
                "(SELinux, AppArmor) that denies ptrace",
            ),
        },
    ),
    "locked-memory": Kind(
        "locked memory",
        "RLIMIT_MEMLOCK, which RDMA devices need for the registered cache.",
        {
            "unlimited": Case("ok", "Memory may be locked without a limit."),
            "unneeded": Case("not applicable", "There is a limit, and no RDMA device that needs locked memory."),
            "limited": Case(
                "problem",
                "There is an RDMA device, and the cache cannot be registered with it beyond this limit.",
                "`ulimit -l unlimited` (/etc/security/limits.conf, systemd LimitMEMLOCK=infinity, docker --ulimit "
                "memlock=-1)",
            ),
        },
    ),
    "open-files": Kind(
        "open files",
        "RLIMIT_NOFILE: every connection takes descriptors.",
        {
            "enough": Case("ok", "Enough files may be open."),
            "low": Case(
                "warning",
                "So few files may be open that an engine with many peers can run out of descriptors.",
                "`ulimit -n 65536` (/etc/security/limits.conf, systemd LimitNOFILE, docker --ulimit nofile=65536)",
            ),
        },
    ),
    "shm": Kind(
        "/dev/shm",
        "Size and free space of /dev/shm, which vLLM's processes and UCX's shared-memory transports use. kvferry moves "
        "no bytes through it.",
        {
            "enough": Case("ok", "There is room in /dev/shm."),
            "small": Case(
                "warning",
                "At most 64 MiB of /dev/shm are free, which is its size in containers by default: vLLM's processes and "
                "UCX may fail there.",
                "make it larger: docker --ipc=host or --shm-size=8g; Kubernetes: an emptyDir of medium Memory on "
                "/dev/shm",
            ),
            "unusable": Case(
                "warning",
                "There is no /dev/shm that this process may write to: vLLM's processes and UCX may fail.",
                "mount a tmpfs on /dev/shm that this user may write to",
            ),
        },
    ),
    "container": Kind(
        "container",
        "Whether this is a container, and what two engines need there to see each other as processes of one host.",
        {
            "none": Case("not applicable", "This does not look like a container."),
            "inside": Case(
                "ok",
                "This is a container. Engines in other containers of the host count as on another host (bytes go "
                "over TCP or RDMA) unless they share a PID namespace (docker --pid, Kubernetes "
                "shareProcessNamespace).",
            ),
        },
    ),
    "address": Kind(
        "address",
        "The address of this host that other engines would be told.",
        {
            "routable": Case("ok", "Other hosts can be told an address of this one."),
            "local-only": Case(
                "warning",
                "Only engines on this host could reach the listener: the configured host is a loopback address, or "
                "there is no address that others could use.",
                "unless that is meant: unset KVFERRY_HOST (or VLLM_HOST_IP, or the option host) where it names a "
                "loopback address; else bring up a network interface or add a route, or give the address as "
                "KVFERRY_HOST",
            ),
            "bad": Case(
                "problem",
                "The configured host or bind is no name or address of this host: an engine could not start its "
                "listener.",
                "set KVFERRY_HOST (or VLLM_HOST_IP, or the option host) and KVFERRY_BIND (or the option bind) to "
                "addresses of this host, or unset them; where host is forwarded to this host, give bind as well",
            ),
            "unneeded": Case("not applicable", _NO_LISTENER),
            "unknown": Case("not applicable", "libkvferry is missing, so it cannot be asked for the address."),
        },
    ),
    "port": Kind(
        "listener port",
        "Binds the handshake listener's port and frees it again.",
        {
            "free": Case("ok", "The port can be bound."),
            "in-use": Case(
                "problem",
                "The port is in use: an engine could not start its listener.",
                "stop what has it if that is a leftover, or give engines of one host different ports (KVFERRY_PORT, "
                "the option port; 0 takes a free one)",
            ),
            "refused": Case(
                "problem",
                "The port cannot be bound.",
                "use a port above 1023 (KVFERRY_PORT, the option port), or 0 for a free one",
            ),
            "unneeded": Case("not applicable", _NO_LISTENER),
            "unknown": Case("not applicable", "There is no library or no address to bind the port with."),
        },
    ),
    "key": Kind(
        "key",
        "The key file that KVFERRY_KEY_FILE or the option key_file names. Of its contents nothing is printed.",
        {
            "none": Case(
                "not applicable",
                "No key is configured: handshakes and messages are neither authenticated nor encrypted.",
            ),
            "usable": Case("ok", "The key file holds a key, and only its owner may use it."),
            "unusable": Case(
                "problem",
                "The key file cannot be used, and an engine would not start.",
                "follow the error's text; `kvferry key PATH` makes a new one",
            ),
            "unknown": Case("not applicable", "libkvferry is missing, so the key file was not read."),
        },
    ),
    "transfer-same-host": Kind(
        "transfer within the host",
        "Moves blocks between two processes as two engines on this host would, with the transport that is configured.",
        {
            **_transfer("The fast path", f"There is no library, UCX or transport to try it with, {_UNTRIED}."),
            "slow": Case(
                "warning",
                "It worked, but through the network stack and not by copies between the processes.",
                "see the findings `same-host` and `transports`; UCX_TLS must have cma (the transport `auto` without "
                "UCX_TLS has it)",
            ),
        },
    ),
    "transfer-tcp": Kind(
        "transfer over TCP",
        "Moves blocks between two processes over TCP, as between hosts without RDMA.",
        _transfer("TCP", f"There is no library, UCX or TCP transport to try it with, {_UNTRIED}."),
    ),
    "transfer-rdma": Kind(
        "transfer over RDMA",
        "Moves blocks one-sided between two processes through this host's RDMA device.",
        {
            **_transfer("RDMA", f"There is no library, UCX or RDMA device that UCX uses to try it with, {_UNTRIED}."),
            "slow": Case(
                "warning",
                "It worked, but by messages and not one-sided.",
                "look at `ucx_info -d`: the device must have rc, dc or srd; ud alone does not read memory",
            ),
        },
    ),
    "transfer-cuda": Kind(
        "transfer between GPU memories",
        "Moves blocks between memory of the first GPU in two processes.",
        {
            **_transfer("CUDA", f"There is no library, UCX or GPU that UCX can move memory of, {_UNTRIED}."),
            "slow": Case(
                "warning",
                "It worked, but by way of host memory.",
                "give both engines one PID namespace and one view of the GPUs, and let them read each other's memory "
                "(ptrace), or let UCX use cuda_ipc (UCX_TLS)",
            ),
        },
    ),
    "peer": Kind(
        "peer's handshake",
        "With --peer: asks that listener for the metadata of all ranks, as a decode engine does.",
        {
            "answered": Case(
                "ok", "The engine answered with all of its ranks, in a version of the protocol that both sides speak."
            ),
            "unreachable": Case(
                "problem",
                "The host's name does not resolve, or nothing answers at that host and port.",
                "check host and port (the engine logs where it listens, 5680 plus the data-parallel index by "
                "default), that it runs and is a producer, and that no firewall is between",
            ),
            "silent": Case(
                "problem",
                "A listener took the question and did not answer in time, or the engine's ranks are not all up yet.",
                "wait until the engine has started; if it has, check that its process is not stopped",
            ),
            "foreign": Case(
                "problem",
                "Something else than kvferry's listener has that port, or its answer cannot be read.",
                "give the port that the engine logs (5680 plus the data-parallel index by default), not vLLM's own",
            ),
            "key": Case(
                "problem",
                "The keys differ, or only one side has one.",
                "give both sides the same key file (KVFERRY_KEY_FILE or key_file; `kvferry key` makes one)",
            ),
            "version": Case(
                "problem",
                "The engine speaks no version of the protocol that this side speaks.",
                "upgrade the older side, one protocol version at a time ('Upgrading' in docs/guide.md)",
            ),
            "refused": Case(
                "problem", "The listener refused the question, or its answer cannot be used.", "follow the error's text"
            ),
            "unknown": Case("not applicable", "libkvferry is missing, so nothing was asked."),
        },
    ),
    "peer-shape": Kind(
        "peer's shape",
        "With --peer: field by field, what the engine has; with --shape, whether an engine of that shape fits it.",
        {
            "described": Case(
                "not applicable",
                "Nothing is compared, because --shape does not describe this side; the evidence has the peer.",
            ),
            "fits": Case("ok", "An engine of the shape given here can hand over requests to and from this one."),
            "differs": Case(
                "problem",
                "The engines cannot exchange caches: their handshake would be refused.",
                "start both engines with the same model, cache dtype and attention backend, or correct the options "
                "of this command: {names}",
            ),
            "unknown": Case("not applicable", "libkvferry is missing, or the engine did not answer."),
        },
    ),
    "peer-path": Kind(
        "path to the peer",
        "With --peer: connects to the agents of the engine's ranks and leaves again; reads nothing of their memory.",
        {
            "fast": Case("ok", "Bytes are read without the peer's processor, or copied by the kernel within the host."),
            "served": Case(
                "ok",
                "Bytes travel in messages that the peer's processor serves, as over TCP between hosts; reads of 256 "
                "KiB and more of host memory go by streams where there can be one.",
            ),
            "slow": Case(
                "warning",
                "The peer is on this host, and bytes travel in messages or streams all the same.",
                "see the findings `same-host`, `transports` and `container`",
            ),
            "unconnected": Case(
                "problem",
                "The listener answered, but a rank's agent cannot be reached.",
                "open the ports between the hosts (UCX and streams take free ones; UCX_TCP_PORT_RANGE narrows both), "
                "and let both sides use a network that reaches the other (UCX_NET_DEVICES)",
            ),
            "unknown": Case("not applicable", "There is nobody, or no UCX, to connect with."),
            "skipped": Case("not applicable", "Left out by --no-connect."),
        },
    ),
}
"""All findings, in the order in which they are told."""


def found(id: str, case: str, evidence: Iterable[str] = (), **values: str) -> Finding:
    """The finding `id` with the outcome `case`; `values` are filled into its remedy."""
    kind = KINDS[id]
    state, meaning, remedy = kind.cases[case]
    lines = [_plain(line) for line in evidence if line]
    return Finding(id, case, state, kind.title, meaning, lines, remedy.format(**values) if values else remedy)


def _plain(text: str) -> str:
    """One line that moves no cursor: some of the evidence comes from other hosts."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where there is a problem, else 0."""
    return int(any(finding.state == "problem" for finding in findings))


def markdown() -> str:
    """The table as it stands in docs/doctor.md."""
    parts = []
    for id, kind in KINDS.items():
        lines = [f"### `{id}`: {kind.title}", "", kind.looks_at, "", "| outcome | state | meaning | remedy |"]
        lines.append("| --- | --- | --- | --- |")
        for name, case in kind.cases.items():
            cells = (f"`{name}`", case.state, case.meaning, case.remedy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
