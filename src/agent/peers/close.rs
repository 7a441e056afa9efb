//! Leaving a peer in order: say goodbye, let what was posted get out, then close.
//!
//! The goodbye is a message of its own, because over TCP UCX keeps one socket for both directions: a side that closes
//! its endpoint leaves the socket open for the other side's, which would notice nothing until UCX's keep-alive
//! (20 seconds).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Io, Peer, Peers};
use crate::agent::core::frame::{AM_ID, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::core::in_flight::{InFlight, Operations};
use crate::ucx::{Endpoint, Posted};

/// What the goodbye and what was posted before it get to leave; then the endpoint is closed by force.
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

/// Endpoints that are left but not yet closed, by the token of their last flush.
#[derive(Default)]
pub(super) struct ClosingEndpoints(HashMap<u64, Closing>);

impl ClosingEndpoints {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// When the next one is closed by force.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.values().map(|closing| closing.at).min()
    }

    /// UCX has given up a message to a peer that is left.
    pub(super) fn failed(&mut self, peer: PeerId) {
        if let Some(closing) = self.0.values_mut().find(|closing| closing.peer == peer) {
            closing.failed += 1;
        }
    }
}

impl Peer {
    /// Says goodbye, unless there is nobody to hear it. Whatever UCX has not got away when the endpoint is closed is lost.
    pub(super) fn say_goodbye(&mut self, operations: &mut Operations) {
        if !self.is_ready() || self.has_left || self.endpoint.failure().is_some() {
            return;
        }
        let frame = self.frame(FrameKind::Goodbye, self.next_sequence);
        let Ok((header, data)) = self.session.wrap(frame, Vec::new()) else { return };
        let token = operations.insert(InFlight::Goodbye);
        if !matches!(self.endpoint.send_am(AM_ID, &header, data, token), Ok(Posted::Pending)) {
            operations.remove(token);
        }
    }
}

impl Peers {
    /// Says goodbye to a peer that was taken out of the table.
    pub(super) fn close(&mut self, mut peer: Peer, io: &mut Io<'_>) {
        // What fails here is closed by force, which is what dropping the endpoint does.
        if !peer.is_ready() {
            return self.tell_undelivered(&peer.name, peer.undelivered(io.operations), "it has not answered");
        }
        let undelivered = peer.undelivered(io.operations);
        peer.say_goodbye(io.operations);
        let token = io.operations.insert(InFlight::CloseFlush);
        // The agent's end waits for messages as it does for transfers.
        let at = io.now.checked_add(LIMIT).max(self.flush_until.filter(|_| undelivered > 0));
        match (peer.endpoint.flush(token), at) {
            (Ok(Posted::Pending), Some(at)) => {
                let Peer { endpoint, id, name, .. } = peer;
                self.closing.0.insert(token, Closing { _endpoint: endpoint, peer: id, name, failed: 0, at });
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
        if let Some(Closing { name, failed, .. }) = self.closing.0.remove(&token) {
            self.tell_undelivered(&name, failed, "the connection broke");
        }
    }

    /// Whether a peer has messages to get and has not answered yet, while there is time for that. It would drop what it gets
    /// from an agent that is gone before they have met.
    pub(crate) fn awaits_answer(&self, id: PeerId, now: Instant) -> bool {
        let is_in_time = self.flush_until.is_some_and(|until| now < until);
        is_in_time && self.get(id).is_ok_and(|peer| !peer.is_ready() && peer.next_sequence > 0)
    }

    /// Closes by force the endpoints that did not close in time.
    pub(super) fn check_closing(&mut self, operations: &Operations, now: Instant) {
        let late: Vec<_> = self.closing.0.extract_if(|_, closing| closing.at <= now).collect();
        for (_, Closing { peer, name, failed, .. }) in late {
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
