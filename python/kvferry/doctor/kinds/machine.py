"""Findings about the machine: its devices, limits and addresses, and what this process may do there."""

from __future__ import annotations

from .case import Case, Kind

_NO_LISTENER = "The engine of --config only loads (kv_role kv_consumer): it has no listener, and nobody asks it."

MACHINE: dict[str, Kind] = {
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
        "RLIMIT_NOFILE: every connection takes descriptors. An agent raises the soft limit to the hard one, up to "
        "65536.",
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
            "engine": Case(
                "ok",
                "The listener of a running engine has the port. Another engine of this host needs a port of its own "
                "(KVFERRY_PORT, the option port; 0 takes a free one).",
            ),
            "in-use": Case(
                "problem",
                "The port is in use by something other than an engine: an engine could not start its listener.",
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
}
