//! Which transfer posts next.

use std::time::{Duration, Instant};

use super::Engine;
use crate::agent::core::ids::PeerId;
use crate::agent::paths::{self, Turn};
use crate::error::ErrorKind;

/// How long a round of posting may last: copying happens during it, and messages, new commands and timers wait for it.
const ROUND_TIME: Duration = Duration::from_micros(100);

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Scheduler {
    /// The peer whose turn was the last before the time was up.
    last: Option<PeerId>,
}

impl Engine {
    /// Posts what the windows allow, in turns. Returns whether anything was posted.
    pub(super) fn post_transfers(&mut self) -> bool {
        if self.transfers.is_idle() {
            return self.copy_what_waits();
        }
        let end = Instant::now() + ROUND_TIME;
        let mut any = false;
        loop {
            let mut progressed = false;
            // Where the last round was cut off, this one begins.
            let mut peers = self.transfers.waiting_peers();
            let begin = peers.partition_point(|peer| Some(*peer) <= self.scheduler.last);
            peers.rotate_left(begin);
            for peer in peers {
                let posted = self.post_turn(peer);
                progressed |= posted;
                if posted && Instant::now() >= end {
                    self.scheduler.last = Some(peer);
                    return true;
                }
            }
            any |= progressed;
            if !progressed {
                return any || self.copy_what_waits();
            }
        }
    }

    /// Copies what no copy thread has begun. Returns whether there was anything.
    fn copy_what_waits(&mut self) -> bool {
        let Some(job) = self.copy_pool.take_back() else { return false };
        let peer = self.peers.get(job.peer).ok();
        self.copy_pool.finish(job.run(), peer.map(|peer| peer.name.as_str()), &mut self.effects);
        self.dispatch(Instant::now());
        true
    }

    /// Gives the first transfer in a peer's queue its turn. Returns whether anything was posted.
    fn post_turn(&mut self, peer_id: PeerId) -> bool {
        let Ok(peer) = self.peers.get_mut(peer_id) else { return false };
        if !peer.is_ready() {
            return false;
        }
        let Some(id) = self.transfers.begin_turn(peer_id) else { return false };
        let Some((transfer, windows)) = self.transfers.get_with_windows(id) else { return false };
        let posted = paths::post(&mut Turn {
            id,
            transfer,
            windows,
            peer,
            regions: &mut self.regions,
            operations: &mut self.operations,
            rpc: &self.rpc,
            streams: &mut self.streams,
            copy_pool: &mut self.copy_pool,
            stats: &mut self.stats,
            effects: &mut self.effects,
        });
        self.transfers.end_turn(peer_id, id, &posted);
        let any = !matches!(posted, Ok(0));
        let now = Instant::now();
        // What the path has noted comes first: the operation that it has ended, for one.
        self.dispatch(now);
        match posted {
            Ok(_) => self.transfers.settle(id, &mut self.effects),
            Err(error) if error.kind() == ErrorKind::PeerDied => self.effects.lose(peer_id, error),
            Err(error) => self.transfers.stop(id, error, &mut self.effects, now),
        }
        self.dispatch(now);
        any
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::agent::command::Shared;
    use crate::agent::core::ids::TransferId;
    use crate::agent::rpc::client::Chunk;
    use crate::agent::{Agent, AgentConfig, Direction, Transport, Window};
    use crate::mem::MemoryRange;
    use crate::proto::ids::Incarnation;
    use crate::proto::plan::{BlockPair, CopyPlan, Segment};
    use crate::proto::wire::MemoryKind;

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

    fn start(engine: &mut Engine, peer: PeerId, direction: Direction) -> TransferId {
        let id = engine.shared.live.ids.transfer().unwrap();
        engine.start_transfer(id, peer, direction, plan(), Instant::now()).unwrap();
        id
    }

    fn read(engine: &mut Engine, peer: PeerId) -> TransferId {
        start(engine, peer, Direction::Read)
    }

    /// What was asked for by messages and streams: whether by a stream, the kind of memory here, bytes.
    fn asked(engine: &Engine) -> Vec<(bool, Vec<MemoryKind>, u64)> {
        let chunks = engine.rpc.borrow();
        let kinds = |chunk: &Chunk| {
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
    /// UCX carries its GET and PUT over TCP too, by messages of its own, so the path for RDMA can be taken here. What it
    /// cannot show is that the peer's processor has no part in it.
    #[test]
    fn the_one_sided_path_moves_every_byte() {
        let filled =
            |seed: usize, len: usize| -> Vec<u8> { (0..len).map(|at| (at * 31 + at / 251 + seed) as u8).collect() };
        for (direction, window) in [
            (Direction::Read, AgentConfig::default().peer_window),
            (Direction::Write, AgentConfig::default().peer_window),
            (Direction::Read, Window { operations: 3, bytes: LEN as u64 }),
        ] {
            let other = Agent::start(config("b", Transport::Tcp)).unwrap();
            let far = MemoryRange::leaked_with(filled(7, 3 * LEN));
            other.register(far).unwrap();
            let shared = Arc::new(Shared::new(1).unwrap());
            let settings = AgentConfig { peer_window: window, ..config("a", Transport::Tcp) };
            let mut engine = Engine::new(settings, Incarnation(77), &shared).unwrap();
            let near = [1, 2, 3].map(|seed| MemoryRange::leaked_with(filled(seed * 50, LEN)));
            for range in near {
                engine.register(range).unwrap();
            }
            let peer = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
            drive(&mut engine, |engine| engine.peers.get(peer).unwrap().is_ready());
            engine.peers.get_mut(peer).unwrap().describe_as_one_sided();
            assert_eq!(paths::route(engine.peers.get(peer).unwrap()).unwrap().host, "one-sided (UCX)");

            let before = engine.stats;
            let (mut locals, mut remote) = (near.map(|range| range.leaked_bytes()), far.leaked_bytes());
            let (plan, run) = (plan(), LEN / 4);
            for segment in &*plan.segments {
                for (local, remote_block) in plan.lists[0].local.ids().iter().zip(plan.lists[0].remote.ids()) {
                    let local = &mut locals[segment.local_region as usize][*local as usize * run..][..run];
                    let at = segment.remote_offset as usize + *remote_block as usize * run;
                    match direction {
                        Direction::Read => local.copy_from_slice(&remote[at..][..run]),
                        Direction::Write => remote[at..][..run].copy_from_slice(local),
                    }
                }
            }
            start(&mut engine, peer, direction);
            drive(&mut engine, |engine| engine.transfers.len() == 0);
            assert!(near.map(|range| range.leaked_bytes()) == locals, "{direction:?}: the bytes of this side");
            assert!(far.leaked_bytes() == remote, "{direction:?}: the bytes of the other side");
            let stats = engine.stats;
            assert_eq!(stats.one_sided_bytes - before.one_sided_bytes, 3 * LEN as u64);
            assert_eq!(stats.operations - before.operations, 12);
            assert_eq!((stats.served_bytes, stats.transfers_done), (before.served_bytes, before.transfers_done + 1));
            drop(engine);
            other.shutdown(Duration::from_secs(60)).unwrap();
        }
    }
}
