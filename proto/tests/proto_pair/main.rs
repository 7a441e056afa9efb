//! A producer engine and a consumer engine, in simulated time: the rules of `proto::worker` and `proto::scheduler`
//! together, one by one and under arbitrary sequences of events.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod awaited;
mod random;
mod rank;
mod ranks;
mod rules;
mod sim;
