//! Which transfer posts next.

use std::time::{Duration, Instant};

use super::Engine;
use crate::agent::core::ids::PeerId;
use crate::agent::core::ids::TransferId;
use crate::agent::paths::{self, Turn};
use crate::agent::transfers::Lack;
use crate::error::{ErrorKind, Result};

/// How long a round of posting may last: copying happens during it, and messages, new commands and timers wait for it.
const ROUND_TIME: Duration = Duration::from_micros(100);

impl Engine {
    /// Posts what the windows allow, in turns. Returns whether anything was posted.
    pub(super) fn post_transfers(&mut self) -> bool {
        if !self.transfers.have_next() {
            return self.copy_what_waits();
        }
        let end = Instant::now() + ROUND_TIME;
        let mut any = false;
        while let Some(peer) = self.transfers.next_peer() {
            if self.post_turn(peer) {
                any = true;
                if Instant::now() >= end {
                    break;
                }
            }
        }
        self.transfers.end_round();
        any || self.copy_what_waits()
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
        if !self.peers.get(peer_id).is_ok_and(|peer| peer.is_ready()) {
            self.transfers.park(peer_id);
            return false;
        }
        let Some(id) = self.transfers.begin_turn(peer_id) else { return false };
        let (posted, lack) = self.post_of(peer_id, id);
        self.transfers.end_turn(peer_id, id, &posted, lack);
        let any = !matches!(posted, Ok(0));
        if any {
            self.peers.note_reading(peer_id);
        }
        let now = Instant::now();
        // Effects that the path has noted come first: the end of an operation, for one.
        self.dispatch(now);
        match posted {
            Ok(_) => self.transfers.settle(id, &mut self.effects),
            Err(error) if error.kind() == ErrorKind::PeerDied => self.effects.lose(peer_id, error),
            Err(error) => self.transfers.stop(id, error, &mut self.effects, now),
        }
        self.dispatch(now);
        any
    }

    /// Posts some of a transfer. Returns its bytes, and the limit that kept it from posting more.
    fn post_of(&mut self, peer: PeerId, id: TransferId) -> (Result<u64>, Option<Lack>) {
        let peer = match self.peers.get_mut(peer) {
            Ok(peer) => peer,
            Err(error) => return (Err(error), None),
        };
        let Some((transfer, windows)) = self.transfers.get_with_windows(id) else { return (Ok(0), None) };
        let mut turn = Turn {
            id,
            transfer,
            windows,
            peer,
            regions: &self.regions,
            operations: &mut self.operations,
            rpc: &self.rpc,
            copy_pool: &mut self.copy_pool,
            device_copies: &mut self.device_copies,
            staged: &mut self.staged,
            stats: &mut self.stats,
            effects: &mut self.effects,
            lack: None,
        };
        let posted = paths::post(&mut turn);
        (posted, turn.lack)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::super::tests::{
        DEVICE, LEN, Other, begin_one, config, connect, drive, other, plan, read, start, turn, undriven,
    };
    use super::super::ucx_settings::CAN_REFUSE;
    use super::*;
    use crate::agent::command::Shared;
    use crate::agent::core::stats::AgentStats;
    use crate::agent::rpc::client::Chunk;
    use crate::agent::transfers::Load;
    use crate::agent::{AgentConfig, Direction, Transport, Window};
    use crate::mem::MemoryRange;
    use crate::proto::ids::Incarnation;
    use crate::proto::wire::MemoryKind;

    /// The chunks that were asked for by messages: the kind of memory here, bytes.
    fn asked(engine: &Engine) -> Vec<(Vec<MemoryKind>, u64)> {
        let chunks = engine.rpc.borrow();
        let kinds = |chunk: &Chunk| {
            let mut kinds: Vec<MemoryKind> = chunk.local.iter().map(|iov| iov.range.kind()).collect();
            kinds.dedup();
            kinds
        };
        chunks.all().into_iter().map(|chunk| (kinds(chunk), chunk.bytes)).collect()
    }

    #[test]
    fn transfer_splits_where_the_memory_changes() {
        for transport in [Transport::Tcp, Transport::Shm] {
            let other = other(transport);
            other.register(MemoryRange::leaked(3 * LEN)).unwrap();
            let mut engine = undriven(config("a", transport), 77);
            let regions = [(); 3].map(|()| engine.register(MemoryRange::leaked(LEN)).unwrap());
            let peer = connect(&mut engine, &other);
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
                assert_eq!(asked(&engine), [(host.clone(), len), (device, len), (host, len)]);
            } else {
                assert_eq!(asked(&engine), [(device, len)]);
                assert_eq!(engine.stats.copied_bytes - before.copied_bytes, 2 * len);
            }
        }
    }

