//! Leaving a peer in order: say goodbye, let what was posted get out, then close.
//!
//! The goodbye is a message of its own, because over TCP UCX keeps one socket for both directions: a side that closes
//! its endpoint leaves the socket open for the other side's, which would notice nothing until UCX's keep-alive
//! (20 seconds).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::agent::core::frame::{AM_ID, Frame, FrameKind};
use crate::agent::core::in_flight::InFlight;
use crate::agent::engine::Engine;
use crate::agent::peers::Peer;
use crate::ucx::{Endpoint, Posted};

/// What the goodbye and what was posted before it get to leave; then the endpoint is closed by force.
const LIMIT: Duration = Duration::from_secs(1);

/// Endpoints that are left but not yet closed, by the token of their last flush, with the time when they will be.
#[derive(Default)]
pub(crate) struct ClosingEndpoints(HashMap<u64, (Endpoint, Instant)>);

impl ClosingEndpoints {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// When the next one is closed by force.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.values().map(|(_, at)| *at).min()
    }
}

impl Engine {
    /// Says goodbye to a peer that was taken out of the table.
    pub(crate) fn leave(&mut self, mut peer: Peer, now: Instant) {
        let frame = Frame {
            kind: FrameKind::Goodbye,
            incarnation: self.incarnation,
            connection: peer.connection,
            sequence: peer.next_sequence,
        };
        // What fails here is closed by force, which is what dropping the endpoint does.
        if !peer.is_ready() {
            return;
        }
        let Ok((header, data)) = peer.wrap(frame, Vec::new()) else { return };
        let token = self.operations.insert(InFlight::Goodbye);
        if !matches!(peer.endpoint.send_am(AM_ID, &header, data, token), Ok(Posted::Pending)) {
            self.operations.remove(token);
        }
        let token = self.operations.insert(InFlight::CloseFlush);
        match (peer.endpoint.flush(token), now.checked_add(LIMIT)) {
            (Ok(Posted::Pending), Some(at)) => {
                self.closing_endpoints.0.insert(token, (peer.endpoint, at));
            }
            (Ok(Posted::Pending), None) => {}
            _ => drop(self.operations.remove(token)),
        }
    }

    /// The flush with this token has ended, well or not: nothing is left to wait for.
    pub(crate) fn left(&mut self, token: u64) {
        self.closing_endpoints.0.remove(&token);
    }

    /// Closes by force what did not get away in time.
    pub(crate) fn check_closing_endpoints(&mut self, now: Instant) {
        self.closing_endpoints.0.retain(|_, (_, at)| *at > now);
    }
}
