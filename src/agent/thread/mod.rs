//! The progress thread's means: waking it, spinning, and callers in its place.

pub(crate) mod callers;
pub(crate) mod edge_wait;
pub(crate) mod spin;
pub(crate) mod waker;

#[cfg(test)]
mod tests;
