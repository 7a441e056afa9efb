//! The ways in which a transfer's bytes can go. For each profile of a transfer the first path is taken that carries it.
//!
//! A further path is a file here and a line in [`PATHS`].

pub(crate) mod copy_pool;
mod message;
mod one_sided;
mod process_vm;
mod stream;

use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::regions::Regions;
use crate::agent::core::route::Route;
use crate::agent::core::stats::AgentStats;
use crate::agent::engine::Engine;
use crate::agent::peers::Peer;
use crate::agent::transfers::Transfer;
use crate::error::Result;
use crate::mem::MemoryRange;
use crate::proto::wire::MemoryKind;

/// What a path must know to say whether it carries an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Profile {
    /// The memory of this side.
    pub(crate) local: MemoryKind,
    /// The peer's memory.
    pub(crate) remote: MemoryKind,
    /// Whether the transfer's runs are so short that messages carry them better than an operation each.
    pub(crate) gathered: bool,
    /// Whether it is of a read so long that a stream is worth having.
    pub(crate) streamable: bool,
    /// Whether the kernel fills missing pages of the peer's memory by itself; known of processes whose memory can be copied.
    pub(crate) is_filled_by_kernel: bool,
    /// Whether the peer's digest is wanted and not the bytes.
    pub(crate) digest: bool,
}

impl Profile {
    /// What there is to know of the next operation of a transfer with `peer`; `None` when all are posted.
    pub(crate) fn of(regions: &Regions, peer: &Peer, transfer: &Transfer) -> Option<Profile> {
        let operation = transfer.next()?;
        Some(Profile {
            local: regions.range(operation.local_region).map_or(MemoryKind::Host, MemoryRange::kind),
            remote: peer.kind(operation.remote_region).unwrap_or(MemoryKind::Host),
            gathered: transfer.is_gathered(),
            streamable: transfer.is_streamable(),
            is_filled_by_kernel: peer.is_filled_by_kernel(operation.remote_region),
            digest: transfer.is_asking(),
        })
    }
}

/// A way in which bytes go.
pub(crate) trait Path: Sync {
    /// Its name in logs and statistics.
    fn name(&self) -> &'static str;

    /// Where the bytes are counted that went this way.
    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64;

    /// Whether it carries this over the connection to `peer`.
    fn carries(&self, peer: &Peer, profile: Profile) -> bool;

    /// Posts operations of a transfer that has some left, as long as they are of `profile`: what comes behind them may be
    /// another path's. At most about a quantum of them, so that others get their turn. Returns the bytes posted; 0 when the
    /// windows have no room.
    ///
    /// # Errors
    /// The transfer cannot go on.
    fn post(&self, engine: &mut Engine, peer: PeerId, id: TransferId, profile: Profile) -> Result<u64>;
}

/// All paths, the best first.
pub(crate) static PATHS: [&dyn Path; 4] =
    [&process_vm::ProcessVm, &one_sided::OneSided, &stream::Stream, &message::Message];

/// The path for a profile. The last one carries everything.
pub(crate) fn choose(peer: &Peer, profile: Profile) -> &'static dyn Path {
    PATHS.into_iter().find(|path| path.carries(peer, profile)).unwrap_or(&message::Message)
}

/// The name of the path for long runs between memory of these kinds.
pub(crate) fn between(peer: &Peer, local: MemoryKind, remote: MemoryKind) -> &'static str {
    let kinds = Profile { local, remote, gathered: false, streamable: true, is_filled_by_kernel: true, digest: false };
    choose(peer, kinds).name()
}

