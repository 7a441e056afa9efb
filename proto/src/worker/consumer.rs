//! The consumer's half: holds, loads and releases.
//!
//! Each has a record with a number of its own, so that a request id that comes again is not mistaken for its predecessor. A
//! load goes from waiting (for a session) to reading to confirming; its report is made when no operation of it can touch
//! memory any more.
//!
//! Requests that name the same lease of a producer use it together. To the producer this rank is one reader of it: only the
//! last of them tells that the lease is needed no more. Where others may follow that are not known yet (`Remote::shared`),
//! the last one lingers for a while before it does.

mod chunks;
mod ending;
mod reading;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::action::{PeerKey, SessionId, TransferFigures, TransferToken};
use super::config::{WorkerMachineConfig, ms};
use super::load::{LoadPhase, LoadState};
use super::output::MachineOutput;
use super::sessions::{JoinResult, LeaseName, RequestNumber, SessionState, Sessions};
use super::timers::Deadlines;
use super::trace::TraceEvent;
use crate::error::ErrorKind;
use crate::handshake::{HandshakeCheck, HandshakeFailure, HandshakeOutcome};
use crate::ids::RequestId;
use crate::plan::Holding;
use crate::time::Time;
use crate::wire::{Cause, EngineShape, HandshakeReply, Hold, Load, RankMetadata, Release, Remote, Verdict};

#[derive(Debug)]
enum RequestKind {
    Hold,
    Load(Box<LoadState>),
    /// Keeps the lease for requests that may follow. No report, no name: the request is over here.
    Linger,
    /// Waits for a session, to say so. No report, no name: the request is over here.
    Release,
}

/// The fate of prefills that wait to be loaded when the machine ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HoldsAtEnd {
    /// Their producers may free them.
    Released,
    /// Their producers keep them while the leases last.
    Kept,
}

#[derive(Debug)]
struct RequestRecord {
    request: RequestId,
    remote: Remote,
    /// When it began.
    known: Time,
    /// When the handshake began that it waits or waited for, and when the first rank was connected.
    handshake: Option<(Time, Option<Time>)>,
    session: Option<SessionId>,
    /// True if heartbeats go out for it, to each rank that is connected.
    heartbeats: bool,
    kind: RequestKind,
}

impl RequestRecord {
    fn lease_name(&self) -> LeaseName {
        (self.remote.request.clone(), self.remote.lease_id)
    }

    /// True if the producer has to keep the lease for it.
    fn needs_lease(&self) -> bool {
        match &self.kind {
            RequestKind::Hold | RequestKind::Linger => true,
            RequestKind::Load(load) => load.phase != LoadPhase::Confirming,
            RequestKind::Release => false,
        }
    }
}

