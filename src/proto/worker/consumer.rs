//! The consumer's half: holds, loads and releases.
//!
//! Each is a *want* with a number of its own (a ticket), so that a request id that comes again is not mistaken for its
//! predecessor. A load goes from waiting (for a session) to reading to confirming; its report is made when no operation
//! of it can touch memory any more.
//!
//! Wants that name the same lease of a producer use it together. To the producer this rank is one reader of it: only the
//! last of them tells that the lease is needed no more. Where others may follow that are not known yet (`Remote::shared`),
//! the last one lingers for a while before it does.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::action::{Action, AwaitId, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken};
use super::config::{WorkerConfig, ms};
use super::life::Life;
use super::load::{LoadState, Phase, Read};
use super::outbox::Outbox;
use super::sessions::{Due, Joined, Leased, Session, Sessions, State, Ticket};
use super::timers::Deadlines;
use crate::error::ErrorKind;
use crate::proto::geometry::GroupKind;
use crate::proto::handshake::{HandshakeFailure, HandshakeOutcome};
use crate::proto::ids::{Incarnation, RequestId};
use crate::proto::plan::Holding;
use crate::proto::time::Time;
use crate::proto::wire::{Cause, Hold, Load, PeerMessage, Prefill, RankMetadata, Release, Remote, Verdict};

