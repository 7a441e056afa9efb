//! Agents, in one process and in two: transfers, peers, memory, threads.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../common/mod.rs"]
mod common;

mod copiers;
mod cuda;
mod descriptors;
mod hostile;
mod idle;
mod keys;
mod life;
mod limits;
mod peers;
mod polling;
mod regions;
mod signals;
mod transfer;
mod verify;

/// The other process of these tests.
#[test]
#[ignore = "the other process of these tests"]
fn child_process() {
    common::agent::child::serve();
}
