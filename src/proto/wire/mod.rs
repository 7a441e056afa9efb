//! What crosses a process boundary: versioned msgpack.
//!
//! Every message is a msgpack map with field names, so that a newer minor reader ignores what it does not know. Each
//! outermost message carries [`VERSION`]; a reader refuses another major version by name before it looks at the rest.

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
pub(crate) use codec::begins_as;
pub use codec::{MAX_DEPTH, VERSION, decode, encode};
pub use handshake::{HandshakeReply, HandshakeRequest, Prefill, RankBlob, RefusalCode};
pub use message::{Message, kind};
pub use metadata::{AgentMetadata, CompatField, EngineShape, MemoryKind, RankMetadata, RegionMetadata};
pub use params::TransferParams;
pub use peer::{PeerMessage, Reader, Verdict};
pub use report::{Cause, RecvFailure, RecvRecord, WorkerReport};
pub use step::{Grant, Hold, Load, Release, Remote, StepMetadata};
