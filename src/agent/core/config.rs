//! How an agent is set up.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Map;

use crate::agent::core::limits::MAX_WAITING;
use crate::error::{Error, Result};
use crate::settings::{Component, defaults, micros, millis};

/// Which of UCX's transports to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// What UCX chooses: `UCX_TLS` of the settings or the environment, else the fastest that reaches the peer.
    #[default]
    Auto,
    /// TCP only (and, where UCX has it, copies between host and CUDA memory).
    Tcp,
    /// Copies between processes of one host, messages over TCP. UCX's own shared-memory transports are not used.
    Shm,
}

impl Transport {
    /// The transport named `auto`, `tcp` or `shm`.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Transport::Auto),
            "tcp" => Ok(Transport::Tcp),
            "shm" => Ok(Transport::Shm),
            other => Err(Error::invalid(format!("the transport {other:?} is unknown; expected auto, tcp or shm"))),
        }
    }
}

/// How much may be in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Operations, at least 1. A peer lets at most 1024 of one other agent's requests wait.
    #[serde(rename = "window")]
    pub operations: u32,
    /// Bytes. A single operation over it is posted when nothing else is in flight.
    #[serde(rename = "window_bytes")]
    pub bytes: u64,
}

/// An agent's settings; [`AgentConfig::default`] suits most.
///
/// Each is a row of the table of settings, by whose key it is read and which has its default. Those that are skipped are
/// for Rust programs alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentConfig {
    /// Name in logs and in what peers see; at most 256 bytes. Default: `agent`.
    #[serde(default = "agent")]
    pub name: String,
    /// Default: [`Transport::Auto`].
    pub transport: Transport,
    /// UCX settings, with or without the `UCX_` prefix; they win over the environment's.
    pub ucx: BTreeMap<String, String>,
    /// The libucp to open; by default one already loaded in the process, else that of the Python package `kvferry-ucx`, else
    /// the system's, else that of a Python package `libucx`.
    pub ucx_lib: Option<PathBuf>,
    /// The file of the key that all agents share: see [`Key`](crate::secret::Key). `None` leaves it to the environment
    /// variable `KVFERRY_KEY_FILE`, an empty path means no key. Default: `None`.
    pub key_file: Option<PathBuf>,
    /// In flight to one peer. Default: 64 operations or 16 MiB. 16 MiB is what a 400 Gbit/s link moves in a third of
    /// a millisecond, well over its round trip; 64 small operations hide the per-operation latency of TCP and RDMA.
    #[serde(flatten)]
    pub peer_window: Window,
    /// In flight to all peers, beyond a sixteenth of `peer_window` that each peer has of its own. A peer that ends no operation
    /// for half a second to a second does not count in it until it does. `None`: 256 operations or 64 MiB, and at least
    /// `peer_window`.
    #[serde(skip)]
    pub total_window: Option<Window>,
    /// Adjacent blocks are merged into operations of at most this many bytes. Default: 4 MiB, so that four are in
    /// flight in a full window and a small transfer behind a large one waits for little.
    pub max_operation_bytes: u64,
    /// A transfer between host memories whose runs are shorter than this on average, as when the two sides' layouts
    /// differ, does not post an operation for each: the side that has the bytes gathers many runs into a message, and
    /// this side puts them in place. 0: never. Default:
    /// [`GATHER_BELOW`](crate::proto::plan::GATHER_BELOW).
    pub gather_below: u64,
    /// How long a peer may take to answer the hello. Default: 10 s.
    #[serde(rename = "connect_timeout_ms", with = "millis")]
    pub connect_timeout: Duration,
    /// How long a cancelled transfer's operations may take to end by themselves before the connection is closed by
    /// force, which ends them; and how long peers that read or write a region may take to end that when it is
    /// deregistered, before the connections to those that have not are closed. Default: 5 s.
    #[serde(rename = "cancel_grace_ms", with = "millis")]
    pub cancel_grace: Duration,
    /// How long `deregister` waits for the transfers that use the region. Default: 30 s.
    #[serde(rename = "deregister_timeout_ms", with = "millis")]
    pub deregister_timeout: Duration,
    /// While transfers are in flight, unless their bytes come slowly (less than 256 MiB a second): how long the thread spins
    /// without progress before it sleeps. Default: 300 us, about
    /// the time between two completions over TCP on one host. A thread that sleeps between them costs more: Linux wakes it
    /// on the processor of the one that sent, where the two then take turns, at half the speed and no less processor time.
    /// 10 ms is faster still where processors are idle, but takes them from engines that compute.
    #[serde(rename = "spin_us", with = "micros")]
    pub spin: Duration,
    /// How many threads copy memory of other processes of this host, the progress thread among them. The others are
    /// started by the first transfer that takes longer than 200 us, at most one per further processor; memory whose
    /// pages may have to come from elsewhere (a mapped file, userfaultfd) is copied by one of them at least. Default:
    /// 2, which on two processors take 0.6 of the time of one.
    pub copy_threads: u32,
    /// Whether device memory of a peer on the same host is mapped by this process and copied by its device, many pieces at a
    /// time. Else UCX moves it, piece by piece, or messages do. Default: yes.
    pub device_copies: bool,
    /// Bytes of unsent messages per peer before `send` refuses. Default: 64 MiB.
    pub send_queue_bytes: u64,
    /// Whether a read, when its last byte has arrived, asks the peer for a digest of what it has in the places that
    /// were read, and fails with [`ErrorKind::DigestMismatch`](crate::ErrorKind::DigestMismatch) unless what arrived
    /// has the same one. For those who want proof of their fabric: both sides read all bytes once more. Default: no.
    pub verify: bool,
    /// Whether the agent connects to a stand-in within its process at its start, so that first contact with a peer of this
    /// host does not wait for UCX to weigh its protocols; the start takes some hundredths of a second longer. Default: yes.
    pub warm_up: bool,
    /// Whether times of transfers are counted in histograms. Default: yes.
    pub telemetry: bool,
    /// A file that is kept up to date with the agent's figures and those of each peer, in Prometheus' text format. `%p` in it
    /// stands for the process id, `%a` for the agent's name. `None` and an empty path mean none. Default: `None`.
    pub metrics_file: Option<PathBuf>,
    /// Whether each connection is logged at level info, for owners that do not do so themselves. Default: yes.
    #[serde(skip, default = "yes")]
    pub tells_connections: bool,
}

