//! Engines: workers in processes of their own, and their schedulers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../common/mod.rs"]
mod common;

mod awaited;
mod devices;
mod engines;
mod faults;
mod hosts;
mod keys;
mod shapes;

/// The other processes of these tests.
#[test]
fn child() {
    common::child::serve_if_child();
}

/// The process that captures what crosses the network.
#[test]
fn capture() {
    common::wire::capture_if_child();
}
