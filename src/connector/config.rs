//! What a host configures. Keys, ranges and defaults on the C ABI are those of [`crate::settings`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::agent::Transport;
use crate::error::{Error, Result};
use crate::net;
use crate::proto::geometry::Group;
use crate::proto::ids::{EngineId, RankId};
use crate::proto::scheduler::{AllowedHosts, MultiTurn};
use crate::proto::wire::{CompatField, EngineShape};
use crate::settings::{self, Part};

/// A worker's configuration. Sizes count ranks, times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// The engine that this worker belongs to; the same on all of its ranks and its scheduler.
    pub engine_id: EngineId,
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Facts that both engines must share: model, dtype, ...; each a list of name, value and, where it is there,
    /// [`CompatField::informative`].
    pub compat: Vec<CompatField>,
    /// Transports allowed.
    pub transport: Transport,
    /// UCX settings by name without the `UCX_` prefix; they win over the environment's. `TLS` is refused beside a `transport`
    /// that is not `auto`.
    pub ucx: BTreeMap<String, String>,
    /// Path of the libucp to open; None searches as `docs/rdma.md` says.
    pub ucx_lib: Option<String>,
    /// The file of the key that all engines share; None leaves it to the environment variable `KVFERRY_KEY_FILE`, an
    /// empty text means no key.
    pub key_file: Option<String>,
    /// Name in logs; None makes one of engine and rank.
    pub name: Option<String>,
    /// UCX operations in flight to one peer.
    pub window: u32,
    /// Heartbeats per lease.
    pub heartbeat_divisor: u32,
    /// Until a producer's ranks must be known and connected.
    pub handshake_timeout_ms: u64,
    /// Until a request's reads must have completed.
    pub transfer_timeout_ms: u64,
    /// Until the producer must have said whether the lease held.
    pub verdict_timeout_ms: u64,
    /// How long a message about a request that is not granted yet is kept.
    pub early_message_ms: u64,
    /// How long an ended request is remembered.
    pub tombstone_ms: u64,
    /// How long a lease is kept alive for a request that is neither loaded nor released, and how long a load awaits the end
    /// of a prefill that is under way.
    pub hold_timeout_ms: u64,
    /// How long a load awaits a prefill of which its engine has said nothing.
    pub await_timeout_ms: u64,
    /// From how many written tokens on a portion of a prefill under way is read; 0: none is.
    pub portion_tokens: u64,
    /// A peer that no request has used for this long is disconnected.
    pub peer_ttl_ms: u64,
    /// Threads that copy memory of other processes of this host, the progress thread among them.
    pub copy_threads: u32,
    /// Whether host memory of producers is read over TCP by a connection beside UCX's: see
    /// [`AgentConfig`](crate::agent::AgentConfig). Default: yes.
    pub streams: bool,
    /// Whether each read is checked against a digest that the producer makes of its own bytes: both read all of them
    /// once more.
    pub verify: bool,
    /// A file that gets one JSON line per finished receive, appended; None or an empty text means none.
    pub request_log: Option<String>,
    /// Whether device memory within a host is copied by the device: see [`AgentConfig`](crate::agent::AgentConfig).
    pub device_copies: bool,
    /// Whether the agent connects to a stand-in within its process at its start: see
    /// [`AgentConfig`](crate::agent::AgentConfig). Default: yes.
    pub rehearse: bool,
    /// Whether anything is counted: without it, reports have no stats and totals stay at zero.
    pub telemetry: bool,
    /// A file to be made for a trace of the lives of requests, in Chrome's trace event format; `%p` stands for the
    /// process id. None leaves it to the environment variable `KVFERRY_TRACE`, an empty text means no trace.
    pub trace: Option<String>,
}

impl WorkerConfig {
    /// A configuration of `engine_id` with every other key at its default.
    pub fn new(engine_id: EngineId) -> WorkerConfig {
        WorkerConfig {
            engine_id,
            pp_rank: 0,
            tp_rank: 0,
            tp_size: 1,
            pp_size: 1,
            dcp_size: 1,
            compat: Vec::new(),
            transport: Transport::Auto,
            ucx: BTreeMap::new(),
            ucx_lib: None,
            key_file: None,
            name: None,
            window: 64,
            heartbeat_divisor: 6,
            handshake_timeout_ms: 30_000,
            transfer_timeout_ms: 120_000,
            verdict_timeout_ms: 10_000,
            early_message_ms: 30_000,
            tombstone_ms: 120_000,
            hold_timeout_ms: 3_600_000,
            await_timeout_ms: 600_000,
            portion_tokens: 256,
            peer_ttl_ms: 600_000,
            copy_threads: 2,
            streams: true,
            device_copies: true,
            verify: false,
            request_log: None,
            rehearse: true,
            telemetry: true,
            trace: None,
        }
    }

    /// The worker's place.
    pub fn rank(&self) -> RankId {
        RankId { pp: self.pp_rank, tp: self.tp_rank }
    }

