//! The progress thread's means: waking it, and asking the kernel for processors.

pub(crate) mod affinity;
pub(crate) mod edge_wait;
pub(crate) mod time_slice;
pub(crate) mod waker;
