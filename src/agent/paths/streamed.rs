//! Reads by a [stream](super::super::streams): of host memory into host memory, where only TCP reaches the peer.

use super::super::ferry::Engine;
use super::super::ids::{PeerId, TransferId};
use super::super::peers::Peer;
use super::super::served::{CHUNK_PIECES, STREAM_CHUNK_BYTES};
use super::super::stats::AgentStats;
use super::served::post_chunk;
use super::{Path, Stretch};
use crate::error::Result;
use crate::proto::wire::MemoryKind;

fn is_full(pieces: usize, bytes: u64) -> bool {
    bytes >= STREAM_CHUNK_BYTES || pieces >= CHUNK_PIECES
}

pub(super) struct Streamed;

impl Path for Streamed {
    fn name(&self) -> &'static str {
        "read by streams"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.streamed_bytes
    }

    fn carries(&self, peer: &Peer, stretch: Stretch) -> bool {
        let hosts = stretch.local == MemoryKind::Host && stretch.remote == MemoryKind::Host;
        peer.streamed && stretch.streamable && hosts && !stretch.digest
    }

    /// Posts one chunk.
    fn post(&self, engine: &mut Engine, peer: PeerId, id: TransferId, stretch: Stretch) -> Result<u64> {
        post_chunk(engine, peer, id, stretch, is_full, true)
    }
}
