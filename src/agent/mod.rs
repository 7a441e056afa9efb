//! The transfer engine: registered regions, peers, transfers and messages between two processes, on UCX.
//!
//! [`Agent`] is the handle, usable from any thread. The **ferry thread** that it starts owns everything of UCX and is
//! one event loop over UCX's event fd, an eventfd for commands, the passenger's ZMQ sockets, and a timer.
//! A [`Passenger`] rides on that thread and uses the same verbs through [`Ferry`] without queues.
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
//! let id = agent.transfer(peer, Direction::Read, CopyPlan { segments: [block].into(), lists })?;
//! while let Some(event) = agent.wait_event(Duration::from_secs(10)) {
//!     if let Event::TransferDone { id: done, result, .. } = event {
//!         assert_eq!(done, id);
//!         return result;
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod backing;
mod chunks;
mod config;
mod copiers;
mod edges;
mod event;
mod event_loop;
mod farewell;
mod ferry;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod guests;
mod handle;
mod hello;
mod ids;
mod messages;
mod metadata;
mod operations;
mod outlook;
mod pace;
mod passenger;
mod paths;
mod peers;
mod reach;
mod registry;
mod rehearsal;
mod route;
mod sealed;
mod served;
mod setup;
mod shared;
mod sidestep;
mod spin;
mod spots;
mod stats;
mod streams;
mod transfers;
mod turns;
mod waker;

pub use config::{AgentConfig, Transport, Window};
pub use event::{Direction, Event};
pub use ferry::{Ferry, MAX_MESSAGE_BYTES};
pub use handle::{Agent, MakePassenger};
pub use ids::{PeerId, RegionId, TransferId};
pub use metadata::{MAX_METADATA_BYTES, decode_metadata, encode_metadata};
pub use outlook::Outlook;
pub use passenger::Passenger;
pub use registry::MAX_REGIONS;
pub use route::Route;
pub use stats::AgentStats;
pub use waker::Waker;
