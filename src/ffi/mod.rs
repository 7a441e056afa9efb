//! The C ABI. `include/kvferry.h` is generated from these files; its top states the conventions.
//!
//! Every export goes through the macro in `boundary.rs`: no panic leaves the library, and every failure leaves its text
//! with the calling thread. Handles and buffers are looked up, never followed, so that a stale one is an error.

// C spells its types in lower case with a prefix.
#![allow(non_camel_case_types)]

#[macro_use]
mod boundary;
pub mod agent;
pub mod agent_transfer;
pub mod aggregator;
pub mod buffer;
mod decode;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod handle;
pub mod handshake;
pub mod listener;
mod lists;
pub mod log;
pub mod plan;
pub mod report;
pub mod scheduler;
pub mod settings;
pub mod stats;
pub mod status;
mod table;
pub mod ucx;
pub mod version;
pub mod worker;

/// How long freeing an object that was not shut down may take: what `Agent`'s own drop allows.
const FREE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
