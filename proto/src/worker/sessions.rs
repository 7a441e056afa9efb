//! The consumer's view of producer engines: handshakes, the connections that they lead to, and heartbeats over these.
//!
//! A session is one handshake with one engine and the connections made from it. It is `Handshaking` until the metadata
//! is there, `Connecting` until every rank needed is connected, then `Ready`. Each rank is of use as soon as it is connected.
//! A session whose connection broke is `Broken`: its users wind down, and the next request makes another one.
//!
//! An address, the host and port of a listener, only says how to get an engine's metadata. Addresses whose listeners tell the same
//! lead to one session. A request joins only a session to which its own address leads: what another listener says of an engine,
//! whatever life of it that names, is no reason to read there.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use super::action::{Action, PeerKey, PeerRef, SessionId};
use super::config::{WorkerMachineConfig, ms};
use super::output::MachineOutput;
use super::timers::{Deadlines, Memory};
use crate::error::{Error, ErrorKind, Result};
use crate::handshake::HandshakeOutcome;
use crate::ids::{EngineId, Incarnation, RequestId};
use crate::plan::{self, Holding, LocalRank, RankPlan};
use crate::time::Time;
use crate::wire::limits::MAX_HEARTBEAT_REQUESTS;
use crate::wire::{AgentMetadata, EngineShape, PeerMessage, RankMetadata, Reader, Remote};

/// Numbers a hold, load or release inside this machine.
pub(super) type RequestNumber = u64;

/// How many ranks of a session are connected to at a time, so that reading from the first ones does not wait for the others.
/// With fewer, those of a distant host would wait for round trips; with sixteen of 64 the first bytes came half as late again.
const MAX_CONNECTING: usize = 8;

/// How many failed addresses are remembered at most.
const MAX_FAILED: usize = 1024;

/// How many addresses to one session are remembered at most, the latest ones.
const MAX_ADDRESSES: usize = 16;

/// Whom to handshake with, and where.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ListenerAddress {
    engine: EngineId,
    host: String,
    port: u16,
}

impl ListenerAddress {
    fn of(remote: &Remote) -> Self {
        ListenerAddress { engine: remote.engine.clone(), host: remote.host.clone(), port: remote.port }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionState {
    Handshaking,
    Connecting,
    Ready,
    Broken,
}

#[derive(Debug)]
pub(super) struct PeerSession {
    address: ListenerAddress,
    /// When its handshake began.
    pub(super) begun: Time,
    /// The life that was asked for.
    wanted: Option<Incarnation>,
    /// True if its handshake was repeated over a new connection.
    retried: bool,
    pub(super) state: SessionState,
    /// The life that answered.
    pub(super) incarnation: Option<Incarnation>,
    /// The shape of its engine.
    pub(super) shape: Option<EngineShape>,
    /// A hash of the engine's life and ranks as the listener told them, by [`Sessions::hasher`].
    metadata_hash: Option<u64>,
    /// The addresses that are known to lead here.
    addresses: VecDeque<ListenerAddress>,
    /// Its connections, by number, in the order of the ranks needed.
    pub(super) peers: Vec<u64>,
    /// How many of them are not made yet.
    unconnected: usize,
    /// Those among these whose turn has not come.
    queued: VecDeque<(PeerKey, AgentMetadata)>,
    pub(super) users: BTreeSet<RequestNumber>,
}

impl PeerSession {
    /// True if a request may join it.
    fn has_address(&self) -> bool {
        !self.addresses.is_empty()
    }

    /// The host and port of the listener, for messages.
    pub(super) fn listener(&self) -> String {
        format!("{} port {}", self.address.host, self.address.port)
    }

    /// Begins connecting to as many ranks as may be connected to at a time.
    fn connect_more(&mut self, out: &mut MachineOutput) {
        while self.unconnected.saturating_sub(self.queued.len()) < MAX_CONNECTING {
            let Some((peer, metadata)) = self.queued.pop_front() else { return };
            out.push(Action::Connect { peer, metadata });
        }
    }
}

#[derive(Debug)]
pub(super) struct ProducerPeer {
    pub(super) key: PeerKey,
    pub(super) plan: RankPlan,
    /// How many ranks of our engine the producer rank hears from about a request.
    pub(super) readers: u32,
    pub(super) session: SessionId,
    connected: bool,
    heartbeats: BTreeMap<LeaseName, LeaseHeartbeat>,
}

/// A lease: the producer's request, and which of its grants; 0 where that is not known.
pub(super) type LeaseName = (RequestId, u64);

impl ProducerPeer {
    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }
}

/// A lease that is kept alive, for `users` of ours. By name: not every user of the lease needs it from every rank.
#[derive(Debug)]
struct LeaseHeartbeat {
    period: Duration,
    users: BTreeSet<RequestNumber>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum SessionTimer {
    /// A session must be ready.
    Session(SessionId),
    /// A session has had no user for long.
    Idle(SessionId),
    /// A peer's heartbeats are due.
    Heartbeat(u64),
}

/// The result of asking for a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JoinResult {
    /// It can be used now.
    Ready(SessionId),
    /// It is being made.
    Waiting(SessionId),
    /// It failed a moment ago; the request is not worth another try.
    Refused,
}

/// The holdings of our own engine's ranks. Not needed for an engine of one rank, nor where the producer is split as we
/// are: then each rank has its counterpart there.
fn consumers(local: &RankMetadata, engine: &[Holding], outcome: &HandshakeOutcome) -> Result<Vec<Holding>> {
    let own = Holding::new(local.rank, &local.geometry);
    if local.shape.ranks() == 1 {
        return Ok(vec![own]);
    }
    if !engine.is_empty() {
        return Ok(engine.to_vec());
    }
    let twin = outcome.ranks.iter().find(|remote| remote.rank == local.rank);
    if local.shape == outcome.shape && twin.is_some_and(|twin| Holding::new(twin.rank, &twin.geometry).holds_as(&own)) {
        return Ok(outcome.ranks.iter().map(|remote| Holding::new(remote.rank, &remote.geometry)).collect());
    }
    Err(Error::new(
        ErrorKind::Incompatible,
        format!(
            "engine {} is {}, this engine {}, and this rank has not been told what the other ranks of its own engine \
             hold; give every rank's metadata to this engine's scheduler side before the first request",
            outcome.engine, outcome.shape, local.shape
        ),
    ))
}

fn heartbeat<'a>(leases: impl IntoIterator<Item = &'a LeaseName>, reader: &Reader) -> PeerMessage {
    let (requests, leases) = leases.into_iter().cloned().unzip();
    PeerMessage::Heartbeat { requests, leases, reader: Some(reader.clone()) }
}

