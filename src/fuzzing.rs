//! Internals that fuzz targets reach, behind the feature `fuzzing`. No part of the interface.
//!
//! Each function takes arbitrary bytes, must end for all of them, and panics when what it found contradicts itself.

// A contradiction is to end the fuzzer.
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used, missing_docs)]

pub use crate::agent::fuzzing::{frame, hello, inbox, pieces};
pub use crate::ffi::fuzzing::{CONFIGS, config};
