//! Two engines in simulated time: schedulers, workers, memory, and a network between them.
//!
//! Messages of one connection stay in order; connections, transfers, steps and reports may overtake each other. A
//! transfer copies real bytes when it completes, so that a producer that reused blocks too early is found out by the
//! bytes at the consumer. Every rule that must always hold is asserted where it can break.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvferry::proto::handshake::{Directory, HandshakeFailure, Pushes};
use kvferry::proto::ids::{Incarnation, RequestId};
use kvferry::proto::plan::CopyPlan;
use kvferry::proto::scheduler::{FinishOutcome, Notice, Scheduler, SchedulerConfig};
use kvferry::proto::time::Time;
use kvferry::proto::wire::{
    Blocks, Cause, HandshakeReply, HandshakeRequest, Message, PeerMessage, Prefill, StepMetadata, TransferParams,
    Verdict, WorkerReport,
};
use kvferry::proto::worker::{
    Action, AwaitId, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken, Worker, WorkerConfig,
};

use super::rank::*;

pub const LEASE_MS: u64 = 1_000;

pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub fn worker_config(name: &str, agent: u64) -> WorkerConfig {
    WorkerConfig {
        handshake_timeout_ms: 3_000,
        handshake_backoff_ms: 100,
        transfer_timeout_ms: 5_000,
        verdict_timeout_ms: 1_500,
        early_message_ms: 1_000,
        tombstone_ms: 4_000,
        hold_timeout_ms: 20_000,
        shared_grace_ms: 2_000,
        peer_ttl_ms: 8_000,
        ..WorkerConfig::new(engine(name), RANK, SHAPE, Incarnation(agent))
    }
}

fn scheduler(name: &str, incarnation: u64) -> Scheduler {
    let config = SchedulerConfig {
        lease_ms: LEASE_MS,
        ..SchedulerConfig::new(engine(name), Incarnation(incarnation), groups())
    };
    let mut s = Scheduler::new(config).unwrap();
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
    Asked(AwaitId, RequestId),
    Prefilled(AwaitId, Result<(Incarnation, Prefill), (Cause, String)>),
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
}

struct PRequest {
    blocks: [Vec<u32>; 2],
    kept: bool,
    /// What D calls it.
    called: RequestId,
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
    worker: Worker,
    scheduler: Scheduler,
    directory: Directory,
    memory: Memory,
    free: Vec<u32>,
    requests: HashMap<RequestId, PRequest>,
    last_step: Time,
}

pub struct Sim {
    pub now: Time,
    events: BTreeMap<(Time, u64), Event>,
    order: u64,
    p: Producer,
    pub d: Worker,
    d_scheduler: Scheduler,
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
    pub p_lag: Duration,
    pub partition_until: Time,
    pub down_until: Time,
    pub fail_next_transfer: bool,
    pub drop_verdicts: bool,
    pub sent: Vec<PeerMessage>,
}

fn producer(life: u64) -> Producer {
    let mut worker = Worker::new(worker_config("p", 1_000 + life)).unwrap();
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
        last_step: Time(0),
    }
}

