//! Drives the state machines: connects `proto` to `agent`, `net` and the clock, and decides nothing.
//!
//! [`Worker`] is one per rank, in the process that owns the KV cache; [`Scheduler`] is one per engine, in the process
//! that schedules, which needs neither a device nor UCX.

#![forbid(unsafe_code)]

mod channel;
mod config;
mod driver;
mod scheduler;
mod trace;
mod worker;
mod writer;

pub use config::{SchedulerConfig, WorkerConfig};
pub use scheduler::Scheduler;
pub use worker::{Worker, WorkerStats};

pub use crate::agent::Transport;
