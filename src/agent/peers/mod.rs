//! Connections to other agents: made lazily, agreed on by hellos, lost once.
//!
//! Either side may connect, both may at once. Each side numbers its connection at random, says its number in its
//! hello, and repeats the other's: so a side knows which life of the connection a message belongs to. A hello that
//! repeats no number from a peer that is known by another one says that the peer has made a new connection, because
//! it lost the old: the old one is then lost here too. Which connection is the newer one tells the number of the hello
//! ([`hello_numbers`]).

pub(crate) mod admission;
pub(crate) mod close;
mod connect;
mod connection;
mod departed;
mod gone;
pub(crate) mod hello;
mod hello_numbers;
pub(crate) mod imports;
pub(crate) mod inbox;
pub(crate) mod locality;
mod peer;
pub(crate) mod reach;
mod secure;
mod table;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use self::admission::Admission;
use self::close::ClosingEndpoints;
use self::departed::Departed;
use self::gone::Gone;
use self::hello_numbers::HelloNumbers;
use self::inbox::{InboxItem, reserve};
pub(crate) use self::peer::Peer;
use self::table::PeerTable;
use super::core::effect::{Effect, Effects};
use super::core::event::Event;
use super::core::frame::{Frame, FrameKind};
use super::core::ids::PeerId;
use super::core::in_flight::Operations;
use super::core::live::Live;
use super::core::route::{self, Route};
use super::core::stats::{AgentStats, PeerStats, Traffic};
use super::revocation::revoked::RevokedRegions;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::net::local_addresses;
use crate::proto::ids::Incarnation;
use crate::secret::Key;
use crate::sys::process::ProcessPlace;
use crate::ucx::{self, Worker};

/// This agent, as peers see it.
pub(crate) struct Local {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    /// The worker's address in its envelope.
    pub(crate) address: Vec<u8>,
    /// Where this process is.
    pub(crate) place: Option<ProcessPlace>,
    /// Whether device memory of peers on this host is mapped here.
    pub(crate) device_copies: bool,
    /// How long a peer may take to say hello.
    pub(crate) connect_timeout: Duration,
}

/// The means to connect to peers and to talk to them, beside the peers.
pub(crate) struct Io<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) operations: &'a mut Operations,
    pub(crate) live: &'a Live,
    /// Bytes of messages that the agent's owner has not taken yet.
    pub(crate) unread_bytes: u64,
    pub(crate) stats: &'a mut AgentStats,
    pub(crate) effects: &'a mut Effects,
    pub(crate) now: Instant,
}

/// All connections.
pub(crate) struct Peers {
    local: Local,
    key: Option<Key>,
    hello_numbers: HelloNumbers,
    by_id: PeerTable,
    by_incarnation: HashMap<Incarnation, PeerId>,
    by_endpoint: HashMap<u64, PeerId>,
    admission: Admission,
    closing: ClosingEndpoints,
    /// While the agent ends: until when messages that were sent before may leave.
    flush_until: Option<Instant>,
    /// The traffic of connections that are over.
    departed: Departed,
    gone: Gone,
    /// The regions that hellos call revoked.
    pub(crate) revoked: RevokedRegions,
    /// Whether no more are connected to.
    is_shut: bool,
    /// Whether none are connected to for now.
    is_paused: bool,
    /// Limits the log of dropped messages.
    drop_log: LogLimit,
}