fn agent() -> String {
    "agent".to_owned()
}

fn yes() -> bool {
    true
}

impl Default for AgentConfig {
    fn default() -> Self {
        defaults(Component::Agent, Map::new())
    }
}

impl AgentConfig {
    /// Refuses settings that cannot work, by name.
    pub fn validate(&self) -> Result<()> {
        if self.name.is_empty() || self.name.len() > 256 {
            return Err(Error::invalid(format!(
                "an agent's name must have 1 to 256 bytes, this one has {}",
                self.name.len()
            )));
        }
        for (what, window) in [("peer_window", self.peer_window), ("total_window", self.total_window())] {
            if window.operations == 0 || window.bytes == 0 {
                return Err(Error::invalid(format!(
                    "{what} is {} operations, {} bytes; expected at least 1 of each",
                    window.operations, window.bytes
                )));
            }
        }
        if self.peer_window.operations as usize > MAX_WAITING {
            return Err(Error::invalid(format!(
                "peer_window is {} operations; expected at most {MAX_WAITING}, what a peer lets wait",
                self.peer_window.operations
            )));
        }
        if self.copy_threads == 0 {
            return Err(Error::invalid("copy_threads is 0; expected at least 1, the progress thread"));
        }
        if self.max_operation_bytes == 0 {
            return Err(Error::invalid("max_operation_bytes is 0; expected at least 1"));
        }
        Ok(())
    }

    /// How much may be in flight to all peers.
    pub(crate) fn total_window(&self) -> Window {
        let Window { operations, bytes } = self.peer_window;
        self.total_window.unwrap_or(Window { operations: operations.max(256), bytes: bytes.max(64 << 20) })
    }

    /// What the caller, or else the environment, sets UCX's setting `name` (without the prefix) to.
    pub(crate) fn ucx_setting(&self, name: &str) -> Option<String> {
        let given = self.ucx.iter().find(|(key, _)| key.strip_prefix("UCX_").unwrap_or(key) == name);
        given.map(|(_, value)| value.clone()).or_else(|| std::env::var(format!("UCX_{name}")).ok())
    }

