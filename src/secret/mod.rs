//! Authentication and encryption with a pre-shared key: the key itself, the Noise exchange by which two holders of it
//! agree on a channel, and the channel. No I/O beside reading the key file; no clock; no threads.
//!
//! A process without the key can neither start an exchange nor answer one. The channel's keys come from two fresh
//! Diffie-Hellman keys and the pre-shared one, so that a key that leaks later does not open a recorded channel. What
//! this protects, and what not, is in `docs/protocol.md`, section Keys.

#![forbid(unsafe_code)]

mod channel;
mod exchange;
mod key;
mod window;

pub use channel::{Channel, Opener, Sealer, sealed_len};
pub use exchange::{Initiator, Protocol, Responder};
pub use key::{ENV, KEY_BYTES, Key};
