//! A safe interface to UCX; the only user of `ucx-sys`.
//!
//! libucp is opened at run time ([`Library`]). A [`Context`] registers [`Memory`] and may be used from
//! several threads. A [`Worker`] and its [`Endpoint`]s and [`Rkey`]s are used by one thread at a time; they move to
//! another thread all together or not at all. Ownership enforces the order that UCX requires: memory, rkeys, endpoints
//! and workers hold what they need, and an operation in flight holds all that it uses until UCX has ended it.
//!
//! Nothing here blocks, except [`Worker::close`] and the drop of a worker. The owner calls
//! [`Worker::progress`] and then empties [`Worker::poll_completion`], [`Worker::poll_message`] and
//! [`Worker::poll_failed_endpoints`]; to sleep, it calls [`Worker::arm`] and polls [`Worker::event_fd`].
//!
//! UCX's callbacks only push to queues: they call nothing of UCX, free nothing and cannot unwind.
//!
//! A single operation cannot be cancelled, because UCX cancels no reads, writes or sends (ucp_request_cancel does
//! nothing for them): closing the endpoint by force ends all of its operations.

mod am;
mod candidate;
mod context;
mod cores;
mod endpoint;
mod envelope;
mod library;
mod memory;
mod memory_kind;
mod print;
mod queue;
mod raw;
mod request;
mod resources;
mod search;
mod status;
mod worker;

pub use am::{AmMessage, MessageSink};
pub use candidate::{Candidate, Fate, LibraryInfo, LibrarySource, OLDEST, PATH_VARIABLE};
pub use context::{Context, ContextConfig, configured};
pub use cores::Rkey;
pub use endpoint::{CloseRequest, Endpoint, MAX_PARTS, MessagePart};
pub use envelope::tells_segments;
pub use library::Library;
pub use memory::{Memory, rkey_range};
pub use memory_kind::{MemoryKind, MemoryTypes};
pub use request::{Completion, Posted};
pub use resources::{Resource, UnknownVariable};
pub use status::{Status, UcxError};
pub use worker::{Armed, Worker, WorkerOptions};
