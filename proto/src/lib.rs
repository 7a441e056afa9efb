//! The pure part of kvferry: address maps, plans, wire formats and the state machines of both sides.
//!
//! Nothing here does I/O, reads a clock, starts a thread or is `unsafe`. Time comes in as a [`Time`] parameter, and
//! what should happen goes out as actions, so that every order of events can be tested in simulated time.

#![forbid(unsafe_code)]

pub mod aggregate;
pub mod error;
pub mod geometry;
pub mod handshake;
pub mod ids;
pub mod latest;
pub mod plan;
pub mod scheduler;
pub mod shape;
pub mod stats;
pub mod time;
pub mod wire;
pub mod worker;

pub use error::{Error, ErrorKind, Result};
pub use ids::{EngineId, Incarnation, RankId, RequestId};
pub use time::Time;
