//! The progress thread's means: waking it, spinning, and callers in its place.
//!
//! - The thread spins briefly while transfers are in flight and sleeps when idle. At most half as many threads of a process
//!   spin as it has processors, and none while others are being woken; a spinning thread yields to threads that wait for
//!   its processor ([`spin`]).
//! - Where bytes come slowly, it sleeps too (`agent::rpc::pace`).
//! - A caller that polls without a pause drives the engine in its place ([`callers`]). The thread takes over when nobody
//!   has polled for a millisecond, or when there is something longer to move.
//! - While a TCP connection waits for the peer's answer, UCX's event fd stays readable without a reason. After some vain
//!   wake-ups only its changes count ([`edge_wait`]).
//! - Other threads wake it through one eventfd ([`waker`]).

pub(crate) mod callers;
pub(crate) mod edge_wait;
pub(crate) mod spin;
pub(crate) mod waker;

#[cfg(test)]
mod tests;
