//! The one table of metrics: their keys in stats maps, their names elsewhere, and what they mean.

use serde::{Serialize, Serializer};

use super::histogram::{BUCKETS, Bytes, Micros, Unit};

/// Whose stats a metric is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricScope {
    /// [`Stats`](super::Stats), of one worker or summed over an engine's.
    Worker,
    /// The agent's, `AgentStats`.
    Agent,
    /// One peer's of an agent, `PeerStats`.
    Peer,
    /// [`SchedulerStats`](crate::scheduler::SchedulerStats).
    Scheduler,
}

/// The type of a metric, in Prometheus' words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that grows.
    Counter,
    /// A number that grows per [`Cause`](crate::wire::Cause), a map in stats and a label elsewhere.
    CounterByCause,
    /// A number that rises and falls.
    Gauge,
    /// A histogram of microseconds in stats, of seconds elsewhere.
    Seconds,
    /// A histogram of bytes.
    Bytes,
}

impl MetricKind {
    /// The type as Prometheus names it.
    pub fn name(self) -> &'static str {
        match self {
            MetricKind::Counter | MetricKind::CounterByCause => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Seconds | MetricKind::Bytes => "histogram",
        }
    }

    /// For a histogram: its bucket bounds and its divisor. The bounds are the upper bounds of all buckets but the
    /// last in the unit of stats; the divisor says how many of that unit make one of the unit elsewhere.
    pub fn bounds(self) -> Option<(&'static [u64; BUCKETS - 1], u64)> {
        match self {
            MetricKind::Seconds => Some((&Micros::BOUNDS, 1_000_000)),
            MetricKind::Bytes => Some((&Bytes::BOUNDS, 1)),
            MetricKind::Counter | MetricKind::CounterByCause | MetricKind::Gauge => None,
        }
    }
}

impl Serialize for MetricKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// One metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Whose stats it is in.
    pub scope: MetricScope,
    /// Its key there.
    pub key: &'static str,
    /// Its type.
    pub kind: MetricKind,
    /// Its name after the prefix (`kvferry_`, `vllm:kvferry_`) and without a counter's `_total`.
    pub name: &'static str,
    /// The unit: `bytes`, `seconds`, or a noun.
    pub unit: &'static str,
    /// Its meaning.
    pub help: &'static str,
}

const fn worker(
    key: &'static str,
    kind: MetricKind,
    name: &'static str,
    unit: &'static str,
    help: &'static str,
) -> Metric {
    Metric { scope: MetricScope::Worker, key, kind, name, unit, help }
}

const fn agent(
    key: &'static str,
    kind: MetricKind,
    name: &'static str,
    unit: &'static str,
    help: &'static str,
) -> Metric {
    Metric { scope: MetricScope::Agent, key, kind, name, unit, help }
}

const fn peer(
    key: &'static str,
    kind: MetricKind,
    name: &'static str,
    unit: &'static str,
    help: &'static str,
) -> Metric {
    Metric { scope: MetricScope::Peer, key, kind, name, unit, help }
}

const fn scheduler(
    key: &'static str,
    kind: MetricKind,
    name: &'static str,
    unit: &'static str,
    help: &'static str,
) -> Metric {
    Metric { scope: MetricScope::Scheduler, key, kind, name, unit, help }
}

