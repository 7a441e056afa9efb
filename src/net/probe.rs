//! Finds out what listens at an address. ZMQ connects again and again without telling why it fails; a probe is a plain TCP
//! connection that never blocks, greets as a ZMQ socket does, and judges the answer.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::net::connecting;

/// The bytes read of an answer: a greeting and a ready command of ZMQ, or enough of something else to name it.
const MOST_READ: usize = 512;
/// Bytes of a foreign answer that are shown.
const MOST_SHOWN: usize = 40;
/// When a server that waits for a line gets the end of one.
const LINE_AFTER: Duration = Duration::from_millis(300);

/// The greeting of ZMTP 3.0, up to its mechanism.
const GREETING: &[u8; 16] = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL";
const GREETING_BYTES: usize = 64;
/// The sockets that a DEALER may be connected to.
const FITTING: [&str; 3] = ["ROUTER", "DEALER", "REP"];

/// The finding of a probe so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    /// No answer to the attempt to connect.
    Nothing,
    /// There can be no connection; what the address does.
    Refused(String),
    /// Connected, and not a word.
    Silent,
    /// Connected, and closed by the other side without a word.
    Closed,
    /// Something else than ZMQ, or a ZMQ socket that does not fit, by its name.
    Foreign(String),
    /// A ZMQ socket that takes a DEALER.
    Fits,
}

impl Finding {
    /// True if more may come.
    pub(super) fn is_open(&self) -> bool {
        matches!(self, Finding::Nothing | Finding::Silent)
    }
}

#[derive(Debug)]
pub(super) struct Probe {
    to: SocketAddr,
    /// While the finding is open.
    stream: Option<TcpStream>,
    read: Vec<u8>,
    finding: Finding,
    /// When the end of a line is sent, once.
    line_at: Option<Instant>,
}

impl Probe {
    pub(super) fn start(to: SocketAddr) -> Probe {
        let (stream, finding) = match connecting(to) {
            Ok(stream) => (Some(stream), Finding::Nothing),
            Err(e) => (None, Finding::Refused(refusal(&e))),
        };
        Probe { to, stream, read: Vec::new(), finding, line_at: None }
    }

    pub(super) fn to(&self) -> SocketAddr {
        self.to
    }

    pub(super) fn finding(&self) -> &Finding {
        &self.finding
    }

    /// Looks at what has happened; never blocks.
    pub(super) fn turn(&mut self, now: Instant) {
        if self.finding == Finding::Nothing {
            self.connected(now);
        }
        if self.finding == Finding::Silent {
            self.listen(now);
        }
        if !self.finding.is_open() {
            self.stream = None;
        }
    }

    fn connected(&mut self, now: Instant) {
        let Some(stream) = &mut self.stream else { return };
        let outcome = match stream.take_error() {
            Ok(Some(e)) | Err(e) => Err(e),
            Ok(None) if stream.peer_addr().is_err() => return,
            Ok(None) => {
                let mut hello = GREETING.to_vec();
                // No ready command after it: a socket that does not fit would hang up before it has told its own type.
                hello.resize(GREETING_BYTES, 0);
                // Far less than an empty socket's buffer.
                stream.write_all(&hello)
            }
        };
        self.finding = match outcome {
            Ok(()) => Finding::Silent,
            Err(e) => Finding::Refused(refusal(&e)),
        };
        self.line_at = Some(now + LINE_AFTER);
    }

    fn listen(&mut self, now: Instant) {
        let Some(stream) = &mut self.stream else { return };
        let mut ended = false;
        let mut buffer = [0u8; MOST_READ];
        while self.read.len() < MOST_READ && !ended {
            match stream.read(&mut buffer) {
                Ok(0) => ended = true,
                Ok(count) => self.read.extend_from_slice(buffer.get(..count).unwrap_or_default()),
                Err(e) if e.kind() == IoErrorKind::Interrupted => {}
                Err(e) if e.kind() == IoErrorKind::WouldBlock => break,
                Err(_) => ended = true,
            }
        }
        ended |= self.read.len() >= MOST_READ;
        if let Some(finding) = judge(&self.read, ended) {
            self.finding = finding;
        } else if self.read.is_empty() && self.line_at.is_some_and(|at| at <= now) {
            self.line_at = None;
            // If it has gone, the next look says so.
            let _ = stream.write_all(b"\r\n\r\n");
        }
    }

    /// When to look again although nothing has come.
    pub(super) fn due(&self) -> Option<Instant> {
        self.line_at.filter(|_| self.finding == Finding::Silent)
    }

    /// To wait on, in the form that [`zmq::poll`] takes.
    pub(super) fn poll_item(&self) -> Option<zmq::PollItem<'_>> {
        let events = if self.finding == Finding::Nothing { zmq::POLLOUT } else { zmq::POLLIN };
        self.stream.as_ref().map(|stream| zmq::PollItem::from_fd(stream.as_raw_fd(), events))
    }
}

fn refusal(error: &std::io::Error) -> String {
    match error.kind() {
        IoErrorKind::ConnectionRefused => "refused the connection: nothing listens there".to_owned(),
        _ => format!("cannot be reached: {error}"),
    }
}

