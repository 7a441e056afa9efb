//! Requests that the peer answers by messages ([`rpc`](crate::agent::rpc)), where nothing moves such memory without the
//! peer's processor, such as over TCP, where runs are short, and for digests.

use std::cell::RefCell;
use std::time::Instant;

use super::{Path, Profile, Turn};
use crate::agent::core::event::Direction;
use crate::agent::core::frame::FrameKind;
use crate::agent::core::in_flight::Operations;
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::limits::{CHUNK_BYTES, CHUNK_PIECES, GATHERED_BYTES, PART_BYTES};
use crate::agent::peers::Peer;
use crate::agent::rpc::client::{Chunk, Client, Service};
use crate::agent::rpc::server::Payload;
use crate::agent::rpc::staged::Continuation;
use crate::agent::rpc::wire::Piece;
use crate::agent::transfers::Lack;
use crate::error::{Error, Result};
use crate::ucx::MAX_PARTS;

/// Whether a chunk should take no more: at its limits, or as many long pieces as UCX sends without copying them.
fn is_full(pieces: usize, bytes: u64) -> bool {
    let in_place = bytes >= pieces as u64 * PART_BYTES;
    let (most_bytes, most_pieces) = if in_place { (CHUNK_BYTES, MAX_PARTS) } else { (GATHERED_BYTES, CHUNK_PIECES) };
    bytes >= most_bytes || pieces >= most_pieces
}

pub(super) struct Message;

impl Path for Message {
    fn name(&self) -> &'static str {
        "served by messages"
    }

    fn carries(&self, _peer: &Peer, _profile: Profile) -> bool {
        true
    }

    /// Posts one chunk.
    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        let in_flight = turn.windows.of(turn.peer.id).bytes;
        let credit = turn.peer.flow.window(turn.windows.peer_bytes());
        if in_flight > 0 && in_flight + CHUNK_BYTES > credit {
            turn.lack = Some(Lack::Peer);
            return Ok(0);
        }
        if !turn.has_room(CHUNK_BYTES) {
            return Ok(0);
        }
        let (mut local, mut remote, mut bytes) = (Vec::new(), Vec::<Piece>::new(), 0);
        while !is_full(local.len(), bytes) && turn.next_of(profile).is_some() {
            let Some(operation) = turn.transfer.take(CHUNK_BYTES - bytes) else { break };
            // At most as long as a chunk, so it fits 32 bits.
            let len = operation.len as u32;
            let range = *turn.regions.live_range(operation.local_region)?;
            local.push(Iov { range, offset: operation.local_offset, len });
            let piece = Piece { region: operation.remote_region, offset: operation.remote_offset, len };
            match remote.last_mut() {
                // As long as the chunk at most, too.
                Some(before) if piece.follows(before) => before.len += len,
                _ => remote.push(piece),
            }
            bytes += operation.len;
        }
        let service = match (profile.digest, turn.transfer.direction()) {
            (true, _) => Service::Digest,
            (false, Direction::Read) => Service::Read,
            (false, Direction::Write) => Service::Write,
        };
        let now = Instant::now();
        turn.transfer.begin(u64::from(service != Service::Digest), now);
        let chunk = Chunk { transfer: turn.id, peer: turn.peer.id, service, local, bytes };
        let (kind, mut data) = chunk.request(&remote);
        if service == Service::Write && iov::device_of(&chunk.local).is_some() {
            turn.staged.read(chunk.local.clone(), Continuation::Ask { chunk, request: data });
        } else {
            if service == Service::Write {
                iov::gather(&chunk.local, &mut data)?;
            }
            ask(turn.peer, chunk, kind, data, turn.rpc, turn.operations).map_err(|(_, error)| error)?;
        }
        turn.enter_flight(bytes, now);
        turn.stats.operations += 1;
        Ok(bytes)
    }
}

/// Asks the peer for a chunk. `Err`: nothing was sent.
pub(crate) fn ask(
    peer: &mut Peer,
    chunk: Chunk,
    kind: FrameKind,
    data: Vec<u8>,
    rpc: &RefCell<Client>,
    operations: &mut Operations,
) -> std::result::Result<(), (Chunk, Error)> {
    let departure = peer.flow.depart(Instant::now());
    let number = rpc.borrow().next_number();
    let posted = peer.identity().and_then(|from| {
        peer.post_rpc(kind, number, Payload::Bytes(data), 0, operations)?;
        Ok(from)
    });
    match posted {
        Ok(from) => {
            peer.flow.departed(departure);
            rpc.borrow_mut().insert(chunk, from, departure);
            Ok(())
        }
        Err(error) => Err((chunk, error)),
    }
}
