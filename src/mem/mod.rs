//! Memory that transfers read and write: what is this pointer, and is the range inside its allocation?
//!
//! [`check`] is asked before any registration, so that a null pointer, freed host memory, or a device pointer that was
//! called host memory is an error with an explanation and never a crash in UCX.

pub mod backing;
mod convert;
pub mod copy;
pub mod cuda;
pub mod host;
mod mapping;
mod outbox;
pub mod process;
mod range;
mod registered;
pub mod socket;
pub mod thread;

pub use convert::ucx_error;
pub use outbox::Outbox;
pub use range::{MemoryRange, check};
pub use registered::map;
