"""Findings by trying: transfers on this machine, NIXL's plug-in, and a running engine."""

from __future__ import annotations

from .case import Case, Kind

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


ATTEMPTS: dict[str, Kind] = {
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
    "nixl": Kind(
        "plug-in for NIXL",
        "Looks for wheels of NIXL and for kvferry's plug-in where they look for it, and reads through it in a process "
        "with stock NIXL, at last with NIXL's own backend UCX beside it.",
        {
            "absent": Case("not applicable", "This Python has no wheel of NIXL."),
            "uninstalled": Case(
                "not applicable",
                "There is NIXL, and it has no backend KVFERRY, because kvferry's plug-in is not installed "
                "(docs/nixl.md).",
            ),
            "works": Case("ok", "Stock NIXL loads the plug-in and reads through it, and every byte was right."),
            "untried": Case("ok", "NIXL finds the plug-in. Whether it loads was not tried (--no-transfers)."),
            "dangling": Case(
                "problem",
                "Where NIXL looks for the plug-in there is a link that leads to no file.",
                "remove the link; the wheel kvferry-nixl (scripts/build-nixl) has the plug-in itself",
            ),
            "hidden": Case(
                "warning",
                "NIXL_PLUGIN_DIR names a folder without the plug-in, so that NIXL does not look where it is installed.",
                "unset NIXL_PLUGIN_DIR, or put a link to the plug-in into that folder: {plugin}",
            ),
            "elsewhere": Case(
                "warning",
                "kvferry's plug-in is installed where this NIXL does not look: in another environment than NIXL, as "
                "where a virtual environment sees the system's NIXL (--system-site-packages).",
                "put a link to {plugin} into {folder}, or install NIXL and kvferry-nixl into one environment",
            ),
            "refused": Case(
                "problem",
                "The plug-in does not load into this NIXL, whose plug-in interface is another one; the evidence has "
                "the difference.",
                "install one of the versions {tested}, or a newer kvferry",
            ),
            "failed": Case(
                "problem",
                "The plug-in does not load, or the read through it did not succeed; the evidence has what NIXL and the "
                "plug-in said.",
                "use the library and the plug-in of one release; `kvferry nixl` shows all that was said",
            ),
            "silent": Case(
                "warning",
                "Stock NIXL had not read through the plug-in when the time was up.",
                "give a longer --timeout, or run `kvferry nixl`, which waits for three minutes",
            ),
            "no-rdma": Case(
                "warning",
                "The plug-in works, but the UCX that it uses has no RDMA here. That of NIXL's wheel, which NIXL's own "
                "backend UCX uses too, has a libibverbs that may not find the provider of the device.",
                "name the libucp.so.0 of the wheel kvferry-ucx in KVFERRY_UCX_LIB, and have no backend UCX in the same "
                "process",
            ),
            "two-ucx": Case(
                "warning",
                "The plug-in works. In a process that also has NIXL's own backend UCX there would be two UCX, which "
                "can hang or end it, as the evidence says.",
                "have only one of the two backends in a process, or no other UCX named (KVFERRY_UCX_LIB, ucx_lib), so "
                "that the plug-in uses that of NIXL: where that has no RDMA and the other one does, the former",
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
                "upgrade the older side, one protocol version at a time (docs/upgrading.md)",
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
                "Bytes travel in messages that the peer's processor serves, as over TCP between hosts.",
            ),
            "slow": Case(
                "warning",
                "The peer is on this host, and bytes travel in messages all the same.",
                "see the findings `same-host`, `transports` and `container`",
            ),
            "unconnected": Case(
                "problem",
                "The listener answered, but a rank's agent cannot be reached.",
                "open the ports between the hosts (UCX takes free ones; UCX_TCP_PORT_RANGE narrows them), and let both "
                "sides use a network that reaches the other (UCX_NET_DEVICES)",
            ),
            "unknown": Case("not applicable", "There is nobody, or no UCX, to connect with."),
            "skipped": Case("not applicable", "Left out by --no-connect."),
        },
    ),
}
