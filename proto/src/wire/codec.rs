//! The envelope of every outermost message: magic, version, what the sender speaks, kind, body.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::scan::scan;
use crate::error::{Error, ErrorKind, Result};

/// The protocol version of this build, the newest that it speaks. Raised when a message changes in a way that an older
/// reader would misread.
pub const VERSION: u16 = 5;

/// The oldest protocol version that this build speaks: the one before [`VERSION`]. So two neighbouring releases talk
/// while engines are upgraded one by one.
pub const OLDEST: u16 = 4;

/// How deeply an incoming message may nest; ours nest at most 8 levels.
pub const MAX_DEPTH: usize = 32;

/// First field of every message, so that a foreign msgpack blob is told from a damaged one of ours.
const MAGIC: &str = "kvferry";

/// The protocol versions that one side speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Versions {
    /// Those of this build.
    pub const OURS: Versions = Versions { oldest: OLDEST, newest: VERSION };

    /// The version in which this build writes to a side that speaks `self`.
    pub fn common(self) -> u16 {
        self.newest.clamp(OLDEST, VERSION)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Versions { oldest, newest } if oldest == newest => write!(f, "version {newest}"),
            Versions { oldest, newest } => write!(f, "versions {oldest} to {newest}"),
        }
    }
}

#[derive(Serialize)]
struct Envelope<'a, T> {
    magic: &'a str,
    version: u16,
    speaks: (u16, u16),
    kind: &'a str,
    body: &'a T,
}

#[derive(Deserialize)]
struct EnvelopeHead {
    #[serde(default)]
    magic: String,
    #[serde(default)]
    version: u16,
    /// Absent in messages of version 4's own builds, which speak no other.
    #[serde(default)]
    speaks: Option<(u16, u16)>,
    #[serde(default)]
    kind: String,
}

impl EnvelopeHead {
    /// The versions that the sender speaks: at least the one in which it wrote.
    fn sender(&self) -> Versions {
        let (oldest, newest) = self.speaks.unwrap_or((self.version, self.version));
        Versions { oldest: oldest.min(self.version), newest: newest.max(self.version) }
    }
}

#[derive(Deserialize)]
struct EnvelopeBody<T> {
    body: T,
}

/// Encodes `body` as a message of `kind`, its name in `docs/protocol.md`. `version` is one of [`Versions::OURS`]:
/// that which its reader has in common with this build, [`OLDEST`] for an unknown reader.
pub fn encode<T: Serialize>(kind: &str, version: u16, body: &T) -> Result<Vec<u8>> {
    let Versions { oldest, newest } = Versions::OURS;
    rmp_serde::to_vec_named(&Envelope { magic: MAGIC, version, speaks: (oldest, newest), kind, body })
        .map_err(|e| Error::new(ErrorKind::Internal, format!("encoding a {kind} message: {e}")))
}

/// Strips the bytes with which [`encode`] begins a message of this kind, in a version from `oldest` on. None for
/// one that begins in another way, which may be the same message in another order of fields.
pub(super) fn body_of<'a>(kind: &str, oldest: u16, bytes: &'a [u8]) -> Option<&'a [u8]> {
    (oldest..=VERSION).rev().find_map(|version| {
        // The body comes last; without content it is one byte.
        let empty = encode(kind, version, &()).ok()?;
        let (_, head) = empty.split_last()?;
        bytes.strip_prefix(head)
    })
}

/// The version in which to answer `bytes`, whether or not they could be decoded: the newest that their sender and this
/// build have in common, or comes nearest to it; [`OLDEST`] if they do not tell.
pub(crate) fn version_for_answer(bytes: &[u8]) -> u16 {
    if scan(bytes, MAX_DEPTH).is_err() {
        return OLDEST;
    }
    rmp_serde::from_slice::<EnvelopeHead>(bytes).map_or(OLDEST, |head| head.sender().common())
}

/// Decodes a message of `kind`, and tells what its sender speaks. It has at most `max_bytes`, and a version from
/// `oldest` on. Errors: [`ErrorKind::Corrupt`] for what is not ours or is damaged, [`ErrorKind::VersionMismatch`] for
/// another version, [`ErrorKind::Exhausted`] for one over the limit.
pub fn decode<T: DeserializeOwned>(kind: &str, oldest: u16, bytes: &[u8], max_bytes: usize) -> Result<(T, Versions)> {
    if bytes.len() > max_bytes {
        return Err(Error::new(
            ErrorKind::Exhausted,
            format!("a {kind} message of {} bytes is over the limit of {max_bytes}", bytes.len()),
        ));
    }
    let foreign = |why: &dyn std::fmt::Display| {
        Error::corrupt(format!(
            "these {} bytes are not a kvferry message ({why}); expected a {kind} message",
            bytes.len()
        ))
    };
    scan(bytes, MAX_DEPTH).map_err(|why| foreign(&why))?;
    let damaged = |e| Error::corrupt(format!("damaged {kind} message: {e}"));
    // As we encode it. Then nothing but the body is left, and it is decoded without being skipped first.
    if let Some(body) = body_of(kind, oldest, bytes) {
        return Ok((rmp_serde::from_slice(body).map_err(damaged)?, Versions::OURS));
    }
    let head: EnvelopeHead = rmp_serde::from_slice(bytes).map_err(|e| foreign(&e))?;
    if head.magic != MAGIC {
        return Err(foreign(&format_args!("no field \"magic\" with the value {MAGIC:?}")));
    }
    if !(oldest..=VERSION).contains(&head.version) {
        return Err(mismatch(kind, oldest, &head));
    }
    if head.kind != kind {
        return Err(Error::corrupt(format!("expected a {kind} message, got a {:?} message", head.kind)));
    }
    let message: EnvelopeBody<T> = rmp_serde::from_slice(bytes).map_err(damaged)?;
    Ok((message.body, head.sender()))
}

/// The error for a message of a version that is not read.
fn mismatch(kind: &str, oldest: u16, head: &EnvelopeHead) -> Error {
    let remedy = if oldest == OLDEST {
        "only releases that have a version in common talk: upgrade the older side, one protocol version at a time \
         (\"Upgrading\" in docs/guide.md)"
    } else {
        "all processes of one engine need the same kvferry release: install it on every host of the engine and restart \
         the engine"
    };
    Error::new(
        ErrorKind::VersionMismatch,
        format!(
            "a {kind} message of protocol version {} arrived; its sender speaks {}, this build {}; {remedy}",
            head.version,
            head.sender(),
            Versions { oldest, newest: VERSION }
        ),
    )
}
