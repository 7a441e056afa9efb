//! The agent's decoders, for fuzz targets.

// A contradiction is to end the fuzzer.
#![allow(clippy::expect_used)]

use crate::agent::core::frame::Frame;
use crate::agent::core::limits::{CHUNK_BYTES, CHUNK_PIECES};
use crate::agent::peers::hello::Hello;
use crate::agent::peers::inbox::{Inbox, InboxItem};
use crate::agent::rpc::wire::{decode_pieces, encode_pieces, read_request};
use crate::proto::wire::{OLDEST, VERSION, Versions};

/// A frame header; what decodes encodes to the same bytes, but for the two that are not looked at.
pub fn frame(bytes: &[u8]) {
    let Ok(frame) = Frame::decode(bytes) else { return };
    let again = frame.encode();
    let differing = again.iter().zip(bytes).enumerate().any(|(at, (a, b))| a != b && !(6..8).contains(&at));
    assert!(!differing && again.len() == bytes.len(), "{frame:?}");
}

/// A hello; what decodes can be encoded, and decodes to the same.
pub fn hello(bytes: &[u8]) {
    let Ok(hello) = Hello::decode(bytes) else { return };
    assert!((OLDEST..=VERSION).contains(&hello.versions.common()), "{hello:?}");
    // Encoding writes the versions that this build speaks.
    let hello = Hello { versions: Versions::OURS, ..hello };
    let again = hello.encode().expect("what was decoded can be encoded");
    assert_eq!(Hello::decode(&again).ok().as_ref(), Some(&hello));
}

/// The pieces of a request.
pub fn pieces(bytes: &[u8]) {
    let read = read_request(bytes);
    let Ok((pieces, rest)) = decode_pieces(bytes) else {
        assert!(read.is_err(), "a read request without pieces");
        return;
    };
    let mut again = encode_pieces(&pieces, rest.len());
    again.extend_from_slice(rest);
    assert_eq!(again, bytes);
    if let Ok(read) = &read {
        let total: u64 = read.iter().map(|piece| u64::from(piece.len)).sum();
        assert!(rest.is_empty() && read.len() <= CHUNK_PIECES && total <= CHUNK_BYTES, "a chunk over its limits");
    }
}

/// Messages that arrive with these sequence numbers come out in order, each at most once, until the first refusal for
/// want of room.
pub fn inbox(numbers: &[u64]) {
    let mut inbox = Inbox::default();
    let mut next = 0u64;
    for &number in numbers {
        match inbox.take(number, InboxItem::Data(number.to_le_bytes().to_vec())) {
            Ok(due) => {
                for item in due {
                    assert_eq!(item, InboxItem::Data(next.to_le_bytes().to_vec()));
                    next += 1;
                }
            }
            Err(error) if error.kind() == crate::ErrorKind::Exhausted => return,
            Err(_) => {}
        }
    }
}
