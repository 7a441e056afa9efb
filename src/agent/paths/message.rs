//! Requests that the peer answers by messages ([`rpc`](crate::agent::rpc)), where nothing moves such memory without the
//! peer's processor, such as over TCP, where runs are short, and for digests.

use std::time::Instant;

use super::{Path, Profile, Turn};
use crate::agent::core::event::Direction;
use crate::agent::core::iov::Iov;
use crate::agent::core::limits::{CHUNK_BYTES, CHUNK_PIECES, GATHERED_BYTES, PART_BYTES, STREAM_CHUNK_BYTES};
use crate::agent::core::stats::PathBytes;
use crate::agent::peers::Peer;
use crate::agent::rpc::client::{Chunk, Service};
use crate::agent::rpc::server::Payload;
use crate::agent::rpc::wire::{Piece, StreamReader};
use crate::agent::thread::affinity;
use crate::error::Result;
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

    fn count(&self, bytes: u64) -> PathBytes {
        PathBytes { served: bytes, ..PathBytes::default() }
    }

    fn carries(&self, _peer: &Peer, _profile: Profile) -> bool {
        true
    }

    /// Posts one chunk.
    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        if profile.streamable {
            turn.streams.ask(turn.peer, turn.effects);
        }
        post_chunk(turn, profile, is_full, false)
    }
}

/// Posts one chunk, if the windows have room: as many pieces as are of `profile` and before `is_full` says that their number
/// and their bytes are enough. Returns its bytes.
pub(super) fn post_chunk(
    turn: &mut Turn<'_>,
    profile: Profile,
    is_full: fn(usize, u64) -> bool,
    streamed: bool,
) -> Result<u64> {
    let most = if streamed { STREAM_CHUNK_BYTES } else { CHUNK_BYTES };
    let in_flight = turn.windows.of(turn.peer.id).bytes;
    let credit = turn.peer.flow.window(turn.windows.peer_bytes());
    if in_flight > 0 && in_flight + most > credit || !turn.has_room(most) {
        return Ok(0);
    }
    let (mut local, mut remote, mut bytes) = (Vec::new(), Vec::<Piece>::new(), 0);
    while !is_full(local.len(), bytes) && turn.next_of(profile).is_some() {
        let Some(operation) = turn.transfer.take(most - bytes) else { break };
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
    turn.begin(u64::from(service != Service::Digest));
    request(turn, Chunk { transfer: turn.id, peer: turn.peer.id, service, local, bytes, streamed }, &remote)?;
    turn.enter_flight(bytes);
    turn.stats.operations += 1;
    Ok(bytes)
}

/// Asks the peer for a chunk. `Err`: nothing was sent.
fn request(turn: &mut Turn<'_>, chunk: Chunk, remote: &[Piece]) -> Result<()> {
    let from = turn.peer.identity()?;
    let departure = turn.peer.flow.depart(Instant::now());
    let reader = chunk.streamed.then(|| StreamReader {
        received: turn.streams.received(turn.peer.id),
        processor: affinity::processor() as u16,
    });
    let (kind, data) = chunk.request(remote, reader)?;
    let number = turn.rpc.borrow().next_number();
    turn.peer.post_rpc(kind, number, Payload::Bytes(data), 0, turn.operations, turn.regions)?;
    if chunk.streamed {
        turn.streams.expect(turn.peer.id);
    }
    turn.peer.flow.departed(departure);
    turn.rpc.borrow_mut().insert(chunk, from, departure);
    Ok(())
}
