//! What an agent counts.

/// Gauges and totals of one agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AgentStats {
    /// Registered regions.
    pub regions: u64,
    /// Bytes in them.
    pub region_bytes: u64,
    /// Known peers.
    pub peers: u64,
    /// Transfers not yet over.
    pub transfers: u64,
    /// UCX operations in flight.
    pub operations_in_flight: u64,
    /// Their bytes.
    pub bytes_in_flight: u64,
    /// Operations since the start: of UCX, pieces copied, requests to peers.
    pub operations: u64,
    /// Bytes copied to or from processes of this host by the kernel (`process_vm_readv`).
    pub copied_bytes: u64,
    /// Bytes posted as one-sided operations of UCX.
    pub one_sided_bytes: u64,
    /// Bytes asked for, or sent, by messages.
    pub served_bytes: u64,
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
    /// Messages dropped: of a sender that did not say hello, late ones of an earlier connection, malformed ones.
    pub messages_dropped: u64,
    /// Peers that were lost.
    pub peers_lost: u64,
    /// How often the loop went to sleep.
    pub sleeps: u64,
    /// How often the loop went round.
    pub turns: u64,
}
