//! The keys of an agent's configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::agent::{AgentConfig, Transport, Window};
use crate::error::Result;

/// What a host may set; the table of settings has the bounds, and fills in its defaults.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    name: Option<String>,
    transport: Transport,
    ucx: BTreeMap<String, String>,
    ucx_lib: Option<PathBuf>,
    key_file: Option<PathBuf>,
    window: u32,
    window_bytes: u64,
    max_operation_bytes: u64,
    gather_below: u64,
    connect_timeout_ms: u64,
    cancel_grace_ms: u64,
    deregister_timeout_ms: u64,
    spin_us: u64,
    copy_threads: u32,
    streams: bool,
    device_copies: bool,
    send_queue_bytes: u64,
    verify: bool,
    rehearse: bool,
    telemetry: bool,
    metrics_file: Option<PathBuf>,
}

impl Config {
    pub(super) fn agent_config(self) -> Result<AgentConfig> {
        let default = AgentConfig::default();
        let config = AgentConfig {
            name: self.name.unwrap_or_else(|| default.name.clone()),
            transport: self.transport,
            ucx: self.ucx,
            ucx_lib: self.ucx_lib,
            key_file: self.key_file,
            peer_window: Window { operations: self.window, bytes: self.window_bytes },
            total_window: Window {
                operations: default.total_window.operations.max(self.window),
                bytes: default.total_window.bytes.max(self.window_bytes),
            },
            max_operation_bytes: self.max_operation_bytes,
            gather_below: self.gather_below,
            connect_timeout: Duration::from_millis(self.connect_timeout_ms),
            cancel_grace: Duration::from_millis(self.cancel_grace_ms),
            deregister_timeout: Duration::from_millis(self.deregister_timeout_ms),
            spin: Duration::from_micros(self.spin_us),
            copy_threads: self.copy_threads,
            streams: self.streams,
            device_copies: self.device_copies,
            send_queue_bytes: self.send_queue_bytes,
            verify: self.verify,
            rehearse: self.rehearse,
            telemetry: self.telemetry,
            metrics_file: self.metrics_file,
            ..default
        };
        config.validate()?;
        Ok(config)
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
