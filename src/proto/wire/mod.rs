//! What crosses a process boundary: versioned msgpack.
//!
//! Every message is a msgpack map with field names, so that a newer minor reader ignores what it does not know. Each
//! outermost message names its protocol version; a reader refuses one outside [`OLDEST`] to [`VERSION`] by name before it
//! looks at the rest.

mod batch;
mod blocks;
mod codec;
mod handshake;
pub mod limits;
mod message;
mod metadata;
mod params;
mod peer;
mod report;
mod scan;
mod step;

pub use batch::ReportBatch;
pub(crate) use batch::requests;
pub use blocks::Blocks;
pub use codec::{MAX_DEPTH, OLDEST, VERSION, Versions, decode, encode};
pub(crate) use codec::{begins_as, version_for_answer};
pub use handshake::{HandshakeReply, HandshakeRequest, Prefill, RankBlob, RefusalCode};
pub use message::{Message, kind};
pub use metadata::{
    AgentMetadata, AgentRegion, CompatField, DeviceHandle, DevicePiece, EngineShape, MemoryKind, RankMetadata,
    RegionMetadata,
};
pub use params::TransferParams;
pub use peer::{PeerMessage, Reader, Verdict};
pub use report::{Cause, RecvFailure, RecvRecord, WorkerReport};
pub use step::{Grant, Hold, Load, Release, Remote, StepMetadata};
