//! Two engines in simulated time: schedulers, workers, memory, and a network between them.
//!
//! Messages of one connection stay in order; connections, transfers, steps and reports may overtake each other. A
//! transfer copies real bytes when it completes, so that a producer that reused blocks too early is found out by the
//! bytes at the consumer. Every rule that must always hold is asserted where it can break.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvferry_proto::handshake::{Directory, HandshakeFailure, PrefillProgress, Pushes};
use kvferry_proto::ids::{Incarnation, RequestId};
use kvferry_proto::plan::CopyPlan;
use kvferry_proto::scheduler::{FinishOutcome, PrefillNotice, SchedulerMachine, SchedulerMachineConfig};
use kvferry_proto::time::Time;
use kvferry_proto::wire::{
    Blocks, Cause, HandshakeReply, HandshakeRequest, Message, PeerMessage, StepMetadata, TransferParams, Verdict,
    WorkerReport,
};
use kvferry_proto::worker::{
    Action, AwaitId, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken, WorkerMachine, WorkerMachineConfig,
    WorkerSettings,
};

use super::rank::*;

// The fuzzer includes this file by its path, from where its modules would be looked for elsewhere.
#[path = "sim/events.rs"]
mod events;

fn take_step(scheduler: &mut SchedulerMachine) -> StepMetadata {
    StepMetadata::from_bytes(&scheduler.encode_step().unwrap()).unwrap()
}

pub const LEASE_MS: u64 = 1_000;

pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub fn worker_config(name: &str, agent: u64) -> WorkerMachineConfig {
    let settings = WorkerSettings {
        handshake_timeout_ms: 3_000,
        transfer_timeout_ms: 5_000,
        verdict_timeout_ms: 1_500,
        early_message_ms: 1_000,
        tombstone_ms: 4_000,
        hold_timeout_ms: 20_000,
        await_timeout_ms: 20_000,
        peer_ttl_ms: 8_000,
        chunk_tokens: u64::from(BLOCK_TOKENS),
        ..settings()
    };
    let base = WorkerMachineConfig::new(engine(name), RANK, SHAPE, Incarnation(agent), settings);
    WorkerMachineConfig { handshake_backoff_ms: 100, shared_grace_ms: 2_000, ..base }
}

fn scheduler(name: &str, incarnation: u64) -> SchedulerMachine {
    let config = SchedulerMachineConfig {
        lease_ms: LEASE_MS,
        ..SchedulerMachineConfig::new(engine(name), Incarnation(incarnation), groups())
    };
    let mut s = SchedulerMachine::new(config).unwrap();
    s.set_address("10.0.0.1", 5680);
    s
}

enum Event {
    StepP(u64, StepMetadata),
    StepD(StepMetadata),
    ReportP(u64, WorkerReport),
    ReportD(WorkerReport),
    Handshake(SessionId),
    /// A question reaches P's listener.
    Asked(AwaitId, RequestId, u64),
    Prefilled(AwaitId, Result<PrefillProgress, (Cause, String)>),
    Connected(PeerKey),
    Lost(PeerKey),
    Transfer(TransferToken),
    ToP(u64, PeerMessage),
    ToD(PeerKey, PeerMessage),
}

struct Connection {
    key: PeerKey,
    life: u64,
    open: bool,
    /// When the last message of either direction arrives: later ones do not overtake it.
    last: [Time; 2],
}

struct Transfer {
    connection: u64,
    plan: CopyPlan,
    /// Why it fails when it completes; it copies part of its bytes then.
    failure: Option<(Cause, String)>,
    posted: Time,
    /// What P had when it was posted, if that must not change under it.
    seen: Option<Vec<u8>>,
}

struct PRequest {
    blocks: [Vec<u32>; 2],
    kept: bool,
    /// What D calls it.
    called: RequestId,
}

/// A prompt that P has computed a part of.
struct Begun {
    id: RequestId,
    full: Vec<u32>,
    /// Whether its blocks were given away, and nobody knows yet.
    untold: bool,
}

pub struct DRequest {
    pub id: RequestId,
    pub params: TransferParams,
    pub prefill: u32,
    pub blocks_total: usize,
    pub local: Option<[Vec<u32>; 2]>,
    pub loading: bool,
    pub load_given: bool,
    pub ended: bool,
    /// Whether P has yet to compute the prompt.
    pub unfinished: bool,
    /// `Ok` or the cause.
    pub outcome: Option<Result<(), Cause>>,
}