    /// The ports that UCX's setting TCP_PORT_RANGE leaves to TCP; `None` where any free one will do.
    pub(crate) fn tcp_ports(&self) -> Option<RangeInclusive<u16>> {
        ports_of(&self.ucx_setting("TCP_PORT_RANGE")?)
    }
}

/// The ports of a value such as `6000-6100` or `6000`, 0 being any. What is no such value UCX has refused before.
fn ports_of(value: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = value.split_once('-').unwrap_or((value, value));
    let ports = first.trim().parse().ok()?..=last.trim().parse().ok()?;
    (*ports.start() != 0 && !ports.is_empty()).then_some(ports)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::settings::parse_config;

    fn parsed(pairs: &[(&str, &str)]) -> Result<AgentConfig> {
        let map: BTreeMap<_, _> = pairs.iter().copied().collect();
        parse_config(Component::Agent, &rmp_serde::to_vec_named(&map).unwrap())
    }

    #[test]
    fn keys_are_taken_and_bad_ones_named() {
        assert_eq!(parsed(&[]).unwrap(), AgentConfig::default());
        let good = parsed(&[("name", "n"), ("transport", "tcp"), ("ucx_lib", "/x/libucp.so.0")]).unwrap();
        assert_eq!((good.name.as_str(), good.transport), ("n", Transport::Tcp));
        assert_eq!(good.ucx_lib, Some(PathBuf::from("/x/libucp.so.0")));
        for (key, value, expected) in [
            ("transport", "rdma", "one of auto, tcp, shm"),
            ("windw", "8", "did you mean \"window\"?"),
            ("window", "8", "window must be a whole number from 1 to 1024"),
        ] {
            let error = parsed(&[(key, value)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(expected), "{error}");
        }
    }

    #[test]
    fn total_window_is_one_peers_at_least() {
        let of = |operations, bytes| {
            let peer_window = Window { operations, bytes };
            AgentConfig { peer_window, ..AgentConfig::default() }.total_window()
        };
        assert_eq!(of(8, 1 << 30), Window { operations: 256, bytes: 1 << 30 });
        assert_eq!(of(1024, 1), Window { operations: 1024, bytes: 64 << 20 });
        let narrow = Window { operations: 1, bytes: 1 };
        let config = AgentConfig { total_window: Some(narrow), ..AgentConfig::default() };
        assert_eq!(config.total_window(), narrow);
    }

    #[test]
    fn the_default_is_valid_and_nonsense_is_named() {
        AgentConfig::default().validate().unwrap();
        let long = AgentConfig { name: "x".repeat(257), ..AgentConfig::default() };
        assert!(long.validate().unwrap_err().message().contains("257"));
        let none = AgentConfig { peer_window: Window { operations: 0, bytes: 1 }, ..AgentConfig::default() };
        assert!(none.validate().unwrap_err().message().contains("peer_window"));
        let many = AgentConfig { peer_window: Window { operations: 1025, bytes: 1 }, ..AgentConfig::default() };
        assert!(many.validate().unwrap_err().message().contains("1024"));
        let zero = AgentConfig { max_operation_bytes: 0, ..AgentConfig::default() };
        assert!(zero.validate().unwrap_err().message().contains("max_operation_bytes"));
        let nobody = AgentConfig { copy_threads: 0, ..AgentConfig::default() };
        assert!(nobody.validate().unwrap_err().message().contains("copy_threads"));
        assert!(Transport::parse("rdma").unwrap_err().message().contains("rdma"));
    }

    #[test]
    fn setting_of_ports_wins_over_the_environment() {
        assert_eq!(ports_of("6000-6100"), Some(6000..=6100));
        assert_eq!(ports_of("6000"), Some(6000..=6000));
        for any in ["0", "0-0", "6100-6000", "6000-", "", "-", "70000-70001", "some"] {
            assert_eq!(ports_of(any), None, "{any:?}");
        }
        let mut config = AgentConfig::default();
        for name in ["TCP_PORT_RANGE", "UCX_TCP_PORT_RANGE"] {
            config.ucx = [(name.to_owned(), "6000-6100".to_owned())].into();
            assert_eq!(config.tcp_ports(), Some(6000..=6100), "{name}");
        }
    }
}
