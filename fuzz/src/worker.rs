//! One worker machine, producer and consumer at once, whose driver, peers and host do anything in any order: answers
//! that nobody asked for, messages of strangers, verdicts that come twice, ids that are used again.
//!
//! The rules: each load has one terminal report, not before its last transfer is over; it is good only if its transfers
//! were and its producer said so after them; each grant ends once; a read is found good only while its lease holds; when
//! everybody stops talking, everything ends by itself.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvferry::proto::handshake::{HandshakeFailure, PrefillProgress};
use kvferry::proto::ids::{Incarnation, RequestId};
use kvferry::proto::time::Time;
use kvferry::proto::wire::{
    Blocks, Cause, Grant, Hold, Load, PeerMessage, Prefill, Reader, Release, Remote, StepMetadata, Verdict,
    WorkerReport,
};
use kvferry::proto::worker::{
    Action, AwaitId, MachineGauges, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken, WorkerMachine,
};

use super::Source;
use super::machines::{rank, worker_config};

/// How the world around the machine stands.
struct World {
    worker: WorkerMachine,
    now: Time,
    /// Handshakes that were asked for, by their engine.
    handshakes: Vec<(SessionId, String)>,
    /// Prefills that are waited for, and those that were.
    awaited: HashSet<AwaitId>,
    /// Connections that were asked for, and whether they are made.
    peers: HashMap<PeerKey, bool>,
    /// Transfers under way and whose they are.
    transfers: Vec<(TransferToken, RequestId)>,
    tokens: HashSet<TransferToken>,
    /// Loads without a report: whether one of their transfers failed.
    loads: HashMap<RequestId, Loading>,
    /// Reads that were said to be done, by number.
    confirming: HashMap<u64, (RequestId, PeerKey)>,
    /// Grants without a report, with their lease's number.
    grants: HashMap<RequestId, u64>,
    /// Reads that were found good.
    judged: HashSet<(RequestId, u64, u64)>,
    closed: bool,
    blocks: u32,
}

#[derive(Default)]
struct Loading {
    failed: bool,
    good: bool,
}

fn name(number: usize) -> RequestId {
    rank::request(format!("r{number}"))
}

fn remote(source: &mut Source, number: usize) -> Remote {
    Remote {
        engine: rank::engine(if source.rarely(4) { "q" } else { "p" }),
        incarnation: if source.flag() { Some(Incarnation(1 + source.below(2) as u64)) } else { None },
        request: name(number),
        host: "10.0.0.1".into(),
        port: 5680 + u16::from(source.rarely(8)),
        lease_ms: if source.rarely(8) { source.number() } else { 1_000 },
        lease_id: source.below(3) as u64,
        shared: source.rarely(4),
    }
}

impl World {
    fn new() -> World {
        let mut worker = WorkerMachine::new(worker_config("d", 77)).unwrap();
        worker.set_local(Arc::new(rank::metadata(rank::engine("d"), 77, 8)));
        World {
            worker,
            now: Time(1_000_000),
            handshakes: vec![],
            awaited: HashSet::new(),
            peers: HashMap::new(),
            transfers: vec![],
            tokens: HashSet::new(),
            loads: HashMap::new(),
            confirming: HashMap::new(),
            grants: HashMap::new(),
            judged: HashSet::new(),
            closed: false,
            blocks: 0,
        }
    }

