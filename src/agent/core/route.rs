//! Which way bytes go between this agent and a peer.

use crate::net::{LocalAddress, is_reachable};

/// How a peer is reached. The paths are those of long runs; short ones between host memories travel in messages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Route {
    /// Transports and devices of the connection, such as `tcp/eth0, cma/memory`.
    pub lanes: String,
    /// Between host memories.
    pub host: &'static str,
    /// Between memories of CUDA devices.
    pub device: &'static str,
    /// From the peer's host memory to a CUDA device of this side, and the other way round.
    pub mixed: &'static str,
}

/// Devices of the TCP lanes in UCX's description of an endpoint, such as `tcp/lo, tcp/eth0`, each once.
fn tcp_devices(lanes: &str) -> Vec<&str> {
    let mut devices = Vec::new();
    for device in lanes.split(", ").filter_map(|lane| lane.trim().strip_prefix("tcp/")) {
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    devices
}

/// How UCX tried to reach a peer, for an error's text: the lanes and, of those over TCP, this host's addresses. A peer whose
/// device has the same address as this host's is not reached.
pub(crate) fn tried(lanes: &str, local: &[LocalAddress]) -> String {
    let devices = tcp_devices(lanes);
    let of = |device: &str| {
        let found: Vec<String> =
            local.iter().filter(|a| a.interface == device && is_reachable(a.ip)).map(|a| a.ip.to_string()).collect();
        (!found.is_empty()).then(|| format!("from {} of {device}", found.join(" and ")))
    };
    let addresses: Vec<String> = devices.into_iter().filter_map(of).collect();
    let from = if addresses.is_empty() { String::new() } else { format!(", {}", addresses.join(", ")) };
    format!("tried over {lanes}{from}; UCX_NET_DEVICES chooses the network devices of a host")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_those_of_the_tcp_lanes() {
        assert_eq!(tcp_devices("tcp/lo, tcp/eth0, tcp/lo, cuda_copy/cuda"), ["lo", "eth0"]);
        assert!(tcp_devices("posix/memory, cma/memory").is_empty());
        assert!(tcp_devices("unknown (this UCX cannot tell)").is_empty());
    }

    #[test]
    fn what_was_tried_has_addresses() {
        let at = |interface: &str, ip: [u8; 4]| LocalAddress {
            interface: interface.to_owned(),
            ip: ip.into(),
            default_route: false,
        };
        let local = [at("lo", [127, 0, 0, 1]), at("docker0", [172, 17, 0, 1])];
        let text = tried("tcp/docker0, tcp/lo", &local);
        assert!(text.starts_with("tried over tcp/docker0, tcp/lo, from 172.17.0.1 of docker0; "), "{text}");
        assert!(tried("rc_mlx5/mlx5_0:1", &local).starts_with("tried over rc_mlx5/mlx5_0:1; "));
    }
}