/// A number that differs from engine to engine, so that engines choose different ones of several copies (FNV-1a).
fn spread(engine: &EngineId) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    engine.as_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[derive(Debug)]
pub(super) struct Sessions {
    sessions: BTreeMap<SessionId, PeerSession>,
    peers: HashMap<u64, ProducerPeer>,
    /// Its keys are of this process, so that nobody outside can make metadata that passes for another's.
    hasher: RandomState,
    /// The session, connecting or ready, that each address is known to lead to.
    addresses: HashMap<ListenerAddress, SessionId>,
    /// This rank as producers know it.
    reader: Reader,
    /// Handshakes under way.
    pending: HashMap<(ListenerAddress, Option<Incarnation>), SessionId>,
    failed: Memory<ListenerAddress, ()>,
    deadlines: Deadlines<SessionTimer>,
    next: u64,
    closed: bool,
    timeout: Duration,
    ttl: Duration,
}

impl Sessions {
    pub(super) fn new(config: &WorkerMachineConfig) -> Self {
        Sessions {
            sessions: BTreeMap::new(),
            peers: HashMap::new(),
            hasher: RandomState::new(),
            addresses: HashMap::new(),
            reader: Reader { engine: config.engine.clone(), incarnation: config.incarnation, rank: config.rank },
            pending: HashMap::new(),
            failed: Memory::new(ms(config.handshake_backoff_ms), MAX_FAILED),
            deadlines: Deadlines::new(),
            next: 0,
            closed: false,
            timeout: ms(config.settings.handshake_timeout_ms),
            ttl: ms(config.settings.peer_ttl_ms),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(super) fn peer_count(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn reader(&self) -> &Reader {
        &self.reader
    }

    pub(super) fn get(&self, id: SessionId) -> Option<&PeerSession> {
        self.sessions.get(&id)
    }

    /// The session's peers that are there.
    pub(super) fn peers_of(&self, id: SessionId) -> impl Iterator<Item = &ProducerPeer> {
        self.sessions.get(&id).into_iter().flat_map(|session| &session.peers).filter_map(|c| self.peers.get(c))
    }

    /// A peer that is connected or being connected to.
    pub(super) fn peer(&self, connection: u64) -> Option<&ProducerPeer> {
        self.peers.get(&connection)
    }

    /// The connections of a session that are made, if it is being made or ready.
    pub(super) fn connected_of(&self, id: SessionId) -> Vec<u64> {
        let usable = |session: &&PeerSession| matches!(session.state, SessionState::Connecting | SessionState::Ready);
        let all = self.sessions.get(&id).filter(usable).map(|session| &*session.peers).unwrap_or_default();
        all.iter().copied().filter(|c| self.peers.get(c).is_some_and(|peer| peer.connected)).collect()
    }

    pub(super) fn session_of(&self, key: &PeerKey) -> Option<SessionId> {
        self.peers.get(&key.connection).filter(|peer| peer.key == *key).map(|peer| peer.session)
    }

    /// Finds or starts a session for `remote` and makes `number` its user. `insist`: also right after a failure.
    pub(super) fn join(
        &mut self,
        now: Time,
        number: RequestNumber,
        remote: &Remote,
        insist: bool,
        out: &mut MachineOutput,
    ) -> JoinResult {
        let address = ListenerAddress::of(remote);
        // Only what a listener has said itself is believed of it: another one may tell the same life with agents of its own.
        if let Some(id) = self.addresses.get(&address)
            && let Some(session) = self.sessions.get_mut(id)
            && (remote.incarnation.is_none() || remote.incarnation == session.incarnation)
        {
            session.users.insert(number);
            self.deadlines.cancel(&SessionTimer::Idle(*id));
            return match session.state {
                SessionState::Ready => JoinResult::Ready(*id),
                _ => JoinResult::Waiting(*id),
            };
        }
        let key = (address.clone(), remote.incarnation);
        if let Some(id) = self.pending.get(&key)
            && let Some(session) = self.sessions.get_mut(id)
        {
            session.users.insert(number);
            return JoinResult::Waiting(*id);
        }
        if self.closed || (!insist && self.failed.get(&address).is_some()) {
            return JoinResult::Refused;
        }
        self.next += 1;
        let id = SessionId(self.next);
        self.sessions.insert(
            id,
            PeerSession {
                address,
                begun: now,
                wanted: remote.incarnation,
                retried: false,
                state: SessionState::Handshaking,
                incarnation: None,
                shape: None,
                metadata_hash: None,
                addresses: VecDeque::new(),
                peers: Vec::new(),
                unconnected: 0,
                queued: VecDeque::new(),
                users: BTreeSet::from([number]),
            },
        );
        self.pending.insert(key, id);
        self.deadlines.set(SessionTimer::Session(id), now + self.timeout);
        out.push(Action::Handshake {
            session: id,
            engine: remote.engine.clone(),
            host: remote.host.clone(),
            port: remote.port,
            anew: false,
        });
        JoinResult::Waiting(id)
    }

    /// Asks once more where another life of the engine has answered: the connection may lead to an engine that is being
    /// replaced, while the host's name leads to its successor already. False if that was done before.
    pub(super) fn retry_handshake(&mut self, id: SessionId, out: &mut MachineOutput) -> bool {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| !session.retried) else { return false };
        session.retried = true;
        let ListenerAddress { engine, host, port } = session.address.clone();
        out.push(Action::Handshake { session: id, engine, host, port, anew: true });
        true
    }

    /// The engine that is expected to answer a handshake, and its life if that is known; nothing if no answer is awaited.
    pub(super) fn awaited(&self, id: SessionId) -> Option<(EngineId, Option<Incarnation>)> {
        let session = self.sessions.get(&id).filter(|session| session.state == SessionState::Handshaking)?;
        Some((session.address.engine.clone(), session.wanted))
    }

    /// True if a handshake found only what another session is connected (or connecting) to. Its address leads there then.
    pub(super) fn has_twin(&mut self, id: SessionId, outcome: &HandshakeOutcome, out: &mut MachineOutput) -> bool {
        let hash = Some(self.hasher.hash_one((&outcome.engine, outcome.incarnation, &outcome.ranks)));
        let twin = self.sessions.iter().find(|(_, other)| other.has_address() && other.metadata_hash == hash);
        let Some(twin) = twin.map(|(twin, _)| *twin) else { return false };
        if let Some(address) = self.sessions.get(&id).map(|session| session.address.clone()) {
            self.set_address(address, twin, out);
        }
        true
    }

    /// From now on `address` leads to session `id`, and not where it led before.
    fn set_address(&mut self, address: ListenerAddress, id: SessionId, out: &mut MachineOutput) {
        if self.addresses.get(&address) == Some(&id) {
            return;
        }
        if let Some(former) = self.addresses.insert(address.clone(), id)
            && let Some(session) = self.sessions.get_mut(&former)
        {
            session.addresses.retain(|known| *known != address);
            if !session.has_address() {
                self.drop_if_unused(former, out);
            }
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.addresses.push_back(address);
        if session.addresses.len() > MAX_ADDRESSES
            && let Some(oldest) = session.addresses.pop_front()
        {
            self.addresses.remove(&oldest);
        }
    }

    /// The session is not to be joined any more.
    fn retire(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        for address in session.addresses.drain(..) {
            self.addresses.remove(&address);
        }
        let pending = (session.address.clone(), session.wanted);
        if self.pending.get(&pending) == Some(&id) {
            self.pending.remove(&pending);
        }
    }

    /// The metadata is there: plan with every rank needed, and connect to them. `engine` is what every rank of our own
    /// engine holds, nothing if that is not known.
    pub(super) fn connect(
        &mut self,
        id: SessionId,
        local: &RankMetadata,
        engine: &[Holding],
        outcome: &HandshakeOutcome,
        out: &mut MachineOutput,
    ) -> Result<()> {
        let producers: Vec<Holding> =
            outcome.ranks.iter().map(|remote| Holding::new(remote.rank, &remote.geometry)).collect();
        let consumers = consumers(local, engine, outcome)?;
        let shares = plan::assign(local.rank, &consumers, &producers, spread(&local.engine))?;
        let this = LocalRank::new(local)?;
        let mut plans = Vec::with_capacity(shares.len());
        for (rank, share) in shares {
            let remote = outcome.ranks.iter().find(|remote| remote.rank == rank).ok_or_else(|| {
                Error::not_found(format!("engine {} gave no metadata of rank {rank}", outcome.engine))
            })?;
            plans.push((remote, this.plan(remote, &share.cells)?, share.readers));
        }
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        session.state = SessionState::Connecting;
        session.incarnation = Some(outcome.incarnation);
        session.shape = Some(outcome.shape);
        session.metadata_hash = Some(self.hasher.hash_one((&outcome.engine, outcome.incarnation, &outcome.ranks)));
        for (remote, plan, readers) in plans {
            self.next += 1;
            let connection = self.next;
            let key = PeerKey {
                connection,
                engine: outcome.engine.clone(),
                incarnation: remote.agent.incarnation,
                rank: remote.rank,
            };
            session.peers.push(connection);
            session.unconnected += 1;
            session.queued.push_back((key.clone(), remote.agent.clone()));
            let peer = ProducerPeer { key, plan, readers, session: id, connected: false, heartbeats: BTreeMap::new() };
            self.peers.insert(connection, peer);
        }
        session.connect_more(out);
        let address = session.address.clone();
        self.pending.remove(&(address.clone(), session.wanted));
        self.set_address(address, id, out);
        Ok(())
    }

    /// Takes note of a connection; gives its session if that is in use, and whether it became ready by this.
    pub(super) fn connected(&mut self, key: &PeerKey, out: &mut MachineOutput) -> Option<(SessionId, bool)> {
        let peer = self.peers.get_mut(&key.connection).filter(|peer| peer.key == *key && !peer.connected)?;
        peer.connected = true;
        let id = peer.session;
        let session = self.sessions.get_mut(&id).filter(|session| session.state == SessionState::Connecting)?;
        session.unconnected = session.unconnected.saturating_sub(1);
        session.connect_more(out);
        let ready = session.unconnected == 0;
        if ready {
            session.state = SessionState::Ready;
            self.deadlines.cancel(&SessionTimer::Session(id));
        }
        Some((id, ready))
    }

    /// Takes a session out of use. Its users stay until they leave; without any it goes at once. `remember`: it failed
    /// before it was of use.
    pub(super) fn break_off(&mut self, now: Time, id: SessionId, remember: bool, out: &mut MachineOutput) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.state = SessionState::Broken;
        let address = session.address.clone();
        self.retire(id);
        self.deadlines.cancel(&SessionTimer::Session(id));
        if remember {
            self.failed.insert(now, address, ());
        }
        self.drop_if_unused(id, out);
    }

    /// Forgets a peer whose connection is gone.
    pub(super) fn forget_peer(&mut self, key: &PeerKey) {
        self.peers.remove(&key.connection);
        self.deadlines.cancel(&SessionTimer::Heartbeat(key.connection));
    }

    /// `number` no longer uses the session.
    pub(super) fn leave(&mut self, now: Time, id: SessionId, number: RequestNumber, out: &mut MachineOutput) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.users.remove(&number);
        if !session.users.is_empty() {
            return;
        }
        if session.has_address() && !self.closed {
            self.deadlines.set(SessionTimer::Idle(id), now + self.ttl);
        } else {
            self.drop_if_unused(id, out);
        }
    }

    /// Keeps the lease alive for `user` on the connected ones of these peers, from this moment on.
    pub(super) fn start_heartbeats(
        &mut self,
        now: Time,
        connections: &[u64],
        user: RequestNumber,
        lease: &LeaseName,
        period: Duration,
        out: &mut MachineOutput,
    ) {
        for connection in connections {
            let Some(peer) = self.peers.get_mut(connection).filter(|peer| peer.connected) else { continue };
            match peer.heartbeats.get_mut(lease) {
                Some(heartbeat) => {
                    heartbeat.users.insert(user);
                    heartbeat.period = heartbeat.period.min(period);
                }
                None => {
                    peer.heartbeats.insert(lease.clone(), LeaseHeartbeat { period, users: BTreeSet::from([user]) });
                    let message = heartbeat([lease], &self.reader);
                    out.send(PeerRef::Outbound(peer.key.clone()), message);
                }
            }
            let timer = SessionTimer::Heartbeat(*connection);
            let due = now + period;
            if self.deadlines.get(&timer).is_none_or(|set| due < set) {
                self.deadlines.set(timer, due);
            }
        }
    }

    /// `user` no longer needs the lease.
    pub(super) fn stop_heartbeats(&mut self, id: SessionId, user: RequestNumber, lease: &LeaseName) {
        let Some(session) = self.sessions.get(&id) else { return };
        for connection in &session.peers {
            let Some(peer) = self.peers.get_mut(connection) else { continue };
            let Some(heartbeat) = peer.heartbeats.get_mut(lease) else { continue };
            heartbeat.users.remove(&user);
            if !heartbeat.users.is_empty() {
                continue;
            }
            peer.heartbeats.remove(lease);
            if peer.heartbeats.is_empty() {
                self.deadlines.cancel(&SessionTimer::Heartbeat(*connection));
            }
        }
    }

    /// Sends what is due and forgets what is unused; gives a session that was not ready in time.
    pub(super) fn advance(&mut self, now: Time, out: &mut MachineOutput) -> Option<SessionId> {
        self.failed.advance(now);
        while let Some(timer) = self.deadlines.expired(now) {
            match timer {
                SessionTimer::Session(id) => return Some(id),
                SessionTimer::Idle(id) => {
                    if self.sessions.get(&id).is_some_and(|session| session.users.is_empty()) {
                        self.break_off(now, id, false, out);
                    }
                }
                SessionTimer::Heartbeat(connection) => self.send_heartbeats(now, connection, out),
            }
        }
        None
    }

    pub(super) fn next_timeout(&mut self) -> Option<Time> {
        [self.deadlines.next(), self.failed.next_due()].into_iter().flatten().min()
    }

    /// Sessions that nobody uses go now, the others when their users leave; no new one is made.
    pub(super) fn close(&mut self, out: &mut MachineOutput) {
        self.closed = true;
        let ids: Vec<SessionId> = self.sessions.keys().copied().collect();
        for id in ids {
            self.drop_if_unused(id, out);
        }
    }

    fn send_heartbeats(&mut self, now: Time, connection: u64, out: &mut MachineOutput) {
        let Some(peer) = self.peers.get(&connection) else { return };
        let Some(period) = peer.heartbeats.values().map(|heartbeat| heartbeat.period).min() else { return };
        let leases: Vec<&LeaseName> = peer.heartbeats.keys().collect();
        for batch in leases.chunks(MAX_HEARTBEAT_REQUESTS) {
            let message = heartbeat(batch.iter().copied(), &self.reader);
            out.send(PeerRef::Outbound(peer.key.clone()), message);
        }
        self.deadlines.set(SessionTimer::Heartbeat(connection), now + period);
    }

    fn drop_if_unused(&mut self, id: SessionId, out: &mut MachineOutput) {
        if self.sessions.get(&id).is_none_or(|session| !session.users.is_empty()) {
            return;
        }
        self.retire(id);
        let Some(session) = self.sessions.remove(&id) else { return };
        self.deadlines.cancel(&SessionTimer::Session(id));
        self.deadlines.cancel(&SessionTimer::Idle(id));
        for connection in session.peers {
            self.deadlines.cancel(&SessionTimer::Heartbeat(connection));
            let queued = session.queued.iter().any(|(key, _)| key.connection == connection);
            if let (Some(peer), false) = (self.peers.remove(&connection), queued) {
                out.push(Action::Disconnect { peer: peer.key });
            }
        }
    }
}
