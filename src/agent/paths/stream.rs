//! Reads by a [stream](crate::agent::streams): of host memory into host memory, where only TCP reaches the peer.

use super::message::post_chunk;
use super::{Path, Profile, Turn};
use crate::agent::core::limits::{CHUNK_PIECES, STREAM_CHUNK_BYTES};
use crate::agent::peers::Peer;
use crate::error::Result;

fn is_full(pieces: usize, bytes: u64) -> bool {
    bytes >= STREAM_CHUNK_BYTES || pieces >= CHUNK_PIECES
}

pub(super) struct Stream;

impl Path for Stream {
    fn name(&self) -> &'static str {
        "read by streams"
    }

    fn carries(&self, peer: &Peer, profile: Profile) -> bool {
        peer.streamed && profile.streamable && profile.are_hosts() && !profile.digest
    }

    /// Posts one chunk.
    fn post(&self, turn: &mut Turn<'_>, profile: Profile) -> Result<u64> {
        post_chunk(turn, profile, is_full, true)
    }
}