    /// Moves every byte of the plan over a connection that is taken for one with one-sided lanes, and looks whether the right
    /// bytes are everywhere. Returns the other agent, the engine, its peer, and how the counters were before.
    fn move_one_sided(
        transport: Transport,
        direction: Direction,
        window: Window,
    ) -> (Other, Engine, PeerId, AgentStats) {
        let filled =
            |seed: usize, len: usize| -> Vec<u8> { (0..len).map(|at| (at * 31 + at / 251 + seed) as u8).collect() };
        let other = other(transport);
        let far = MemoryRange::leaked_with(filled(7, 3 * LEN));
        other.register(far).unwrap();
        let shared = Arc::new(Shared::new(1).unwrap());
        let settings = AgentConfig { peer_window: window, ..config("a", transport) };
        let mut engine = Engine::new(settings, Incarnation(77), &shared).unwrap();
        let near = [1, 2, 3].map(|seed| MemoryRange::leaked_with(filled(seed * 50, LEN)));
        for range in near {
            engine.register(range).unwrap();
        }
        let peer = connect(&mut engine, &other);
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
        assert_eq!(engine.transfers.in_flight().operations, 0);
        assert_eq!((engine.stats.transfers_done, engine.stats.transfers_failed), (before.transfers_done + 1, 0));
        (other, engine, peer, before)
    }

    #[test]
    fn endpoint_counts_until_closed() {
        let other = other(Transport::Tcp);
        let mut engine = undriven(config("a", Transport::Tcp), 77);
        let counts = |engine: &Engine| (engine.stats().peers, engine.stats().endpoints);
        assert_eq!(counts(&engine), (0, 0));
        let peer = connect(&mut engine, &other);
        assert_eq!(counts(&engine), (1, 1));
        engine.disconnect(peer, Instant::now()).unwrap();
        assert_eq!(counts(&engine), (0, 1), "its goodbye is on its way");
        drive(&mut engine, |engine| {
            engine.check_timers(Instant::now());
            counts(engine) == (0, 0)
        });
    }

    /// While it connects, UCX ends an operation that it refuses only later, when others of the transfer are posted or over.
    #[test]
    fn operations_taken_back_are_posted_again() {
        let other = other(Transport::Tcp);
        let far: Vec<u8> = (0..3 * LEN).map(|at| (at * 37 + at / 241) as u8).collect();
        other.register(MemoryRange::leaked_with(far.clone())).unwrap();
        let mut engine = undriven(config("a", Transport::Tcp), 77);
        let near = [(); 3].map(|()| MemoryRange::leaked(LEN));
        for range in near {
            engine.register(range).unwrap();
        }
        let peer = connect(&mut engine, &other);
        let id = read(&mut engine, peer);
        assert_eq!(engine.transfers.begin_turn(peer), Some(id));
        // As a path does that posts operations which UCX has not ended.
        let (transfer, windows) = engine.transfers.get_with_windows(id).unwrap();
        let taken = [(); 4].map(|()| {
            let operation = transfer.take(u64::MAX).unwrap();
            transfer.enter_flight();
            windows.enter(peer, operation.len, Instant::now());
            operation
        });
        engine.transfers.end_turn(peer, id, &Ok(1), None);
        let [first, second, third, last] = taken;
        for operation in [first, second] {
            engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
        }
        drive(&mut engine, |engine| engine.transfers.in_flight().operations == 2 && engine.transfers.is_idle());
        for operation in [third, last] {
            engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
        }
        drive(&mut engine, |engine| engine.transfers.len() == 0);
        let run = LEN / 4;
        for (range, far) in near.into_iter().zip(far.chunks(LEN)) {
            let blocks = [1, 0, 3, 2].map(|block| &far[block * run..][..run]);
            assert!(range.leaked_bytes() == blocks.concat());
        }
        assert_eq!((engine.stats.transfers_done, engine.stats.bytes_read), (1, 3 * LEN as u64));
        assert_eq!(engine.transfers.in_flight(), Load::default());

        // One that was cancelled meanwhile is over, and nothing of it is posted again.
        let id = read(&mut engine, peer);
        let operation = begin_one(&mut engine, peer, id);
        engine.cancel(id, Instant::now()).unwrap();
        assert_eq!((engine.transfers.len(), engine.post_transfers()), (1, false));
        engine.transfers.take_back(id, operation, &mut engine.effects, Instant::now());
        engine.dispatch(Instant::now());
        assert_eq!((engine.transfers.len(), engine.stats.transfers_failed), (0, 1));
    }