impl Peers {
    pub(crate) fn new(local: Local, key: Option<Key>) -> Self {
        Peers {
            local,
            key,
            hello_numbers: HelloNumbers::default(),
            by_id: PeerTable::default(),
            by_incarnation: HashMap::new(),
            by_endpoint: HashMap::new(),
            admission: Admission::default(),
            closing: ClosingEndpoints::default(),
            flush_until: None,
            departed: Departed::default(),
            gone: Gone::default(),
            revoked: RevokedRegions::default(),
            is_shut: false,
            is_paused: false,
            drop_log: LogLimit::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn get(&self, id: PeerId) -> Result<&Peer> {
        self.by_id.get(id).ok_or_else(|| id.unknown())
    }

    pub(crate) fn get_mut(&mut self, id: PeerId) -> Result<&mut Peer> {
        self.by_id.get_mut(id).ok_or_else(|| id.unknown())
    }

    /// Its name, for a log line.
    pub(crate) fn name(&self, id: PeerId) -> &str {
        self.get(id).map_or("a lost agent", |peer| peer.name.as_str())
    }

    pub(crate) fn find(&self, incarnation: Incarnation) -> Option<PeerId> {
        self.by_incarnation.get(&incarnation).copied()
    }

    /// Bytes were asked of a peer, or have come from it.
    pub(crate) fn note_reading(&mut self, id: PeerId) {
        self.by_id.note_reading(id);
    }

    /// Whether bytes that were asked of any peer come so fast that it is worth spinning for them.
    pub(crate) fn has_fast_reads(&mut self, now: Instant) -> bool {
        self.by_id.has_fast_reads(now)
    }

    pub(crate) fn ids(&self) -> Vec<PeerId> {
        self.by_id.all().map(|peer| peer.id).collect()
    }

    /// How many peers were visited by going through all of them.
    #[cfg(test)]
    pub(crate) fn visits(&self) -> usize {
        self.by_id.visits()
    }

    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> u64 {
        self.by_id.held_bytes()
    }

    /// This agent, as peers see it.
    pub(crate) fn local(&self) -> &Local {
        &self.local
    }

    /// Whether what is sent is sealed.
    pub(crate) fn are_keyed(&self) -> bool {
        self.key.is_some()
    }

    /// The next time at which a peer must have said hello, or an endpoint is closed by force.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.by_id.deadline().into_iter().chain(self.closing.deadline()).min()
    }

    /// Endpoints that are open, those being closed included.
    pub(crate) fn endpoints(&self) -> usize {
        self.by_id.len() + self.closing.endpoints()
    }

    /// No more peers are connected to from now on; those that there are get what was sent to them until `flush_until`.
    pub(crate) fn shut(&mut self, flush_until: Option<Instant>) {
        (self.is_shut, self.flush_until) = (true, flush_until);
    }

    /// Whether none are connected to from now on, because UCX's worker is replaced.
    pub(crate) fn pause(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }

    fn check_open(&self) -> Result<()> {
        if self.is_shut {
            return Err(Error::new(ErrorKind::ShutDown, "the agent is shutting down"));
        }
        if self.is_paused {
            return Err(Error::new(ErrorKind::Unreachable, "this agent opens its data port anew; connect again"));
        }
        Ok(())
    }

    fn insert(&mut self, peer: Peer, live: &Live) {
        live.lock().peers.insert(peer.id, Arc::clone(&peer.connection.unsent));
        self.by_incarnation.insert(peer.incarnation, peer.id);
        self.by_endpoint.insert(peer.connection.endpoint.id(), peer.id);
        self.by_id.insert(peer);
    }

    fn remove(&mut self, id: PeerId, live: &Live) -> Option<Peer> {
        let peer = self.by_id.remove(id)?;
        live.lock().peers.remove(&id);
        self.by_incarnation.remove(&peer.incarnation);
        self.by_endpoint.remove(&peer.connection.endpoint.id());
        if let Some(pid) = peer.locality.process() {
            self.gone.note(peer.incarnation, pid);
        }
        // One that came by itself and had no part in transfers of this side may have given itself any name.
        if peer.vouched || peer.traffic != Traffic::default() {
            self.departed.add(id, &peer.name, &peer.traffic, |name| self.by_id.has_name(name));
        }
        Some(peer)
    }

    /// The traffic of a peer, also after its connection is over: its transfers end then.
    pub(crate) fn traffic(&mut self, id: PeerId) -> Option<&mut Traffic> {
        match self.by_id.get_mut(id) {
            Some(peer) => Some(&mut peer.traffic),
            None => self.departed.traffic(id),
        }
    }

    /// The figures of each peer, by name. `route` tells how one is reached.
    pub(crate) fn stats(&self, route: impl Fn(&Peer) -> Option<Route>) -> Vec<PeerStats> {
        let mut by_name = BTreeMap::<&str, (Option<&Peer>, Traffic)>::new();
        for (name, traffic) in self.departed.iter() {
            by_name.entry(name).or_default().1.merge(traffic);
        }
        for peer in self.by_id.all() {
            let (told, sum) = by_name.entry(&peer.name).or_default();
            // One of several that is in use.
            let rank = |peer: &Peer| (peer.is_ready(), peer.vouched);
            if told.is_none_or(|other| rank(peer) >= rank(other)) {
                *told = Some(peer);
            }
            sum.merge(&peer.traffic);
        }
        let told = |(name, (peer, sum)): (&str, (Option<&Peer>, Traffic))| {
            PeerStats::new(name.to_owned(), peer.and_then(&route), &sum)
        };
        by_name.into_iter().map(told).collect()
    }

    /// Checks again whether a peer of this host has proved which process it is.
    pub(crate) fn find_neighbour(&mut self, id: PeerId) -> Result<()> {
        let Peer { name, incarnation, locality, .. } = self.by_id.get_mut(id).ok_or_else(|| id.unknown())?;
        locality.find_neighbour((name, *incarnation), &self.local.address);
        Ok(())
    }

    /// As [`Peers::find_neighbour`], for every peer.
    pub(crate) fn find_neighbours(&mut self) {
        for Peer { name, incarnation, locality, .. } in self.by_id.all_mut() {
            locality.find_neighbour((name, *incarnation), &self.local.address);
        }
    }

    /// Reserves room for a message in the peer's send queue, as the handle does before it queues one.
    pub(crate) fn reserve(&self, id: PeerId, len: usize, limit: u64) -> Result<()> {
        reserve(&self.get(id)?.connection.unsent, len, limit)
    }

    /// Gives back what was reserved for a message that is not sent.
    pub(crate) fn release(&self, id: PeerId, reserved: Option<usize>) {
        if let (Ok(peer), Some(len)) = (self.get(id), reserved) {
            peer.connection.unsent.fetch_sub(len as u64, Ordering::Relaxed);
        }
    }

    /// Sends a message for which room was reserved.
    pub(crate) fn send(&mut self, id: PeerId, data: Vec<u8>, io: &mut Io<'_>) -> Result<()> {
        let connection = &mut self.get_mut(id)?.connection;
        let frame = connection.frame(FrameKind::Data, connection.next_sequence);
        let reserved = data.len() as u64;
        connection.next_sequence += 1;
        io.stats.messages_sent += 1;
        connection.post(frame, data, reserved, io.operations).inspect_err(|error| {
            // A gap in the numbers would hold up all later messages for ever.
            io.effects.lose(id, error.clone());
        })
    }

    /// UCX is done with a message.
    pub(crate) fn message_ended(
        &mut self,
        id: PeerId,
        reserved: u64,
        result: Result<()>,
        effects: &mut Effects,
        now: Instant,
    ) {
        let Ok(peer) = self.get_mut(id) else {
            if result.is_err() {
                self.closing.failed(id);
            }
            return;
        };
        peer.connection.unsent.fetch_sub(reserved, Ordering::Relaxed);
        peer.liveness.sent(false, now);
        if let Err(error) = result {
            // As above: the peer would wait for it for ever.
            effects.lose(id, error.context("a message could not be sent"));
        }
    }

    /// Takes a frame that arrived. Returns it if it is a request or reply.
    ///
    /// # Errors
    /// The frame was dropped.
    pub(crate) fn receive(
        &mut self,
        header: &[u8],
        data: Vec<u8>,
        io: &mut Io<'_>,
    ) -> Result<Option<(PeerId, Frame, Vec<u8>)>> {
        let frame = Frame::decode(header)?;
        let (frame, data) = self.unwrap(frame, header, data)?;
        if matches!(frame.kind, FrameKind::Hello | FrameKind::SealedHello | FrameKind::SealedAnswer) {
            return self.on_hello(frame, &data, io).map(|()| None);
        }
        let Some(id) = self.find(frame.incarnation) else {
            return Err(Error::not_found(format!("agent {} did not say hello", frame.incarnation)));
        };
        let peer = self.get_mut(id)?;
        if !peer.connection.is_current(frame.connection) {
            return Err(Error::not_found(format!("it belongs to an earlier connection of agent {}", peer.name)));
        }
        peer.silent = false;
        peer.liveness.heard(io.now);
        let item = match frame.kind {
            FrameKind::Goodbye => InboxItem::Goodbye,
            FrameKind::Data => InboxItem::Data(data),
            _ => return Ok(Some((id, frame, data))),
        };
        let due = self.by_id.take_message(id, frame.sequence, item);
        let due = due.and_then(|due| self.check_waiting(id, io.unread_bytes).map(|()| due));
        let due = due.inspect_err(|error| {
            if error.kind() == ErrorKind::Exhausted {
                io.effects.lose(id, error.clone());
            }
        })?;
        for item in due {
            match item {
                InboxItem::Data(data) => {
                    io.stats.messages_received += 1;
                    io.effects.push(Effect::Tell(Event::Message { peer: id, data }));
                }
                InboxItem::Goodbye => {
                    self.get_mut(id)?.connection.has_left = true;
                    io.effects.lose(id, Error::new(ErrorKind::PeerDied, "the peer closed the connection"));
                }
            }
        }
        Ok(None)
    }

    /// Counts a message that was dropped.
    pub(crate) fn dropped(&mut self, error: &Error, stats: &mut AgentStats, now: Instant) {
        stats.messages_dropped += 1;
        if let Some(left_out) = self.drop_log.pass(now) {
            let name = &self.local.name;
            log::warn!("agent {name}: a message was dropped: {error} ({left_out} similar lines suppressed)");
        }
    }

    /// Messages were refused that were announced by rendezvous.
    pub(crate) fn announcements_refused(&mut self, now: Instant) {
        if let Some(left_out) = self.drop_log.pass(now) {
            log::warn!(
                "agent {}: a message was refused: it was announced by rendezvous, which no agent does unless UCX_RNDV_THRESH \
                 is set for an older kvferry ({left_out} similar lines suppressed)",
                self.local.name
            );
        }
    }

    /// The connection is broken or given up: its id becomes stale, its owner is told. Closes the endpoint by force, which
    /// ends its operations with errors; a peer that still listens is told. Both come later where memory of it is being copied
    /// (`is_copying`), which nothing ends: until then it waits with its memory.
    pub(crate) fn lose(&mut self, id: PeerId, error: Error, is_copying: bool, io: &mut Io<'_>) {
        if let Some(mut peer) = self.remove(id, io.live) {
            log::info!("agent {}: {id} is lost: {error}", self.local.name);
            // Nobody takes the event any more.
            if self.is_shut {
                self.tell_undelivered(&peer.name, peer.connection.undelivered(io.operations), error.message());
            }
            let given_up = peer.given_up();
            if is_copying && peer.connection.listens() {
                self.closing.leave_late(peer, true, io.operations);
            } else {
                peer.connection.say_goodbye(io.operations);
                drop(peer);
            }
            io.stats.peers_lost += 1;
            io.effects.push(Effect::Tell(Event::PeerLost { peer: id, error: error.clone() }));
            io.effects.push(Effect::PeerGone { peer: id, error, given_up });
        }
    }

    /// Drops the connection in order, and later where memory of the peer is being copied, as in [`Peers::lose`].
    pub(crate) fn disconnect(&mut self, id: PeerId, is_copying: bool, io: &mut Io<'_>) -> Result<()> {
        let peer = self.remove(id, io.live).ok_or_else(|| id.unknown())?;
        if is_copying && peer.connection.listens() {
            self.closing.leave_late(peer, false, io.operations);
        } else {
            self.close(peer, io);
        }
        let error = Error::new(ErrorKind::Cancelled, "its peer was disconnected by this side");
        io.effects.push(Effect::PeerGone { peer: id, error, given_up: None });
        Ok(())
    }

    /// Loses the peer of an endpoint that UCX gave up.
    pub(crate) fn endpoint_failed(&mut self, endpoint: u64, status: ucx::Status, effects: &mut Effects) {
        let Some(id) = self.by_endpoint.get(&endpoint).copied() else { return };
        let (name, ready) = self.get(id).map_or(("", false), |peer| (peer.name.as_str(), peer.is_ready()));
        let error = if ready {
            Error::new(
                ErrorKind::PeerDied,
                format!("the connection to agent {name} broke ({status}): it died, restarted, or closed it"),
            )
        } else {
            Error::new(
                ErrorKind::Unreachable,
                format!(
                    "agent {name} could not be reached ({status}): is it running, and the network open ({})?",
                    self.get(id).map_or_else(|_| String::new(), |peer| tried(&peer.connection.first_lanes))
                ),
            )
        };
        effects.lose(id, error);
    }

    /// Gives up on peers that did not say hello in time, and on endpoints that did not close in time.
    pub(crate) fn check_deadlines(&mut self, operations: &Operations, effects: &mut Effects, now: Instant) {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let hint = match self.key {
            Some(_) => " Has it the same key (key_file, KVFERRY_KEY_FILE)?",
            None => " If it has a key (key_file, KVFERRY_KEY_FILE), this agent needs it too",
        };
        for peer in self.by_id.overdue(now) {
            let error = Error::new(
                ErrorKind::Unreachable,
                format!(
                    "agent {} did not answer within {:?}: is it running, and the network open ({})?{hint}",
                    peer.name,
                    self.local.connect_timeout,
                    tried(&peer.connection.first_lanes)
                ),
            );
            effects.lose(peer.id, error);
        }
        self.check_closing(operations, now);
    }

    /// Whether no endpoint is being closed.
    pub(crate) fn have_closed(&self) -> bool {
        self.closing.endpoints() == 0
    }
}

/// How UCX tried to reach a peer, by its description of the endpoint.
fn tried(lanes: &str) -> String {
    route::tried(lanes, &local_addresses().unwrap_or_default())
}

fn two_addresses(name: &str, incarnation: Incarnation) -> Error {
    Error::corrupt(format!(
        "agent {name} ({incarnation}) is connected by another address than this one: one of the two is not that agent"
    ))
}
