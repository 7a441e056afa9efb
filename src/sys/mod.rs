//! The operating system: memory of other processes, ports, threads, and memory that a caller shares with the library. Calls
//! that need `unsafe` are here, so that the modules above need none.

pub mod ended;
pub mod fork;
pub mod isolated;
pub mod limits;
mod outbox;
pub mod ports;
pub mod process;
pub mod thread;

#[cfg(test)]
mod tests;

pub use outbox::Outbox;
