//! The transfer engine: registered regions, peers, transfers and messages between two processes, on UCX.
//!
//! [`Agent`] is the handle, usable from any thread. The **progress thread** that it starts drives everything of UCX and is
//! one event loop over UCX's event fd, an eventfd for commands, the driver's ZMQ sockets, and a timer.
//! A [`Driver`] rides on that thread and uses the same verbs through [`Context`] without queues.
//!
//! # Example
//! ```no_run
//! use std::time::Duration;
//! use kvferry::agent::{Agent, AgentConfig, Direction, Event};
//! use kvferry::mem::MemoryRange;
//! use kvferry::proto::plan::{BlockPair, CopyPlan, Segment};
//! use kvferry::proto::wire::MemoryKind;
//!
//! # fn main() -> kvferry::Result<()> {
//! # let remote_metadata = Vec::new();
//! let agent = Agent::start(AgentConfig::default())?;
//! let cache = vec![0u8; 1 << 20];
//! // SAFETY: `cache` outlives the registration and is not used while it lasts.
//! let range = unsafe { MemoryRange::new(cache.as_ptr() as u64, 1 << 20, MemoryKind::Host)? };
//! let region = agent.register(range)?;
//! let peer = agent.connect(&kvferry::agent::decode_metadata(&remote_metadata)?)?;
//! let block = Segment {
//!     list: 0, local_region: region.index(), remote_region: 0, local_offset: 0, remote_offset: 0,
//!     local_stride: 4096, remote_stride: 4096, len: 4096,
//! };
//! let lists = vec![BlockPair { local: vec![3, 4].into(), remote: vec![8, 9].into() }];
//! let id = agent.transfer(peer, Direction::Read, CopyPlan { segments: [block].into(), lists }, 0)?;
//! while let Some(event) = agent.wait_event(Duration::from_secs(10)) {
//!     if let Event::TransferDone { id: done, result, .. } = event {
//!         assert_eq!(done, id);
//!         return result;
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod command;
mod core;
mod engine;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod handle;
mod metrics_file;
mod paths;
mod peers;
mod progress_thread;
mod revocation;
mod rpc;
mod thread;
mod transfers;

pub use self::core::config::{AgentConfig, Transport, Window};
pub use self::core::event::{Direction, Event};
pub use self::core::ids::{PeerId, RegionId, TransferId};
pub use self::core::limits::MAX_MESSAGE_BYTES;
pub use self::core::metadata::{MAX_METADATA_BYTES, decode_metadata, decode_region, encode_metadata, encode_region};
pub use self::core::route::Route;
pub use self::core::stats::{AgentStats, PeerStats};
#[cfg(test)]
pub(crate) use engine::driver::Stuck;
pub use engine::driver::{Context, Driver, MakeDriver};
pub use engine::probe::Probe;
pub use handle::Agent;
pub use thread::waker::Waker;

pub use crate::proto::wire::limits::MAX_REGIONS;