#[derive(Debug)]
enum Kind {
    Hold,
    Load(Box<LoadState>),
    /// Keeps the lease for requests that may follow. No report, no name: the request is over here.
    Linger,
    /// Waits for a session, to say so. No report, no name: the request is over here.
    Release,
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
    serials: HashMap<u64, Ticket>,
    sessions: Sessions,
    deadlines: Deadlines<Timer>,
    /// Source of tickets, tokens and serials.
    next: u64,
    closed: bool,
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
            serials: HashMap::new(),
            sessions: Sessions::new(config),
            deadlines: Deadlines::new(),
            next: 0,
            closed: false,
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
        self.deadlines.set(Timer::Hold(ticket), now + ms(self.config.hold_timeout_ms));
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
        self.await_prefill(now, ticket, out);
        if joined {
            self.progress(now, ticket, None, out);
        } else {
            self.join(now, ticket, true, out);
        }
    }

    /// Asks for what is not known of a load yet.
    fn await_prefill(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), remote, .. }) = self.wants.get(&ticket) else { return };
        if !load.load.awaits {
            return;
        }
        self.deadlines.set(Timer::Load(ticket), now + ms(self.config.hold_timeout_ms));
        out.push(Action::Await {
            number: AwaitId(ticket),
            engine: remote.engine.clone(),
            host: remote.host.clone(),
            port: remote.port,
            request: remote.request.clone(),
        });
    }

    /// A prefill that a load awaits is over, by the word of this life of its engine.
    pub(super) fn prefilled(
        &mut self,
        now: Time,
        AwaitId(ticket): AwaitId,
        result: Result<(Incarnation, Prefill), (Cause, String)>,
        out: &mut Outbox,
    ) {
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let Kind::Load(load) = &mut want.kind else { return };
        if !load.load.awaits || load.failure.is_some() {
            return;
        }
        let (incarnation, prefill) = match result {
            Ok(prefill) => prefill,
            Err((cause, message)) => return self.fail(now, ticket, cause, message, out),
        };
        let session = want.session.and_then(|id| self.sessions.get(id));
        let connected_to = session.and_then(|session| session.incarnation).or(want.remote.incarnation);
        if let Some(other) = connected_to.filter(|other| *other != incarnation) {
            let text = format!(
                "engine {} restarted: this rank is connected to incarnation {other}, the prefill is of {incarnation}",
                want.remote.engine
            );
            return self.fail(now, ticket, Cause::PeerDied, text, out);
        }
        let end = load.load.tokens.1;
        let stateful = |local: &Arc<RankMetadata>| local.geometry.groups.iter().any(|g| g.kind == GroupKind::State);
        if prefill.tokens < end || prefill.tokens != end && self.local.as_ref().is_some_and(stateful) {
            let text = format!(
                "the producer holds {} tokens, {end} are to be loaded; send both engines the same prompt",
                prefill.tokens
            );
            return self.fail(now, ticket, Cause::InvalidRequest, text, out);
        }
        // Until now heartbeats could not name the lease, and its length was a guess.
        if let (true, Some(id)) = (std::mem::take(&mut want.beating), want.session) {
            self.sessions.stop_beat(id, &(want.remote.request.clone(), want.remote.lease_id));
        }
        (want.remote.incarnation, want.remote.lease_id) = (Some(incarnation), prefill.lease_id);
        want.remote.lease_ms = prefill.lease_ms;
        load.prefilled(now, prefill);
        self.deadlines.cancel(&Timer::Load(ticket));
        self.progress(now, ticket, None, out);
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
        result: Result<HandshakeOutcome, HandshakeFailure>,
        out: &mut Outbox,
    ) {
        if !self.sessions.is_handshaking(id) {
            return;
        }
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(failure) => return self.session_failed(now, id, failure.cause, &failure.message, out),
        };
        // The leases of another life are gone, whoever answered now.
        for ticket in self.users(id) {
            let Some(want) = self.wants.get(&ticket) else { continue };
            let Some(granted_by) = want.remote.incarnation.filter(|i| *i != outcome.incarnation) else { continue };
            let text = format!(
                "engine {} restarted: incarnation {granted_by} granted the lease, {} answers now",
                outcome.engine, outcome.incarnation
            );
            self.strand(now, ticket, Cause::PeerDied, text, out);
        }
        let users = self.users(id);
        if self.sessions.has_twin(id, &outcome) {
            for ticket in users {
                self.sessions.leave(now, id, ticket, out);
                self.join(now, ticket, true, out);
            }
            self.sessions.break_off(now, id, false, out);
            return;
        }
        if users.is_empty() {
            self.sessions.break_off(now, id, false, out);
            return;
        }
        let Some(local) = self.local.clone() else { return };
        if let Err(e) = self.sessions.connect(id, &local, &self.engine, &outcome, out) {
            let cause = match e.kind() {
                ErrorKind::Incompatible => Cause::Incompatible,
                _ => Cause::HandshakeFailed,
            };
            self.session_failed(now, id, cause, e.message(), out);
        }
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
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        match result {
            Ok(figures) => {
                load.completed(token, Some(figures));
                if load.failure.is_none() {
                    self.confirm_if_read(now, ticket, out);
                } else if load.in_flight().next().is_none() {
                    self.conclude(now, ticket, out);
                }
            }
            Err((cause, message)) => {
                load.completed(token, None);
                self.fail(now, ticket, cause, message, out);
            }
        }
    }

    pub(super) fn verdict(
        &mut self,
        now: Time,
        key: &PeerKey,
        request: &RequestId,
        verdict: Verdict,
        serial: u64,
        out: &mut Outbox,
    ) {
        let Some(&ticket) = self.serials.get(&serial) else { return };
        let Some(want) = self.wants.get_mut(&ticket).filter(|want| want.remote.request == *request) else { return };
        let Kind::Load(load) = &mut want.kind else { return };
        let Some(read) = load.reads.iter_mut().find(|read| read.connection == key.connection) else { return };
        let text = match verdict {
            Verdict::Valid => {
                read.valid = true;
                if load.reads.iter().all(|read| read.valid) {
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
        while let Some(Due::Late(id)) = self.sessions.advance(now, out) {
            let limit = self.config.handshake_timeout_ms;
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
                    let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get(&ticket) else { continue };
                    let text = match load.phase {
                        Phase::Confirming => {
                            format!("no verdict within {} ms of the read", self.config.verdict_timeout_ms)
                        }
                        _ if load.load.awaits => {
                            format!("the prefill was not over within {} ms", self.config.hold_timeout_ms)
                        }
                        _ => format!("the read took longer than {} ms", self.config.transfer_timeout_ms),
                    };
                    self.fail(now, ticket, Cause::Timeout, text, out);
                }
            }
        }
    }

    pub(super) fn next_timeout(&mut self) -> Option<Time> {
        [self.deadlines.next(), self.sessions.next_timeout()].into_iter().flatten().min()
    }

    pub(super) fn shut_down(&mut self, now: Time, out: &mut Outbox) {
        self.closed = true;
        let tickets: Vec<Ticket> = self.wants.keys().copied().collect();
        for ticket in tickets {
            self.strand(now, ticket, Cause::ShutDown, "the worker is shut down".into(), out);
        }
        self.sessions.close(out);
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn add(&mut self, now: Time, request: RequestId, remote: Remote, kind: Kind, out: &mut Outbox) -> Ticket {
        let ticket = self.number();
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

    /// Does what the want can do with the ranks that are connected: all of them, or `newly` beside those before it.
    fn progress(&mut self, now: Time, ticket: Ticket, newly: Option<u64>, out: &mut Outbox) {
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let Some(id) = want.session else { return };
        let begun = match &mut want.kind {
            Kind::Release => {
                // The producer's ranks are told together.
                if self.sessions.get(id).is_some_and(|session| session.state == State::Ready) {
                    self.remove(now, ticket, true, out);
                }
                return;
            }
            Kind::Load(load) if load.phase == Phase::Confirming => return,
            Kind::Load(load) if load.failure.is_some() && !want.remote.shared => return,
            // As a hold.
            Kind::Load(load) if load.load.awaits || load.failure.is_some() => None,
            Kind::Load(load) => Some(load.phase != Phase::Waiting),
            Kind::Hold | Kind::Linger => None,
        };
        // Not looked for again with every rank that is connected.
        let needs_all = newly.is_none() || !want.beating || begun == Some(false);
        let connected = if needs_all { self.sessions.connected_of(id) } else { Vec::new() };
        if needs_all && connected.is_empty() {
            return;
        }
        if let Some((_, connected)) = &mut want.handshake {
            connected.get_or_insert(now);
        }
        let newly = newly.map(|connection| vec![connection]);
        let of_these = |before: bool| newly.as_ref().filter(|_| before).unwrap_or(&connected);
        let beating = std::mem::replace(&mut want.beating, true);
        if !beating || newly.is_some() {
            let period = self.config.heartbeat_period(want.remote.lease_ms);
            self.sessions.beat(now, of_these(beating), &want.leased(), period, out);
        }
        if let Some(begun) = begun
            && (!begun || newly.is_some())
        {
            self.read(now, ticket, of_these(begun), out);
        }
    }

    /// Posts a load's reads from these ranks, one each; none if one of them cannot be planned.
    fn read(&mut self, now: Time, ticket: Ticket, connections: &[u64], out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        let peers = connections.iter().filter_map(|connection| self.sessions.peer(*connection));
        let plans: crate::Result<Vec<_>> =
            peers.map(|peer| Ok((peer.key.clone(), peer.plan.request(&load.load.wanted())?))).collect();
        let posts = match plans {
            Ok(posts) => posts,
            Err(e) => return self.fail(now, ticket, Cause::InvalidRequest, e.message().into(), out),
        };
        if load.phase == Phase::Waiting {
            load.phase = Phase::Reading;
            load.planned(now);
            self.deadlines.set(Timer::Load(ticket), now + ms(self.config.transfer_timeout_ms));
        }
        for (peer, plan) in posts {
            let mut token = None;
            let connection = peer.connection;
            if !plan.is_empty() {
                self.next += 1;
                let number = TransferToken(self.next);
                self.tokens.insert(number, ticket);
                out.push(Action::Transfer { token: number, peer, plan });
                token = Some(number);
            }
            load.reads.push(Read { connection, token, valid: false });
        }
        self.confirm_if_read(now, ticket, out);
    }

    /// Goes on to confirm a load of which nothing is left to read, from any rank.
    fn confirm_if_read(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), session: Some(id), .. }) = self.wants.get(&ticket) else { return };
        let ready = |session: &Session| session.state == State::Ready && load.reads.len() == session.peers.len();
        if load.in_flight().next().is_none() && self.sessions.get(*id).is_some_and(ready) {
            self.confirm(now, ticket, out);
        }
    }

    /// Everything is read: asks the producer whether it still holds good.
    fn confirm(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let serial = self.number();
        let more = self.wants.get(&ticket).is_some_and(|want| want.remote.shared) || self.is_wanted_beside(ticket);
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let leased = want.leased();
        let (Kind::Load(load), Some(id)) = (&mut want.kind, want.session) else { return };
        load.phase = Phase::Confirming;
        load.serial = Some(serial);
        self.serials.insert(serial, ticket);
        // Without it, a request that comes for the lease from now on tells the producer at once that it wants it again.
        if !more && std::mem::take(&mut want.beating) {
            self.sessions.stop_beat(id, &leased);
        }
        let reader = self.sessions.reader();
        for peer in self.sessions.peers_of(id) {
            let message = PeerMessage::Done {
                request: want.remote.request.clone(),
                lease_id: want.remote.lease_id,
                reader: reader.clone(),
                readers: peer.readers,
                serial,
                more,
            };
            out.send(PeerRef::Outbound(peer.key.clone()), message);
        }
        self.deadlines.set(Timer::Load(ticket), now + ms(self.config.verdict_timeout_ms));
    }

    /// Whether another want needs the lease of this one.
    fn is_wanted_beside(&self, ticket: Ticket) -> bool {
        self.wants.get(&ticket).is_some_and(|want| self.is_wanted(ticket, &want.remote))
    }

    /// Whether another want than `except` needs the lease.
    fn is_wanted(&self, except: Ticket, lease: &Remote) -> bool {
        let users = self.users.get(&lease.request);
        let others = users.into_iter().flatten().filter(|ticket| **ticket != except);
        others
            .filter_map(|ticket| self.wants.get(ticket))
            .any(|other| other.needs_lease() && same_lease(lease, &other.remote))
    }

    /// A load has failed: nothing more is posted, what is posted is cancelled, and once that is over the load concludes.
    fn fail(&mut self, now: Time, ticket: Ticket, cause: Cause, message: String, out: &mut Outbox) {
        let Some(Want { kind: Kind::Load(load), .. }) = self.wants.get_mut(&ticket) else { return };
        if load.failure.is_none() {
            load.failure = Some((cause, message));
            self.deadlines.cancel(&Timer::Load(ticket));
            if load.load.awaits {
                out.push(Action::Forget { number: AwaitId(ticket) });
            }
            for token in load.in_flight() {
                out.push(Action::Cancel { token });
            }
        }
        if load.in_flight().next().is_none() {
            self.conclude(now, ticket, out);
        }
    }

    /// The load's one terminal report.
    fn conclude(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(want) = self.wants.get(&ticket) else { return };
        let Want { request, remote, handshake, kind: Kind::Load(load), .. } = want else { return };
        let record = load.record(now, request, remote);
        out.count(|stats| load.count(now, &record, stats));
        out.trace(|| Life::RecvEnded {
            number: ticket,
            receive: Box::new(load.life(now, &remote.engine, *handshake, &record)),
        });
        // One that others may share said that the lease is still needed.
        let told = load.phase == Phase::Confirming && !remote.shared;
        let gone = matches!(
            load.failure,
            Some((Cause::PeerDied | Cause::HandshakeFailed | Cause::Incompatible | Cause::ShutDown, _))
        );
        out.report.failed_recving.extend(load.recv_failure(request));
        out.report.records.push(record);
        out.report.finished_recving.push(request.clone());
        let over = matches!(load.failure, Some((Cause::LeaseExpired, _)));
        if told {
            self.remove(now, ticket, false, out);
        } else if gone {
            self.remove(now, ticket, true, out);
        } else if over {
            self.let_go(now, ticket, out);
        } else {
            self.give_back(now, ticket, out);
        }
    }

    /// The want ends here. The producer is told, unless others need its lease, or may soon.
    fn give_back(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(want) = self.wants.get(&ticket) else { return };
        let usable = |session: &Session| session.state != State::Broken;
        let session = want.session.and_then(|id| self.sessions.get(id)).is_some_and(usable);
        if !want.remote.shared || self.closed || !session || self.is_wanted_beside(ticket) {
            return self.let_go(now, ticket, out);
        }
        self.turn_into(now, ticket, Kind::Linger, out);
        self.deadlines.set(Timer::Hold(ticket), now + ms(self.config.shared_grace_ms));
        self.progress(now, ticket, None, out);
    }

    /// The request is over here; its want goes on as `kind`.
    fn turn_into(&mut self, now: Time, ticket: Ticket, kind: Kind, out: &mut Outbox) {
        self.forget_name(ticket);
        self.deadlines.cancel(&Timer::Hold(ticket));
        self.deadlines.cancel(&Timer::Load(ticket));
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        if matches!(want.kind, Kind::Hold) {
            out.trace(|| Life::RecvGivenBack { number: ticket, request: want.request.clone(), at: now });
        }
        if let Kind::Load(load) = std::mem::replace(&mut want.kind, kind)
            && let Some(serial) = load.serial
        {
            self.serials.remove(&serial);
        }
    }

    /// The want ends here, but the producer is told, as soon as there is a session.
    fn let_go(&mut self, now: Time, ticket: Ticket, out: &mut Outbox) {
        let Some(want) = self.wants.get_mut(&ticket) else { return };
        let waits = want
            .session
            .and_then(|id| self.sessions.get(id))
            .is_some_and(|session| matches!(session.state, State::Handshaking | State::Connecting));
        if !waits {
            self.remove(now, ticket, true, out);
            return;
        }
        // It would not keep the lease alive on the ranks that are still to come.
        if let (true, Some(id)) = (std::mem::take(&mut want.beating), want.session) {
            self.sessions.stop_beat(id, &want.leased());
        }
        self.turn_into(now, ticket, Kind::Release, out);
    }

    fn forget_name(&mut self, ticket: Ticket) {
        if let Some(want) = self.wants.get(&ticket)
            && self.names.get(&want.request) == Some(&ticket)
        {
            self.names.remove(&want.request);
        }
    }

    /// Forgets a want. `tell`: release the producer's blocks, unless another request of ours still wants them.
    fn remove(&mut self, now: Time, ticket: Ticket, tell: bool, out: &mut Outbox) {
        self.forget_name(ticket);
        let Some(want) = self.wants.remove(&ticket) else { return };
        if matches!(want.kind, Kind::Hold) {
            out.trace(|| Life::RecvGivenBack { number: ticket, request: want.request.clone(), at: now });
        }
        self.deadlines.cancel(&Timer::Hold(ticket));
        self.deadlines.cancel(&Timer::Load(ticket));
        if let Kind::Load(load) = &want.kind
            && let Some(serial) = load.serial
        {
            self.serials.remove(&serial);
        }
        if let Some(users) = self.users.get_mut(&want.remote.request) {
            users.remove(&ticket);
            if users.is_empty() {
                self.users.remove(&want.remote.request);
            }
        }
        let Some(id) = want.session else { return };
        if want.beating {
            self.sessions.stop_beat(id, &want.leased());
        }
        if tell && !self.is_wanted(ticket, &want.remote) {
            let reader = self.sessions.reader();
            for peer in self.sessions.peers_of(id).filter(|peer| peer.is_connected()) {
                let message = PeerMessage::Release {
                    request: want.remote.request.clone(),
                    lease_id: want.remote.lease_id,
                    reader: reader.clone(),
                    readers: peer.readers,
                };
                out.send(PeerRef::Outbound(peer.key.clone()), message);
            }
        }
        self.sessions.leave(now, id, ticket, out);
    }

    /// A want that has lost its session, or the machine's end: a load fails, anything else is forgotten.
    fn strand(&mut self, now: Time, ticket: Ticket, cause: Cause, message: String, out: &mut Outbox) {
        if matches!(self.wants.get(&ticket), Some(Want { kind: Kind::Load(_), .. })) {
            self.fail(now, ticket, cause, message, out);
        } else {
            self.remove(now, ticket, true, out);
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
