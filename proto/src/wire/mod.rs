//! Messages that cross a process boundary: versioned msgpack.
//!
//! Every message is a msgpack map with field names, so that a newer minor reader ignores what it does not know. Each
//! outermost message names its protocol version; a reader refuses one outside [`OLDEST`] to [`VERSION`] by name before it
//! handles the rest.

mod batch;
mod blocks;
mod cause;
mod codec;
mod handshake;
pub mod limits;
mod message;
mod metadata;
mod params;
mod peer;
mod region;
mod report;
mod scan;
mod step;

pub use batch::ReportBatch;
pub(crate) use batch::requests;
pub use blocks::Blocks;
pub use cause::Cause;
pub(crate) use codec::version_for_answer;
pub use codec::{MAX_DEPTH, OLDEST, VERSION, Versions, decode, encode};
pub use handshake::{HandshakeReply, HandshakeRequest, Prefill, RankBlob, RefusalCode};
pub use message::{Message, begins_as, kind};
pub use metadata::{AgentMetadata, AgentRegion, CompatField, EngineShape, LateRegion, RankMetadata};
pub use params::TransferParams;
pub use peer::{PeerMessage, Reader, Verdict};
pub use region::{DeviceHandle, DevicePiece, MemoryKind, RegionMetadata};
pub use report::{RecvFailure, RecvRecord, WorkerReport};
pub use step::{Grant, Hold, Load, Release, Remote, StepMetadata};
