//! The drivers of the state machines: they pump `proto` <-> `agent`, `net` and the clock, and decide nothing.
//!
//! [`Worker`] is one per rank, in the process that owns the KV cache; [`Scheduler`] is one per engine, in the process
//! that schedules, which needs neither a device nor UCX.

mod config;
mod request_log;


pub use config::{SchedulerConfig, Transport, WorkerConfig, parse_config};