impl Sim {
    pub fn new() -> Sim {
        let mut d = Worker::new(worker_config("d", 77)).unwrap();
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
            p_lag: ms(1),
            partition_until: Time(0),
            down_until: Time(0),
            fail_next_transfer: false,
            drop_verdicts: false,
            sent: Vec::new(),
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
        if self.p.free.len() < blocks + windowed {
            return None;
        }
        let full: Vec<u32> = (0..blocks).map(|_| self.p.free.remove(0)).collect();
        let tail: Vec<u32> = (0..windowed).map(|_| self.p.free.remove(0)).collect();
        for (position, &block) in full.iter().enumerate() {
            self.p.memory.block(0, block).copy_from_slice(&tag(prefill, 0, position));
        }
        for (i, &block) in tail.iter().enumerate() {
            self.p.memory.block(1, block).copy_from_slice(&tag(prefill, 1, blocks - windowed + i));
        }
        // The lowest name that is free: names are used again as soon as they can be.
        let mut names = (0..).map(|n| request(format!("p-{n}")));
        let id = names.find(|name| !self.p.requests.contains_key(name)).unwrap();
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
                Notice::Ready(prefill) => self.p.directory.prefilled(prefill),
                Notice::Gone(request) => self.p.directory.prefill_gone(request),
            }
        }
        while let Some((asker, reply)) = self.p.directory.poll_answer() {
            let number = u64::from_le_bytes(asker.try_into().unwrap());
            self.told(AwaitId(number), &reply);
        }
    }

    fn told(&mut self, number: AwaitId, reply: &[u8]) {
        let Ok(HandshakeReply::Prefills { incarnation, mut ready, gone, .. }) = HandshakeReply::from_bytes(reply)
        else {
            panic!("not an answer to who awaits a prefill")
        };
        let result = match (ready.pop(), gone.len()) {
            (Some(prefill), 0) => Ok((incarnation, prefill)),
            (None, 1) => Err((Cause::LeaseExpired, "nothing is kept".into())),
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
            let step = self.p.scheduler.build_step();
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
            let step = self.d_scheduler.build_step();
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

    /// Lets `span` of simulated time pass.
    pub fn run(&mut self, span: Duration) {
        let end = self.now + span;
        self.pump();
        loop {
            let event = self.events.keys().next().map(|(at, _)| *at);
            let timer = [self.d.poll_timeout(), self.p.worker.poll_timeout()].into_iter().flatten().min();
            let Some(next) = [event, timer].into_iter().flatten().min().filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            if event.is_some_and(|at| at <= next) {
                let (_, event) = self.events.pop_first().unwrap();
                self.handle(event);
            } else {
                self.d.handle_timeout(self.now);
                self.p.worker.handle_timeout(self.now);
            }
            for worker in [&mut self.d, &mut self.p.worker] {
                if event.is_none_or(|at| at > next) {
                    let due = worker.poll_timeout();
                    assert!(due.is_none_or(|due| due > self.now), "a timeout that is handled is over");
                }
            }
            self.pump();
        }
        self.now = end;
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::StepP(life, step) if life == self.p.life => self.p.worker.handle_step(now, step),
            Event::StepD(step) => self.d.handle_step(now, step),
            Event::ReportP(life, report) if life == self.p.life => {
                for id in &report.finished_sending {
                    assert!(self.p.requests.get(id).is_some_and(|r| r.kept), "{id} finished sending once");
                    self.p_free(id);
                }
                let outcome = self.p.scheduler.on_report(&report).unwrap();
                assert_eq!(outcome.finished_sending, report.finished_sending, "one rank is all ranks");
                self.p_tell();
            }
            Event::StepP(..) | Event::ReportP(..) => {}
            Event::ReportD(report) => self.report_d(&report),
            Event::Handshake(id) => {
                let result = if now < self.down_until {
                    Err(HandshakeFailure { cause: Cause::HandshakeFailed, message: "connection refused".into() })
                } else {
                    let ask = HandshakeRequest::Query { id: id.0, engine: Some(engine("p")), ranks: vec![] };
                    let reply = self.p.directory.answer(&ask.to_bytes().unwrap());
                    Ok(HandshakeReply::from_bytes(&reply).unwrap())
                };
                self.d.handle_handshake(now, id, result);
            }
            Event::Asked(number, request) => {
                if now < self.down_until {
                    let refused = Err((Cause::HandshakeFailed, "connection refused".into()));
                    return self.d.handle_prefill(now, number, refused);
                }
                let ask = HandshakeRequest::Await { id: number.0, engine: engine("p"), requests: vec![request] };
                let answer = self.p.directory.answer_to(&number.0.to_le_bytes(), &ask.to_bytes().unwrap());
                answer.into_iter().for_each(|reply| self.told(number, &reply));
            }
            Event::Prefilled(number, result) => {
                if self.awaited.remove(&number) {
                    self.d.handle_prefill(now, number, result);
                }
            }
            Event::Connected(key) => {
                if self.connections.get(&key.connection).is_some_and(|c| c.open) {
                    self.d.handle_connected(now, &key);
                }
            }
            Event::Lost(key) => self.d.handle_peer_lost(now, &PeerRef::Outbound(key), "connection reset"),
            Event::Transfer(token) => self.transfer_done(token),
            Event::ToP(number, message) => {
                let c = &self.connections[&number];
                if c.life == self.p.life && c.open {
                    self.p.worker.handle_message(now, &PeerRef::Inbound(number), message);
                }
            }
            Event::ToD(key, message) => {
                if self.connections.get(&key.connection).is_some_and(|c| c.open) {
                    self.d.handle_message(now, &PeerRef::Outbound(key), message);
                }
            }
        }
    }

    fn transfer_done(&mut self, token: TransferToken) {
        if self.now < self.partition_until {
            let at = self.partition_until;
            return self.at(at, Event::Transfer(token));
        }
        // A cancelled or broken transfer has two completions scheduled; the first one counts.
        let Some(t) = self.transfers.remove(&token) else { return };
        let alive = self.connections[&t.connection].life == self.p.life;
        let (mut bytes, mut operations) = (0, 0);
        if alive {
            let all = t.plan.bytes();
            for op in t.plan.clone().expand(64) {
                if t.failure.is_some() && bytes * 2 >= all {
                    break;
                }
                let from = op.remote_offset as usize;
                let to = op.local_offset as usize;
                let len = op.len as usize;
                self.assert_writable(op.local_region as usize, to, len);
                let data = self.p.memory.regions[op.remote_region as usize][from..from + len].to_vec();
                self.d_memory.regions[op.local_region as usize][to..to + len].copy_from_slice(&data);
                bytes += op.len;
                operations += 1;
            }
        }
        let result = match t.failure {
            Some(failure) => Err(failure),
            None => Ok(TransferFigures {
                bytes,
                operations,
                posted_at: t.posted,
                all_posted_at: t.posted,
                finished_at: self.now,
            }),
        };
        self.d.handle_transfer_done(self.now, token, result);
    }

    fn assert_writable(&self, group: usize, at: usize, len: usize) {
        let stride = self.d_memory.stride;
        for block in at / stride..(at + len).div_ceil(stride) {
            let owner = self
                .requests
                .iter()
                .find(|r| r.local.as_ref().is_some_and(|lists| lists[group].contains(&(block as u32))));
            assert!(owner.is_some_and(|r| r.loading), "block {block} of group {group} written while nothing loads it");
        }
    }

    fn report_d(&mut self, report: &WorkerReport) {
        for id in &report.finished_recving {
            let i = self.requests.iter().position(|r| r.id == *id).expect("a known request");
            assert!(self.requests[i].loading && self.requests[i].outcome.is_none(), "{id}: one terminal report");
            let local = self.requests[i].local.clone().expect("blocks stay until the report");
            let failure = report.failed_recving.iter().find(|f| f.request == *id);
            let outcome = match failure {
                Some(failure) => {
                    let mut all: Vec<u32> = local.iter().flatten().copied().collect();
                    all.sort_unstable();
                    assert_eq!(failure.invalid_blocks.ids(), all, "every local block is suspect");
                    Err(failure.cause)
                }
                None => {
                    self.check_bytes(i, &local);
                    Ok(())
                }
            };
            let record = report.records.iter().find(|r| r.request == *id).expect("figures of every load");
            assert_eq!(record.cause, outcome.err());
            let r = &mut self.requests[i];
            r.loading = false;
            r.outcome = Some(outcome);
            if r.ended {
                self.d_free_request(i);
            }
        }
        for failure in &report.failed_recving {
            assert!(report.finished_recving.contains(&failure.request), "a failure is reported as finished too");
        }
        let outcome = self.d_scheduler.on_report(report).unwrap();
        assert_eq!(outcome.finished_recving, report.finished_recving, "one rank is all ranks");
        self.d_step();
    }

    /// A load that was reported right has the right bytes, all of them.
    fn check_bytes(&mut self, i: usize, local: &[Vec<u32>; 2]) {
        let (prefill, total) = (self.requests[i].prefill, self.requests[i].blocks_total);
        for (group, blocks) in local.iter().enumerate() {
            for (k, &block) in blocks.iter().enumerate() {
                let position = total - blocks.len() + k;
                let found = self.d_memory.block(group, block).to_vec();
                assert_eq!(found, tag(prefill, group, position), "prefill {prefill} group {group} block {position}");
            }
        }
    }

    /// Does what the machines want done.
    fn pump(&mut self) {
        while let Some(action) = self.d.poll_action() {
            self.act(action);
        }
        while let Some(action) = self.p.worker.poll_action() {
            let Action::Send { peer: PeerRef::Inbound(number), message } = action else {
                panic!("a producer only answers: {action:?}")
            };
            if let PeerMessage::Verdict { request, verdict: Verdict::Valid, serial } = &message {
                let kept = self.p.requests.values().any(|r| r.kept && r.called == *request);
                let again = !self.judged.insert((self.p.life, *serial));
                assert!(kept || again, "{request} is found good when its blocks are free");
            }
            self.send(number, 1, message);
        }
        if let Some(report) = self.d.poll_report() {
            self.at(self.now + ms(1), Event::ReportD(report));
        }
        if let Some(report) = self.p.worker.poll_report() {
            self.at(self.now + ms(1), Event::ReportP(self.p.life, report));
        }
    }

    fn act(&mut self, action: Action) {
        let soon = (self.now + self.delay).max(self.partition_until);
        match action {
            Action::Handshake { session, engine: name, host, port } => {
                assert_eq!((name, host.as_str(), port), (engine("p"), "10.0.0.1", 5680));
                self.at(soon, Event::Handshake(session));
            }
            Action::Await { number, engine: name, host, port, request } => {
                assert_eq!((name, host.as_str(), port), (engine("p"), "10.0.0.1", 5680));
                assert!(self.awaited.insert(number), "a wait's number is new");
                self.at(soon, Event::Asked(number, request));
            }
            Action::Forget { number } => drop(self.awaited.remove(&number)),
            Action::Connect { peer, metadata } => {
                assert_eq!(peer.incarnation, metadata.incarnation);
                let life = metadata.incarnation.0 - 1_000;
                let open = life == self.p.life && self.now >= self.down_until;
                let connection = Connection { key: peer.clone(), life, open, last: [Time(0); 2] };
                assert!(self.connections.insert(peer.connection, connection).is_none(), "a connection's number is new");
                self.at(soon, if open { Event::Connected(peer) } else { Event::Lost(peer) });
            }
            Action::Transfer { token, peer, plan } => {
                assert!(self.tokens_seen.insert(token), "a token is used once");
                let open = self.connections[&peer.connection].open;
                let failing = !open || std::mem::take(&mut self.fail_next_transfer);
                let failure = failing.then(|| (Cause::TransportError, "posting failed".into()));
                let posted = self.now;
                self.transfers.insert(token, Transfer { connection: peer.connection, plan, failure, posted });
                self.at(self.now + self.transfer_time, Event::Transfer(token));
            }
            Action::Cancel { token } => {
                if let Some(t) = self.transfers.get_mut(&token) {
                    t.failure.get_or_insert((Cause::TransportError, "cancelled".into()));
                    self.at(self.now + ms(3), Event::Transfer(token));
                }
            }
            Action::Send { peer: PeerRef::Outbound(key), message } => {
                self.sent.push(message.clone());
                self.send(key.connection, 0, message);
            }
            Action::Send { .. } => panic!("the consumer speaks only to those that it connected to"),
            Action::Disconnect { peer } => {
                let pending = self.transfers.values().any(|t| t.connection == peer.connection);
                assert!(!pending, "no disconnect under a transfer");
                // What was sent before is delivered: the peer stays open for the messages under way.
                assert!(self.connections.contains_key(&peer.connection));
            }
        }
    }

    fn send(&mut self, number: u64, direction: usize, message: PeerMessage) {
        if direction == 1 && self.drop_verdicts {
            return;
        }
        let soon = (self.now + self.delay).max(self.partition_until);
        let Some(c) = self.connections.get_mut(&number) else { panic!("message for unknown connection {number}") };
        let at = soon.max(c.last[direction]);
        c.last[direction] = at;
        let event = if direction == 0 { Event::ToP(number, message) } else { Event::ToD(c.key.clone(), message) };
        self.at(at, event);
    }

    // ---- the end ---------------------------------------------------------------------------------------------------

    pub fn outcome(&self, i: usize) -> Option<Result<(), Cause>> {
        self.requests[i].outcome
    }

    pub fn p_kept(&self) -> usize {
        self.p.scheduler.sending()
    }

    pub fn p_gauges(&self) -> kvferry::proto::worker::Gauges {
        self.p.worker.gauges()
    }

    /// Everything ends, and nothing is left over anywhere.
    pub fn settle(&mut self) {
        self.drop_verdicts = false;
        self.run(ms(15_000));
        for i in 0..self.requests.len() {
            self.finish(i, FinishOutcome::Complete);
        }
        self.run(ms(60_000));
        for r in &self.requests {
            assert_eq!(r.load_given, r.outcome.is_some(), "{}: a terminal report for every load", r.id);
        }
        assert!(self.transfers.is_empty());
        assert!(self.awaited.is_empty(), "the consumer waits for nothing that it does not want");
        assert_eq!(self.d.gauges(), Default::default(), "the consumer has forgotten everything");
        assert_eq!(self.p.worker.gauges(), Default::default(), "the producer has forgotten everything");
        assert_eq!((self.d_scheduler.receiving(), self.p.scheduler.sending()), (0, 0));
        assert!(!self.d_scheduler.has_pending() && !self.p.scheduler.has_pending());
        assert_eq!(self.p.free.len(), BLOCKS as usize - 1, "all of P's blocks are free");
        assert_eq!(self.d_free.len(), BLOCKS as usize - 1, "all of D's blocks are free");
        assert!(self.d.poll_timeout().is_none() && self.p.worker.poll_timeout().is_none(), "idle machines sleep");
    }
}