/// Every metric, in the order of its struct's fields.
#[rustfmt::skip]
pub const METRICS: &[Metric] = &[
    worker("recvs", MetricKind::Counter, "recvs", "receives",
        "KV cache receives that succeeded, one per request and rank."),
    worker("recv_failures", MetricKind::CounterByCause, "recv_failures", "receives",
        "KV cache receives that failed, by cause, one per request and rank."),
    worker("local_requests", MetricKind::Counter, "local_requests", "requests",
        "Requests without a hand-over, because their kv_transfer_params ask for none that the engine's kv_role serves: their \
         prompts are computed here and not kept. Counted by vLLM's connector, once per request."),
    worker("bytes", MetricKind::Counter, "bytes", "bytes", "Bytes of KV cache received."),
    worker("ahead_bytes", MetricKind::Counter, "ahead_bytes", "bytes",
        "Bytes of KV cache whose reads began before the end of the prefill was known."),
    worker("blocks", MetricKind::Counter, "blocks", "blocks", "Blocks of KV cache received, over all KV cache groups."),
    worker("operations", MetricKind::Counter, "operations", "operations", "Operations posted to receive KV cache."),
    worker("sends_granted", MetricKind::Counter, "sends_granted", "leases",
        "Leases granted on finished prefills, one per request and rank."),
    worker("sends_read", MetricKind::Counter, "sends_read", "leases",
        "Sends that a decode engine confirmed, one per request and rank."),
    worker("sends_released", MetricKind::Counter, "sends_released", "leases",
        "Sends that a decode engine gave back unread, one per request and rank."),
    worker("sends_expired", MetricKind::Counter, "sends_expired", "leases",
        "Sends whose lease ran out before a decode engine read them, one per request and rank."),
    worker("renewals", MetricKind::Counter, "renewals", "renewals", "Leases renewed by a decode engine's heartbeats."),
    worker("handshakes", MetricKind::Counter, "handshakes", "handshakes",
        "Handshakes with another engine that succeeded."),
    worker("handshake_failures", MetricKind::Counter, "handshake_failures", "handshakes",
        "Handshakes with another engine that failed."),
    worker("handover_time", MetricKind::Seconds, "handover_seconds", "seconds",
        "Time from the worker's first word of a request, or of the end of its awaited prefill, to the report of its receive."),
    worker("queued_time", MetricKind::Seconds, "queued_seconds", "seconds",
        "Time from a load's arrival at the worker, or the end of its awaited prefill, to its first read."),
    worker("posting_time", MetricKind::Seconds, "posting_seconds", "seconds",
        "Time from the first read posted to the last read posted of a KV cache receive."),
    worker("transfer_time", MetricKind::Seconds, "transfer_seconds", "seconds",
        "Time from the first read posted to the last byte of a KV cache receive."),
    worker("confirm_time", MetricKind::Seconds, "confirm_seconds", "seconds",
        "Time from the last byte of a KV cache receive, through the notification of the producer, to its word that the \
         lease held."),
    worker("handshake_time", MetricKind::Seconds, "handshake_seconds", "seconds",
        "Time from a handshake's begin until every rank needed was connected."),
    worker("recv_bytes", MetricKind::Bytes, "recv_bytes", "bytes", "Bytes per KV cache receive."),
    worker("leases", MetricKind::Gauge, "leases", "leases", "Leases that hold now."),
    worker("peers", MetricKind::Gauge, "peers", "agents", "Agents of other workers that are known as peers now."),
    worker("endpoints", MetricKind::Gauge, "endpoints", "endpoints",
        "UCX endpoints that are open now, those being closed included."),
    worker("registered_bytes", MetricKind::Gauge, "registered_bytes", "bytes", "Bytes of KV cache that are registered now."),

    agent("regions", MetricKind::Gauge, "agent_regions", "regions", "Registered regions."),
    agent("region_bytes", MetricKind::Gauge, "agent_region_bytes", "bytes", "Bytes in registered regions."),
    agent("peers", MetricKind::Gauge, "agent_peers", "agents", "Known peers."),
    agent("endpoints", MetricKind::Gauge, "agent_endpoints", "endpoints",
        "UCX endpoints that are open, those being closed included."),
    agent("transfers", MetricKind::Gauge, "agent_transfers", "transfers", "Transfers not yet over."),
    agent("operations_in_flight", MetricKind::Gauge, "agent_operations_in_flight", "operations", "Operations in flight."),
    agent("bytes_in_flight", MetricKind::Gauge, "agent_bytes_in_flight", "bytes", "Bytes of the operations in flight."),
    agent("operations", MetricKind::Counter, "agent_operations", "operations",
        "Operations posted: of UCX, pieces copied, requests to peers."),
    agent("copied_bytes", MetricKind::Counter, "agent_copied_bytes", "bytes",
        "Bytes copied from or to processes of this host by the kernel (process_vm_readv, process_vm_writev)."),
    agent("device_copied_bytes", MetricKind::Counter, "agent_device_copied_bytes", "bytes",
        "Bytes copied by a device from or to device memory of processes of this host (CUDA IPC)."),
    agent("one_sided_bytes", MetricKind::Counter, "agent_one_sided_bytes", "bytes",
        "Bytes moved by one-sided operations of UCX."),
    agent("served_bytes", MetricKind::Counter, "agent_served_bytes", "bytes",
        "Bytes moved by messages that the peer has answered."),
    agent("bytes_read", MetricKind::Counter, "agent_bytes_read", "bytes", "Bytes read from peers."),
    agent("bytes_written", MetricKind::Counter, "agent_bytes_written", "bytes", "Bytes written to peers."),
    agent("transfers_done", MetricKind::Counter, "agent_transfers_done", "transfers", "Transfers that succeeded."),
    agent("transfers_failed", MetricKind::Counter, "agent_transfers_failed", "transfers",
        "Transfers that failed or were cancelled."),
    agent("messages_sent", MetricKind::Counter, "agent_messages_sent", "messages", "Messages sent."),
    agent("messages_received", MetricKind::Counter, "agent_messages_received", "messages", "Messages delivered."),
    agent("messages_dropped", MetricKind::Counter, "agent_messages_dropped", "messages",
        "Messages dropped: malformed, too long, announced by rendezvous, from a sender that has not said hello or has \
         another key, or late ones of an earlier connection."),
    agent("peers_lost", MetricKind::Counter, "agent_peers_lost", "agents", "Peers that were lost."),
    agent("sleeps", MetricKind::Counter, "agent_sleeps", "sleeps", "Times that the progress thread went to sleep."),
    agent("turns", MetricKind::Counter, "agent_turns", "turns", "Iterations of the progress thread's event loop."),
    agent("posting_time", MetricKind::Seconds, "agent_posting_seconds", "seconds",
        "Time from the first to the last operation posted of a transfer that succeeded."),
    agent("transfer_time", MetricKind::Seconds, "agent_transfer_seconds", "seconds",
        "Time from the first operation posted to the end of a transfer that succeeded."),

    peer("connected", MetricKind::Gauge, "peer_connected", "agents",
        "1 while the peer is connected, else 0; labels say by which transports, and which way long runs go."),
    peer("copied_bytes", MetricKind::Counter, "peer_copied_bytes", "bytes",
        "Bytes copied from or to the peer by the kernel (process_vm_readv, process_vm_writev)."),
    peer("device_copied_bytes", MetricKind::Counter, "peer_device_copied_bytes", "bytes",
        "Bytes copied from or to the peer's device memory by a device (CUDA IPC)."),
    peer("one_sided_bytes", MetricKind::Counter, "peer_one_sided_bytes", "bytes",
        "Bytes moved from or to the peer by one-sided operations of UCX."),
    peer("served_bytes", MetricKind::Counter, "peer_served_bytes", "bytes",
        "Bytes moved by messages that the peer has answered."),
    peer("bytes_read", MetricKind::Counter, "peer_bytes_read", "bytes", "Bytes read from the peer."),
    peer("bytes_written", MetricKind::Counter, "peer_bytes_written", "bytes", "Bytes written to the peer."),
    peer("transfers_done", MetricKind::Counter, "peer_transfers_done", "transfers",
        "Transfers with the peer that succeeded."),
    peer("transfers_failed", MetricKind::Counter, "peer_transfers_failed", "transfers",
        "Transfers with the peer that failed or were cancelled."),

    scheduler("holds", MetricKind::Counter, "scheduler_holds", "requests",
        "Requests with a remote prefill that arrived, and whose lease the workers were told to keep."),
    scheduler("loads", MetricKind::Counter, "scheduler_loads", "requests", "Loads handed to the workers."),
    scheduler("releases", MetricKind::Counter, "scheduler_releases", "requests",
        "Requests whose prefill was given back without a load."),
    scheduler("aborts", MetricKind::Counter, "scheduler_aborts", "requests", "Loads that were aborted."),
    scheduler("grants", MetricKind::Counter, "scheduler_grants", "requests", "Finished prefills that were offered."),
    scheduler("drops", MetricKind::Counter, "scheduler_drops", "requests",
        "Prefills for a remote decode that ended with nothing to offer."),
    scheduler("receiving", MetricKind::Gauge, "scheduler_receiving", "requests",
        "Requests of a remote prefill that are remembered."),
    scheduler("sending", MetricKind::Gauge, "scheduler_sending", "requests",
        "Finished prefills whose blocks are kept for a decode engine."),
    scheduler("listener_requests", MetricKind::Counter, "scheduler_listener_requests", "messages",
        "Messages that the handshake listener received, malformed ones included."),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::scheduler::SchedulerStats;
    use crate::stats::Stats;

    fn keys<T: Serialize>(stats: &T) -> BTreeSet<String> {
        let value = serde_json::to_value(stats).unwrap_or_default();
        value.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default()
    }

    #[test]
    fn the_table_has_every_figure_once_and_no_other() {
        for (scope, fields) in
            [(MetricScope::Worker, keys(&Stats::default())), (MetricScope::Scheduler, keys(&SchedulerStats::default()))]
        {
            let listed: Vec<String> =
                METRICS.iter().filter(|metric| metric.scope == scope).map(|metric| metric.key.to_owned()).collect();
            assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), fields, "{scope:?}");
            assert_eq!(listed.len(), fields.len(), "{scope:?}");
        }
        let names: BTreeSet<&str> = METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), METRICS.len());
    }

    #[test]
    fn names_follow_prometheus_rules() {
        for metric in METRICS {
            assert!(metric.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{}", metric.name);
            assert!(metric.help.ends_with('.') && !metric.help.contains('\n'), "{}", metric.name);
            assert_eq!(metric.kind == MetricKind::Seconds, metric.name.ends_with("_seconds"), "{}", metric.name);
            assert!(!metric.name.ends_with("_total"), "{}", metric.name);
        }
    }
}
