//! Reads by a [stream](crate::agent::streams): of host memory into host memory, where only TCP reaches the peer.

use super::message::post_chunk;
use super::{Path, Profile};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::limits::{CHUNK_PIECES, STREAM_CHUNK_BYTES};
use crate::agent::core::stats::AgentStats;
use crate::agent::engine::Engine;
use crate::agent::peers::Peer;
use crate::error::Result;
use crate::proto::wire::MemoryKind;

fn is_full(pieces: usize, bytes: u64) -> bool {
    bytes >= STREAM_CHUNK_BYTES || pieces >= CHUNK_PIECES
}

pub(crate) struct Stream;

impl Path for Stream {
    fn name(&self) -> &'static str {
        "read by streams"
    }

    fn counter<'a>(&self, stats: &'a mut AgentStats) -> &'a mut u64 {
        &mut stats.streamed_bytes
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        let hosts = profile.local == MemoryKind::Host && profile.remote == MemoryKind::Host;
        peer.streamed && profile.streamable && hosts && !profile.digest
    }

    /// Posts one chunk.
    fn post(&self, engine: &mut Engine, peer: PeerId, id: TransferId, profile: Profile) -> Result<u64> {
        post_chunk(engine, peer, id, profile, is_full, true)
    }
}
