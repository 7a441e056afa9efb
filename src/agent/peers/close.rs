//! Leaving a peer in order: say goodbye, let what was posted get out, then close.
//!
//! The goodbye is a message of its own, because over TCP UCX keeps one socket for both directions: a side that closes
//! its endpoint leaves the socket open for the other side's, which would notice nothing until UCX's keep-alive
//! (20 seconds).
//!
//! A peer takes the goodbye, or the end of the connection, for the end of all that this side does with its memory. So a peer
//! whose memory is being copied, by a call of the kernel's or by a device, is left when that has ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::locality::Locality;
use super::{Io, Peer, Peers};
use crate::agent::core::effect::GivenUp;
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::core::in_flight::{InFlight, Operations};
use crate::proto::ids::Incarnation;
use crate::sys::ended::has_ended;
use crate::ucx::{Endpoint, Posted};

/// The time for the goodbye and all that was posted before it; then the endpoint is closed by force.
const LIMIT: Duration = Duration::from_secs(1);

/// An endpoint that is left but not yet closed.
struct Closing {
    /// Closed by force when this is dropped.
    _endpoint: Endpoint,
    peer: PeerId,
    name: String,
    /// Messages that UCX has given up.
    failed: u64,
    /// When it is closed by force.
    at: Instant,
}

/// A peer that is left when the copies of its memory have ended.
struct Late {
    peer: Peer,
    by_force: bool,
}

/// Endpoints that are not of peers any more and not yet closed.
#[derive(Default)]
pub(super) struct ClosingEndpoints {
    /// By the token of their last flush.
    flushed: HashMap<u64, Closing>,
    /// When each of these is closed by force.
    due: BTreeSet<(Instant, u64)>,
    late: BTreeMap<PeerId, Late>,
}

impl ClosingEndpoints {
    pub(super) fn endpoints(&self) -> usize {
        self.flushed.len() + self.late.len()
    }

    /// Leaves a peer when [`Peers::leave`] says so. It gets no request of this side's any more, and what it sends is dropped.
    pub(super) fn leave_late(&mut self, mut peer: Peer, by_force: bool, operations: &mut Operations) {
        // As if the connection had ended: it begins no copy of this side's memory.
        peer.locality.witness.end();
        if peer.locality.knows_uses {
            peer.connection.say(FrameKind::InUse, 0, operations);
        }
        self.late.insert(peer.id, Late { peer, by_force });
    }

    /// Whether an agent is to be left late.
    pub(super) fn is_left_late(&self, incarnation: Incarnation) -> bool {
        self.late.values().any(|late| late.peer.incarnation == incarnation)
    }

    /// When the next one is closed by force.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    fn insert(&mut self, token: u64, closing: Closing) {
        self.due.insert((closing.at, token));
        self.flushed.insert(token, closing);
    }

    fn remove(&mut self, token: u64) -> Option<Closing> {
        let closing = self.flushed.remove(&token)?;
        self.due.remove(&(closing.at, token));
        Some(closing)
    }

    /// UCX has given up a message to a peer that is left.
    pub(super) fn failed(&mut self, peer: PeerId) {
        if let Some(closing) = self.flushed.values_mut().find(|closing| closing.peer == peer) {
            closing.failed += 1;
        }
    }
}

impl Peer {
    /// Its state where this side gives it up; `None` if it has left, is on another host, or its process or connection
    /// has ended.
    pub(super) fn given_up(&self) -> Option<GivenUp> {
        let Locality { is_near, on_this_host, .. } = self.locality;
        let process = self.locality.process();
        let goes_on = (is_near || on_this_host) && self.connection.listens() && !process.is_some_and(has_ended);
        goes_on.then_some(GivenUp { process, is_near, on_this_host })
    }
}

