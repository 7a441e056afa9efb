//! What is said on the way to a stream, and what stands before the bytes on one.

use std::collections::VecDeque;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::{self, OLDEST};

/// Bytes of a secret.
const SECRET_BYTES: usize = 16;
/// Says who connects: drawn at random for one peer, told over the connection that UCX has with it.
pub(crate) type Secret = [u8; SECRET_BYTES];

/// Where a stream can be had, as a message of its own: the answer to the question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// Addresses with ports, such as `10.0.0.1:5000` or `[fd00::1]:5000`, the best first; none where there is no stream.
    pub(crate) addresses: Vec<String>,
    /// What the asking side says first on the stream.
    #[serde(with = "serde_bytes")]
    pub(crate) ticket: Secret,
    /// What the offering side answers there.
    #[serde(with = "serde_bytes")]
    pub(crate) answer: Secret,
}

/// Addresses that an offer may have; a host with more offers the first.
pub(crate) const MAX_ADDRESSES: usize = 16;
/// An offer is two secrets and some addresses.
const MAX_OFFER_BYTES: usize = 4096;

impl Offer {
    /// `version`: the protocol version in common with the reader.
    pub(crate) fn encode(&self, version: u16) -> Result<Vec<u8>> {
        wire::encode("stream offer", version, self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Offer> {
        let (offer, _) = wire::decode::<Offer>("stream offer", OLDEST, bytes, MAX_OFFER_BYTES)?;
        if offer.addresses.len() > MAX_ADDRESSES {
            return Err(Error::corrupt(format!(
                "a stream offer of {} addresses, at most {MAX_ADDRESSES} are allowed",
                offer.addresses.len()
            )));
        }
        offer.parsed()?;
        Ok(offer)
    }

    /// The addresses.
    pub(crate) fn parsed(&self) -> Result<VecDeque<SocketAddr>> {
        let parse = |text: &String| {
            let foreign =
                || Error::corrupt(format!("a stream offer with the address {text:?}, expected an IP and a port"));
            text.parse().map_err(|_| foreign())
        };
        self.addresses.iter().map(parse).collect()
    }
}

pub(crate) fn draw() -> Result<Secret> {
    let mut secret = [0; SECRET_BYTES];
    getrandom::fill(&mut secret)
        .map_err(|e| Error::new(ErrorKind::Io, format!("drawing a random ticket for a stream: {e}")))?;
    Ok(secret)
}

/// Length of a [`Greeting`].
pub(crate) const GREETING_BYTES: usize = 8 + SECRET_BYTES;
const MAGIC: [u8; 4] = *b"KVFS";
const VERSION: u8 = 1;

/// The first bytes on a stream, from the side that connected: magic, version, three bytes of zero, the ticket.
pub(crate) fn greeting(ticket: &Secret) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    let fields = MAGIC.into_iter().chain([VERSION, 0, 0, 0]).chain(*ticket);
    bytes.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
    bytes
}

/// The ticket in a greeting.
pub(crate) fn ticket_of(bytes: &[u8; GREETING_BYTES]) -> Result<Secret> {
    let [m0, m1, m2, m3, version, _, _, _, ticket @ ..] = *bytes;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(Error::corrupt("the first bytes are not those of a kvferry stream"));
    }
    if version != VERSION {
        return Err(Error::new(
            ErrorKind::VersionMismatch,
            format!("a stream of version {version}, this build speaks {VERSION}"),
        ));
    }
    Ok(ticket)
}

/// Length of a [`Heading`].
pub(crate) const HEADING_BYTES: usize = 16;

/// What stands before the bytes of a chunk on a stream: magic, length (32 bits), number of the chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heading {
    pub(crate) chunk: u64,
    pub(crate) len: u32,
}

impl Heading {
    pub(crate) fn encode(self) -> [u8; HEADING_BYTES] {
        let mut bytes = [0; HEADING_BYTES];
        let fields = MAGIC.into_iter().chain(self.len.to_le_bytes()).chain(self.chunk.to_le_bytes());
        bytes.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADING_BYTES]) -> Result<Heading> {
        let [m0, m1, m2, m3, l0, l1, l2, l3, chunk @ ..] = *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(Error::corrupt("bytes on a stream that are not the heading of a chunk"));
        }
        Ok(Heading { chunk: u64::from_le_bytes(chunk), len: u32::from_le_bytes([l0, l1, l2, l3]) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_survives_the_wire_and_damage_is_refused() {
        let offer = Offer {
            addresses: vec!["127.0.0.1:5".to_owned(), "[fd00::1]:6".to_owned()],
            ticket: draw().unwrap(),
            answer: draw().unwrap(),
        };
        assert_ne!(offer.ticket, offer.answer);
        let bytes = offer.encode(OLDEST).unwrap();
        assert_eq!(Offer::decode(&bytes).unwrap(), offer);
        for cut in 0..bytes.len() {
            assert!(Offer::decode(&bytes[..cut]).is_err());
        }
        let many = Offer { addresses: vec![offer.addresses[0].clone(); MAX_ADDRESSES + 1], ..offer.clone() };
        assert!(Offer::decode(&many.encode(OLDEST).unwrap()).unwrap_err().message().contains("at most 16"));
        let named = Offer { addresses: vec!["localhost:5".to_owned()], ..offer.clone() };
        assert!(Offer::decode(&named.encode(OLDEST).unwrap()).unwrap_err().message().contains("\"localhost:5\""));

        let mut bytes = greeting(&offer.ticket);
        assert_eq!(ticket_of(&bytes).unwrap(), offer.ticket);
        bytes[4] = 9;
        let error = ticket_of(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        assert!(error.message().contains("version 9, this build speaks 1"), "{error}");
        bytes[0] = b'X';
        assert_eq!(ticket_of(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);

        let heading = Heading { chunk: u64::MAX - 1, len: 7 };
        let mut bytes = heading.encode();
        assert_eq!(Heading::decode(&bytes).unwrap(), heading);
        bytes[3] = 0;
        assert_eq!(Heading::decode(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
