//! The consumer's half: holds, loads and releases.
//!
//! Each is a *want* with a number of its own (a ticket), so that a request id that comes again is not mistaken for its
//! predecessor. A load goes from waiting (for a session) to reading to confirming; its report is made when no operation
//! of it can touch memory any more.
//!
//! Wants that name the same lease of a producer use it together. To the producer this rank is one reader of it: only the
//! last of them tells that the lease is needed no more. Where others may follow that are not known yet (`Remote::shared`),
//! the last one lingers for a while before it does.

mod ending;
mod portions;
mod reading;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::action::{PeerKey, SessionId, TransferFigures, TransferToken};
use super::config::{WorkerConfig, ms};
use super::life::Life;
use super::load::{LoadState, Phase};
use super::outbox::Outbox;
use super::sessions::{Joined, Leased, Sessions, State, Ticket};
use super::timers::Deadlines;
use crate::error::ErrorKind;
use crate::handshake::{HandshakeFailure, HandshakeOutcome, Session};
use crate::ids::RequestId;
use crate::plan::Holding;
use crate::time::Time;
use crate::wire::{Cause, EngineShape, HandshakeReply, Hold, Load, RankMetadata, Release, Remote, Verdict};

#[derive(Debug)]
enum Kind {
    Hold,
    Load(Box<LoadState>),
    /// Keeps the lease for requests that may follow. No report, no name: the request is over here.
    Linger,
    /// Waits for a session, to say so. No report, no name: the request is over here.
    Release,
}

/// What becomes of prefills that wait to be loaded when the machine ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    /// Their producers may free them.
    GivenBack,
    /// Their producers keep them while the leases last.
    Left,
}

#[derive(Debug)]
struct Want {
    request: RequestId,
    remote: Remote,
    /// When it began.
    known: Time,
    /// When the handshake began that it waits or waited for, and when the first rank was connected.
    handshake: Option<(Time, Option<Time>)>,
    session: Option<SessionId>,
    /// Whether heartbeats go out for it, to each rank that is connected.
    beating: bool,
    kind: Kind,
}

impl Want {
    fn leased(&self) -> Leased {
        (self.remote.request.clone(), self.remote.lease_id)
    }

    /// Whether the producer has to keep the lease for it.
    fn needs_lease(&self) -> bool {
        match &self.kind {
            Kind::Hold | Kind::Linger => true,
            Kind::Load(load) => load.phase != Phase::Confirming,
            Kind::Release => false,
        }
    }
}