impl Peers {
    /// Says goodbye to a peer that was taken out of the table.
    pub(super) fn close(&mut self, mut peer: Peer, io: &mut Io<'_>) {
        // A failure here closes the endpoint by force, as dropping it does.
        if !peer.is_ready() {
            return self.tell_undelivered(
                &peer.name,
                peer.connection.undelivered(io.operations),
                "it has not answered",
            );
        }
        let undelivered = peer.connection.undelivered(io.operations);
        peer.connection.say_goodbye(io.operations);
        let token = io.operations.insert(InFlight::CloseFlush);
        // The agent's end waits for messages as it does for transfers.
        let at = io.now.checked_add(LIMIT).max(self.flush_until.filter(|_| undelivered > 0));
        match (peer.connection.endpoint.flush(token), at) {
            (Ok(Posted::Pending), Some(at)) => {
                let Peer { connection, id, name, .. } = peer;
                self.closing.insert(token, Closing { _endpoint: connection.endpoint, peer: id, name, failed: 0, at });
            }
            (Ok(Posted::Pending), None) => {}
            (flushed, _) => {
                io.operations.remove(token);
                if let Err(error) = flushed {
                    self.tell_undelivered(&peer.name, undelivered, &error.to_string());
                }
            }
        }
    }

    /// The last flush of an endpoint that is being closed has ended, well or not: nothing is left to wait for.
    pub(crate) fn close_ended(&mut self, token: u64) {
        if let Some(Closing { name, failed, .. }) = self.closing.remove(token) {
            self.tell_undelivered(&name, failed, "the connection broke");
        }
    }

    /// The peers that are to be left when the copies of their memory have ended.
    pub(crate) fn leaving(&self) -> Vec<PeerId> {
        self.closing.late.keys().copied().collect()
    }

    /// The names of the agents of [`Peers::leaving`].
    pub(crate) fn leaving_names(&self) -> BTreeSet<&str> {
        self.closing.late.values().map(|late| late.peer.name.as_str()).collect()
    }

    /// Leaves a peer of which nothing is copied any more, and says hello to it where it was connected to again.
    pub(crate) fn leave(&mut self, id: PeerId, io: &mut Io<'_>) {
        let Some(Late { mut peer, by_force }) = self.closing.late.remove(&id) else { return };
        let incarnation = peer.incarnation;
        if by_force {
            peer.connection.say_goodbye(io.operations);
            drop(peer);
        } else {
            self.close(peer, io);
        }
        let again = self.find(incarnation).filter(|_| !self.closing.is_left_late(incarnation));
        if let Some(id) = again.filter(|id| self.get(*id).is_ok_and(|peer| !peer.is_ready()))
            && let Err(error) = self.send_hello(id, None, io)
        {
            io.effects.lose(id, error);
        }
    }

    /// Takes out the connections with peers of which something is still copied, for ever; the others are to be dropped.
    pub(crate) fn take_copied(&mut self, is_copied: impl Fn(PeerId) -> bool) -> Vec<Peer> {
        let ids: Vec<PeerId> = self.by_id.all().map(|peer| peer.id).filter(|id| is_copied(*id)).collect();
        let late = std::mem::take(&mut self.closing.late).into_values().map(|late| late.peer);
        late.filter(|peer| is_copied(peer.id)).chain(ids.into_iter().filter_map(|id| self.by_id.remove(id))).collect()
    }

    /// Whether a peer has messages to get and has not answered yet, while there is time for that. It would drop what it gets
    /// from an agent that is gone before they have met.
    pub(crate) fn awaits_answer(&self, id: PeerId, now: Instant) -> bool {
        let is_in_time = self.flush_until.is_some_and(|until| now < until);
        is_in_time && self.get(id).is_ok_and(|peer| !peer.is_ready() && peer.connection.next_sequence > 0)
    }

    /// Closes by force the endpoints that did not close in time.
    pub(super) fn check_closing(&mut self, operations: &Operations, now: Instant) {
        while let Some((_, token)) = self.closing.due.first().copied().filter(|(at, _)| *at <= now)
            && let Some(Closing { peer, name, failed, .. }) = self.closing.remove(token)
        {
            let messages = failed + operations.messages(peer);
            self.tell_undelivered(&name, messages, "it took nothing any more");
        }
    }

    /// Says which messages an agent that ends, or that leaves a peer, could not deliver, if there are any.
    pub(super) fn tell_undelivered(&self, name: &str, messages: u64, why: &str) {
        if messages > 0 {
            let own = &self.local.name;
            log::warn!("agent {own}: messages to agent {name} that were not delivered: {messages} ({why})");
        }
    }
}
