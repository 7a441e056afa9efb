//! The first message of each connection.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::mem::process::{Challenge, ProcessPlace};
use crate::proto::ids::Incarnation;
use crate::proto::wire::{self, OLDEST, Versions};

/// The first message on a connection, from either side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The sender's name.
    pub(crate) name: String,
    /// The sender's incarnation.
    pub(crate) incarnation: Incarnation,
    /// The sender's number for its connection to the receiver.
    pub(crate) connection: u64,
    /// The receiver's number for its connection to the sender, if the sender has heard of one. A side that reads its
    /// own current number here need not answer.
    pub(crate) seen: Option<u64>,
    /// The sender's worker address in its checked envelope, so that the receiver can connect back.
    #[serde(with = "serde_bytes")]
    pub(crate) address: Vec<u8>,
    /// Where the sender's process is, for a receiver on the same host.
    #[serde(default)]
    pub(crate) process: Option<ProcessPlace>,
    /// Whether the sender may be asked for a stream.
    #[serde(default)]
    pub(crate) streams: bool,
    /// What the receiver is to write into its witness for this connection, before the sender copies its memory. `None` of a
    /// sender that knows nothing of it: its own witness has no answers either.
    #[serde(default)]
    pub(crate) challenge: Option<Challenge>,
    /// The protocol versions that the sender speaks; on the wire they are in the envelope.
    #[serde(skip, default = "ours")]
    pub(crate) versions: Versions,
}

fn ours() -> Versions {
    Versions::OURS
}

/// A hello is a name, an address of a few hundred bytes and some numbers.
const MAX_HELLO_BYTES: usize = 64 << 10;

impl Hello {
    /// Encodes it in the oldest version that is spoken: it is the first message of its connection.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        wire::encode("hello", OLDEST, self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Hello> {
        let (hello, versions) = wire::decode::<Hello>("hello", OLDEST, bytes, MAX_HELLO_BYTES)?;
        if hello.name.is_empty() || hello.name.len() > 256 {
            return Err(Error::corrupt(format!(
                "a hello with a name of {} bytes, expected 1 to 256",
                hello.name.len()
            )));
        }
        Ok(Hello { versions, ..hello })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;
    use crate::mem::process::Witness;
    use crate::proto::wire::VERSION;

    /// The hello of a build that knows no streams and no challenges.
    #[derive(Serialize)]
    struct Older {
        name: &'static str,
        incarnation: Incarnation,
        connection: u64,
        seen: Option<u64>,
        #[serde(with = "serde_bytes")]
        address: Vec<u8>,
    }

    #[test]
    fn a_hello_survives_the_wire_and_foreign_bytes_are_refused() {
        let hello = Hello {
            name: "a".to_owned(),
            incarnation: Incarnation(3),
            connection: 4,
            seen: Some(5),
            address: vec![1, 2, 3],
            process: Witness::new(3, &[1]).place(),
            streams: true,
            challenge: Some((6, 7)),
            versions: Versions::OURS,
        };
        assert_eq!(Hello::decode(&hello.encode().unwrap()).unwrap(), hello);
        assert!(Hello::decode(b"something else").is_err());
        let older = Older { name: "a", incarnation: Incarnation(3), connection: 4, seen: None, address: vec![1, 2, 3] };
        let older = wire::encode("hello", OLDEST, &older).unwrap();
        let decoded = Hello::decode(&older).unwrap();
        assert_eq!((decoded.streams, decoded.challenge), (false, None));
        // What a build of version 4 says speaks only that.
        let text = older.windows(7).position(|bytes| bytes == b"\xa6speaks").unwrap();
        let before = [&[0x84], &older[1..text], &older[text + 10..]].concat();
        let before = Hello::decode(&before).unwrap();
        assert_eq!((before.versions, before.versions.common()), (Versions { oldest: 4, newest: 4 }, 4));
        let newer = wire::encode("hello", VERSION, &hello).unwrap();
        assert_eq!(Hello::decode(&newer).unwrap().versions.common(), VERSION);
        let nameless = Hello { name: String::new(), ..hello };
        assert!(Hello::decode(&nameless.encode().unwrap()).is_err());
    }
}
