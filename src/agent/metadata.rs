//! Agent metadata as bytes, for hosts that carry it themselves.

use crate::error::Result;
use crate::proto::wire::{self, AgentMetadata};

/// The largest encoded metadata accepted: a few thousand regions with rkeys of some hundred bytes.
pub const MAX_METADATA_BYTES: usize = 16 << 20;

/// Encodes metadata for another process.
pub fn encode_metadata(metadata: &AgentMetadata) -> Result<Vec<u8>> {
    wire::encode("agent_metadata", metadata)
}

/// Decodes what [`encode_metadata`] made. The address and the rkeys inside are checked when they are used.
///
/// # Errors
/// [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) for damaged or foreign bytes,
/// [`ErrorKind::VersionMismatch`](crate::ErrorKind::VersionMismatch) for another version's,
/// [`ErrorKind::Exhausted`](crate::ErrorKind::Exhausted) for more than [`MAX_METADATA_BYTES`].
pub fn decode_metadata(bytes: &[u8]) -> Result<AgentMetadata> {
    wire::decode("agent_metadata", bytes, MAX_METADATA_BYTES)
}