/// One life of the producer engine.
struct Producer {
    life: u64,
    worker: WorkerMachine,
    scheduler: SchedulerMachine,
    directory: Directory,
    memory: Memory,
    free: Vec<u32>,
    requests: HashMap<RequestId, PRequest>,
    /// By the number of the prefill.
    begun: BTreeMap<u32, Begun>,
    last_step: Time,
}

pub struct Sim {
    pub now: Time,
    events: BTreeMap<(Time, u64), Event>,
    order: u64,
    p: Producer,
    pub d: WorkerMachine,
    d_scheduler: SchedulerMachine,
    d_memory: Memory,
    d_free: Vec<u32>,
    d_last_step: Time,
    pub requests: Vec<DRequest>,
    connections: HashMap<u64, Connection>,
    transfers: HashMap<TransferToken, Transfer>,
    tokens_seen: HashSet<TransferToken>,
    /// Prefills that D's worker waits for, and no more.
    awaited: HashSet<AwaitId>,
    /// Reads that P found good: its life, and the read's number.
    judged: HashSet<(u64, u64)>,
    prefills: u32,
    /// Network and pace, set by the test.
    pub delay: Duration,
    pub transfer_time: Duration,
    /// How long a cancelled transfer takes to end.
    pub cancel_time: Duration,
    pub p_lag: Duration,
    pub partition_until: Time,
    pub down_until: Time,
    pub fail_next_transfer: bool,
    /// D compares what it has read with what P had.
    pub verify: bool,
    pub drop_verdicts: bool,
    pub sent: Vec<PeerMessage>,
    /// The blocks that transfers wrote to, in their order: group and block.
    written: Vec<(usize, u32)>,
}

fn producer(life: u64) -> Producer {
    let mut worker = WorkerMachine::new(worker_config("p", 1_000 + life)).unwrap();
    let meta = metadata(engine("p"), 1_000 + life, 16);
    worker.set_local(Arc::new(meta.clone()));
    let mut directory = Directory::new(engine("p"), Incarnation(life), SHAPE, Pushes::Refused).unwrap();
    directory.offer(meta.to_bytes().unwrap()).unwrap();
    Producer {
        life,
        worker,
        scheduler: scheduler("p", life),
        directory,
        memory: Memory::new(16),
        free: (1..BLOCKS).collect(),
        requests: HashMap::new(),
        begun: BTreeMap::new(),
        last_step: Time(0),
    }
}

impl Sim {
    pub fn new() -> Sim {
        let mut d = WorkerMachine::new(worker_config("d", 77)).unwrap();
        d.set_local(Arc::new(metadata(engine("d"), 77, 8)));
        Sim {
            now: Time(1_000_000),
            events: BTreeMap::new(),
            order: 0,
            p: producer(1),
            d,
            d_scheduler: scheduler("d", 5),
            d_memory: Memory::new(8),
            d_free: (1..BLOCKS).collect(),
            d_last_step: Time(0),
            requests: Vec::new(),
            connections: HashMap::new(),
            transfers: HashMap::new(),
            tokens_seen: HashSet::new(),
            awaited: HashSet::new(),
            judged: HashSet::new(),
            prefills: 0,
            delay: ms(1),
            transfer_time: ms(5),
            cancel_time: ms(3),
            p_lag: ms(1),
            partition_until: Time(0),
            down_until: Time(0),
            fail_next_transfer: false,
            verify: false,
            drop_verdicts: false,
            sent: Vec::new(),
            written: Vec::new(),
        }
    }

    fn at(&mut self, time: Time, event: Event) {
        self.order += 1;
        self.events.insert((time, self.order), event);
    }

    // ---- the engines -------------------------------------------------------------------------------------------

    /// P computes a prompt of `blocks` blocks and finishes; gives the number of D's request for it, which knows the
    /// params but has not arrived. None when P has no blocks left, or was told to abort.
    pub fn prefill(&mut self, blocks: usize, abort: bool) -> Option<usize> {
        let prefill = self.prefills + 1;
        let params = self.compute(prefill, blocks, abort, None)?;
        self.prefills = prefill;
        Some(self.request(prefill, blocks, params?, false))
    }

    /// D is asked for a request of `blocks` blocks at the same time as P, which has not begun; gives its number.
    pub fn announce(&mut self, blocks: usize) -> usize {
        self.prefills += 1;
        let params = TransferParams {
            do_remote_prefill: true,
            transfer_id: Some(format!("x-{}", self.prefills)),
            remote_engine_id: Some("p".into()),
            remote_host: Some("10.0.0.1".into()),
            remote_port: Some(5680),
            ..Default::default()
        };
        self.request(self.prefills, blocks, params, true)
    }

