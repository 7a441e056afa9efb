//! kvferry moves KV-cache blocks between the processes of LLM inference engines, on UCX.
//!
//! The life of a request, the layers and their rules are in `docs/architecture.md`; the wire formats are in
//! `docs/protocol.md`.

#![warn(missing_docs)]

pub mod agent;
pub mod connector;
pub mod ffi;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod log_limit;
pub mod mem;
pub mod net;
pub mod planner;
pub mod secret;
pub mod settings;
mod sync;
pub mod sys;
pub mod ucx;

#[doc(inline)]
pub use kvferry_proto as proto;
#[doc(inline)]
pub use kvferry_proto::error;
pub use kvferry_proto::{Error, ErrorKind, Result};