    /// Takes what the machine wants done and says.
    fn drain(&mut self) {
        while let Some(action) = self.worker.poll_action() {
            self.act(action);
        }
        if let Some(report) = self.worker.poll_report() {
            self.report(&report);
        }
        let due = self.worker.poll_timeout();
        assert!(due.is_none_or(|due| due > self.now), "a timeout that is handled is over");
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Handshake { session, engine, .. } => self.handshakes.push((session, engine.to_string())),
            Action::Await { number, .. } => {
                assert!(self.awaited.insert(number), "a wait is answered before it begins again");
            }
            Action::Forget { number } => drop(self.awaited.remove(&number)),
            Action::Connect { peer, .. } => {
                assert!(self.peers.insert(peer, false).is_none(), "a connection's number is new");
            }
            Action::Transfer { token, peer, plan } => {
                assert_eq!(self.peers.get(&peer), Some(&true), "only what is connected is read from");
                assert!(self.tokens.insert(token), "a token is used once");
                let len = |of_block| move |region: u32| (region < 2).then_some(u64::from(rank::BLOCKS) * of_block);
                plan.check(len(8), len(16)).expect("a plan inside the regions");
                let owner = plan.lists.iter().flat_map(|pair| pair.local.ids()).next().copied();
                let owner = owner.and_then(|block| self.owner(block)).expect("a read is some load's");
                assert!(self.loads.contains_key(&owner), "{owner} is read for after its report");
                self.transfers.push((token, owner));
            }
            Action::Cancel { token } => assert!(self.tokens.contains(&token), "what was never begun is cancelled"),
            Action::Send { peer: PeerRef::Outbound(key), message } => {
                assert!(self.peers.contains_key(&key), "{key} was never asked for");
                if let PeerMessage::Done { request, serial, .. } = message {
                    let busy = self.transfers.iter().any(|(_, owner)| *owner == request);
                    assert!(!busy, "{request} is done while it is read");
                    self.confirming.insert(serial, (request, key));
                }
            }
            Action::Send { peer: PeerRef::Inbound(peer), message } => {
                let PeerMessage::Verdict { request, verdict, serial } = message else {
                    panic!("a producer only answers: {message:?}")
                };
                if verdict == Verdict::Valid {
                    let key = (request.clone(), peer, serial);
                    let held = self.grants.contains_key(&request);
                    assert!(held || self.judged.contains(&key), "{request} is found good after its end");
                    self.judged.insert(key);
                }
            }
            Action::Disconnect { peer } => {
                assert!(self.peers.remove(&peer).is_some(), "{peer} is not connected");
            }
        }
    }

    /// Block ids of loads are `index of the name + 4 * n`, so that a plan tells whose it is.
    fn owner(&self, block: u32) -> Option<RequestId> {
        Some(name((block as usize) % 4))
    }

    fn report(&mut self, report: &WorkerReport) {
        for id in &report.finished_sending {
            assert!(self.grants.remove(id).is_some(), "{id} finished sending without a grant, or twice");
        }
        for failure in &report.failed_recving {
            assert!(report.finished_recving.contains(&failure.request), "what failed is finished too");
        }
        for id in &report.finished_recving {
            let load = self.loads.remove(id);
            let load = load.unwrap_or_else(|| panic!("{id} finished receiving without a load, or twice"));
            assert!(!self.transfers.iter().any(|(_, owner)| owner == id), "{id} is reported while it is read");
            let failed = report.failed_recving.iter().any(|failure| failure.request == *id);
            assert!(failed || load.good && !load.failed, "{id} is reported good and was not found so");
            self.confirming.retain(|_, (request, _)| request != id);
        }
        assert_eq!(report.records.len(), report.finished_recving.len());
    }

    /// What was due by now happens before what comes now.
    fn tick(&mut self) {
        self.worker.handle_timeout(self.now);
        self.drain();
    }

    fn grant(&mut self, id: RequestId, lease_ms: u64, lease_id: u64) {
        self.grants.insert(id.clone(), lease_id);
        let step = StepMetadata {
            grants: vec![Grant { request: id, lease_ms, lease_id, name: None, history: false }],
            ..Default::default()
        };
        self.worker.handle_step(self.now, step);
    }

    fn load(&mut self, source: &mut Source, number: usize) {
        let id = name(number);
        // Blocks that may still be written are not given to another load.
        if self.transfers.iter().any(|(_, owner)| *owner == id) {
            return;
        }
        self.blocks = (self.blocks + 1) % 8;
        let block = |n: u32| number as u32 + 4 * (1 + self.blocks * 4 + n);
        let mut local: Vec<Blocks> =
            vec![(0..4).map(block).collect::<Vec<_>>().into(), vec![block(0), block(1)].into()];
        let mut remote_blocks: Vec<Blocks> = vec![vec![5, 6, 7, 8].into(), vec![9, 10].into()];
        if source.rarely(8) {
            local.truncate(source.below(3));
        }
        if source.rarely(8) {
            remote_blocks =
                vec![source.bytes(4).iter().map(|&b| u32::from(b)).collect::<Vec<_>>().into(); source.below(3)];
        }
        let load = Load {
            request: id.clone(),
            remote: remote(source, number),
            local_blocks: local,
            remote_blocks,
            tokens: if source.rarely(8) { (source.number(), source.number()) } else { (0, 8) },
            remote_tokens: if source.rarely(8) { source.number() } else { 8 },
            null_block: source.flag().then_some(0),
            window_only: true,
            refused: source.rarely(16).then(|| "no".to_owned()),
            awaits: source.rarely(3),
        };
        self.loads.entry(id).or_default();
        self.worker.handle_step(self.now, StepMetadata { loads: vec![load], ..Default::default() });
    }

    fn handshake(&mut self, source: &mut Source) {
        if self.handshakes.is_empty() {
            return;
        }
        let at = source.below(self.handshakes.len().min(256));
        let (session, engine) = self.handshakes.swap_remove(at);
        let life = 1 + source.below(2) as u64;
        let mut metadata = rank::metadata(rank::engine(&engine), 1_000 + life, 16);
        if source.rarely(8) {
            metadata.geometry.areas.pop();
        }
        let result = if source.rarely(6) {
            let message = "refused".into();
            Err(HandshakeFailure { cause: Cause::HandshakeFailed, message })
        } else {
            Ok(rank::reply(session, life, &[metadata]))
        };
        self.worker.handle_handshake(self.now, session, result);
    }

    /// A prefill is over, or somebody says so.
    fn prefilled(&mut self, source: &mut Source, number: usize) {
        let mut waiting: Vec<AwaitId> = self.awaited.iter().copied().collect();
        waiting.sort_unstable();
        let known = source.below(256).checked_rem(waiting.len()).and_then(|at| waiting.get(at)).copied();
        let known = if source.rarely(8) { Some(AwaitId(source.number())) } else { known };
        let Some(known) = known else { return };
        let result = if source.rarely(5) {
            Err((Cause::LeaseExpired, "gone".into()))
        } else {
            let prefill = Prefill {
                request: name(number),
                blocks: vec![vec![5, 6, 7, 8].into(), vec![9, 10].into()],
                tokens: if source.rarely(8) { source.number() } else { 8 },
                lease_ms: if source.rarely(8) { source.number() } else { 500 },
                lease_id: source.below(3) as u64,
            };
            let incarnation = Incarnation(1 + source.below(2) as u64);
            Ok(PrefillProgress { incarnation, prefill, over: source.flag() })
        };
        self.awaited.remove(&known);
        self.worker.handle_prefill(self.now, known, result);
    }

    fn transfer_done(&mut self, at: usize, result: Result<TransferFigures, (Cause, String)>) {
        let (token, owner) = self.transfers.swap_remove(at);
        if result.is_err()
            && let Some(load) = self.loads.get_mut(&owner)
        {
            load.failed = true;
        }
        self.worker.handle_transfer_done(self.now, token, result);
    }

    fn peer(&self, source: &mut Source) -> Option<PeerKey> {
        let mut keys: Vec<&PeerKey> = self.peers.keys().collect();
        keys.sort();
        keys.get(source.below(256).checked_rem(keys.len())?).map(|key| (*key).clone())
    }

    fn verdict(&mut self, source: &mut Source) {
        let mut serials: Vec<u64> = self.confirming.keys().copied().collect();
        serials.sort_unstable();
        let serial = if source.rarely(8) { Some(source.number()) } else { serials.get(source.below(8)).copied() };
        let Some(serial) = serial else { return };
        let known = self.confirming.get(&serial).cloned();
        let verdict = match source.below(6) {
            0 => Verdict::Expired,
            1 => Verdict::Unknown,
            _ => Verdict::Valid,
        };
        let request = match &known {
            Some((request, _)) if !source.rarely(8) => request.clone(),
            _ => name(source.below(4)),
        };
        let from = match &known {
            Some((_, key)) if !source.rarely(8) => key.clone(),
            _ => match self.peer(source) {
                Some(key) => key,
                None => return,
            },
        };
        if verdict == Verdict::Valid
            && let Some((owner, key)) = &known
            && *owner == request
            && *key == from
            && let Some(load) = self.loads.get_mut(owner)
        {
            load.good = true;
        }
        let from = if source.rarely(16) { PeerRef::Inbound(1) } else { PeerRef::Outbound(from) };
        self.worker.handle_message(self.now, &from, PeerMessage::Verdict { request, verdict, serial });
    }

    fn reader_says(&mut self, source: &mut Source, number: usize) {
        let peer = source.below(3) as u64;
        let reader = Reader { engine: rank::engine("c"), incarnation: Incarnation(50 + peer), rank: rank::RANK };
        let request = name(number);
        let lease_id = source.below(4) as u64;
        let readers = if source.rarely(4) { source.number() as u32 } else { 1 };
        let message = match source.below(4) {
            0 => PeerMessage::Heartbeat {
                requests: vec![request, name(source.below(4))],
                leases: vec![lease_id; source.below(3)],
                reader: source.flag().then_some(reader),
            },
            1 => PeerMessage::Release { request, lease_id, reader, readers },
            _ => PeerMessage::Done { request, lease_id, reader, readers, serial: source.number(), more: source.flag() },
        };
        self.worker.handle_message(self.now, &PeerRef::Inbound(peer), message);
    }

    fn step(&mut self, source: &mut Source) {
        let number = source.below(4);
        let id = name(number);
        let one = |step: StepMetadata, world: &mut World| world.worker.handle_step(world.now, step);
        match source.below(26) {
            0..=2 => self.load(source, number),
            3 => {
                let hold = Hold { request: id, remote: remote(source, number) };
                one(StepMetadata { holds: vec![hold], ..Default::default() }, self);
            }
            4 => {
                let release = Release { request: id, remote: remote(source, number) };
                one(StepMetadata { releases: vec![release], ..Default::default() }, self);
            }
            5 => one(StepMetadata { aborts: vec![id], ..Default::default() }, self),
            6 | 7 => {
                let (lease_ms, lease_id) = (source.number(), source.below(3) as u64);
                self.grant(id, lease_ms % 8_640_000 * 100, lease_id);
            }
            8 => {
                if !self.grants.contains_key(&id) {
                    one(StepMetadata { dropped: vec![id], ..Default::default() }, self);
                }
            }
            9..=11 => self.handshake(source),
            12..=14 => {
                if let Some(key) = self.peer(source) {
                    self.peers.insert(key.clone(), true);
                    self.worker.handle_connected(self.now, &key);
                }
            }
            15 => {
                if let Some(key) = self.peer(source) {
                    self.peers.remove(&key);
                    self.worker.handle_peer_lost(self.now, &PeerRef::Outbound(key), "lost");
                }
            }
            16 | 17 => {
                if let Some(at) = source.below(256).checked_rem(self.transfers.len()) {
                    let result = if source.rarely(5) {
                        Err((Cause::TransportError, "broken".into()))
                    } else {
                        Ok(TransferFigures {
                            bytes: 8,
                            operations: 1,
                            posted_at: self.now,
                            all_posted_at: self.now,
                            finished_at: self.now,
                        })
                    };
                    self.transfer_done(at, result);
                }
            }
            18 => self.verdict(source),
            19 | 20 => self.reader_says(source, number),
            23 | 24 => self.prefilled(source, number),
            21 => self.now = self.now + Duration::from_millis(source.below(200) as u64),
            22 => self.now = self.now + Duration::from_millis(u64::from(source.short())),
            _ => match source.below(32) {
                0 => {
                    self.closed = true;
                    self.worker.handle_shutdown(self.now);
                }
                // An answer to nothing: the end of a transfer that was never begun, or that was over before.
                1 => {
                    let token = TransferToken(source.number());
                    if !self.transfers.iter().any(|(begun, _)| *begun == token) {
                        self.worker.handle_transfer_done(self.now, token, Err((Cause::Aborted, "x".into())));
                    }
                }
                _ => self.verdict(source),
            },
        }
        // The clock may have moved.
        self.tick();
    }

    /// Nobody says anything any more, but for the end of transfers.
    fn settle(&mut self) {
        for _ in 0..20_000 {
            while !self.transfers.is_empty() {
                self.transfer_done(0, Err((Cause::TransportError, "the end".into())));
                self.drain();
            }
            let Some(due) = self.worker.poll_timeout() else { break };
            self.now = due;
            self.tick();
        }
        assert!(self.loads.is_empty(), "loads without a report: {:?}", self.loads.keys());
        assert!(self.grants.is_empty(), "grants without a report: {:?}", self.grants.keys());
        assert_eq!(self.worker.gauges(), MachineGauges::default(), "everything is forgotten");
        assert!(self.awaited.is_empty(), "nothing is waited for that no load wants");
        assert!(self.worker.is_drained() && self.worker.poll_timeout().is_none(), "an idle machine sleeps");
    }
}

/// A sequence of events, and then silence.
pub fn run(data: &[u8]) {
    let mut source = Source::new(data);
    let mut world = World::new();
    for _ in 0..400 {
        if source.is_empty() {
            break;
        }
        world.tick();
        world.step(&mut source);
    }
    world.settle();
}
