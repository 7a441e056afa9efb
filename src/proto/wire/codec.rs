//! The envelope of every outermost message: magic, version, body.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::scan::scan;
use crate::error::{Error, ErrorKind, Result};

/// The protocol version of this build. Raised when a message changes in a way that an older reader would misread.
pub const VERSION: u16 = 4;

/// How deeply an incoming message may nest; ours nest at most 8 levels.
pub const MAX_DEPTH: usize = 32;

/// First field of every message, so that a foreign msgpack blob is told from a damaged one of ours.
const MAGIC: &str = "kvferry";

#[derive(Serialize)]
struct Out<'a, T> {
    magic: &'a str,
    version: u16,
    kind: &'a str,
    body: &'a T,
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    magic: String,
    #[serde(default)]
    version: u16,
    #[serde(default)]
    kind: String,
}

#[derive(Deserialize)]
struct In<T> {
    body: T,
}

/// Encodes `body` as a message of `kind` (its name in `docs/protocol.md`).
pub fn encode<T: Serialize>(kind: &str, body: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(&Out { magic: MAGIC, version: VERSION, kind, body })
        .map_err(|e| Error::new(ErrorKind::Internal, format!("encoding a {kind} message: {e}")))
}

/// Whether `bytes` are not too many and begin as [`encode`] begins a message of this kind. The body is not looked at.
pub(crate) fn begins_as<M: super::Message>(bytes: &[u8]) -> bool {
    bytes.len() <= M::MAX_BYTES && body_of(M::KIND, bytes).is_some()
}

/// What follows the bytes with which [`encode`] begins a message of this kind. None for one that begins in another way,
/// which may be the same message in another order of fields.
fn body_of<'a>(kind: &str, bytes: &'a [u8]) -> Option<&'a [u8]> {
    // The body comes last; without content it is one byte.
    let empty = encode(kind, &()).ok()?;
    let (_, head) = empty.split_last()?;
    bytes.strip_prefix(head)
}

/// Decodes a message of `kind` of at most `max_bytes`. Errors: [`ErrorKind::Corrupt`] for what is not ours or is
/// damaged, [`ErrorKind::VersionMismatch`] for another version, [`ErrorKind::Exhausted`] for one over the limit.
pub fn decode<T: DeserializeOwned>(kind: &str, bytes: &[u8], max_bytes: usize) -> Result<T> {
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
    if let Some(body) = body_of(kind, bytes) {
        return rmp_serde::from_slice(body).map_err(damaged);
    }
    let head: Head = rmp_serde::from_slice(bytes).map_err(|e| foreign(&e))?;
    if head.magic != MAGIC {
        return Err(foreign(&format_args!("no field \"magic\" with the value {MAGIC:?}")));
    }
    if head.version != VERSION {
        return Err(Error::new(
            ErrorKind::VersionMismatch,
            format!(
                "a {kind} message of protocol version {} arrived, this build speaks version {VERSION}; run the same \
                 kvferry release on both engines",
                head.version
            ),
        ));
    }
    if head.kind != kind {
        return Err(Error::corrupt(format!("expected a {kind} message, got a {:?} message", head.kind)));
    }
    let message: In<T> = rmp_serde::from_slice(bytes).map_err(damaged)?;
    Ok(message.body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::wire::{Message, StepMetadata, WorkerReport};

    #[test]
    fn the_beginning_tells_kind_and_version() {
        let step = StepMetadata::default().to_bytes().unwrap();
        assert!(begins_as::<StepMetadata>(&step));
        assert!(!begins_as::<WorkerReport>(&step));
        // The body is not looked at, what is before it is, whole.
        let body = step.windows(5).position(|bytes| bytes == b"\xa4body").unwrap() + 5;
        for len in 0..=step.len() {
            assert_eq!(begins_as::<StepMetadata>(step.get(..len).unwrap()), len >= body, "{len} of {}", step.len());
        }
        let other = encode(StepMetadata::KIND, &"anything").unwrap();
        assert!(begins_as::<StepMetadata>(&other));
        let version = other.windows(1).position(|byte| byte == [VERSION as u8]).unwrap();
        let mut newer = other.clone();
        *newer.get_mut(version).unwrap() += 1;
        assert!(!begins_as::<StepMetadata>(&newer));
    }
}
