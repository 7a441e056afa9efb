//! Memory that transfers read and write: what is this pointer, and is the range inside its allocation?
//!
//! [`check`] is asked before any registration, so that a null pointer, freed host memory, or a device pointer that was
//! called host memory is an error with an explanation and never a crash in UCX.

mod check;
mod convert;
pub mod copy;
pub mod cuda;
pub mod host;
pub mod iov;
mod mapping;
mod pages;
mod range;
mod registered;

pub use check::check;
pub use convert::ucx_error;
pub use iov::Iov;
pub use range::MemoryRange;
pub use registered::map;

/// Which way a transfer moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the peer's regions into local ones (UCX GET).
    Read,
    /// From local regions into the peer's (UCX PUT).
    Write,
}
