//! Streams: a TCP connection beside UCX's to each peer that only TCP reaches, by which host memory is read.
//!
//! UCX sends what it is given from a copy in the kernel, and a message of scattered blocks is gathered before and put in
//! place after. Here the peer lends the pages of the blocks to its socket, and the kernel on this side puts what arrives
//! where it belongs, many places a call: one copy is left, which on the peer's side no processor makes at all.
//!
//! The asking side connects. It asks for a stream over UCX when a transfer is worth one, is told addresses and a ticket
//! ([`accept`], [`connect`]), and uses it from when the peer has answered on it; until then, and where that fails,
//! messages carry the bytes ([`rpc`](super::rpc)). Requests still go by UCX; on the stream come the bytes of one chunk
//! after the other, each behind its number ([`send`], [`recv`]). A stream that breaks while chunks are under way takes
//! the peer's connection along, as its processes or the network have broken; an idle one is asked for again.
//!
//! The sockets are in one epoll descriptor, which wakes the loop for changes. Those with something to do are tried in each
//! turn, which costs a system call and finds news some microseconds earlier. The loop spins for them only while they are
//! fast ([`pace`](super::rpc::pace)).
//!
//! Pages that are lent show what is written to them until the reader has them. So the reader says which chunks it has, with
//! its next request or by itself when it waits for none, and regions stay registered until then.

mod accept;
mod connect;
mod recv;
mod send;
pub(crate) mod wire;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::net::{TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::sockopt;

use self::accept::Unidentified;
use self::connect::Attempt;
use self::recv::Inbound;
use self::send::Outbound;
use self::wire::Secret;
use super::core::config::AgentConfig;
use super::core::effect::Effects;
use super::core::ids::PeerId;
use super::core::iov::Iov;
use super::core::regions::Regions;
use super::peers::Peers;
use super::rpc::client::Client;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::proto::ids::Incarnation;
use crate::sys::socket::{PagePipe, Stretch, Stretches};

/// What one stream moves before others, and the rest of the loop, have their turn.
const TURN_BYTES: u64 = 1 << 20;
/// How often the sockets' changes are looked at while the loop does not sleep.
const LOOK_INTERVAL: Duration = Duration::from_micros(200);
/// Changes taken by one look.
const CHANGES: usize = 64;
/// What the changes of listeners and of connections of unknown peers are known by: no peer's number.
const LISTENING: u64 = u64::MAX;
/// Set in what the changes of a stream are known by that brings bytes; the lower bits are the peer's number.
const INBOUND: u64 = 1 << 63;

/// All streams of an agent.
pub(crate) struct Streams {
    /// The agent's name, for log lines.
    name: String,
    /// The ports that may be listened at; any free one if `None`.
    ports: Option<RangeInclusive<u16>>,
    /// Where among them to begin, so that agents of one host do not all try the same.
    first_port: u64,
    /// Watches the sockets. `None` until there is one.
    changes: Option<OwnedFd>,
    /// Whether they have changed since the last look.
    changed: bool,
    looked_at: Option<Instant>,
    listeners: Vec<TcpListener>,
    unidentified: Vec<Unidentified>,
    /// Whom a ticket was given to.
    tickets: HashMap<Secret, PeerId>,
    /// Streams from peers that are being made.
    attempts: HashMap<PeerId, Attempt>,
    inbound: HashMap<PeerId, Inbound>,
    outbound: HashMap<PeerId, Outbound>,
    /// Streams from which bytes are expected, or that have changed.
    reading: BTreeSet<PeerId>,
    /// Streams for which there is something to send.
    writing: BTreeSet<PeerId>,
    /// `None` until bytes are sent, and where there can be none.
    pipe: Option<PagePipe>,
    /// What connections avoid congestion with on this host, unless told otherwise.
    congestion: Option<String>,
    /// Of connections that are refused.
    log: LogLimit,
}

/// What streams take of others.
pub(crate) struct Io<'a> {
    pub(crate) peers: &'a mut Peers,
    pub(crate) regions: &'a mut Regions,
    pub(crate) rpc: &'a RefCell<Client>,
    pub(crate) effects: &'a mut Effects,
    pub(crate) now: Instant,
}

