//! What every part of the agent shares: ids, settings, events, frames, regions and counters. Nothing here names a part.

pub(crate) mod config;
pub(crate) mod effect;
pub(crate) mod event;
pub(crate) mod frame;
pub(crate) mod id_map;
pub(crate) mod ids;
pub(crate) mod in_flight;
pub(crate) mod iov;
pub(crate) mod limits;
pub(crate) mod live;
pub(crate) mod metadata;
pub(crate) mod refusals;
pub(crate) mod regions;
pub(crate) mod reply;
pub(crate) mod request;
pub(crate) mod route;
pub(crate) mod stats;
