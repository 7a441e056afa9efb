//! What the test files share.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

pub mod agent;
pub mod alone;
pub mod cache;
pub mod child;
pub mod engine;
pub mod keys;
pub mod memory;
pub mod netns;
pub mod ports;
pub mod skip;
pub mod ucx;
pub mod wire;