    /// The engine's shape.
    pub fn shape(&self) -> EngineShape {
        EngineShape { tp: self.tp_size, pp: self.pp_size, dcp: self.dcp_size }
    }

    /// The compatibility fields, sorted by name.
    ///
    /// # Errors
    /// A name given twice with other values.
    pub fn compat(&self) -> Result<Vec<CompatField>> {
        let mut fields: BTreeMap<&str, &CompatField> = BTreeMap::new();
        for field in &self.compat {
            let CompatField { name, value, .. } = field;
            if let Some(CompatField { value: other, .. }) = fields.insert(name, field)
                && other != value
            {
                return Err(Error::invalid(format!("compat has {name:?} twice, as {other:?} and as {value:?}")));
            }
        }
        Ok(fields.into_values().cloned().collect())
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// The first key that is wrong, with its value and what was expected.
    pub fn check(&self) -> Result<()> {
        settings::check(Part::Worker, self)?;
        let shape = self.shape();
        for (key, rank, size) in [("pp_rank", self.pp_rank, shape.pp), ("tp_rank", self.tp_rank, shape.tp)] {
            if rank >= size {
                let size_key = key.replace("rank", "size");
                return Err(Error::invalid(format!("{key} is {rank}, expected less than {size_key}, which is {size}")));
            }
        }
        self.compat()?;
        Ok(())
    }
}

/// A scheduler side's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerConfig {
    /// The engine; the same on all of its workers.
    pub engine_id: EngineId,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// The KV-cache groups, in the engine's order.
    pub groups: Vec<Group>,
    /// The block id that stands for "no block" in block lists; it is never read or written.
    pub null_block: Option<u32>,
    /// Whether the engine reuses a request's blocks for other requests with the same prefix. Default true.
    pub reuses_blocks: bool,
    /// Whether a finished prefill's answer may leave before all of its blocks are written. Default false.
    pub written_late: bool,
    /// How long a producer keeps a finished prefill's blocks without hearing from a reader, in milliseconds.
    pub lease_ms: u64,
    /// Whether conversations go on: this engine keeps what it has decoded for the conversation's next turn, and loads the turn
    /// before for a prefill.
    pub multi_turn: bool,
    /// How long a decoded conversation is kept for its next turn, in milliseconds.
    pub history_lease_ms: u64,
    /// The fewest missing tokens for which a prefill loads the turn before.
    pub history_least_tokens: u64,
    /// The share of `num_blocks` that is kept for next turns, in percent.
    pub history_percent: u64,
    /// The blocks of the engine's cache. 0: it keeps none for next turns.
    pub num_blocks: u64,
    /// What other engines are told: an address or a name of this host, or None (or `0.0.0.0`, `::`) to have an address
    /// found. A loopback address that is spelled out is also all that is bound.
    pub host: Option<String>,
    /// The one address or name of this host to listen on, `0.0.0.0` for those of IPv4, or None for all of the host's.
    pub bind: Option<String>,
    /// The listener's TCP port; 0 takes a free one.
    pub port: u16,
    /// Added to a port that is not 0, so that data-parallel engines of one host differ.
    pub data_parallel_index: u16,
    /// Whether workers may push their metadata to the listener.
    pub push: bool,
    /// Whether a name such as `localhost` may be advertised as loopback. A loopback address that is
    /// spelled out is taken as it is.
    pub advertise_local: bool,
    /// As [`WorkerConfig::key_file`].
    pub key_file: Option<String>,
    /// Names and networks of the engines that this one may read from, with commas between them; None or an empty text
    /// allows all.
    pub allowed_hosts: Option<String>,
}

impl SchedulerConfig {
    /// A configuration of `engine_id` with `groups` and every other key at its default.
    pub fn new(engine_id: EngineId, groups: Vec<Group>) -> SchedulerConfig {
        SchedulerConfig {
            engine_id,
            tp_size: 1,
            pp_size: 1,
            dcp_size: 1,
            groups,
            null_block: Some(0),
            reuses_blocks: true,
            written_late: false,
            lease_ms: 30_000,
            multi_turn: false,
            history_lease_ms: 480_000,
            history_least_tokens: 64,
            history_percent: 50,
            num_blocks: 0,
            host: None,
            bind: None,
            port: 5680,
            data_parallel_index: 0,
            push: false,
            advertise_local: false,
            key_file: None,
            allowed_hosts: None,
        }
    }

    /// The engine's shape.
    pub fn shape(&self) -> EngineShape {
        EngineShape { tp: self.tp_size, pp: self.pp_size, dcp: self.dcp_size }
    }

    /// How conversations go on, if they do.
    pub fn multi_turn(&self) -> Option<MultiTurn> {
        self.multi_turn.then(|| MultiTurn {
            lease_ms: self.history_lease_ms,
            least_tokens: self.history_least_tokens,
            most_blocks: self.num_blocks.saturating_mul(self.history_percent) / 100,
        })
    }