    /// P computes the prompt of a request that was announced, or aborts it, if it has room.
    pub fn complete(&mut self, i: usize, abort: bool) {
        let DRequest { prefill, blocks_total, unfinished, ref params, .. } = self.requests[i];
        let id = params.transfer_id.clone();
        if unfinished && self.compute(prefill, blocks_total, abort, id).is_some() {
            self.requests.iter_mut().filter(|r| r.prefill == prefill).for_each(|r| r.unfinished = false);
        }
    }

    /// P computes up to `blocks` more blocks of a prompt that was announced, but not the last one.
    pub fn proceed(&mut self, i: usize, blocks: usize) {
        let DRequest { prefill, blocks_total, unfinished, ref params, .. } = self.requests[i];
        let Some(name) = params.transfer_id.as_ref().map(request).filter(|_| unfinished) else { return };
        let Begun { id, mut full, untold } = self.p.begun.remove(&prefill).unwrap_or_else(|| Begun {
            id: self.free_name(),
            full: Vec::new(),
            untold: false,
        });
        let more = blocks.min((blocks_total - 1).saturating_sub(full.len())).min(self.p.free.len());
        for _ in 0..more {
            let block = self.p.free.remove(0);
            self.p.memory.block(0, block).copy_from_slice(&tag(prefill, 0, full.len()));
            full.push(block);
        }
        if untold {
            self.p.scheduler.progressed(&id, &name, &[], 0).unwrap();
        }
        if self.p.directory.is_followed(&name) && !full.is_empty() {
            let lists = [Blocks::from(full.clone()), Blocks::from(vec![0; full.len()])];
            let tokens = full.len() as u64 * u64::from(BLOCK_TOKENS);
            self.p.scheduler.progressed(&id, &name, &lists, tokens).unwrap();
        }
        self.p.begun.insert(prefill, Begun { id, full, untold: false });
        self.p_tell();
    }

    /// Turns every bit of a block that P computes or keeps, the `n`th of a prompt's first group.
    pub fn turn(&mut self, i: usize, n: usize) {
        let prefill = self.requests[i].prefill;
        let begun = self.p.begun.get(&prefill).map(|begun| begun.full[n]);
        let kept = || self.p.requests.values().find(|request| request.kept).unwrap().blocks[0][n];
        let block = begun.unwrap_or_else(kept);
        self.p.memory.block(0, block).iter_mut().for_each(|byte| *byte ^= 0xff);
    }

    /// How many transfers D has posted.
    pub fn posted(&self) -> usize {
        self.tokens_seen.len()
    }

    /// P gives away the blocks of a prompt that it has computed a part of; it may say so later.
    pub fn preempt(&mut self, i: usize, tell: bool) {
        let DRequest { prefill, ref params, .. } = self.requests[i];
        let Some(begun) = self.p.begun.get_mut(&prefill) else { return };
        for block in begun.full.drain(..) {
            self.p.memory.block(0, block).fill(0xEE);
            self.p.free.push(block);
        }
        begun.untold = !tell;
        let name = request(params.transfer_id.as_ref().unwrap());
        if tell {
            self.p.scheduler.progressed(&begun.id, &name, &[], 0).unwrap();
        }
        self.p_tell();
    }

    /// The lowest name that is free at P: names are used again as soon as they can be.
    fn free_name(&self) -> RequestId {
        let mut names = (0..).map(|n| request(format!("p-{n}")));
        let begun = |name: &RequestId| self.p.begun.values().any(|begun| begun.id == *name);
        names.find(|name| !self.p.requests.contains_key(name) && !begun(name)).unwrap()
    }

    fn request(&mut self, prefill: u32, blocks_total: usize, params: TransferParams, unfinished: bool) -> usize {
        let id = request(format!("d-{prefill}"));
        self.requests.push(DRequest {
            id,
            params,
            prefill,
            blocks_total,
            local: None,
            loading: false,
            load_given: false,
            ended: false,
            unfinished,
            outcome: None,
        });
        self.requests.len() - 1
    }

