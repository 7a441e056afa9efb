//! An engine that no thread drives, and what tests do with one.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Engine;
use crate::agent::command::{Command, Shared};
use crate::agent::core::frame::{FRAME_BYTES, Frame, FrameKind};
use crate::agent::core::ids::{PeerId, RegionId, TransferId};
use crate::agent::core::reply::{Answer, answer};
use crate::agent::core::request::TransferRequest;
use crate::agent::peers::hello::Hello;
use crate::agent::{Agent, AgentConfig, Direction, Transport};
use crate::error::Result;
use crate::mem::MemoryRange;
use crate::proto::ids::Incarnation;
use crate::proto::plan::{BlockPair, CopyPlan, Operation, Segment};
use crate::proto::wire::MemoryKind;

pub(super) const LEN: usize = 256 << 10;
pub(super) const DEVICE: MemoryKind = MemoryKind::Cuda { device: 0 };

pub(super) fn config(name: &str, transport: Transport) -> AgentConfig {
    AgentConfig {
        name: name.to_owned(),
        transport,
        warm_up: false,
        copy_threads: 1,
        // A peer that is asked may stand still for a while on a busy machine.
        cancel_grace: Duration::from_secs(60),
        ..AgentConfig::default()
    }
}

/// An agent with a thread, to connect to. It is to shut down well at the end, when the engine is gone.
pub(super) struct Other(Agent);

impl Other {
    pub(super) fn new(config: AgentConfig) -> Other {
        Other(Agent::start(config).unwrap())
    }
}

impl std::ops::Deref for Other {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.0
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let ended = self.0.shutdown(Duration::from_secs(60));
        assert!(ended.is_ok() || std::thread::panicking(), "{ended:?}");
    }
}

/// As [`Other`], over a transport.
pub(super) fn other(transport: Transport) -> Other {
    Other::new(config("b", transport))
}

