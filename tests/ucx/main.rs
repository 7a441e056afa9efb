//! The UCX layer, and how it finds its library.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../common/mod.rs"]
mod common;

mod layer;
mod library;
mod processes;
