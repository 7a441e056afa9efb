//! Agent metadata as bytes, for hosts that carry it themselves.

use crate::error::Result;
use crate::proto::wire::{AgentMetadata, AgentRegion, Message};

pub use crate::proto::wire::limits::MAX_AGENT_METADATA_BYTES as MAX_METADATA_BYTES;

/// Encodes metadata for another process.
pub fn encode_metadata(metadata: &AgentMetadata) -> Result<Vec<u8>> {
    metadata.to_bytes()
}

/// Decodes what [`encode_metadata`] made. The address and the rkeys inside are checked when they are used.
///
/// # Errors
/// [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) for damaged or foreign bytes,
/// [`ErrorKind::VersionMismatch`](crate::ErrorKind::VersionMismatch) for another version's,
/// [`ErrorKind::Exhausted`](crate::ErrorKind::Exhausted) for more than [`MAX_METADATA_BYTES`].
pub fn decode_metadata(bytes: &[u8]) -> Result<AgentMetadata> {
    AgentMetadata::from_bytes(bytes)
}

/// Encodes one region for another process.
pub fn encode_region(region: &AgentRegion) -> Result<Vec<u8>> {
    region.to_bytes()
}

/// Decodes what [`encode_region`] made. The rkey inside is checked when a peer takes the region.
///
/// # Errors
/// As [`decode_metadata`].
pub fn decode_region(bytes: &[u8]) -> Result<AgentRegion> {
    AgentRegion::from_bytes(bytes)
}