    /// None when P has no blocks left, else the params that it hands out, if any.
    fn compute(
        &mut self,
        prefill: u32,
        blocks: usize,
        abort: bool,
        transfer_id: Option<String>,
    ) -> Option<Option<TransferParams>> {
        let windowed = blocks.min(WINDOW as usize / BLOCK_TOKENS as usize + 1);
        let there = self.p.begun.get(&prefill).map_or(0, |begun| begun.full.len());
        if self.p.free.len() + there < blocks + windowed {
            return None;
        }
        let begun = self.p.begun.remove(&prefill);
        let id = begun.as_ref().map_or_else(|| self.free_name(), |begun| begun.id.clone());
        if begun.as_ref().is_some_and(|begun| begun.untold) {
            self.p.scheduler.progressed(&id, &request(transfer_id.as_ref().unwrap()), &[], 0).unwrap();
        }
        let mut full = begun.map(|begun| begun.full).unwrap_or_default();
        full.extend((there..blocks).map(|_| self.p.free.remove(0)));
        let tail: Vec<u32> = (0..windowed).map(|_| self.p.free.remove(0)).collect();
        for (position, &block) in full.iter().enumerate() {
            self.p.memory.block(0, block).copy_from_slice(&tag(prefill, 0, position));
        }
        for (i, &block) in tail.iter().enumerate() {
            self.p.memory.block(1, block).copy_from_slice(&tag(prefill, 1, blocks - windowed + i));
        }
        let padded: Vec<u32> = std::iter::repeat_n(0, blocks - windowed).chain(tail.iter().copied()).collect();
        let called = transfer_id.as_ref().map_or_else(|| id.clone(), request);
        let asked = TransferParams { do_remote_decode: true, transfer_id, ..Default::default() };
        let outcome = if abort { FinishOutcome::Aborted } else { FinishOutcome::Complete };
        let tokens = blocks as u64 * u64::from(BLOCK_TOKENS);
        let lists = vec![Blocks::from(full.clone()), Blocks::from(padded)];
        let finish = self.p.scheduler.finished(&id, &asked, outcome, lists, tokens).unwrap();
        assert_eq!(finish.keep, !abort);
        self.p.requests.insert(id.clone(), PRequest { blocks: [full, tail], kept: finish.keep, called });
        if abort {
            self.p_free(&id);
        }
        self.p_step();
        self.p_tell();
        Some(finish.params)
    }

    /// P's listener learns what has become of prefills.
    fn p_tell(&mut self) {
        while let Some(notice) = self.p.scheduler.poll_notice() {
            match notice {
                PrefillNotice::Ready(prefill) => self.p.directory.prefilled(prefill),
                PrefillNotice::Written(prefill) => self.p.directory.prefill_progressed(prefill),
                PrefillNotice::Retracted(request) => self.p.directory.prefill_retracted(&request),
                PrefillNotice::Gone(request) => self.p.directory.prefill_gone(request),
            }
        }
        while let Some((client, reply)) = self.p.directory.poll_answer() {
            let number = u64::from_le_bytes(client.try_into().unwrap());
            self.told(AwaitId(number), &reply);
        }
    }

    fn told(&mut self, number: AwaitId, reply: &[u8]) {
        let Ok(HandshakeReply::Prefills { incarnation, mut ready, gone, mut partial, .. }) =
            HandshakeReply::from_bytes(reply)
        else {
            panic!("not an answer to who awaits a prefill")
        };
        let result = match (ready.pop(), partial.pop(), gone.len()) {
            (Some(prefill), None, 0) => Ok(PrefillProgress { incarnation, prefill, over: true }),
            (None, Some(prefill), 0) => Ok(PrefillProgress { incarnation, prefill, over: false }),
            (None, None, 1) => Err((Cause::LeaseExpired, "nothing is kept".into())),
            other => panic!("one prefill was asked for: {other:?}"),
        };
        let soon = (self.now + self.delay).max(self.partition_until);
        self.at(soon, Event::Prefilled(number, result));
    }

    /// D's host says that other requests for the same prefill may follow.
    pub fn share(&mut self, i: usize) {
        self.requests[i].params.shared = Some(true);
    }

    /// Another request of D for the same prefill, as with several samples of one prompt.
    pub fn twin(&mut self, i: usize) -> usize {
        let r = &self.requests[i];
        let twin = DRequest {
            id: request(format!("d-{}-{}", r.prefill, self.requests.len())),
            params: r.params.clone(),
            prefill: r.prefill,
            blocks_total: r.blocks_total,
            local: None,
            loading: false,
            load_given: false,
            ended: false,
            unfinished: r.unfinished,
            outcome: None,
        };
        self.requests.push(twin);
        self.requests.len() - 1
    }

    fn p_step(&mut self) {
        if self.p.scheduler.has_pending() {
            let step = take_step(&mut self.p.scheduler);
            let at = (self.now + self.p_lag).max(self.p.last_step);
            self.p.last_step = at;
            self.at(at, Event::StepP(self.p.life, step));
        }
    }

    /// P's blocks are reused at once, by others' bytes.
    fn p_free(&mut self, id: &RequestId) {
        let request = self.p.requests.remove(id).expect("P's engine knows what it frees");
        for (group, blocks) in request.blocks.iter().enumerate() {
            for &block in blocks {
                self.p.memory.block(group, block).fill(0xEE);
                self.p.free.push(block);
            }
        }
    }