/// Reads region 0 of the peer into three regions one after the other, each in four runs.
pub(super) fn plan() -> CopyPlan {
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
pub(super) fn drive(engine: &mut Engine, mut holds: impl FnMut(&mut Engine) -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !holds(engine) {
        assert!(Instant::now() < end, "not within two minutes");
        turn(engine);
    }
}

/// Does what its thread does in a turn, but for timers and ended copies.
pub(super) fn turn(engine: &mut Engine) {
    let now = Instant::now();
    engine.worker.progress();
    engine.reap_failed_endpoints(now);
    engine.reap_completions(now);
    engine.receive_messages(now);
    engine.post_transfers();
}

pub(super) fn start(engine: &mut Engine, peer: PeerId, direction: Direction) -> TransferId {
    let id = engine.shared.live.ids.transfer().unwrap();
    engine
        .start_transfer(
            TransferRequest { id, peer, direction, plan: plan(), message: None, user_data: 0 },
            Instant::now(),
        )
        .unwrap();
    id
}

pub(super) fn read(engine: &mut Engine, peer: PeerId) -> TransferId {
    start(engine, peer, Direction::Read)
}

/// An engine that no thread drives, of this incarnation.
pub(super) fn undriven(config: AgentConfig, incarnation: u64) -> Engine {
    let shared = Arc::new(Shared::new(incarnation).unwrap());
    Engine::new(config, Incarnation(incarnation), &shared).unwrap()
}

/// Connects an engine that no thread drives to an agent, until that has said hello.
pub(super) fn connect(engine: &mut Engine, other: &Agent) -> PeerId {
    let peer = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
    drive(engine, |engine| engine.peers.get(peer).unwrap().is_ready());
    peer
}

/// Begins to deregister a region.
pub(super) fn deregister(engine: &mut Engine, region: RegionId) -> Answer<()> {
    let (reply, caller) = answer();
    engine.serve(Command::Deregister { region, reply }, Instant::now());
    caller
}

/// An engine that no thread drives, with the three regions of [`plan`], connected to `other`.
pub(super) fn reader(transport: Transport, other: &Agent) -> (Engine, PeerId) {
    let mut engine = undriven(config("a", transport), 77);
    for _ in 0..3 {
        engine.register(MemoryRange::leaked(LEN)).unwrap();
    }
    let peer = connect(&mut engine, other);
    (engine, peer)
}

/// Has a transfer's first operation under way, for as long as the test wants.
pub(super) fn begin_one(engine: &mut Engine, peer: PeerId, id: TransferId) -> Operation {
    assert_eq!(engine.transfers.begin_turn(peer), Some(id));
    let (transfer, windows) = engine.transfers.get_with_windows(id).unwrap();
    let operation = transfer.take(u64::MAX).unwrap();
    transfer.enter_flight();
    windows.enter(peer, operation.len, Instant::now());
    engine.transfers.end_turn(peer, id, &Ok(1), None);
    operation
}

/// A hello of agent "a" over its connection `connection`, its `number`th one.
pub(super) fn hello(
    address: &[u8],
    (number, connection): (u64, u64),
    seen: Option<u64>,
) -> ([u8; FRAME_BYTES], Vec<u8>) {
    let hello = Hello::older((Incarnation(7), connection), seen, address);
    let frame = Frame { kind: FrameKind::Hello, incarnation: Incarnation(7), connection, sequence: number };
    (frame.encode(), hello.encode().unwrap())
}

#[test]
fn late_hello_does_not_roll_a_connection_back() {
    let make = |number| undriven(config("a", Transport::Tcp), number);
    let (mut engine, other) = (make(8), make(7));
    let address = other.metadata().address;
    let take = |engine: &mut Engine, hello: ([u8; FRAME_BYTES], Vec<u8>)| {
        let (peers, mut io) = engine.peers(Instant::now());
        let taken = peers.receive(&hello.0, hello.1, &mut io);
        engine.dispatch(Instant::now());
        let id = engine.peers.find(Incarnation(7));
        (taken.is_ok(), id.map(|id| (id, engine.peers.get(id).unwrap().connection.remote)))
    };
    let (is_taken, newer) = take(&mut engine, hello(&address, (2, 20), None));
    let (id, connection) = newer.unwrap();
    assert!(is_taken && connection == Some(20));
    assert_eq!(take(&mut engine, hello(&address, (1, 10), None)), (false, newer));
    // Nor does an answer over the earlier connection.
    let own = engine.peers.get(id).unwrap().connection.number;
    assert_eq!(take(&mut engine, hello(&address, (1, 10), Some(own))), (false, newer));
    // One of the same connection that was overtaken says nothing new.
    assert_eq!(take(&mut engine, hello(&address, (1, 20), None)), (true, newer));
    // An answer over a new connection is that of a peer that has left the one before.
    assert_eq!(take(&mut engine, hello(&address, (3, 25), Some(own))), (true, Some((id, Some(25)))));
    let (is_taken, newest) = take(&mut engine, hello(&address, (4, 30), None));
    assert!(is_taken && newest.unwrap().0 != id && newest.unwrap().1 == Some(30));
    engine.disconnect(newest.unwrap().0, Instant::now()).unwrap();
    assert_eq!(take(&mut engine, hello(&address, (2, 20), None)), (false, None));
    // An older kvferry does not count its hellos.
    for connection in [50, 40] {
        let (is_taken, peer) = take(&mut engine, hello(&address, (0, connection), None));
        assert!(is_taken && peer.unwrap().1 == Some(connection));
    }
}

/// Drives the engine until an agent's deregistration has ended well in a thread, and returns that agent.
pub(super) fn until_deregistered(engine: &mut Engine, ending: JoinHandle<(Result<()>, Other)>) -> Other {
    drive(engine, |engine| {
        engine.reap_copies(Instant::now());
        engine.check_timers(Instant::now());
        ending.is_finished()
    });
    let (ended, other) = ending.join().unwrap();
    ended.unwrap();
    other
}
