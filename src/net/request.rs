//! One question of a client's: how far it is, and what to say if nobody answers it.

use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::net::host_port;
use crate::net::route::ListenerRoute;
use crate::net::sealed::Exchange;
use crate::proto::wire::HandshakeReply;
use crate::secret::Key;

pub(super) enum RequestPhase {
    Unsent,
    Sent(Instant),
    /// Refused as not ready; to be sent again then.
    Resting(Instant),
}

pub(super) struct ClientRequest {
    pub(super) key: (String, u16),
    /// The encoded request.
    pub(super) clear: Vec<u8>,
    /// The bytes to send next; the request itself without a key.
    pub(super) bytes: Vec<u8>,
    /// With a key: the exchange's number and how far it is.
    pub(super) exchange: Option<(u64, Exchange)>,
    pub(super) asked: Instant,
    pub(super) deadline: Instant,
    pub(super) phase: RequestPhase,
    pub(super) sends: u32,
    /// How long its answer may take before it is asked for again by a new connection.
    pub(super) answer_timeout: Duration,
    pub(super) rest: Duration,
    /// The last "not ready", given as the answer if the deadline comes first.
    pub(super) refusal: Option<HandshakeReply>,
}

impl ClientRequest {
    /// Makes ready to be sent, for the first time or again. With a key that is a new exchange each time.
    pub(super) fn begin(&mut self, key: Option<&Key>) -> Result<()> {
        self.phase = RequestPhase::Unsent;
        let Some(key) = key else {
            self.bytes.clone_from(&self.clear);
            return Ok(());
        };
        let number =
            getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("drawing an exchange's number: {e}")))?;
        let (exchange, bytes) = Exchange::begin(key, number)?;
        (self.exchange, self.bytes) = (Some((number, exchange)), bytes);
        Ok(())
    }
}

pub(super) fn no_answer(r: &ClientRequest, route: Option<&ListenerRoute>, now: Instant) -> Error {
    if r.sends == 0
        && let Some(route) = route
    {
        return Error::new(ErrorKind::Unreachable, route.describe(now));
    }
    let at = host_port(&r.key.0, r.key.1);
    let waited = now.saturating_duration_since(r.asked).as_millis();
    Error::new(
        ErrorKind::Timeout,
        format!(
            "the handshake listener at {at} took {} requests and answered none within {waited} ms; check that it is a \
             kvferry listener and that its process is not stopped",
            r.sends
        ),
    )
}