impl Streams {
    pub(crate) fn new(config: &AgentConfig, incarnation: Incarnation) -> Self {
        Streams {
            name: config.name.clone(),
            ports: config.tcp_ports(),
            first_port: incarnation.0,
            changes: None,
            changed: false,
            looked_at: None,
            listeners: Vec::new(),
            unidentified: Vec::new(),
            tickets: HashMap::new(),
            attempts: HashMap::new(),
            inbound: HashMap::new(),
            outbound: HashMap::new(),
            reading: BTreeSet::new(),
            writing: BTreeSet::new(),
            pipe: None,
            congestion: None,
            log: LogLimit::default(),
        }
    }

    /// What to wait on, if anything.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.changes.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// The descriptor was found readable.
    pub(crate) fn note_changes(&mut self) {
        self.changed = true;
    }

    /// When something must have happened.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let attempts = self.attempts.values().map(|attempt| attempt.deadline);
        self.unidentified.iter().map(|unidentified| unidentified.deadline).chain(attempts).min()
    }

    /// Streams for which there is something to send.
    pub(crate) fn writing(&self) -> Vec<PeerId> {
        self.writing.iter().copied().collect()
    }

    /// Streams from which something may have come.
    pub(crate) fn reading(&self) -> Vec<PeerId> {
        self.reading.iter().copied().collect()
    }

    /// Whether any stream has something to move, or may have.
    pub(crate) fn are_moving(&self) -> bool {
        self.changed || !self.writing.is_empty() || !self.reading.is_empty()
    }

    /// Closes the streams to and from a peer that is gone.
    pub(crate) fn close(&mut self, id: PeerId, regions: &mut Regions) {
        self.attempts.remove(&id);
        self.inbound.remove(&id);
        self.reading.remove(&id);
        self.close_outbound(id, regions);
    }

    /// Takes the changes of sockets if there may be any. Returns whether there were.
    pub(crate) fn look(&mut self, io: &mut Io<'_>) -> bool {
        let Some(descriptor) = &self.changes else { return false };
        let due = self.looked_at.is_none_or(|at| io.now.saturating_duration_since(at) >= LOOK_INTERVAL);
        if !(self.changed || due) {
            return false;
        }
        let mut changes = Vec::with_capacity(CHANGES);
        // A signal is no matter: what has changed is there at the next look.
        let found = epoll::wait(descriptor, spare_capacity(&mut changes), Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        self.looked_at = Some(io.now);
        self.changed = found.is_err() || changes.len() == CHANGES;
        let mut listening = false;
        for change in &changes {
            match change.data.u64() {
                LISTENING => listening = true,
                peer if peer & INBOUND != 0 => self.inbound_changed(PeerId::from_raw(peer & !INBOUND), io),
                peer => self.outbound_changed(PeerId::from_raw(peer), io),
            }
        }
        if listening {
            self.accept(io);
        }
        // After what has come: this process may have paused.
        self.end_late(io);
        !changes.is_empty()
    }

    /// Gives up on who takes too long.
    fn end_late(&mut self, io: &mut Io<'_>) {
        if self.deadline().is_some_and(|deadline| deadline <= io.now) {
            self.end_late_accepts(io);
            self.end_late_attempts(io);
        }
    }

    /// Watches a socket for changes.
    fn watch(&mut self, socket: impl AsFd, known_by: u64) -> Result<()> {
        let failed =
            |e| Error::new(ErrorKind::Io, format!("watching a stream: {e}; is the limit of open files too low?"));
        let changes = match self.changes.take() {
            Some(changes) => changes,
            None => epoll::create(CreateFlags::CLOEXEC).map_err(failed)?,
        };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let added = epoll::add(&changes, socket, EventData::new_u64(known_by), flags).map_err(failed);
        self.changes = Some(changes);
        added
    }

    /// Knows a watched socket by another number from now on.
    fn watch_as(&self, socket: impl AsFd, known_by: u64) -> Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let Some(changes) = &self.changes else { return Ok(()) };
        epoll::modify(changes, socket, EventData::new_u64(known_by), flags)
            .map_err(|e| Error::new(ErrorKind::Io, format!("watching a stream: {e}")))
    }
}

/// Where the bytes of a chunk are.
fn stretches(iovs: &[Iov]) -> Result<Stretches> {
    let all: Result<Vec<Stretch>> =
        iovs.iter().map(|iov| Stretch::new(&iov.range, iov.offset, iov.len.into())).collect();
    all.map(Stretches::new)
}

/// Sets up a socket that was connected or accepted. Without these it works, worse.
fn prepare(socket: &TcpStream) {
    let _ = socket.set_nodelay(true);
    // A connection of which the network has lost the other end, or a box between them the memory, ends within a minute.
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_keepidle(socket, Duration::from_secs(20));
    let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepcnt(socket, 3);
}