    /// The hosts that this engine may read from, if they are limited.
    ///
    /// # Errors
    /// Those of [`AllowedHosts::parse`].
    pub fn allowed_hosts(&self) -> Result<Option<AllowedHosts>> {
        self.allowed_hosts.as_deref().filter(|list| !list.is_empty()).map(AllowedHosts::parse).transpose()
    }

    /// The port to bind, with the data-parallel offset.
    ///
    /// # Errors
    /// A sum over 65535.
    pub fn bind_port(&self) -> Result<u16> {
        net::bind_port(self.port, self.data_parallel_index)
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// The first key that is wrong, with its value and what was expected.
    pub fn check(&self) -> Result<()> {
        settings::check(Part::Scheduler, self)?;
        self.bind_port()?;
        self.allowed_hosts()?;
        if self.groups.is_empty() {
            return Err(Error::invalid("groups is empty, expected at least one KV-cache group"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::proto::geometry::GroupKind;
    use crate::settings::parse_config;

    fn worker(config: Value) -> Result<WorkerConfig> {
        let config: WorkerConfig = parse_config(Part::Worker, &rmp_serde::to_vec_named(&config).unwrap())?;
        config.check()?;
        Ok(config)
    }

    fn scheduler(config: Value) -> Result<SchedulerConfig> {
        let config: SchedulerConfig = parse_config(Part::Scheduler, &rmp_serde::to_vec_named(&config).unwrap())?;
        config.check()?;
        Ok(config)
    }

    fn groups() -> Value {
        serde_json::to_value(vec![Group::new(GroupKind::Full, 16)]).unwrap()
    }

    #[test]
    fn defaults_fill_what_is_not_given() {
        let engine = EngineId::new("e").unwrap();
        assert_eq!(worker(json!({"engine_id": "e"})).unwrap(), WorkerConfig::new(engine.clone()));
        let groups_of = vec![Group::new(GroupKind::Full, 16)];
        let got = scheduler(json!({"engine_id": "e", "groups": groups()})).unwrap();
        assert_eq!(got, SchedulerConfig::new(engine, groups_of));
        let given = json!({
            "engine_id": "e", "tp_rank": 1, "tp_size": 2, "transport": "shm", "ucx": {"LOG_LEVEL": "info"},
            "compat": [["model", "m"]], "window": 8, "request_log": "/tmp/x",
        });
        let got = worker(given).unwrap();
        assert_eq!((got.rank(), got.transport, got.window), (RankId { pp: 0, tp: 1 }, Transport::Shm, 8));
        assert_eq!(got.ucx, BTreeMap::from([("LOG_LEVEL".to_owned(), "info".to_owned())]));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let mistakes = [
            (json!({}), vec!["engine_id"]),
            (json!({"engine_id": ""}), vec!["engine_id", "1 to 256"]),
            (json!({"engine_id": "e", "tp_sise": 2}), vec!["tp_sise", "tp_size"]),
            (json!({"engine_id": "e", "tp_size": "two"}), vec!["tp_size", "two", "1 to 65536"]),
            (json!({"engine_id": "e", "tp_size": 0}), vec!["tp_size", "0", "1 to 65536"]),
            (json!({"engine_id": "e", "pp_rank": 2, "pp_size": 2}), vec!["pp_rank", "2", "pp_size"]),
            (json!({"engine_id": "e", "transport": "rdma"}), vec!["transport", "rdma", "tcp"]),
            (json!({"engine_id": "e", "window": 0}), vec!["window"]),
            (json!({"engine_id": "e", "verdict_timeout_ms": 0}), vec!["verdict_timeout_ms", "0"]),
            (json!({"engine_id": "e", "compat": [["a", "1"], ["a", "2"]]}), vec!["\"a\" twice"]),
            (json!([1, 2]), vec!["worker configuration"]),
        ];
        for (config, parts) in mistakes {
            let error = worker(config.clone()).unwrap_err();
            for part in parts {
                assert!(error.message().contains(part), "{config}: {part:?} is not in {error}");
            }
        }
        let base = |extra: Value| {
            let mut all = json!({"engine_id": "e", "groups": groups()});
            all.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            all
        };
        let mistakes = [
            (base(json!({"port": 65_535, "data_parallel_index": 1})), vec!["data_parallel_index", "65535"]),
            (base(json!({"port": 70_000})), vec!["port", "70000"]),
            (base(json!({"lease_ms": 10})), vec!["lease_ms", "10", "1000"]),
            (base(json!({"groups": []})), vec!["groups"]),
            (base(json!({"allowed_hosts": "10.0.0.0/8,http://a"})), vec!["allowed_hosts", "http://a", "10.1.0.0/16"]),
        ];
        for (config, parts) in mistakes {
            let error = scheduler(config.clone()).unwrap_err();
            for part in parts {
                assert!(error.message().contains(part), "{config}: {part:?} is not in {error}");
            }
        }
        assert_eq!(scheduler(base(json!({"port": 0, "data_parallel_index": 9}))).unwrap().bind_port(), Ok(0));
        assert_eq!(scheduler(base(json!({"port": 10, "data_parallel_index": 9}))).unwrap().bind_port(), Ok(19));
    }
}
