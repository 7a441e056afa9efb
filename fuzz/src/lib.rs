//! What is fuzzed. Each target is a function of bytes that must end for all of them, and panics when a rule is broken.
//!
//! The fuzzers in `fuzz_targets` call them with bytes that coverage guides; `tests/tree/fuzz_cases.rs` calls them with the
//! cases that were kept.

pub mod agent;
pub mod aggregate;
pub mod config;
pub mod geometry;
pub mod listener;
pub mod machines;
pub mod scheduler;
mod source;
pub mod wire;
pub mod worker;

use source::Source;

/// A name and a function of any bytes.
pub type Target = (&'static str, fn(&[u8]));

/// Every target by name.
pub const TARGETS: &[Target] = &[
    ("agent", agent::run),
    ("aggregate", aggregate::run),
    ("config", config::run),
    ("geometry", geometry::run),
    ("listener", listener::run),
    ("machines", machines::run),
    ("scheduler", scheduler::run),
    ("wire", wire::run),
    ("worker", worker::run),
];
