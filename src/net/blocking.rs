//! The client for callers that may wait: tools, tests, and a host that pushes metadata from its own thread.

use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::net::{Client, ClientLimits};
use crate::proto::ids::{EngineId, RankId};
use crate::proto::wire::{HandshakeReply, HandshakeRequest};
use crate::secret::Key;

/// Asks the listener at `host`:`port` for ranks' metadata, and waits up to `timeout`. All ranks if `ranks` is empty;
/// of any engine if `engine` is None; sealed with `key` if there is one. Waits also for a listener that is not
/// complete yet. An address that refuses connections, or a name that does not resolve, is not waited for. A refusal
/// is a reply.
///
/// # Errors
/// [`ErrorKind::Unreachable`] or [`ErrorKind::Timeout`] without an answer in time, [`ErrorKind::Corrupt`] or
/// [`ErrorKind::VersionMismatch`] for one that cannot be understood, [`ErrorKind::Incompatible`] where the listener has no
/// key or another one.
pub fn query(
    key: Option<&Key>,
    host: &str,
    port: u16,
    engine: Option<EngineId>,
    ranks: Vec<RankId>,
    timeout: Duration,
) -> Result<HandshakeReply> {
    let grace = ClientLimits::default().grace.min(timeout);
    ask(key, host, port, HandshakeRequest::Query { id: 1, engine, ranks }, timeout, grace)
}

/// Hands one rank's encoded `RankMetadata` to its own engine's listener. That is complete with `expected` ranks.
/// Sealed with `key` if there is one; waits up to `timeout`, also for a listener that is not up yet. Returns how many
/// ranks are still missing.
///
/// # Errors
/// As [`query`]; [`ErrorKind::InvalidArgument`] with the listener's words when it refuses.
pub fn push(
    key: Option<&Key>,
    host: &str,
    port: u16,
    expected: u32,
    metadata: Vec<u8>,
    timeout: Duration,
) -> Result<u32> {
    let request = HandshakeRequest::Push { id: 1, expected, metadata: metadata.into() };
    match ask(key, host, port, request, timeout, timeout)? {
        HandshakeReply::Pushed { missing, .. } => Ok(missing),
        HandshakeReply::Refused { message, .. } => Err(Error::invalid(message)),
        HandshakeReply::Ranks { .. } | HandshakeReply::Prefills { .. } => {
            Err(Error::corrupt("the listener answered a push as if it were something else"))
        }
    }
}

fn ask(
    key: Option<&Key>,
    host: &str,
    port: u16,
    request: HandshakeRequest,
    timeout: Duration,
    grace: Duration,
) -> Result<HandshakeReply> {
    let limits = ClientLimits { grace, ..ClientLimits::default() };
    let mut client = Client::new(limits, key.cloned());
    let start = Instant::now();
    client.ask(start, host, port, request, start + timeout);
    loop {
        let now = Instant::now();
        client.turn(now);
        if let Some(answer) = client.poll_answer() {
            return answer.result;
        }
        let wait = client.next_deadline().map_or(timeout, |d| d.saturating_duration_since(now));
        // Rounded up, so that the deadline has come when the wait is over.
        let ms = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX).saturating_add(1);
        let mut items = Vec::new();
        client.poll_items(&mut items);
        match zmq::poll(&mut items, ms) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(e) => return Err(Error::new(ErrorKind::Io, format!("waiting for {host}: {e}"))),
        }
    }
}
