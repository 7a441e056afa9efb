//! Requests that the peer answers by messages ([`served`](crate::agent::rpc::server)), where nothing moves such memory without
//! the peer's processor, such as over TCP, where runs are short, and for digests.

use std::time::Instant;

use super::{Path, Profile};
use crate::agent::core::event::Direction;
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::iov::Iov;
use crate::agent::core::limits::{CHUNK_BYTES, CHUNK_PIECES, GATHERED_BYTES, PART_BYTES, STREAM_CHUNK_BYTES};
use crate::agent::core::stats::AgentStats;
use crate::agent::engine::Engine;
use crate::agent::peers::Peer;
use crate::agent::rpc::client::{Chunk, Service};
use crate::agent::rpc::wire::Piece;
use crate::agent::transfers::Transfer;
use crate::error::Result;
use crate::ucx::MAX_PARTS;

/// Whether a chunk should take no more: at its limits, or as many long pieces as UCX sends without copying them.
fn is_full(pieces: usize, bytes: u64) -> bool {
    let in_place = bytes >= pieces as u64 * PART_BYTES;
    let (most_bytes, most_pieces) = if in_place { (CHUNK_BYTES, MAX_PARTS) } else { (GATHERED_BYTES, CHUNK_PIECES) };
    bytes >= most_bytes || pieces >= most_pieces
}

pub(crate) struct Message;

impl Path for Message {
    fn name(&self) -> &'static str {
        "served by messages"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.served_bytes
    }

    fn carries(&self, _peer: &Peer, _stretch: Profile) -> bool {
        true
    }

    /// Posts one chunk.
    fn post(&self, engine: &mut Engine, peer_id: PeerId, id: TransferId, profile: Profile) -> Result<u64> {
        if engine.transfers.get(id).is_some_and(Transfer::is_streamable) {
            engine.ask_for_stream(peer_id)?;
        }
        post_chunk(engine, peer_id, id, profile, is_full, false)
    }
}

/// Posts one chunk, if the windows have room: as many pieces as are of `profile` and before `is_full` says that their number
/// and their bytes are enough. Returns its bytes.
pub(crate) fn post_chunk(
    engine: &mut Engine,
    peer_id: PeerId,
    id: TransferId,
    profile: Profile,
    is_full: fn(usize, u64) -> bool,
    streamed: bool,
) -> Result<u64> {
    let peer = engine.peers.get(peer_id)?;
    let most = if streamed { STREAM_CHUNK_BYTES } else { CHUNK_BYTES };
    let has_credit = peer.bytes == 0 || peer.bytes + most <= peer.flow.window(engine.config.peer_window.bytes);
    if !has_credit || !engine.has_room(peer_id, most) {
        return Ok(0);
    }
    let Some(transfer) = engine.transfers.get_mut(id) else { return Ok(0) };
    let (mut local, mut remote, mut bytes) = (Vec::new(), Vec::new(), 0);
    while !is_full(local.len(), bytes) && Profile::of(&engine.regions, peer, transfer) == Some(profile) {
        let Some(operation) = transfer.take(most - bytes) else { break };
        // At most as long as a chunk, so it fits 32 bits.
        let len = operation.len as u32;
        let range = *engine.regions.live_range(operation.local_region)?;
        local.push(Iov { range, offset: operation.local_offset, len });
        let piece = Piece { region: operation.remote_region, offset: operation.remote_offset, len };
        match remote.last_mut() {
            // As long as the chunk at most, too.
            Some(before) if piece.follows(before) => before.len += len,
            _ => remote.push(piece),
        }
        bytes += operation.len;
    }
    let service = match (transfer.is_asking(), transfer.direction()) {
        (true, _) => Service::Digest,
        (false, Direction::Read) => Service::Read,
        (false, Direction::Write) => Service::Write,
    };
    transfer.begin(u64::from(service != Service::Digest), Instant::now());
    engine.request_chunk(Chunk { transfer: id, peer: peer_id, service, local, bytes, streamed }, &remote)?;
    if let Some(transfer) = engine.transfers.get_mut(id) {
        transfer.in_flight += 1;
    }
    engine.entered_flight(peer_id, bytes);
    engine.stats.operations += 1;
    Ok(bytes)
}
