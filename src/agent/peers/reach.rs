//! The memory that a connection's transports reach, read from UCX's description of its lanes.

use crate::proto::wire::MemoryKind;

/// The kinds of memory on the two sides of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MemoryPair {
    /// Host memory on both sides.
    Host,
    /// Device memory on both sides.
    Device,
    /// One of each.
    Mixed,
}

impl MemoryPair {
    pub(crate) fn of(local: MemoryKind, remote: MemoryKind) -> MemoryPair {
        match (local, remote) {
            (MemoryKind::Host, MemoryKind::Host) => MemoryPair::Host,
            (MemoryKind::Cuda { .. }, MemoryKind::Cuda { .. }) => MemoryPair::Device,
            _ => MemoryPair::Mixed,
        }
    }
}

/// The memory that a connection's transports move one-sided, that is without the peer's processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reach {
    /// Between host memory and host memory.
    pub(super) host: bool,
    /// Between device memory and device memory.
    pub(super) device: bool,
    /// Between host and device memory.
    pub(super) mixed: bool,
    /// Whether device memory may go by UCX's CUDA IPC.
    pub(super) by_cuda_ipc: bool,
}

impl Reach {
    /// From UCX's description of an endpoint's lanes, such as `tcp/lo, cma/memory`.
    ///
    /// UCX tells processes of a host apart by what clones of a virtual machine have in common. So host memory of a peer that
    /// UCX would reach within a host is never left to UCX: it is copied once the peer's witness was seen, else sent by
    /// messages.
    pub(super) fn of(lanes: &str) -> Reach {
        let any = |starts: &[&str]| {
            lanes.split(", ").any(|lane| starts.iter().any(|start| lane.trim_start().starts_with(start)))
        };
        let rdma = any(&["rc_", "dc_", "srd"]);
        let within = any(&["cma/", "knem/", "xpmem/", "sysv/", "posix/", "self/"]);
        let by_cuda_ipc = any(&["cuda_ipc/"]);
        Reach { host: rdma && !within, device: rdma || by_cuda_ipc, mixed: rdma, by_cuda_ipc }
    }

    /// Without UCX's CUDA IPC.
    pub(super) fn without_cuda_ipc(self) -> Reach {
        // RDMA, which is left, moves all kinds of memory or none.
        Reach { device: self.mixed, by_cuda_ipc: false, ..self }
    }

    pub(super) fn has(self, pair: MemoryPair) -> bool {
        match pair {
            MemoryPair::Host => self.host,
            MemoryPair::Device => self.device,
            MemoryPair::Mixed => self.mixed,
        }
    }
}

/// Whether UCX would copy the other side's host memory within the host, over a connection of these lanes.
pub(super) fn reaches_host_memory(lanes: &str) -> bool {
    lanes.split(", ").any(|lane| lane.trim_start().starts_with("cma/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_tell_what_a_connection_reaches() {
        let reach = |host, device, mixed| Reach { host, device, mixed, by_cuda_ipc: false };
        for (lanes, expected) in [
            ("tcp/lo, tcp/eth0", reach(false, false, false)),
            ("tcp/lo, cma/memory", reach(false, false, false)),
            ("self/memory", reach(false, false, false)),
            ("posix/memory, cuda_copy/cuda", reach(false, false, false)),
            ("tcp/eth0, cuda_ipc/cuda, cma/memory", Reach { by_cuda_ipc: true, ..reach(false, true, false) }),
            ("rc_mlx5/mlx5_0:1, cuda_copy/cuda", reach(true, true, true)),
            ("rc_mlx5/mlx5_0:1, cma/memory", reach(false, true, true)),
            ("unknown (this UCX cannot tell)", reach(false, false, false)),
        ] {
            assert_eq!(Reach::of(lanes), expected, "{lanes}");
            let without = Reach { device: expected.mixed, by_cuda_ipc: false, ..expected };
            assert_eq!(Reach::of(lanes).without_cuda_ipc(), without, "{lanes}");
        }
    }
}
