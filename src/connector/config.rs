//! The configuration of workers and scheduler sides. [`crate::settings`] has keys, ranges and defaults of the C ABI.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::agent::AgentConfig;
use crate::error::{Error, Result};
use crate::net;
use crate::proto::geometry::Group;
use crate::proto::ids::{EngineId, RankId};
use crate::proto::scheduler::{AllowedHosts, MultiTurn};
use crate::proto::wire::{CompatField, EngineShape};
use crate::proto::worker::WorkerSettings;
use crate::settings::{self, Component};

/// A worker's configuration. Sizes count ranks.
///
/// Each field, and each of [`AgentConfig`] and [`WorkerSettings`], takes the value of the key of the same name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerConfig {
    /// The engine of this worker. It is the same on all of its ranks and its scheduler.
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
    /// Facts that both engines must share, such as model and dtype. Each is a list of name, value and, where it is
    /// there, [`CompatField::informative`].
    pub compat: Vec<CompatField>,
    /// Name in logs, in place of the agent's; None makes one of engine and rank.
    pub name: Option<String>,
    /// The agent beneath. Its `connect_timeout` is the handshake's, since connecting is part of one.
    pub agent: AgentConfig,
    /// The state machine's settings.
    pub machine: WorkerSettings,
    /// Taken for `trace` where that is None, with a warning.
    pub request_log: Option<String>,
    /// A file to be made for a trace of requests, in Chrome's trace event format. `%p` stands for the process id.
    /// None leaves it to the environment variable `KVFERRY_TRACE`, an empty text means no trace.
    pub trace: Option<String>,
}

impl WorkerConfig {
    /// A configuration of `engine_id` with every other key at its default.
    pub fn new(engine_id: EngineId) -> WorkerConfig {
        let required = required(&engine_id);
        WorkerConfig { engine_id, ..settings::defaults(Component::Worker, required) }
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
        settings::check(Component::Worker, self)?;
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

/// The keys without a default.
fn required(engine_id: &EngineId) -> Map<String, Value> {
    Map::from_iter([("engine_id".to_owned(), Value::from(engine_id.as_str()))])
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
    /// The id that stands for "no block" in block lists. It is never read or written.
    pub null_block: Option<u32>,
    /// True if the engine reuses a request's blocks for other requests with the same prefix. Default true.
    pub reuses_blocks: bool,
    /// True if a finished prefill's answer may leave before all of its blocks are written. Default false.
    pub written_late: bool,
    /// How long a producer keeps a finished prefill without hearing from a reader, in milliseconds.
    pub lease_ms: u64,
    /// True if conversations go on. This engine keeps what it has decoded for the next turn, and loads the turn
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
    /// The address that other engines are told. An address or a name of this host, or None (or `0.0.0.0`, `::`) to
    /// have one found. A loopback address that is spelled out is also all that is bound.
    pub host: Option<String>,
    /// The one address or name of this host to listen on. `0.0.0.0` stands for those of IPv4, None for all of the
    /// host's.
    pub bind: Option<String>,
    /// The listener's TCP port; 0 takes a free one.
    pub port: u16,
    /// Added to a port that is not 0. So data-parallel engines of one host differ.
    pub data_parallel_index: u16,
    /// True if workers may push their metadata to the listener.
    pub push: bool,
    /// True if a name such as `localhost` may be advertised as loopback. A loopback address that is
    /// spelled out is taken as it is.
    pub advertise_local: bool,
    /// As [`AgentConfig::key_file`].
    pub key_file: Option<PathBuf>,
    /// Names and networks of the engines that this one may read from. Commas separate them; None or an empty text
    /// allows all.
    pub allowed_hosts: Option<String>,
}

impl SchedulerConfig {
    /// A configuration of `engine_id` with `groups` and every other key at its default.
    pub fn new(engine_id: EngineId, groups: Vec<Group>) -> SchedulerConfig {
        let mut required = required(&engine_id);
        required.insert("groups".to_owned(), Value::Array(Vec::new()));
        SchedulerConfig { groups, ..settings::defaults(Component::Scheduler, required) }
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
        settings::check(Component::Scheduler, self)?;
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
    use serde_json::json;

    use super::*;
    use crate::agent::Transport;
    use crate::proto::geometry::GroupKind;
    use crate::settings::parse_config;

    fn worker(config: Value) -> Result<WorkerConfig> {
        let config: WorkerConfig = parse_config(Component::Worker, &rmp_serde::to_vec_named(&config).unwrap())?;
        config.check()?;
        Ok(config)
    }

    fn scheduler(config: Value) -> Result<SchedulerConfig> {
        let config: SchedulerConfig = parse_config(Component::Scheduler, &rmp_serde::to_vec_named(&config).unwrap())?;
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
        assert_eq!(got.rank(), RankId { pp: 0, tp: 1 });
        let AgentConfig { transport, peer_window, ucx, .. } = got.agent;
        assert_eq!((transport, peer_window.operations), (Transport::Shm, 8));
        assert_eq!(ucx, BTreeMap::from([("LOG_LEVEL".to_owned(), "info".to_owned())]));
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
