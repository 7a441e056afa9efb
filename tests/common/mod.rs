//! What the tests of several processes share.

#![allow(dead_code)]

pub mod cache;
pub mod child;
pub mod engine;
pub mod netns;
pub mod wire;