/// Whether both name the same lease. What is not known of one may be as in the other.
fn same_lease(one: &Remote, other: &Remote) -> bool {
    let differ = |a: u64, b: u64| a != 0 && b != 0 && a != b;
    let life = |remote: &Remote| remote.incarnation.map_or(0, |incarnation| incarnation.0);
    one.engine == other.engine
        && one.request == other.request
        && !differ(one.lease_id, other.lease_id)
        && !differ(life(one), life(other))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Timer {
    /// Of a hold, or of a want that lingers.
    Hold(Ticket),
    Load(Ticket),
}

#[derive(Debug)]
pub(super) struct Consumer {
    config: WorkerConfig,
    local: Option<Arc<RankMetadata>>,
    /// What every rank of this engine holds, once it is known.
    engine: Vec<Holding>,
    wants: BTreeMap<Ticket, Want>,
    names: HashMap<RequestId, Ticket>,
    /// By what the producer calls it.
    users: HashMap<RequestId, BTreeSet<Ticket>>,
    tokens: HashMap<TransferToken, Ticket>,
    /// Of these, those that read from prefills under way, and over which connection.
    portions: HashMap<TransferToken, u64>,
    sessions: Sessions,
    deadlines: Deadlines<Timer>,
    /// Source of tickets and tokens.
    next: u64,
    closed: bool,
    /// Whether producers are told all that is not wanted any more. Not at the end of a worker that another one follows: what
    /// waits is announced to that one, and of a shared lease that one request has given up another may be waiting.
    releases: bool,
}

impl Consumer {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        Consumer {
            config: config.clone(),
            local: None,
            engine: Vec::new(),
            wants: BTreeMap::new(),
            names: HashMap::new(),
            users: HashMap::new(),
            tokens: HashMap::new(),
            portions: HashMap::new(),
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

    /// Holds, loads, releases.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        self.wants.values().fold((0, 0, 0), |(holds, loads, releases), want| match want.kind {
            Kind::Hold => (holds + 1, loads, releases),
            Kind::Load(_) => (holds, loads + 1, releases),
            Kind::Linger | Kind::Release => (holds, loads, releases + 1),
        })
    }

    pub(super) fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Transfers that may touch memory.
    pub(super) fn in_flight(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn hold(&mut self, now: Time, hold: Hold, out: &mut Outbox) {
        if self.closed || self.local.is_none() || self.names.contains_key(&hold.request) {
            return;
        }
        let ticket = self.add(now, hold.request, hold.remote, Kind::Hold, out);
        self.deadlines.set(Timer::Hold(ticket), now + ms(self.config.settings.hold_timeout_ms));
        self.join(now, ticket, false, out);
    }

    pub(super) fn load(&mut self, now: Time, load: Load, out: &mut Outbox) {
        let (request, remote, refused) = (load.request.clone(), load.remote.clone(), load.refused.clone());
        let mut held = None;
        if let Some(&known) = self.names.get(&request) {
            match self.wants.get(&known) {
                // The load is under way; its one report will come.
                Some(Want { kind: Kind::Load(_), .. }) => return,
                Some(want) if want.remote == remote => held = Some(known),
                _ => self.give_back(now, known, out),
            }
        }
        let joined = held.is_some();
        let known = held.and_then(|ticket| self.wants.get(&ticket)).map_or(now, |want| want.known);
        let state = Box::new(LoadState::new(now, known, load));
        let ticket = match held.and_then(|ticket| Some((ticket, self.wants.get_mut(&ticket)?))) {
            Some((ticket, want)) => {
                want.kind = Kind::Load(state);
                self.deadlines.cancel(&Timer::Hold(ticket));
                ticket
            }
            None => self.add(now, request, remote, Kind::Load(state), out),
        };
        if self.closed {
            self.fail(now, ticket, Cause::ShutDown, "the worker is shut down".into(), out);
            return;
        }
        if self.local.is_none() {
            let text = "this rank has not stated its geometry, so nothing can be read; call set_geometry first";
            self.fail(now, ticket, Cause::InvalidRequest, text.into(), out);
            return;
        }
        if let Some(text) = refused {
            if !joined {
                self.join_session(now, ticket, true, out);
            }
            self.fail(now, ticket, Cause::InvalidRequest, text, out);
            return;
        }
        self.await_first(now, ticket, out);
        if joined {
            self.progress(now, ticket, None, out);
        } else {
            self.join(now, ticket, true, out);
        }
    }

    pub(super) fn release(&mut self, now: Time, release: Release, out: &mut Outbox) {
        if let Some(&ticket) = self.names.get(&release.request) {
            match self.wants.get(&ticket).map(|want| &want.kind) {
                Some(Kind::Load(_)) => self.abort(now, &release.request, out),
                _ => self.give_back(now, ticket, out),
            }
            return;
        }
        if self.closed || self.local.is_none() {
            return;
        }
        let shared = release.remote.shared;
        let kind = if shared { Kind::Linger } else { Kind::Release };
        let ticket = self.add(now, release.request.clone(), release.remote, kind, out);
        self.names.remove(&release.request);
        if shared {
            self.deadlines.set(Timer::Hold(ticket), now + ms(self.config.shared_grace_ms));
        }
        self.join(now, ticket, false, out);
    }

    pub(super) fn abort(&mut self, now: Time, request: &RequestId, out: &mut Outbox) {
        let Some(&ticket) = self.names.get(request) else { return };
        match self.wants.get(&ticket).map(|want| &want.kind) {
            Some(Kind::Load(_)) => {
                self.fail(now, ticket, Cause::Aborted, "this engine aborted the request".into(), out);
            }
            _ => self.give_back(now, ticket, out),
        }
    }

    pub(super) fn handshake(
        &mut self,
        now: Time,
        id: SessionId,
        answer: Result<HandshakeReply, HandshakeFailure>,
        out: &mut Outbox,
    ) -> Option<Result<Vec<String>, HandshakeFailure>> {
        let local = self.local.clone()?;
        let (engine, life) = self.sessions.awaited(id)?;
        let session = Session::new(Arc::clone(&local), id.0, engine, life);
        let mut outcome = match answer.and_then(|reply| session.judge(reply)) {
            Ok(outcome) => outcome,
            Err(failure) if failure.cause == Cause::PeerDied && self.sessions.ask_anew(id, out) => return None,
            Err(failure) => {
                self.session_failed(now, id, failure.cause, &failure.message, out);
                return Some(Err(failure));
            }
        };
        let notes = std::mem::take(&mut outcome.notes);
        self.met(now, id, &local, &outcome, out);
        Some(Ok(notes))
    }

    /// An engine has told its ranks' metadata, which fits.
    fn met(&mut self, now: Time, id: SessionId, local: &RankMetadata, outcome: &HandshakeOutcome, out: &mut Outbox) {
        let users = self.users(id);
        if self.sessions.has_twin(id, outcome, out) {
            // First, so that none of them finds it again.
            self.sessions.break_off(now, id, false, out);
            for ticket in users {
                self.sessions.leave(now, id, ticket, out);
                self.join(now, ticket, true, out);
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

    pub(super) fn connected(&mut self, now: Time, key: &PeerKey, out: &mut Outbox) {
        let Some((id, ready)) = self.sessions.connected(key, out) else { return };
        if ready {
            let begun = self.sessions.get(id).map_or(now, |session| session.begun);
            out.count(|stats| {
                stats.handshakes += 1;
                stats.handshake_time.observe(u64::try_from(now.since(begun).as_micros()).unwrap_or(u64::MAX));
            });
        }
        for ticket in self.users(id) {
            self.progress(now, ticket, Some(key.connection), out);
        }
    }

    pub(super) fn peer_lost(&mut self, now: Time, key: &PeerKey, message: &str, out: &mut Outbox) {
        let Some(id) = self.sessions.session_of(key) else { return };
        self.sessions.forget_peer(key);
        if self.sessions.get(id).is_some_and(|session| session.state == State::Connecting) {
            out.count(|stats| stats.handshake_failures += 1);
        }
        self.sessions.break_off(now, id, true, out);
        for ticket in self.users(id) {
            self.strand(now, ticket, Cause::PeerDied, format!("{key} is lost: {message}"), out);
        }
    }

    pub(super) fn transfer_done(
        &mut self,
        now: Time,
        token: TransferToken,
        result: Result<TransferFigures, (Cause, String)>,
        out: &mut Outbox,
    ) {
        let Some(ticket) = self.tokens.remove(&token) else { return };
        let lane = self.portions.remove(&token);
        self.read_of(now, ticket, token, lane, result, out);
        if let Some(connection) = lane {
            self.next_portion(now, connection, out);
        }
    }

    fn read_of(
        &mut self,
        now: Time,
        ticket: Ticket,
        token: TransferToken,
        lane: Option<u64>,
        result: Result<TransferFigures, (Cause, String)>,
        out: &mut Outbox,
    ) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        let counts = load.completed(token, result.as_ref().ok().copied());
        if !counts && load.failure.is_none() {
            return self.voided(now, ticket, out);
        }
        match result {
            Ok(_) => {
                if load.failure.is_none() {
                    self.confirm_if_read(now, ticket, out);
                } else if load.in_flight().next().is_none() {
                    self.conclude(now, ticket, out);
                }
            }
            Err((cause, message)) => match lane.filter(|_| cause == Cause::DigestMismatch && load.failure.is_none()) {
                Some(connection) => self.doubt(now, ticket, token, connection, out),
                None => self.fail(now, ticket, cause, message, out),
            },
        }
    }

    pub(super) fn verdict(
        &mut self,
        now: Time,
        key: &PeerKey,
        request: &RequestId,
        verdict: Verdict,
        ticket: Ticket,
        out: &mut Outbox,
    ) {
        let Some(want) = self.wants.get_mut(&ticket).filter(|want| want.remote.request == *request) else { return };
        let Kind::Load(load) = &mut want.kind else { return };
        if load.phase != Phase::Confirming {
            return;
        }
        let Some(read) = load.reads.get_mut(&key.connection) else { return };
        let text = match verdict {
            Verdict::Valid => {
                read.valid = true;
                if load.reads.values().all(|read| read.valid) {
                    self.conclude(now, ticket, out);
                }
                return;
            }
            Verdict::Expired => "the lease had run out, or the blocks had been given back, when the read was over",
            Verdict::Unknown => "the producer does not know the request (any more)",
        };
        self.fail(now, ticket, Cause::LeaseExpired, format!("{key}, request {request}: {text}"), out);
    }

    pub(super) fn advance(&mut self, now: Time, out: &mut Outbox) {
        while let Some(id) = self.sessions.advance(now, out) {
            let limit = self.config.settings.handshake_timeout_ms;
            let Some(session) = self.sessions.get(id) else { continue };
            let what = match session.state {
                State::Connecting => "its ranks were not connected",
                _ => "no usable answer came",
            };
            let text = format!("{what} within {limit} ms; its listener is {}", session.listener());
            self.session_failed(now, id, Cause::HandshakeFailed, &text, out);
        }
        while let Some(timer) = self.deadlines.expired(now) {
            match timer {
                Timer::Hold(ticket) => self.let_go(now, ticket, out),
                Timer::Load(ticket) => {
                    let Some(Want { kind: Kind::Load(load), remote, .. }) = self.wants.get(&ticket) else { continue };
                    let text = match load.phase {
                        Phase::Confirming => format!(
                            "no verdict within {} ms of the read: engine {} has granted no lease of request {}, which must \
                             be the remote_request_id of its answer, or its workers do not run",
                            self.config.settings.verdict_timeout_ms, remote.engine, remote.request
                        ),
                        _ if load.load.awaits && load.life.is_none() && self.config.settings.portion_tokens > 0 => {
                            let limit = self.config.settings.await_timeout_ms;
                            format!(
                                "the prefill engine has said nothing of this prefill within {limit} ms; check that the proxy \
                                 sends both engines the same prompt and the same name for it"
                            )
                        }
                        _ if load.load.awaits => {
                            let limit = self.config.settings.hold_timeout_ms;
                            format!("the prefill was not over within {limit} ms of the last news of it")
                        }
                        _ => format!("the read took longer than {} ms", self.config.settings.transfer_timeout_ms),
                    };
                    self.fail(now, ticket, Cause::Timeout, text, out);
                }
            }
        }
    }

    pub(super) fn next_timeout(&mut self) -> Option<Time> {
        [self.deadlines.next(), self.sessions.next_timeout()].into_iter().flatten().min()
    }

    pub(super) fn shut_down(&mut self, now: Time, holds: Holds, out: &mut Outbox) {
        self.closed = true;
        self.releases = holds == Holds::GivenBack;
        let tickets: Vec<Ticket> = self.wants.keys().copied().collect();
        for ticket in tickets {
            self.strand(now, ticket, Cause::ShutDown, "the worker is shut down".into(), out);
        }
        self.sessions.close(out);
    }

    fn add(&mut self, now: Time, request: RequestId, remote: Remote, kind: Kind, out: &mut Outbox) -> Ticket {
        self.next += 1;
        let ticket = self.next;
        if matches!(kind, Kind::Hold | Kind::Load(_)) {
            out.trace(|| Life::RecvBegan { number: ticket, request: request.clone(), at: now });
        }
        self.names.insert(request.clone(), ticket);
        self.users.entry(remote.request.clone()).or_default().insert(ticket);
        let want = Want { request, remote, known: now, handshake: None, session: None, beating: false, kind };
        self.wants.insert(ticket, want);
        ticket
    }

    fn users(&self, id: SessionId) -> Vec<Ticket> {
        self.sessions.get(id).map(|session| session.users.iter().copied().collect()).unwrap_or_default()
    }

    /// Finds a session for a want. `insist`: also right after a failed handshake.
    fn join_session(&mut self, now: Time, ticket: Ticket, insist: bool, out: &mut Outbox) -> bool {
        let Some(want) = self.wants.get_mut(&ticket) else { return false };
        match self.sessions.join(now, ticket, &want.remote, insist, out) {
            Joined::Ready(id) => {
                want.session = Some(id);
                true
            }
            Joined::Waiting(id) => {
                want.session = Some(id);
                want.handshake = self.sessions.get(id).map(|session| (session.begun, None));
                true
            }
            Joined::Refused => false,
        }
    }

    fn join(&mut self, now: Time, ticket: Ticket, insist: bool, out: &mut Outbox) {
        if self.join_session(now, ticket, insist, out) {
            self.progress(now, ticket, None, out);
        } else {
            let text = "the last handshake with the engine failed a moment ago".into();
            self.strand(now, ticket, Cause::HandshakeFailed, text, out);
        }
    }

    fn session_failed(&mut self, now: Time, id: SessionId, cause: Cause, message: &str, out: &mut Outbox) {
        out.count(|stats| stats.handshake_failures += 1);
        // A restarted engine answers well: only the leases of its former life are gone.
        self.sessions.break_off(now, id, cause != Cause::PeerDied, out);
        for ticket in self.users(id) {
            let engine = self.wants.get(&ticket).map(|want| want.remote.engine.to_string()).unwrap_or_default();
            self.strand(now, ticket, cause, format!("handshake with engine {engine} failed: {message}"), out);
        }
    }
}
