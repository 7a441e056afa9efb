//! The keys of an agent's configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::agent::{AgentConfig, Transport};
use crate::error::Result;

/// What a host may set; the table of settings has their defaults and bounds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    name: Option<String>,
    transport: Option<String>,
    ucx: BTreeMap<String, String>,
    ucx_lib: Option<PathBuf>,
    key_file: Option<PathBuf>,
    window: Option<u32>,
    window_bytes: Option<u64>,
    max_operation_bytes: Option<u64>,
    gather_below: Option<u64>,
    connect_timeout_ms: Option<u64>,
    cancel_grace_ms: Option<u64>,
    deregister_timeout_ms: Option<u64>,
    spin_us: Option<u64>,
    copy_threads: Option<u32>,
    streams: Option<bool>,
    send_queue_bytes: Option<u64>,
    verify: Option<bool>,
    rehearse: Option<bool>,
    telemetry: Option<bool>,
    metrics_file: Option<PathBuf>,
}

impl Config {
    pub(super) fn agent_config(self) -> Result<AgentConfig> {
        let (ucx_lib, key_file, metrics_file) = (self.ucx_lib, self.key_file, self.metrics_file);
        let mut config = AgentConfig { ucx: self.ucx, ucx_lib, key_file, metrics_file, ..AgentConfig::default() };
        if let Some(name) = self.name {
            config.name = name;
        }
        if let Some(transport) = self.transport {
            config.transport = Transport::parse(&transport)?;
        }
        set(&mut config.peer_window.operations, self.window);
        config.total_window.operations = config.total_window.operations.max(config.peer_window.operations);
        set(&mut config.peer_window.bytes, self.window_bytes);
        config.total_window.bytes = config.total_window.bytes.max(config.peer_window.bytes);
        set(&mut config.max_operation_bytes, self.max_operation_bytes);
        set(&mut config.gather_below, self.gather_below);
        set(&mut config.connect_timeout, self.connect_timeout_ms.map(Duration::from_millis));
        set(&mut config.cancel_grace, self.cancel_grace_ms.map(Duration::from_millis));
        set(&mut config.deregister_timeout, self.deregister_timeout_ms.map(Duration::from_millis));
        set(&mut config.spin, self.spin_us.map(Duration::from_micros));
        set(&mut config.copy_threads, self.copy_threads);
        set(&mut config.streams, self.streams);
        set(&mut config.send_queue_bytes, self.send_queue_bytes);
        set(&mut config.verify, self.verify);
        set(&mut config.rehearse, self.rehearse);
        set(&mut config.telemetry, self.telemetry);
        config.validate()?;
        Ok(config)
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::settings::{Part, parse_config};

    fn config(pairs: &[(&str, &str)]) -> Result<AgentConfig> {
        let map: BTreeMap<_, _> = pairs.iter().copied().collect();
        parse_config::<Config>(Part::Agent, &rmp_serde::to_vec_named(&map).unwrap())?.agent_config()
    }

    #[test]
    fn the_tables_defaults_are_the_agents() {
        assert_eq!(config(&[]).unwrap(), AgentConfig::default());
    }

    #[test]
    fn settings_are_taken_and_bad_ones_named() {
        let good = config(&[("name", "n"), ("transport", "tcp"), ("ucx_lib", "/x/libucp.so.0")]).unwrap();
        assert_eq!((good.name.as_str(), good.transport), ("n", Transport::Tcp));
        assert_eq!(good.ucx_lib, Some(PathBuf::from("/x/libucp.so.0")));
        for (key, value, expected) in [
            ("transport", "rdma", "one of auto, tcp, shm"),
            ("windw", "8", "did you mean \"window\"?"),
            ("window", "8", "window must be a whole number from 1 to 1024"),
        ] {
            let error = config(&[(key, value)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(expected), "{error}");
        }
    }
}