/// True if both name the same lease. What is not known of one may be as in the other.
fn same_lease(one: &Remote, other: &Remote) -> bool {
    let differ = |a: u64, b: u64| a != 0 && b != 0 && a != b;
    let life = |remote: &Remote| remote.incarnation.map_or(0, |incarnation| incarnation.0);
    one.engine == other.engine
        && one.request == other.request
        && !differ(one.lease_id, other.lease_id)
        && !differ(life(one), life(other))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ConsumerTimer {
    /// The time limit of a hold, or of a request that lingers.
    Hold(RequestNumber),
    Load(RequestNumber),
}

#[derive(Debug)]
pub(super) struct Consumer {
    config: WorkerMachineConfig,
    local: Option<Arc<RankMetadata>>,
    /// The holdings of every rank of this engine, once they are known.
    engine: Vec<Holding>,
    records: BTreeMap<RequestNumber, RequestRecord>,
    names: HashMap<RequestId, RequestNumber>,
    /// By what the producer calls it.
    users: HashMap<RequestId, BTreeSet<RequestNumber>>,
    tokens: HashMap<TransferToken, RequestNumber>,
    /// Those of `tokens` that read from prefills under way, and the connection of each.
    chunks_in_flight: HashMap<TransferToken, u64>,
    sessions: Sessions,
    deadlines: Deadlines<ConsumerTimer>,
    /// Source of numbers and tokens.
    next: u64,
    closed: bool,
    /// True if producers are told of all leases that are not needed any more. False at the end of a worker that another one
    /// follows: waiting requests are announced to that one, and another may wait for a shared lease that one has given up.
    releases: bool,
}

impl Consumer {
    pub(super) fn new(config: &WorkerMachineConfig) -> Self {
        Consumer {
            config: config.clone(),
            local: None,
            engine: Vec::new(),
            records: BTreeMap::new(),
            names: HashMap::new(),
            users: HashMap::new(),
            tokens: HashMap::new(),
            chunks_in_flight: HashMap::new(),
            sessions: Sessions::new(config),
            deadlines: Deadlines::new(),
            next: 0,
            closed: false,
            releases: true,
        }
    }

    pub(super) fn set_local(&mut self, local: Arc<RankMetadata>) {
        self.local = Some(local);
    }

    /// States what every rank of this engine holds; nothing changes nothing.
    pub(super) fn set_engine(&mut self, engine: Vec<Holding>) {
        if !engine.is_empty() {
            self.engine = engine;
        }
    }

    /// HoldsAtEnd, loads, releases.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        self.records.values().fold((0, 0, 0), |(holds, loads, releases), record| match record.kind {
            RequestKind::Hold => (holds + 1, loads, releases),
            RequestKind::Load(_) => (holds, loads + 1, releases),
            RequestKind::Linger | RequestKind::Release => (holds, loads, releases + 1),
        })
    }

    pub(super) fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Transfers that may touch memory.
    pub(super) fn in_flight(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn hold(&mut self, now: Time, hold: Hold, out: &mut MachineOutput) {
        if self.closed || self.local.is_none() || self.names.contains_key(&hold.request) {
            return;
        }
        let number = self.add(now, hold.request, hold.remote, RequestKind::Hold, out);
        self.deadlines.set(ConsumerTimer::Hold(number), now + ms(self.config.settings.hold_timeout_ms));
        self.join(now, number, false, out);
    }

    pub(super) fn load(&mut self, now: Time, load: Load, out: &mut MachineOutput) {
        let (request, remote, refused) = (load.request.clone(), load.remote.clone(), load.refused.clone());
        let mut held = None;
        if let Some(&known) = self.names.get(&request) {
            match self.records.get(&known) {
                // The load is under way; its one report will come.
                Some(RequestRecord { kind: RequestKind::Load(_), .. }) => return,
                Some(record) if record.remote == remote => held = Some(known),
                _ => self.release_or_linger(now, known, out),
            }
        }
        let joined = held.is_some();
        let known = held.and_then(|number| self.records.get(&number)).map_or(now, |record| record.known);
        let state = Box::new(LoadState::new(now, known, load));
        let number = match held.and_then(|number| Some((number, self.records.get_mut(&number)?))) {
            Some((number, record)) => {
                record.kind = RequestKind::Load(state);
                self.deadlines.cancel(&ConsumerTimer::Hold(number));
                number
            }
            None => self.add(now, request, remote, RequestKind::Load(state), out),
        };
        if self.closed {
            self.fail(now, number, Cause::ShutDown, "the worker is shut down".into(), out);
            return;
        }
        if self.local.is_none() {
            let text = "this rank has not stated its geometry, so nothing can be read; call set_geometry first";
            self.fail(now, number, Cause::InvalidRequest, text.into(), out);
            return;
        }
        if let Some(text) = refused {
            if !joined {
                self.join_session(now, number, true, out);
            }
            self.fail(now, number, Cause::InvalidRequest, text, out);
            return;
        }
        self.await_prefill_first(now, number, out);
        if joined {
            self.progress(now, number, None, out);
        } else {
            self.join(now, number, true, out);
        }
    }

    pub(super) fn release(&mut self, now: Time, release: Release, out: &mut MachineOutput) {
        if let Some(&number) = self.names.get(&release.request) {
            match self.records.get(&number).map(|record| &record.kind) {
                Some(RequestKind::Load(_)) => self.abort(now, &release.request, out),
                _ => self.release_or_linger(now, number, out),
            }
            return;
        }
        if self.closed || self.local.is_none() {
            return;
        }
        let shared = release.remote.shared;
        let kind = if shared { RequestKind::Linger } else { RequestKind::Release };
        let number = self.add(now, release.request.clone(), release.remote, kind, out);
        self.names.remove(&release.request);
        if shared {
            self.deadlines.set(ConsumerTimer::Hold(number), now + ms(self.config.shared_grace_ms));
        }
        self.join(now, number, false, out);
    }

    pub(super) fn abort(&mut self, now: Time, request: &RequestId, out: &mut MachineOutput) {
        let Some(&number) = self.names.get(request) else { return };
        match self.records.get(&number).map(|record| &record.kind) {
            Some(RequestKind::Load(_)) => {
                self.fail(now, number, Cause::Aborted, "this engine aborted the request".into(), out);
            }
            _ => self.release_or_linger(now, number, out),
        }
    }

    pub(super) fn handshake(
        &mut self,
        now: Time,
        id: SessionId,
        answer: Result<HandshakeReply, HandshakeFailure>,
        out: &mut MachineOutput,
    ) -> Option<Result<Vec<String>, HandshakeFailure>> {
        let local = self.local.clone()?;
        let (engine, life) = self.sessions.awaited(id)?;
        let check = HandshakeCheck::new(Arc::clone(&local), id.0, engine, life);
        let mut outcome = match answer.and_then(|reply| check.judge(reply)) {
            Ok(outcome) => outcome,
            Err(failure) if failure.cause == Cause::PeerDied && self.sessions.retry_handshake(id, out) => return None,
            Err(failure) => {
                self.session_failed(now, id, failure.cause, &failure.message, out);
                return Some(Err(failure));
            }
        };
        let notes = std::mem::take(&mut outcome.notes);
        self.accept_metadata(now, id, &local, &outcome, out);
        Some(Ok(notes))
    }

    /// An engine has told its ranks' metadata, which fits.
    fn accept_metadata(
        &mut self,
        now: Time,
        id: SessionId,
        local: &RankMetadata,
        outcome: &HandshakeOutcome,
        out: &mut MachineOutput,
    ) {
        let users = self.users(id);
        if self.sessions.has_twin(id, outcome, out) {
            // First, so that none of them finds it again.
            self.sessions.break_off(now, id, false, out);
            for number in users {
                self.sessions.leave(now, id, number, out);
                self.join(now, number, true, out);
            }
            return;
        }
        if users.is_empty() {
            self.sessions.break_off(now, id, false, out);
            return;
        }
        if let Err(e) = self.sessions.connect(id, local, &self.engine, outcome, out) {
            let cause = match e.kind() {
                ErrorKind::Incompatible => Cause::Incompatible,
                _ => Cause::HandshakeFailed,
            };
            self.session_failed(now, id, cause, e.message(), out);
        }
    }

    pub(super) fn shape_of(&self, peer: &PeerKey) -> Option<EngineShape> {
        self.sessions.get(self.sessions.session_of(peer)?)?.shape
    }

    pub(super) fn connected(&mut self, now: Time, key: &PeerKey, out: &mut MachineOutput) {
        let Some((id, ready)) = self.sessions.connected(key, out) else { return };
        if ready {
            let begun = self.sessions.get(id).map_or(now, |session| session.begun);
            out.count(|stats| {
                stats.handshakes += 1;
                stats.handshake_time.observe(u64::try_from(now.since(begun).as_micros()).unwrap_or(u64::MAX));
            });
        }
        for number in self.users(id) {
            self.progress(now, number, Some(key.connection), out);
        }
    }

    pub(super) fn peer_lost(&mut self, now: Time, key: &PeerKey, message: &str, out: &mut MachineOutput) {
        let Some(id) = self.sessions.session_of(key) else { return };
        self.sessions.forget_peer(key);
        if self.sessions.get(id).is_some_and(|session| session.state == SessionState::Connecting) {
            out.count(|stats| stats.handshake_failures += 1);
        }
        self.sessions.break_off(now, id, true, out);
        for number in self.users(id) {
            self.lose_session(now, number, Cause::PeerDied, format!("{key} is lost: {message}"), out);
        }
    }

    pub(super) fn transfer_done(
        &mut self,
        now: Time,
        token: TransferToken,
        result: Result<TransferFigures, (Cause, String)>,
        out: &mut MachineOutput,
    ) {
        let Some(number) = self.tokens.remove(&token) else { return };
        let lane = self.chunks_in_flight.remove(&token);
        self.read_of(now, number, token, lane, result, out);
        if let Some(connection) = lane {
            self.next_chunk(now, connection, out);
        }
    }

    fn read_of(
        &mut self,
        now: Time,
        number: RequestNumber,
        token: TransferToken,
        lane: Option<u64>,
        result: Result<TransferFigures, (Cause, String)>,
        out: &mut MachineOutput,
    ) {
        let Some(RequestRecord { kind: RequestKind::Load(load), .. }) = self.records.get_mut(&number) else { return };
        let counts = load.completed(token, result.as_ref().ok().copied());
        if !counts && load.failure.is_none() {
            return self.revoked_read_ended(now, number, out);
        }
        match result {
            Ok(_) => {
                if load.failure.is_none() {
                    self.confirm_if_read(now, number, out);
                } else if load.in_flight().next().is_none() {
                    self.conclude(now, number, out);
                }
            }
            Err((cause, message)) => match lane.filter(|_| cause == Cause::DigestMismatch && load.failure.is_none()) {
                Some(connection) => self.digest_mismatch(now, number, token, connection, out),
                None => self.fail(now, number, cause, message, out),
            },
        }
    }

    pub(super) fn verdict(
        &mut self,
        now: Time,
        key: &PeerKey,
        request: &RequestId,
        verdict: Verdict,
        number: RequestNumber,
        out: &mut MachineOutput,
    ) {
        let Some(record) = self.records.get_mut(&number).filter(|record| record.remote.request == *request) else {
            return;
        };
        let RequestKind::Load(load) = &mut record.kind else { return };
        if load.phase != LoadPhase::Confirming {
            return;
        }
        let Some(read) = load.reads.get_mut(&key.connection) else { return };
        let text = match verdict {
            Verdict::Valid => {
                read.valid = true;
                if load.reads.values().all(|read| read.valid) {
                    self.conclude(now, number, out);
                }
                return;
            }
            Verdict::Expired => "the lease had run out, or the blocks had been given back, when the read was over",
            Verdict::Unknown => "the producer does not know the request (any more)",
        };
        self.fail(now, number, Cause::LeaseExpired, format!("{key}, request {request}: {text}"), out);
    }

    pub(super) fn advance(&mut self, now: Time, out: &mut MachineOutput) {
        while let Some(id) = self.sessions.advance(now, out) {
            let limit = self.config.settings.handshake_timeout_ms;
            let Some(session) = self.sessions.get(id) else { continue };
            let what = match session.state {
                SessionState::Connecting => "its ranks were not connected",
                _ => "no usable answer came",
            };
            let text = format!("{what} within {limit} ms; its listener is {}", session.listener());
            self.session_failed(now, id, Cause::HandshakeFailed, &text, out);
        }
        while let Some(timer) = self.deadlines.expired(now) {
            match timer {
                ConsumerTimer::Hold(number) => self.release_lease(now, number, out),
                ConsumerTimer::Load(number) => {
                    let Some(RequestRecord { kind: RequestKind::Load(load), remote, .. }) = self.records.get(&number)
                    else {
                        continue;
                    };
                    let text = match load.phase {
                        LoadPhase::Confirming => format!(
                            "no verdict within {} ms of the read: engine {} has granted no lease of request {}, which must \
                             be the remote_request_id of its answer, or its workers do not run",
                            self.config.settings.verdict_timeout_ms, remote.engine, remote.request
                        ),
                        _ if load.load.awaits && load.lease.is_none() && self.config.settings.chunk_tokens > 0 => {
                            let limit = self.config.settings.await_timeout_ms;
                            format!(
                                "the prefill engine has said nothing of this prefill within {limit} ms; check that the proxy \
                                 sends both engines the same prompt and the same name for it"
                            )
                        }
                        _ if load.load.awaits => {
                            let limit = self.config.settings.hold_timeout_ms;
                            format!("the prefill was not over within {limit} ms of its last progress")
                        }
                        _ => format!("the read took longer than {} ms", self.config.settings.transfer_timeout_ms),
                    };
                    self.fail(now, number, Cause::Timeout, text, out);
                }
            }
        }
    }

    pub(super) fn next_timeout(&mut self) -> Option<Time> {
        [self.deadlines.next(), self.sessions.next_timeout()].into_iter().flatten().min()
    }

    pub(super) fn shut_down(&mut self, now: Time, holds: HoldsAtEnd, out: &mut MachineOutput) {
        self.closed = true;
        self.releases = holds == HoldsAtEnd::Released;
        let numbers: Vec<RequestNumber> = self.records.keys().copied().collect();
        for number in numbers {
            self.lose_session(now, number, Cause::ShutDown, "the worker is shut down".into(), out);
        }
        self.sessions.close(out);
    }

    fn add(
        &mut self,
        now: Time,
        request: RequestId,
        remote: Remote,
        kind: RequestKind,
        out: &mut MachineOutput,
    ) -> RequestNumber {
        self.next += 1;
        let number = self.next;
        if matches!(kind, RequestKind::Hold | RequestKind::Load(_)) {
            out.trace(|| TraceEvent::RecvBegan { number, request: request.clone(), at: now });
        }
        self.names.insert(request.clone(), number);
        self.users.entry(remote.request.clone()).or_default().insert(number);
        let record =
            RequestRecord { request, remote, known: now, handshake: None, session: None, heartbeats: false, kind };
        self.records.insert(number, record);
        number
    }

    fn users(&self, id: SessionId) -> Vec<RequestNumber> {
        self.sessions.get(id).map(|session| session.users.iter().copied().collect()).unwrap_or_default()
    }

    /// Finds a session for a record. `insist`: also right after a failed handshake.
    fn join_session(&mut self, now: Time, number: RequestNumber, insist: bool, out: &mut MachineOutput) -> bool {
        let Some(record) = self.records.get_mut(&number) else { return false };
        match self.sessions.join(now, number, &record.remote, insist, out) {
            JoinResult::Ready(id) => {
                record.session = Some(id);
                true
            }
            JoinResult::Waiting(id) => {
                record.session = Some(id);
                record.handshake = self.sessions.get(id).map(|session| (session.begun, None));
                true
            }
            JoinResult::Refused => false,
        }
    }

    fn join(&mut self, now: Time, number: RequestNumber, insist: bool, out: &mut MachineOutput) {
        if self.join_session(now, number, insist, out) {
            self.progress(now, number, None, out);
        } else {
            let text = "the last handshake with the engine failed a moment ago".into();
            self.lose_session(now, number, Cause::HandshakeFailed, text, out);
        }
    }

    fn session_failed(&mut self, now: Time, id: SessionId, cause: Cause, message: &str, out: &mut MachineOutput) {
        out.count(|stats| stats.handshake_failures += 1);
        // A restarted engine answers well: only the leases of its former life are gone.
        self.sessions.break_off(now, id, cause != Cause::PeerDied, out);
        for number in self.users(id) {
            let engine = self.records.get(&number).map(|record| record.remote.engine.to_string()).unwrap_or_default();
            self.lose_session(now, number, cause, format!("handshake with engine {engine} failed: {message}"), out);
        }
    }
}
