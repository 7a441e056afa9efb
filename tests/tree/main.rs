//! What holds of the source tree: its layers, its settings and their document, the kept cases of the fuzzers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod architecture;
mod fuzz_cases;
mod settings;
