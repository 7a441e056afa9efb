//! The scheduler side's state machine: from a request's life in the engine's scheduler to the workers' steps.
//!
//! One machine serves both roles. The host calls it from its scheduler thread:
//!
//! | when | call | role | effect |
//! | --- | --- | --- | --- |
//! | a request came in | [`SchedulerMachine::arrived`] | consumer | hold: workers connect and keep the lease alive |
//! | prefix lookup | [`SchedulerMachine::matched`] | consumer | none; how many tokens can be loaded |
//! | blocks allocated | [`SchedulerMachine::allocated`] | consumer | load, or release when nothing is to be loaded |
//! | tokens are written | [`SchedulerMachine::progressed`] | producer | consumers that follow the prefill are told |
//! | the request ended | [`SchedulerMachine::finished`] | both | producer: grant or drop; consumer: release or abort |
//! | a step is scheduled | [`SchedulerMachine::encode_step`] | both | hands out what the calls above queued |
//! | a rank reported | [`SchedulerMachine::on_report`] | both | what every rank has reported is over, and returned |
//! | the host knows that all ranks have | [`SchedulerMachine::over`] | both | the same without their reports |
//! | blocks are short, or weights have changed | [`SchedulerMachine::forget_histories`] | consumer | kept conversations are evicted |
//! | after `progressed`, `finished`, `on_report`, `over` | [`SchedulerMachine::poll_notice`] | producer | what consumers that await prefills are told |
//!
//! A consumer's request is remembered from its first call until `finished` was called and no load is under way; a
//! producer's from `finished` until its sending is over. So the machine holds no more than the engine does, and a bounded
//! number of ended requests' ids, by which the aggregator tells late reports.

mod allowed;
mod config;
mod offer;
mod params;
mod step;

use std::collections::{HashMap, HashSet, VecDeque};

use serde::Serialize;

pub use allowed::AllowedHosts;
pub use config::{MultiTurn, SchedulerMachineConfig};

use crate::aggregate::{Aggregator, Outcome, RequestSide};
use crate::error::{Error, Result};
use crate::ids::{Incarnation, RequestId};
use crate::plan::Holding;
use crate::wire::{
    Blocks, Hold, Load, Message, Prefill, Release, Remote, ReportBatch, StepMetadata, TransferParams, limits,
};

/// The largest id of a lease: it travels through the JSON of proxies, whose numbers may have 53 bits.
const MAX_LEASE_ID: u64 = (1 << 53) - 1;

/// The tokens that can be loaded for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixMatch {
    /// Tokens beyond those computed here.
    pub tokens: u64,
    /// True if they are loaded between steps, while the engine runs other requests.
    pub asynchronous: bool,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishOutcome {
    /// By its length or a stop.
    Complete,
    /// In any other way: aborted, failed, never scheduled.
    Aborted,
}

/// The fate of a finished request's blocks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FinishResult {
    /// True if the blocks must stay until a report says that sending or receiving is over.
    pub keep: bool,
    /// Producer: what to hand to the decoder.
    pub params: Option<TransferParams>,
}

/// News of a prefill for the consumers that await it, by its `transfer_id`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrefillNotice {
    /// It is over, its blocks are kept, and all ranks have said that these are written.
    Ready(Prefill),
    /// It is under way, and its blocks hold so much.
    Written(Prefill),
    /// Retracts everything announced about it.
    Retracted(RequestId),
    /// Nothing is kept of it (any more).
    Gone(RequestId),
}

/// A finished prefill that is kept.
#[derive(Debug)]
struct KeptPrefill {
    /// Its `transfer_id`.
    name: Option<RequestId>,
    /// The announcement for consumers that await it, until all ranks have said that it can be read.
    unannounced: Option<Prefill>,
}

/// A decoded request whose blocks are kept for the conversation's next turn.
#[derive(Debug)]
struct KeptConversation {
    request: RequestId,
    blocks: u64,
    /// It was evicted, and its blocks are not free yet.
    evicted: bool,
}

/// A prefill that was told of while it is under way.
#[derive(Debug)]
struct RunningPrefill {
    /// Its `transfer_id`.
    name: RequestId,
    /// The id of the lease that it gets if its blocks stay its own until its end.
    lease_id: u64,
    /// The blocks announced last, of groups that keep all tokens.
    blocks: Vec<Blocks>,
    tokens: u64,
}

/// Where a consumer's request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecvState {
    /// The lease is kept alive, nothing is allocated.
    Held,
    /// The workers load it. `ended`: the request has finished meanwhile.
    Loading { ended: bool },
    /// Its load is over, or it was released.
    Over,
}

