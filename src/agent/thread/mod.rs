//! The progress thread's means: waking it, spinning, and asking the kernel for processors.

pub(crate) mod callers;
pub(crate) mod edge_wait;
pub(crate) mod spin;
pub(crate) mod time_slice;
pub(crate) mod waker;

#[cfg(test)]
mod tests;
