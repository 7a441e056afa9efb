//! Reads, writes and digests carried by messages: what is asked of peers, and what they ask for.

pub(crate) mod client;
pub(crate) mod flow_control;
pub(crate) mod liveness;
pub(crate) mod pace;
pub(crate) mod server;
pub(crate) mod staged;
pub(crate) mod wire;
