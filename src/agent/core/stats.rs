//! What an agent counts.

use serde::Serialize;

use crate::proto::stats::{Histogram, Micros};

/// Gauges and totals of one agent. What each is, in words, is in [`METRICS`](crate::proto::stats::METRICS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct AgentStats {
    /// Registered regions.
    pub regions: u64,
    /// Bytes in them.
    pub region_bytes: u64,
    /// Known peers.
    pub peers: u64,
    /// UCX endpoints that are open, those being closed included.
    pub endpoints: u64,
    /// Transfers not yet over.
    pub transfers: u64,
    /// Operations in flight: of UCX, batches being copied, requests to peers.
    pub operations_in_flight: u64,
    /// Their bytes.
    pub bytes_in_flight: u64,
    /// Operations since the start: of UCX, pieces copied, requests to peers.
    pub operations: u64,
    /// Bytes copied from or to processes of this host by the kernel (`process_vm_readv`, `process_vm_writev`).
    pub copied_bytes: u64,
    /// Bytes copied by a device from or to device memory of processes of this host.
    pub device_copied_bytes: u64,
    /// Bytes posted as one-sided operations of UCX.
    pub one_sided_bytes: u64,
    /// Bytes asked for, or sent, by messages.
    pub served_bytes: u64,
    /// Bytes asked for by streams.
    pub streamed_bytes: u64,
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes written to peers.
    pub bytes_written: u64,
    /// Transfers that succeeded.
    pub transfers_done: u64,
    /// Transfers that failed or were cancelled.
    pub transfers_failed: u64,
    /// Messages sent.
    pub messages_sent: u64,
    /// Messages delivered.
    pub messages_received: u64,
    /// Messages dropped: malformed, too long, announced by rendezvous, from a sender that has not said hello or has another
    /// key, or late ones of an earlier connection.
    pub messages_dropped: u64,
    /// Peers that were lost.
    pub peers_lost: u64,
    /// Times that the progress thread went to sleep.
    pub sleeps: u64,
    /// Iterations of the event loop.
    pub turns: u64,
    /// Of transfers that succeeded: from the first to the last operation posted.
    pub posting_time: Histogram<Micros>,
    /// Of transfers that succeeded: from the first operation posted to the end.
    pub transfer_time: Histogram<Micros>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::proto::stats::{METRICS, Scope};

    #[test]
    fn the_table_of_metrics_has_every_figure_once_and_no_other() {
        let value = serde_json::to_value(AgentStats::default()).unwrap_or_default();
        let fields: BTreeSet<&str> =
            value.as_object().map(|map| map.keys().map(String::as_str).collect()).unwrap_or_default();
        let listed: Vec<&str> = METRICS.iter().filter(|m| m.scope == Scope::Agent).map(|m| m.key).collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), fields);
        assert_eq!(listed.len(), fields.len());
    }
}
