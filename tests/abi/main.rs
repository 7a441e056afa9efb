//! The C ABI: its header, and C programs that use it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../common/skip.rs"]
mod skip;

mod header;
mod programs;