    pub fn arrive(&mut self, i: usize) {
        let r = &self.requests[i];
        if !r.ended {
            self.d_scheduler.arrived(&r.id, &r.params).unwrap();
            self.d_step();
        }
    }

    /// D allocates for the request, with `cached` of its blocks in its own prefix cache.
    pub fn allocate(&mut self, i: usize, cached: usize) {
        let r = &self.requests[i];
        if r.ended || r.local.is_some() {
            return;
        }
        let cached = cached.min(r.blocks_total);
        let n = r.blocks_total - cached;
        let windowed = n.min(WINDOW as usize / BLOCK_TOKENS as usize);
        if self.d_free.len() < n + windowed {
            return;
        }
        let prompt = r.blocks_total as u64 * u64::from(BLOCK_TOKENS);
        let computed = cached as u64 * u64::from(BLOCK_TOKENS);
        let found = self.d_scheduler.matched(&r.id, &r.params, prompt, computed).unwrap();
        assert_eq!((found.tokens, found.asynchronous), (prompt - computed, prompt > computed));
        let full: Vec<u32> = (0..n).map(|_| self.d_free.remove(0)).collect();
        let tail: Vec<u32> = (0..windowed).map(|_| self.d_free.remove(0)).collect();
        let padded: Vec<u32> = std::iter::repeat_n(0, n - windowed).chain(tail.iter().copied()).collect();
        let lists = vec![Blocks::from(full.clone()), Blocks::from(padded)];
        self.d_scheduler.allocated(&r.id, &r.params, lists.clone(), prompt, found.tokens).unwrap();
        // vLLM calls again when the request is scheduled after its load.
        self.d_scheduler.allocated(&r.id, &r.params, lists, prompt, 0).unwrap();
        assert_eq!(self.d_scheduler.matched(&r.id, &r.params, prompt, 0).unwrap().tokens, 0, "one load per request");
        let r = &mut self.requests[i];
        r.local = Some([full, tail]);
        r.loading = n > 0;
        r.load_given = n > 0;
        self.d_step();
    }

    /// The request ends on D.
    pub fn finish(&mut self, i: usize, outcome: FinishOutcome) {
        let r = &mut self.requests[i];
        if r.ended {
            return;
        }
        r.ended = true;
        let finish = self.d_scheduler.finished(&r.id, &r.params, outcome, vec![], 0).unwrap();
        assert_eq!(finish.keep, r.loading, "blocks stay exactly while they may be written");
        assert!(finish.params.is_none());
        if !finish.keep {
            self.d_free_request(i);
        }
        self.d_step();
    }

    fn d_free_request(&mut self, i: usize) {
        if let Some(lists) = self.requests[i].local.take() {
            for (group, blocks) in lists.iter().enumerate() {
                for &block in blocks {
                    self.d_memory.block(group, block).fill(0xDD);
                    self.d_free.push(block);
                }
            }
        }
    }

    fn d_step(&mut self) {
        if self.d_scheduler.has_pending() {
            let step = take_step(&mut self.d_scheduler);
            let at = (self.now + ms(1)).max(self.d_last_step);
            self.d_last_step = at;
            self.at(at, Event::StepD(step));
        }
    }

    // ---- faults --------------------------------------------------------------------------------------------------

    /// The producer engine dies and comes back as another life, with other bytes.
    pub fn restart_p(&mut self) {
        let life = self.p.life + 1;
        self.p = producer(life);
        for region in &mut self.p.memory.regions {
            region.fill(0xCC);
        }
        self.break_connections();
    }

    /// Every connection breaks; both sides stay alive.
    pub fn break_connections(&mut self) {
        let mut open: Vec<(u64, PeerKey)> =
            self.connections.values().filter(|c| c.open).map(|c| (c.key.connection, c.key.clone())).collect();
        open.sort();
        for (number, key) in open {
            self.connections.get_mut(&number).unwrap().open = false;
            let mut tokens: Vec<TransferToken> =
                self.transfers.iter().filter(|(_, t)| t.connection == number).map(|(token, _)| *token).collect();
            tokens.sort();
            for token in tokens {
                self.transfers.get_mut(&token).unwrap().failure = Some((Cause::PeerDied, "connection reset".into()));
                self.at(self.now + ms(2), Event::Transfer(token));
            }
            self.at(self.now + ms(1), Event::Lost(key));
        }
    }

    pub fn shut_down_d(&mut self) {
        self.d.handle_shutdown(self.now);
        self.pump();
    }

    // ---- time ----------------------------------------------------------------------------------------------------
}
