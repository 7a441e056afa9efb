//! Requests that the peer answers by messages ([`served`](super::super::served)), where nothing moves such memory without
//! the peer's processor, such as over TCP, where runs are short, and for digests.

use std::time::Instant;

use super::super::chunks::{Chunk, Service};
use super::super::event::Direction;
use super::super::ferry::Engine;
use super::super::ids::{PeerId, TransferId};
use super::super::peers::Peer;
use super::super::served::{CHUNK_BYTES, CHUNK_PIECES, GATHERED_BYTES, PART_BYTES, Piece, STREAM_CHUNK_BYTES};
use super::super::spots::Spot;
use super::super::stats::AgentStats;
use super::super::transfers::Transfer;
use super::{Path, Stretch};
use crate::error::Result;
use crate::ucx::MAX_PARTS;

/// Whether a chunk should take no more: at its limits, or as many long pieces as UCX sends without copying them.
fn is_full(pieces: usize, bytes: u64) -> bool {
    let in_place = bytes >= pieces as u64 * PART_BYTES;
    let (most_bytes, most_pieces) = if in_place { (CHUNK_BYTES, MAX_PARTS) } else { (GATHERED_BYTES, CHUNK_PIECES) };
    bytes >= most_bytes || pieces >= most_pieces
}

pub(super) struct Served;

impl Path for Served {
    fn name(&self) -> &'static str {
        "served by messages"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.served_bytes
    }

    fn carries(&self, _peer: &Peer, _stretch: Stretch) -> bool {
        true
    }

    /// Posts one chunk.
    fn post(&self, engine: &mut Engine, peer_id: PeerId, id: TransferId, stretch: Stretch) -> Result<u64> {
        if engine.transfers.get(id).is_some_and(Transfer::is_streamable) {
            engine.ask_for_stream(peer_id)?;
        }
        post_chunk(engine, peer_id, id, stretch, is_full, false)
    }
}

/// Posts one chunk, if the windows have room: as many pieces as are of `stretch` and before `is_full` says that their number
/// and their bytes are enough. Returns its bytes.
pub(super) fn post_chunk(
    engine: &mut Engine,
    peer_id: PeerId,
    id: TransferId,
    stretch: Stretch,
    is_full: fn(usize, u64) -> bool,
    streamed: bool,
) -> Result<u64> {
    let peer = engine.peers.get(peer_id)?;
    let most = if streamed { STREAM_CHUNK_BYTES } else { CHUNK_BYTES };
    let paced = peer.bytes == 0 || peer.bytes + most <= peer.pace.window(engine.config.peer_window.bytes);
    if !paced || !engine.has_room(peer_id, most) {
        return Ok(0);
    }
    let Some(transfer) = engine.transfers.get_mut(id) else { return Ok(0) };
    let (mut local, mut remote, mut bytes) = (Vec::new(), Vec::new(), 0);
    while !is_full(local.len(), bytes) && Stretch::of(&engine.registry, peer, transfer) == Some(stretch) {
        let Some(operation) = transfer.take(most - bytes) else { break };
        // At most as long as a chunk, so it fits 32 bits.
        let len = operation.len as u32;
        let range = *engine.registry.live_range(operation.local_region)?;
        local.push(Spot { range, offset: operation.local_offset, len });
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