/// How a peer that has said hello is reached; what its connection can do is not known before.
pub(crate) fn route(peer: &Peer) -> Option<Route> {
    let cuda = MemoryKind::Cuda { device: 0 };
    peer.is_ready().then(|| Route {
        lanes: peer.endpoint.describe(),
        host: between(peer, MemoryKind::Host, MemoryKind::Host),
        device: between(peer, cuda, cuda),
        mixed: between(peer, cuda, MemoryKind::Host),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::agent::command::Shared;
    use crate::agent::{Agent, AgentConfig, Direction, Transport};
    use crate::proto::ids::Incarnation;
    use crate::proto::plan::{BlockPair, CopyPlan, Segment};

    const LEN: usize = 256 << 10;
    const DEVICE: MemoryKind = MemoryKind::Cuda { device: 0 };

    fn config(name: &str, transport: Transport) -> AgentConfig {
        AgentConfig { name: name.to_owned(), transport, rehearse: false, copy_threads: 1, ..AgentConfig::default() }
    }

    /// Reads region 0 of the peer into three regions one after the other, each in four runs.
    fn plan() -> CopyPlan {
        let run = LEN as u64 / 4;
        let segment = |local_region: u32| Segment {
            list: 0,
            local_region,
            remote_region: 0,
            local_offset: 0,
            remote_offset: u64::from(local_region) * LEN as u64,
            local_stride: run,
            remote_stride: run,
            len: run,
        };
        let lists = vec![BlockPair { local: vec![3, 2, 1, 0].into(), remote: vec![2, 3, 0, 1].into() }];
        CopyPlan { segments: (0..3).map(segment).collect(), lists }
    }

    /// Drives an engine, as its thread would, until something holds.
    fn drive(engine: &mut Engine, mut holds: impl FnMut(&mut Engine) -> bool) {
        let end = Instant::now() + Duration::from_secs(120);
        while !holds(engine) {
            let now = Instant::now();
            assert!(now < end, "not within two minutes");
            engine.worker.progress();
            engine.reap_failed_endpoints(now);
            engine.reap_completions(now);
            engine.receive_messages(now);
            engine.streams.note_changes();
            engine.drive_streams(now);
            engine.post_transfers();
        }
    }

    fn read(engine: &mut Engine, peer: PeerId) -> TransferId {
        let id = engine.shared.live.ids.transfer().unwrap();
        engine.start_transfer(id, peer, Direction::Read, plan(), Instant::now()).unwrap();
        id
    }

    /// What was asked for by messages and streams: whether by a stream, the kind of memory here, bytes.
    fn asked(engine: &Engine) -> Vec<(bool, Vec<MemoryKind>, u64)> {
        let chunks = engine.rpc.borrow();
        let kinds = |chunk: &crate::agent::rpc::client::Chunk| {
            let mut kinds: Vec<MemoryKind> = chunk.local.iter().map(|iov| iov.range.kind()).collect();
            kinds.dedup();
            kinds
        };
        chunks.all().into_iter().map(|chunk| (chunk.streamed, kinds(chunk), chunk.bytes)).collect()
    }

    #[test]
    fn a_transfer_is_split_where_the_kind_of_memory_changes() {
        for transport in [Transport::Tcp, Transport::Shm] {
            let other = Agent::start(config("b", transport)).unwrap();
            other.register(MemoryRange::leaked(3 * LEN)).unwrap();
            let shared = Arc::new(Shared::new(1).unwrap());
            let mut engine = Engine::new(config("a", transport), Incarnation(77), &shared).unwrap();
            let regions = [(); 3].map(|()| engine.register(MemoryRange::leaked(LEN)).unwrap());
            let peer = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
            drive(&mut engine, |engine| engine.peers.get(peer).unwrap().is_ready());
            if transport == Transport::Tcp {
                drive(&mut engine, |engine| {
                    if engine.transfers.len() == 0 {
                        read(engine, peer);
                    }
                    engine.peers.get(peer).unwrap().streamed
                });
                drive(&mut engine, |engine| engine.transfers.len() == 0);
            } else {
                // Until then copy threads copy, which have to be waited for.
                drive(&mut engine, |engine| engine.peers.get(peer).unwrap().is_filled_by_kernel(0));
            }
            let before = engine.stats;
            // The memory of a device could not be told from the host's by whatever moves it here, so nothing is driven.
            engine.regions.describe_as(regions[1], DEVICE);
            let id = read(&mut engine, peer);
            for _ in 0..100 {
                engine.post_transfers();
            }
            assert_eq!(engine.transfers.get(id).unwrap().next(), None, "all is posted");
            let (host, device) = (vec![MemoryKind::Host], vec![DEVICE]);
            let len = LEN as u64;
            if transport == Transport::Tcp {
                assert_eq!(asked(&engine), [(true, host.clone(), len), (false, device, len), (true, host, len)]);
            } else {
                assert_eq!(asked(&engine), [(false, device, len)]);
                assert_eq!(engine.stats.copied_bytes - before.copied_bytes, 2 * len);
            }
            // With it goes the stream, for which the other side would wait.
            drop(engine);
            other.shutdown(Duration::from_secs(60)).unwrap();
        }
    }
}