    /// Engines that no thread drives answer nothing.
    #[test]
    fn peers_without_room_take_no_turns() {
        let make = |number| {
            let mut engine = undriven(config("a", Transport::Tcp), number);
            for _ in 0..3 {
                engine.register(MemoryRange::leaked(3 * LEN)).unwrap();
            }
            engine
        };
        let (mut engine, mut silent) = (make(77), [1, 2, 3].map(make));
        for other in &mut silent {
            let peer = engine.connect(&other.metadata(), Instant::now()).unwrap();
            // Begun before the peer has answered.
            for _ in 0..20 {
                read(&mut engine, peer);
            }
            while engine.post_transfers() {}
            let turns = engine.transfers.turns;
            assert!(!engine.post_transfers());
            assert_eq!(engine.transfers.turns, turns, "peers without an answer take turns");
            drive(&mut engine, |engine| {
                turn(other);
                engine.peers.get(peer).unwrap().is_ready()
            });
        }
        while engine.post_transfers() {}
        let turns = engine.transfers.turns;
        (0..100).for_each(|_| assert!(!engine.post_transfers()));
        assert_eq!(engine.transfers.turns, turns, "peers without room take turns");
        drive(&mut engine, |engine| {
            silent.iter_mut().for_each(turn);
            engine.transfers.len() == 0
        });
        assert_eq!((engine.stats.transfers_done, engine.stats.bytes_read), (60, 60 * 3 * LEN as u64));
        assert_eq!(engine.transfers.in_flight(), Load::default());
    }

    const NARROW: Window = Window { operations: 3, bytes: LEN as u64 };

    /// UCX moves memory by CMA within a host, without the peer's processor, as over RDMA.
    #[test]
    fn the_one_sided_path_moves_every_byte() {
        let wide = AgentConfig::default().peer_window;
        for (direction, window) in [(Direction::Read, wide), (Direction::Write, wide), (Direction::Read, NARROW)] {
            let (_other, engine, _, before) = move_one_sided(Transport::Shm, direction, window);
            let stats = engine.stats;
            assert_eq!(stats.one_sided_bytes - before.one_sided_bytes, 3 * LEN as u64);
            assert_eq!(stats.operations - before.operations, 12);
            assert_eq!(stats.served_bytes, before.served_bytes);
        }
    }

    /// TCP has no lane that moves memory without the peer's processor, and UCX says so when it is asked to.
    #[test]
    fn what_ucx_would_only_emulate_goes_by_messages() {
        let wide = AgentConfig::default().peer_window;
        for (direction, window) in
            [(Direction::Read, wide), (Direction::Write, wide), (Direction::Read, NARROW), (Direction::Write, NARROW)]
        {
            let (_other, engine, peer, before) = move_one_sided(Transport::Tcp, direction, window);
            let stats = engine.stats;
            if engine.context.library().info().number >= CAN_REFUSE {
                assert_eq!(stats.one_sided_bytes, before.one_sided_bytes);
                assert_eq!(stats.served_bytes - before.served_bytes, 3 * LEN as u64);
                let route = paths::route(engine.peers.get(peer).unwrap()).unwrap();
                assert_eq!(route.host, "served by messages");
            } else {
                eprintln!("skipped: {} cannot be told not to emulate", engine.context.library().info());
                assert_eq!(stats.one_sided_bytes - before.one_sided_bytes, 3 * LEN as u64);
            }
        }
    }
}