#[derive(Debug)]
struct Recv {
    remote: Remote,
    state: RecvState,
}

/// Counters of one scheduler side since its start, and gauges. The meaning of each figure is in
/// [`METRICS`](crate::stats::METRICS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SchedulerStats {
    /// Consumer: requests that arrived.
    pub holds: u64,
    /// Consumer: loads.
    pub loads: u64,
    /// Consumer: requests released without a load.
    pub releases: u64,
    /// Consumer: loads aborted.
    pub aborts: u64,
    /// Producer: prefills offered.
    pub grants: u64,
    /// Producer: prefills with nothing to offer.
    pub drops: u64,
    /// Gauge, consumer: requests remembered.
    pub receiving: u64,
    /// Gauge, producer: prefills kept.
    pub sending: u64,
    /// Messages that the handshake listener received.
    pub listener_requests: u64,
}

/// One engine's state machine, producer and consumer at once. Not thread-safe by itself: the host's scheduler thread
/// owns it.
#[derive(Debug)]
pub struct SchedulerMachine {
    config: SchedulerMachineConfig,
    address: Option<(String, u16)>,
    recvs: HashMap<RequestId, Recv>,
    /// Prefills that were told of while they are under way.
    running: HashMap<RequestId, RunningPrefill>,
    /// Finished prefills that are kept.
    sends: HashMap<RequestId, KeptPrefill>,
    /// The names by which consumers know them.
    names: HashSet<RequestId>,
    notices: VecDeque<PrefillNotice>,
    aggregator: Aggregator,
    /// The last lease granted.
    lease_id: u64,
    /// Conversations that are kept for their next turns, the oldest first.
    histories: VecDeque<KeptConversation>,
    step: StepMetadata,
    stats: SchedulerStats,
}