/// Judges the first bytes of an answer; `None` if more are needed. `ended`: no more will come.
fn judge(bytes: &[u8], ended: bool) -> Option<Finding> {
    let Some(first) = bytes.first() else { return ended.then_some(Finding::Closed) };
    if *first == 0xff {
        return judge_zmq(bytes).or_else(|| ended.then(|| Finding::Foreign(shown("something", bytes))));
    }
    let names: [(&[u8], &str); 5] = [
        (b"HTTP/", "an HTTP server"),
        (b"SSH-", "an SSH server"),
        (b"\x15\x03", "a TLS server"),
        (b"-ERR", "a Redis server"),
        (b"220", "a mail or file server"),
    ];
    let partial = |name: &[u8]| !ended && bytes.len() < name.len() && name.starts_with(bytes);
    if names.iter().any(|(name, _)| partial(name)) {
        return None;
    }
    let what = names.iter().find(|(name, _)| bytes.starts_with(name)).map_or("something else", |(_, what)| what);
    Some(Finding::Foreign(shown(what, bytes)))
}

fn shown(what: &str, bytes: &[u8]) -> String {
    let line = bytes.split(|b| matches!(b, b'\r' | b'\n')).next().unwrap_or_default();
    format!("{what} that answers \"{}\"", line.get(..MOST_SHOWN).unwrap_or(line).escape_ascii())
}

fn judge_zmq(bytes: &[u8]) -> Option<Finding> {
    // Before version 3 a socket does not tell its type in this form.
    if *bytes.get(10)? < 3 {
        return Some(Finding::Fits);
    }
    let mechanism = bytes.get(12..32)?;
    let mechanism = mechanism.split(|b| *b == 0).next().unwrap_or_default();
    if mechanism != b"NULL" {
        let text = format!("a ZMQ socket that wants {}", mechanism.escape_ascii());
        return Some(Finding::Foreign(text));
    }
    let frame = bytes.get(GREETING_BYTES..)?;
    let length = usize::from(*frame.get(1)?);
    let body = frame.get(2..2 + length)?;
    let not_fitting = |what: String| Some(Finding::Foreign(format!("a ZMQ socket {what}")));
    let Some(properties) = body.strip_prefix(b"\x05READY").filter(|_| frame.first() == Some(&0x04)) else {
        return not_fitting(format!("that answers \"{}\"", body.get(..MOST_SHOWN).unwrap_or(body).escape_ascii()));
    };
    let Some(kind) = socket_type(properties) else { return not_fitting("of no type".to_owned()) };
    if FITTING.iter().any(|fits| fits.as_bytes() == kind) {
        return Some(Finding::Fits);
    }
    not_fitting(format!("of the type {}", kind.escape_ascii()))
}

/// The value of `Socket-Type` among a ready command's properties: name's length u8, name, value's length u32, value.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A ready command, in its frame.
    const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";

    fn zmq(mechanism: &str, ready: &[u8]) -> Vec<u8> {
        let mut bytes = GREETING.get(..12).unwrap().to_vec();
        bytes.extend_from_slice(mechanism.as_bytes());
        bytes.resize(GREETING_BYTES, 0);
        bytes.extend_from_slice(ready);
        bytes
    }

    fn foreign(bytes: &[u8]) -> String {
        match judge(bytes, false) {
            Some(Finding::Foreign(what)) => what,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn answers_are_told_apart() {
        assert_eq!(judge(b"", false), None);
        assert_eq!(judge(b"", true), Some(Finding::Closed));
        assert_eq!(judge(b"HT", false), None);
        assert_eq!(
            foreign(b"HTTP/1.1 400 Bad Request\r\nServer: x"),
            "an HTTP server that answers \"HTTP/1.1 400 Bad Request\""
        );
        assert_eq!(foreign(b"\x15\x03\x01\0"), "a TLS server that answers \"\\x15\\x03\\x01\\x00\"");
        assert!(foreign(b"hello").starts_with("something else"));
        assert!(foreign(&[b'x'; 300]).len() < 80);
    }

    #[test]
    fn zmq_sockets_are_told_apart() {
        let whole = zmq("NULL", READY);
        assert_eq!(judge(&whole, false), Some(Finding::Fits));
        let router = b"\x04\x29\x05READY\x08Identity\0\0\0\0\x0bsocket-type\0\0\0\x06ROUTER";
        assert_eq!(judge(&zmq("NULL", router), false), Some(Finding::Fits));
        assert_eq!(
            foreign(&zmq("NULL", b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB")),
            "a ZMQ socket of the type PUB"
        );
        assert_eq!(foreign(&zmq("CURVE", b"")), "a ZMQ socket that wants CURVE");
        assert!(foreign(&zmq("NULL", b"\x04\x09\x05ERROR\x02no")).contains("ERROR"));
        assert_eq!(foreign(&zmq("NULL", b"\x04\x06\x05READY")), "a ZMQ socket of no type");
        // Any part of it is waited for, and never panics.
        for len in 1..whole.len() {
            assert_eq!(judge(whole.get(..len).unwrap(), false), None, "{len}");
            assert!(matches!(judge(whole.get(..len).unwrap(), true), Some(Finding::Foreign(_))), "{len}");
        }
    }
}
