//! The counters of an agent.

use serde::Serialize;

use super::event::Direction;
use super::route::Route;
use crate::proto::stats::{Histogram, Micros};

/// Bytes by the path that they took, as [`AgentStats`] names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PathBytes {
    pub(crate) copied: u64,
    pub(crate) device_copied: u64,
    pub(crate) one_sided: u64,
    pub(crate) served: u64,
}

impl PathBytes {
    /// The bytes, whatever the path.
    pub(crate) fn total(self) -> u64 {
        let PathBytes { copied, device_copied, one_sided, served } = self;
        copied + device_copied + one_sided + served
    }

    fn add(&mut self, more: PathBytes) {
        let PathBytes { copied, device_copied, one_sided, served } = more;
        self.copied += copied;
        self.device_copied += device_copied;
        self.one_sided += one_sided;
        self.served += served;
    }
}

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
    /// Bytes moved by one-sided operations of UCX.
    pub one_sided_bytes: u64,
    /// Bytes moved by messages that the peer has answered.
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

impl AgentStats {
    /// Counts bytes that were moved.
    pub(crate) fn add(&mut self, moved: PathBytes) {
        let PathBytes { copied, device_copied, one_sided, served } = moved;
        self.copied_bytes += copied;
        self.device_copied_bytes += device_copied;
        self.one_sided_bytes += one_sided;
        self.served_bytes += served;
    }

    /// Counts a transfer that is over.
    pub(crate) fn end(&mut self, of: &Traffic) {
        self.bytes_read += of.bytes_read;
        self.bytes_written += of.bytes_written;
        self.transfers_done += of.transfers_done;
        self.transfers_failed += of.transfers_failed;
    }
}

/// The counters of one peer. Transfers and their bytes count on the side that started them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Traffic {
    pub(crate) by_path: PathBytes,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) transfers_done: u64,
    pub(crate) transfers_failed: u64,
}

impl Traffic {
    /// A transfer that is over.
    pub(crate) fn of(direction: Direction, bytes: u64, is_done: bool) -> Traffic {
        let (bytes_read, bytes_written) = match direction {
            Direction::Read => (bytes, 0),
            Direction::Write => (0, bytes),
        };
        let (transfers_done, transfers_failed) = (is_done.into(), (!is_done).into());
        Traffic { bytes_read, bytes_written, transfers_done, transfers_failed, ..Traffic::default() }
    }

    /// Counts bytes that were moved.
    pub(crate) fn add(&mut self, moved: PathBytes) {
        self.by_path.add(moved);
    }

    /// Adds what another connection to the same agent counted.
    pub(crate) fn merge(&mut self, other: &Traffic) {
        self.by_path.add(other.by_path);
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.transfers_done += other.transfers_done;
        self.transfers_failed += other.transfers_failed;
    }
}

/// The figures of one peer, by its name: of all its connections that are remembered. What each is, in words, is in
/// [`METRICS`](crate::proto::stats::METRICS).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct PeerStats {
    /// The agent's name.
    pub name: String,
    /// 1 while it is connected and has answered, else 0: then the next four are empty.
    pub connected: u64,
    /// As in [`Route`].
    pub lanes: String,
    /// As in [`Route`].
    pub host: &'static str,
    /// As in [`Route`].
    pub device: &'static str,
    /// As in [`Route`].
    pub mixed: &'static str,
    /// As in [`AgentStats`], like all that follow.
    pub copied_bytes: u64,
    /// Bytes copied by a device.
    pub device_copied_bytes: u64,
    /// Bytes moved by one-sided operations of UCX.
    pub one_sided_bytes: u64,
    /// Bytes moved by messages that the peer has answered.
    pub served_bytes: u64,
    /// Bytes read from it.
    pub bytes_read: u64,
    /// Bytes written to it.
    pub bytes_written: u64,
    /// Transfers that succeeded.
    pub transfers_done: u64,
    /// Transfers that failed or were cancelled.
    pub transfers_failed: u64,
}

impl PeerStats {
    pub(crate) fn new(name: String, route: Option<Route>, traffic: &Traffic) -> PeerStats {
        let connected = route.is_some().into();
        let Route { lanes, host, device, mixed } = route.unwrap_or_default();
        let PathBytes { copied, device_copied, one_sided, served } = traffic.by_path;
        PeerStats {
            name,
            connected,
            lanes,
            host,
            device,
            mixed,
            copied_bytes: copied,
            device_copied_bytes: device_copied,
            one_sided_bytes: one_sided,
            served_bytes: served,
            bytes_read: traffic.bytes_read,
            bytes_written: traffic.bytes_written,
            transfers_done: traffic.transfers_done,
            transfers_failed: traffic.transfers_failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::proto::stats::{METRICS, MetricScope};

    /// Compares the fields of a struct, but for those of a route, with the table.
    fn compare(stats: &impl Serialize, scope: MetricScope) {
        let value = serde_json::to_value(stats).unwrap_or_default();
        let is_figure = |key: &&str| !["name", "lanes", "host", "device", "mixed"].contains(key);
        let fields: BTreeSet<&str> =
            value.as_object().map(|map| map.keys().map(String::as_str).filter(is_figure).collect()).unwrap_or_default();
        let listed: Vec<&str> = METRICS.iter().filter(|m| m.scope == scope).map(|m| m.key).collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), fields);
        assert_eq!(listed.len(), fields.len());
    }

    #[test]
    fn metrics_table_has_every_figure_once() {
        compare(&AgentStats::default(), MetricScope::Agent);
        compare(&PeerStats::default(), MetricScope::Peer);
    }

    #[test]
    fn what_connections_counted_adds_up() {
        let by_path = PathBytes { copied: 1, device_copied: 2, one_sided: 3, served: 4 };
        let mut traffic = Traffic { by_path, bytes_read: 6, bytes_written: 7, transfers_done: 8, transfers_failed: 9 };
        let other = traffic;
        traffic.merge(&other);
        let stats = PeerStats::new("a".to_owned(), None, &traffic);
        let paths = [stats.copied_bytes, stats.device_copied_bytes, stats.one_sided_bytes, stats.served_bytes];
        assert_eq!(paths, [2, 4, 6, 8]);
        let ends = [stats.bytes_read, stats.bytes_written, stats.transfers_done, stats.transfers_failed];
        assert_eq!((ends, stats.connected), ([12, 14, 16, 18], 0));
    }
}