impl SchedulerMachine {
    /// A machine without requests. Errors: what [`SchedulerMachineConfig::check`] says.
    pub fn new(config: SchedulerMachineConfig) -> Result<SchedulerMachine> {
        config.check()?;
        Ok(SchedulerMachine {
            address: None,
            recvs: HashMap::new(),
            running: HashMap::new(),
            sends: HashMap::new(),
            names: HashSet::new(),
            notices: VecDeque::new(),
            aggregator: Aggregator::new(config.shape().rank_ids())?,
            config,
            lease_id: 0,
            histories: VecDeque::new(),
            step: StepMetadata::default(),
            stats: SchedulerStats::default(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &SchedulerMachineConfig {
        &self.config
    }

    /// Counters and gauges; the listener's are not known here.
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats { receiving: self.recvs.len() as u64, sending: self.sends.len() as u64, ..self.stats }
    }

    /// Requests of a remote prefill that are remembered.
    pub fn receiving(&self) -> usize {
        self.recvs.len()
    }

    /// Finished requests whose blocks are kept for a decoder.
    pub fn sending(&self) -> usize {
        self.sends.len()
    }

    /// True if the next step has work. An engine without other work must still make one.
    pub fn has_pending(&self) -> bool {
        !self.step.is_empty()
    }

    /// States the holdings of every rank of this engine, which the next step tells the workers. Needed before the
    /// first load of an engine of several ranks.
    pub fn set_engine(&mut self, ranks: Vec<Holding>) {
        self.step.engine = ranks;
    }

    /// Takes over the engine's new workers, which know nothing of this machine's requests. The next step tells them what every
    /// rank holds, and of the requests that wait to be loaded. Loads that the old workers had begun they have reported as over.
    /// Leases granted from here on are of another `life` of the engine.
    pub fn renew_engine(&mut self, life: Incarnation, ranks: Vec<Holding>) {
        self.config.incarnation = life;
        self.notices.extend(self.running.drain().map(|(_, begun)| PrefillNotice::Retracted(begun.name)));
        self.set_engine(ranks);
        let queued = &self.step.holds;
        let waits = |(request, recv): (&RequestId, &Recv)| {
            let waits = recv.state == RecvState::Held && !queued.iter().any(|hold| hold.request == *request);
            waits.then(|| Hold { request: request.clone(), remote: recv.remote.clone() })
        };
        let mut holds: Vec<Hold> = self.recvs.iter().filter_map(waits).collect();
        holds.sort_by(|a, b| a.request.cmp(&b.request));
        self.step.holds.extend(holds);
    }

    /// Where this engine's handshake listener is reached. Needed before a hand-over can be offered.
    pub fn set_address(&mut self, host: impl Into<String>, port: u16) {
        self.address = Some((host.into(), port));
    }

    /// The id of the next lease granted is made of `random`. The driver gives 64 bits that nobody can guess before each
    /// prefill that ends, because a client that knows a lease's id may keep its blocks. Without that, ids count.
    pub fn set_lease_entropy(&mut self, random: u64) {
        self.lease_id = random % MAX_LEASE_ID;
    }

    /// Consumer: takes a request that came in. If it was prefilled remotely, its lease is kept alive from the next
    /// step on. Calling it is optional, and calling it again changes nothing.
    ///
    /// Errors: [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming the missing or malformed keys; nothing is
    /// remembered then.
    pub fn arrived(&mut self, request: &RequestId, params: &TransferParams) -> Result<()> {
        params::check_roles(request, params)?;
        if !self.loads(params) || self.recvs.contains_key(request) {
            return Ok(());
        }
        let remote = params::remote(request, params, &self.config)?;
        self.stats.holds += 1;
        self.step.holds.push(Hold { request: request.clone(), remote: remote.clone() });
        self.recvs.insert(request.clone(), Recv { remote, state: RecvState::Held });
        Ok(())
    }

    /// Consumer: how many of the prompt's tokens beyond `computed_tokens` can be loaded from the producer. Zero for a
    /// request without a remote prefill, and for one that has had its load or release already. No side effect.
    ///
    /// Errors: [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for params that no load could use, naming the key.
    pub fn matched(
        &self,
        request: &RequestId,
        params: &TransferParams,
        prompt_tokens: u64,
        computed_tokens: u64,
    ) -> Result<PrefixMatch> {
        params::check_roles(request, params)?;
        let known = self.recvs.get(request).is_some_and(|recv| recv.state != RecvState::Held);
        if !self.loads(params) || known {
            return Ok(PrefixMatch::default());
        }
        params::remote(request, params, &self.config)?;
        let held = params::held_tokens(request, params, &self.config, prompt_tokens)?;
        if !params::awaits(params) {
            params::remote_blocks(request, params, held)?;
        }
        let mut tokens = self.config.handed_over(prompt_tokens).saturating_sub(computed_tokens);
        if params.do_remote_decode && self.config.multi_turn.as_ref().is_some_and(|turns| tokens < turns.least_tokens) {
            tokens = 0;
        }
        Ok(PrefixMatch { tokens, asynchronous: tokens > 0 })
    }

    /// Consumer: queues the load of the prompt's last `external_tokens` tokens into `local_blocks`. These are the
    /// allocated blocks to fill, per KV-cache group, in the order of their tokens. With
    /// `external_tokens` 0 it queues the release instead. Only the first call for a request does anything.
    ///
    /// Blocks that the tokens do not fit become a load that fails as an invalid request on every worker, so that the
    /// host, which may have committed itself to a load, gets its terminal report. Whether the producer's blocks fit is
    /// found by the workers, who know its block sizes.
    ///
    /// Errors: [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for params that [`SchedulerMachine::matched`] refuses, for a
    /// wrong number of lists and for more than [`MAX_BLOCK_IDS`](limits::MAX_BLOCK_IDS) blocks; nothing is queued then.
    pub fn allocated(
        &mut self,
        request: &RequestId,
        params: &TransferParams,
        local_blocks: Vec<Blocks>,
        prompt_tokens: u64,
        external_tokens: u64,
    ) -> Result<()> {
        params::check_roles(request, params)?;
        let known = self.recvs.get(request).is_some_and(|recv| recv.state != RecvState::Held);
        if !self.loads(params) || known {
            return Ok(());
        }
        let remote = params::remote(request, params, &self.config)?;
        if external_tokens == 0 {
            self.release(request.clone(), remote.clone());
            self.recvs.insert(request.clone(), Recv { remote, state: RecvState::Over });
            return Ok(());
        }
        let awaits = params::awaits(params);
        let remote_tokens = params::held_tokens(request, params, &self.config, prompt_tokens)?;
        let remote_blocks = if awaits { Vec::new() } else { params::remote_blocks(request, params, remote_tokens)? };
        let end = self.config.handed_over(prompt_tokens);
        if local_blocks.len() != self.config.groups.len() {
            return Err(Error::invalid(format!(
                "request {request}: expected one list of allocated blocks for each of the {} KV-cache groups, got {}",
                self.config.groups.len(),
                local_blocks.len()
            )));
        }
        // With the producer's bounded too, every load fits a step, and its blocks a report of its failure.
        let to_fill = local_blocks.iter().map(Blocks::len).fold(0, usize::saturating_add);
        if to_fill > limits::MAX_BLOCK_IDS {
            return Err(Error::invalid(format!(
                "request {request}: {to_fill} blocks are to be filled, at most {} can be",
                limits::MAX_BLOCK_IDS
            )));
        }
        let start = end.checked_sub(external_tokens);
        let refused = match start {
            None => Some(format!("{external_tokens} tokens are to be loaded of {end}")),
            Some(start) => params::check_local(&self.config, &local_blocks, start, end).err(),
        };
        let load = Load {
            request: request.clone(),
            remote: remote.clone(),
            local_blocks,
            remote_blocks: remote_blocks.into_iter().map(Blocks::from).collect(),
            tokens: (start.unwrap_or(0), end),
            remote_tokens,
            awaits,
            null_block: self.config.null_block,
            window_only: !self.config.reuses_blocks,
            refused,
        };
        self.stats.loads += 1;
        self.step.loads.push(load);
        // An earlier request may have had this id.
        self.aggregator.forget_side(request, RequestSide::Recv);
        self.recvs.insert(request.clone(), Recv { remote, state: RecvState::Loading { ended: false } });
        Ok(())
    }

    /// Evicts the `most` oldest conversations kept for their next turns. The host needs their blocks, or the contents
    /// are no longer valid. Their blocks are free when the workers have reported them as sent. Returns how many
    /// evicted ones, now or earlier, have blocks that are not free yet.
    pub fn forget_histories(&mut self, most: usize) -> usize {
        let mut left = most;
        self.evict_while(|_| {
            let evict = left > 0;
            left = left.saturating_sub(1);
            evict
        });
        self.histories.iter().filter(|history| history.evicted).count()
    }

    /// Evicts kept conversations, oldest first, while `evict(blocks)` returns true.
    fn evict_while(&mut self, mut evict: impl FnMut(u64) -> bool) {
        let staying = self.histories.iter_mut().filter(|history| !history.evicted);
        for history in staying.take_while(|history| evict(history.blocks)) {
            history.evicted = true;
            self.step.dropped.push(history.request.clone());
        }
    }

    /// Ends a request. `blocks` are its blocks per KV-cache group and `computed_tokens` the tokens whose cache they
    /// hold.
    ///
    /// - Producer, `do_remote_decode`, complete: the blocks are kept, a lease is granted with the next step, and the
    ///   params for the decoder come back. In any other outcome, or without blocks, nothing is kept. With a `transfer_id`
    ///   that is what consumers call it, and those that await it are told ([`SchedulerMachine::poll_notice`]).
    ///   A request whose history is still being loaded ends without a hand-over.
    /// - Consumer: a request without a load releases the producer's blocks; one that is being loaded is aborted, and
    ///   its blocks must stay until its terminal report; one that was loaded owes nothing. Params that name no producer
    ///   have nothing to release and are no error here.
    /// - Consumer, complete, where conversations go on: what it has is kept for the next turn, and the params for that turn's
    ///   prefill engine come back.
    ///
    /// Errors ([`InvalidArgument`](crate::ErrorKind::InvalidArgument), [`AlreadyExists`](crate::ErrorKind::AlreadyExists))
    /// mean that nothing is kept or handed over.
    pub fn finished(
        &mut self,
        request: &RequestId,
        params: &TransferParams,
        outcome: FinishOutcome,
        blocks: Vec<Blocks>,
        computed_tokens: u64,
    ) -> Result<FinishResult> {
        let begun = self.running.remove(request);
        let finish = self.finish(request, params, outcome, &blocks, computed_tokens, begun.as_ref());
        if let Some(begun) = begun
            && self.sends.get(request).is_none_or(|sent| sent.name.as_ref() != Some(&begun.name))
        {
            self.notices.push_back(PrefillNotice::Retracted(begun.name));
        }
        finish
    }

    fn finish(
        &mut self,
        request: &RequestId,
        params: &TransferParams,
        outcome: FinishOutcome,
        blocks: &[Blocks],
        computed_tokens: u64,
        begun: Option<&RunningPrefill>,
    ) -> Result<FinishResult> {
        let recv = self.recvs.get_mut(request);
        let known = recv.is_some();
        if let Some(recv) = recv {
            match recv.state {
                RecvState::Loading { ended } => {
                    if !ended {
                        recv.state = RecvState::Loading { ended: true };
                        self.stats.aborts += 1;
                        self.step.aborts.push(request.clone());
                        // A prefill that ends while its history is loaded is handed over to nobody.
                        if params.do_remote_decode && self.loads(params) {
                            // With a name that nobody can have, none awaits it. The load's blocks stay in any case.
                            let name = params::name(request, params).unwrap_or_default();
                            let called = name.as_ref().unwrap_or(request);
                            if !self.names.contains(called) {
                                self.drop_prefill(called);
                                self.notices.extend(name.map(PrefillNotice::Gone));
                            }
                        }
                    }
                    return Ok(FinishResult { keep: true, params: None });
                }
                RecvState::Held => {
                    let remote = recv.remote.clone();
                    self.release(request.clone(), remote);
                }
                RecvState::Over => {}
            }
            self.recvs.remove(request);
        }
        if known && self.config.multi_turn.is_none() {
            return Ok(FinishResult::default());
        }
        params::check_roles(request, params)?;
        if !known
            && self.loads(params)
            && let Ok(remote) = params::remote(request, params, &self.config)
        {
            self.release(request.clone(), remote);
        }
        if params.do_remote_decode {
            let name = params::name(request, params)?;
            let finish = self.finished_prefill(request, name.as_ref(), outcome, blocks, computed_tokens, begun);
            self.notices.extend(name.filter(|name| !self.names.contains(name)).map(PrefillNotice::Gone));
            return finish;
        }
        if params.do_remote_prefill && outcome == FinishOutcome::Complete && params.shared != Some(true) {
            return self.finished_turn(request, blocks, computed_tokens);
        }
        Ok(FinishResult::default())
    }

    /// The next thing to tell consumers that await prefills.
    pub fn poll_notice(&mut self) -> Option<PrefillNotice> {
        self.notices.pop_front()
    }

    /// The work for the next step, for every worker alike, as an encoded [`StepMetadata`]. Each piece of work is handed out
    /// once. What does not fit into one message comes with the next steps ([`SchedulerMachine::has_pending`]).
    ///
    /// Errors: those of encoding; nothing is taken then.
    pub fn encode_step(&mut self) -> Result<Vec<u8>> {
        step::take(&mut self.step, StepMetadata::MAX_BYTES)
    }

    /// Takes reports of ranks. Returns what every rank has reported with them, and the figures in them. Ranks may report in
    /// any order; a report that comes again ends nothing twice. On error the ranks before the failing one have been taken,
    /// and what is over with them is returned with the next report; the batch can be given again.
    ///
    /// Errors: those of [`Aggregator::add`].
    pub fn on_report(&mut self, reports: &ReportBatch) -> Result<Outcome> {
        self.aggregator.add_batch(reports)?;
        let outcome = self.aggregator.poll().unwrap_or_default();
        for request in &outcome.granted {
            let prefill = self.sends.get_mut(request).and_then(|sent| sent.unannounced.take());
            self.notices.extend(prefill.map(PrefillNotice::Ready));
        }
        outcome.finished_sending.iter().for_each(|request| self.sent(request));
        outcome.finished_recving.iter().for_each(|request| self.received(request));
        Ok(outcome)
    }

    /// The host knows by itself that every rank is done with `request` on this side. It is over now, whether or not the
    /// ranks' reports have come or ever come, and no outcome names it any more. A request that is not known, or over
    /// already, is no error. Its id must not be used again before the reports have come: they would count for the new one.
    pub fn over(&mut self, request: &RequestId, direction: RequestSide) {
        self.aggregator.end(request, direction);
        match direction {
            RequestSide::Send => self.sent(request),
            RequestSide::Recv => self.received(request),
        }
    }

    fn sent(&mut self, request: &RequestId) {
        let Some(KeptPrefill { name, .. }) = self.sends.remove(request) else { return };
        self.histories.retain(|history| history.request != *request);
        self.names.remove(name.as_ref().unwrap_or(request));
        self.notices.extend(name.map(PrefillNotice::Gone));
    }

    fn received(&mut self, request: &RequestId) {
        let Some(recv) = self.recvs.get_mut(request) else { return };
        match recv.state {
            RecvState::Loading { ended: false } => recv.state = RecvState::Over,
            RecvState::Loading { ended: true } => {
                self.recvs.remove(request);
                self.step.aborts.retain(|aborted| aborted != request);
            }
            RecvState::Held | RecvState::Over => {}
        }
    }

    /// Queues a release, in place of a hold that no step has taken yet.
    fn release(&mut self, request: RequestId, remote: Remote) {
        self.step.holds.retain(|hold| hold.request != request);
        self.stats.releases += 1;
        self.step.releases.push(Release { request, remote });
    }

    /// True if a producer is named whose cache is to be loaded: by what a decoder is given, or, where conversations go on, by
    /// what a prefill engine is given of the turn before.
    fn loads(&self, params: &TransferParams) -> bool {
        params.do_remote_prefill || (self.config.multi_turn.is_some() && params::names_history(params))
    }
}
