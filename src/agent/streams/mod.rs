//! Streams: a TCP connection beside UCX's to each peer that only TCP reaches, by which host memory is read.
//!
//! UCX sends what it is given from a copy in the kernel, and a message of scattered blocks is gathered before and put in
//! place after. Here the peer lends the pages of the blocks to its socket, and the kernel on this side puts what arrives
//! where it belongs, many places a call: one copy is left, which on the peer's side no processor makes at all.
//!
//! The asking side connects. It asks for a stream over UCX when a transfer is worth one, is told addresses and a ticket
//! ([`connect`]), and uses it from when the peer has answered on it; until then, and where that fails, messages carry the
//! bytes ([`served`](crate::agent::rpc::server)). Requests still go by UCX; on the stream come the bytes of one chunk after the other,
//! each behind its number ([`send`], [`recv`]). A stream that breaks while chunks are under way takes the peer's
//! connection along, as its processes or the network have broken; an idle one is asked for again.
//!
//! The sockets are in one epoll descriptor, which wakes the loop for changes. Those with something to do are tried in each
//! turn, which costs a system call and finds news some microseconds earlier.
//!
//! Pages that are lent show what is written to them until the reader has them. So the reader says which chunks it has, with
//! its next request or by itself when it waits for none, and regions stay registered until then.

mod connect;
mod recv;
mod send;
mod wire;

use std::collections::{BTreeSet, HashMap};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::sockopt;

use connect::{Attempt, Stranger};
use recv::Inbound;
use send::Outbound;
#[cfg(feature = "fuzzing")]
pub(crate) use wire::Offer;
use wire::Secret;
#[cfg(feature = "fuzzing")]
pub(crate) use wire::{Heading, ticket_of};

use crate::agent::core::ids::PeerId;
use crate::agent::engine::Engine;
use crate::agent::thread::affinity::KeepApart;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::mem::socket::PagePipe;
use crate::mem::thread::block_broken_pipe_signals;

/// What one stream moves before others, and the rest of the loop, have their turn.
const TURN_BYTES: u64 = 1 << 20;
/// How often the sockets' changes are looked at while the loop does not sleep.
const LOOK_INTERVAL: Duration = Duration::from_micros(200);
/// Changes taken by one look.
const CHANGES: usize = 64;
/// What the changes of listeners and of connections of unknown peers are known by: no peer's number.
const DOOR: u64 = u64::MAX;
/// Set in what the changes of a stream are known by that brings bytes; the lower bits are the peer's number.
const INBOUND: u64 = 1 << 63;

/// All streams of an agent.
#[derive(Default)]
pub(crate) struct Streams {
    /// Watches the sockets. `None` until there is one.
    changes: Option<OwnedFd>,
    /// Whether they have changed since the last look.
    changed: bool,
    looked_at: Option<Instant>,
    listeners: Vec<TcpListener>,
    strangers: Vec<Stranger>,
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
    keep_apart: KeepApart,
    /// What connections avoid congestion with on this host, unless told otherwise.
    congestion: Option<String>,
    /// Of connections that are refused.
    log: LogLimit,
}

impl Streams {
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
        let meeting = self.attempts.values().map(|attempt| attempt.deadline).min();
        self.strangers.iter().map(|stranger| stranger.deadline).chain(meeting).min()
    }

    /// Watches a socket for changes.
    fn watch(&mut self, socket: impl AsFd, known_by: u64) -> Result<()> {
        let failed =
            |e| Error::new(ErrorKind::Io, format!("watching a stream: {e}; is the limit of open files too low?"));
        let changes = match self.changes.take() {
            Some(changes) => changes,
            None => {
                block_broken_pipe_signals()
                    .map_err(|e| Error::new(ErrorKind::Io, format!("blocking the signal of broken pipes: {e}")))?;
                epoll::create(CreateFlags::CLOEXEC).map_err(failed)?
            }
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

impl Engine {
    /// Closes the streams to and from a peer that is gone.
    pub(crate) fn close_streams(&mut self, id: PeerId) {
        self.streams.attempts.remove(&id);
        self.streams.inbound.remove(&id);
        self.streams.reading.remove(&id);
        self.close_outbound(id);
    }

    /// Moves what the streams have to move. Returns whether there was anything.
    pub(crate) fn drive_streams(&mut self, now: Instant) -> bool {
        if self.streams.changes.is_none() {
            return false;
        }
        let due = self.streams.looked_at.is_none_or(|at| now.saturating_duration_since(at) >= LOOK_INTERVAL);
        let mut any = false;
        if self.streams.changed || due {
            any |= self.look_at_streams(now);
        }
        let writing: Vec<PeerId> = self.streams.writing.iter().copied().collect();
        for id in writing {
            any |= self.send_stream(id, now);
        }
        let reading: Vec<PeerId> = self.streams.reading.iter().copied().collect();
        for id in reading {
            any |= self.receive_stream(id, now);
        }
        any
    }

    /// Takes the changes of sockets. Returns whether there were any.
    fn look_at_streams(&mut self, now: Instant) -> bool {
        self.streams.changed = false;
        self.streams.looked_at = Some(now);
        self.end_late_meetings(now);
        let mut changes = Vec::with_capacity(CHANGES);
        let Some(descriptor) = &self.streams.changes else { return false };
        // A signal is no matter: what has changed is there at the next look.
        let found = epoll::wait(descriptor, spare_capacity(&mut changes), Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        if found.is_err() {
            self.streams.changed = true;
            return false;
        }
        self.streams.changed = changes.len() == CHANGES;
        let mut door = false;
        for change in &changes {
            match change.data.u64() {
                DOOR => door = true,
                peer if peer & INBOUND != 0 => self.inbound_changed(PeerId::from_raw(peer & !INBOUND), now),
                peer => self.outbound_changed(PeerId::from_raw(peer), now),
            }
        }
        if door {
            self.answer_door(now);
        }
        !changes.is_empty()
    }
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
