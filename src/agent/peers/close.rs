//! Leaving a peer in order: say goodbye, let what was posted get out, then close.
//!
//! The goodbye is a message of its own, because over TCP UCX keeps one socket for both directions: a side that closes
//! its endpoint leaves the socket open for the other side's, which would notice nothing until UCX's keep-alive
//! (20 seconds).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Io, Peer, Peers};
use crate::agent::core::frame::{AM_ID, FrameKind};
use crate::agent::core::in_flight::InFlight;
use crate::ucx::{Endpoint, Posted};

/// What the goodbye and what was posted before it get to leave; then the endpoint is closed by force.
const LIMIT: Duration = Duration::from_secs(1);

/// Endpoints that are left but not yet closed, by the token of their last flush, with the time when they will be.
#[derive(Default)]
pub(super) struct ClosingEndpoints(HashMap<u64, (Endpoint, Instant)>);

impl ClosingEndpoints {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// When the next one is closed by force.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.values().map(|(_, at)| *at).min()
    }

    /// The flush with this token has ended, well or not: nothing is left to wait for.
    pub(super) fn end(&mut self, token: u64) {
        self.0.remove(&token);
    }

    /// Closes by force what did not get away in time.
    pub(super) fn check(&mut self, now: Instant) {
        self.0.retain(|_, (_, at)| *at > now);
    }
}

impl Peers {
    /// Says goodbye to a peer that was taken out of the table.
    pub(super) fn close(&mut self, mut peer: Peer, io: &mut Io<'_>) {
        // What fails here is closed by force, which is what dropping the endpoint does.
        if !peer.is_ready() {
            return;
        }
        let frame = peer.frame(FrameKind::Goodbye, peer.next_sequence);
        let Ok((header, data)) = peer.session.wrap(frame, Vec::new()) else { return };
        let token = io.operations.insert(InFlight::Goodbye);
        if !matches!(peer.endpoint.send_am(AM_ID, &header, data, token), Ok(Posted::Pending)) {
            io.operations.remove(token);
        }
        let token = io.operations.insert(InFlight::CloseFlush);
        match (peer.endpoint.flush(token), io.now.checked_add(LIMIT)) {
            (Ok(Posted::Pending), Some(at)) => {
                self.closing.0.insert(token, (peer.endpoint, at));
            }
            (Ok(Posted::Pending), None) => {}
            _ => drop(io.operations.remove(token)),
        }
    }
}
