//! Which network devices UCX gets.
//!
//! By default all but those whose addresses are the same on every host, such as a container bridge's: UCX would take the
//! peer's one for a neighbour on its own, and connect to this host. The listener's search for an address passes over them by
//! the same rule ([`repeats_on_every_host`]). A host that has nothing else keeps them.

use std::net::IpAddr;
use std::path::Path;

use crate::error::{Error, Result};
use crate::net::{LocalAddress, is_reachable, repeats_on_every_host};
use crate::ucx::Resource;

/// The first UCX whose NET_DEVICES can name what is left out.
const CAN_LEAVE_OUT: (u32, u32, u32) = (1, 21, 0);
/// The most devices that UCX takes in a list.
const MOST_NAMES: usize = 64;

/// A network device of this host, and whether UCX has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetDevice {
    /// UCX's name of it, such as `eth0` or `mlx5_0:1`.
    pub name: String,
    /// Its addresses; none for a device that is no interface of the system's.
    pub addresses: Vec<IpAddr>,
    /// Whether UCX may use it.
    pub is_used: bool,
    /// Whether other hosts may have the same addresses, by its name.
    pub repeats: bool,
    /// Why, or why not.
    pub why: String,
}

/// The network devices among `resources`, each once.
pub(super) fn network_devices(resources: &[Resource]) -> Vec<&str> {
    distinct(resources.iter().filter(|resource| resource.is_network()))
}

fn tcp_devices(resources: &[Resource]) -> Vec<&str> {
    distinct(resources.iter().filter(|resource| resource.transport == "tcp"))
}

fn distinct<'a>(resources: impl Iterator<Item = &'a Resource>) -> Vec<&'a str> {
    let mut names: Vec<&str> = resources.map(|resource| resource.device.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn addresses_of<'a>(name: &'a str, local: &'a [LocalAddress]) -> impl Iterator<Item = &'a LocalAddress> {
    local.iter().filter(move |address| address.interface == name)
}

/// Whether other hosts could reach `name`.
fn reaches(name: &str, local: &[LocalAddress]) -> bool {
    addresses_of(name, local).any(|address| is_reachable(address.ip))
}

/// Whether the interface is a bridge, which UCX passes over by default.
pub(super) fn is_bridge(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).join("bridge").is_dir()
}

/// Whether UCX must be told to use bridges too. `resources` are those of a UCX that passes over them.
///
/// It must where the default route uses one, where `named` names one, and where other hosts could reach nothing else.
pub(super) fn needs_bridges(
    resources: &[Resource],
    local: &[LocalAddress],
    named: Option<&str>,
    is_bridge: impl Fn(&str) -> bool,
) -> bool {
    let tcp = tcp_devices(resources);
    let mut absent = local.iter().filter(|address| {
        is_reachable(address.ip) && !tcp.contains(&address.interface.as_str()) && is_bridge(&address.interface)
    });
    match named {
        Some(named) => {
            let mut names = named.split(',');
            absent.any(|address| names.any(|name| name.trim() == address.interface))
        }
        None => {
            let has_other = network_devices(resources).iter().any(|name| !tcp.contains(name) || reaches(name, local));
            absent.any(|address| address.default_route || !has_other)
        }
    }
}

/// The TCP devices to leave out of those that UCX has by default.
pub(super) fn left_out<'a>(resources: &'a [Resource], local: &[LocalAddress]) -> Vec<&'a str> {
    let (repeat, others): (Vec<_>, Vec<_>) =
        tcp_devices(resources).into_iter().partition(|name| repeats_on_every_host(name, local));
    if others.iter().any(|name| reaches(name, local)) { repeat } else { Vec::new() }
}

/// The value of UCX's setting NET_DEVICES that leaves out `left_out`; `None` where UCX's list has no room for it.
pub(super) fn setting(ucx: (u32, u32, u32), resources: &[Resource], left_out: &[&str]) -> Option<String> {
    let (sign, names) = if ucx >= CAN_LEAVE_OUT {
        ("^", left_out.to_vec())
    } else {
        ("", network_devices(resources).into_iter().filter(|name| !left_out.contains(name)).collect())
    };
    (!names.is_empty() && names.len() <= MOST_NAMES).then(|| format!("{sign}{}", names.join(",")))
}

/// Every network device that UCX has, of `resources`, or could have, of `all`; `named` is what the settings say of them.
pub(super) fn describe(
    resources: &[Resource],
    all: &[Resource],
    local: &[LocalAddress],
    named: Option<&str>,
) -> Vec<NetDevice> {
    let used = network_devices(resources);
    let mut names = network_devices(all);
    names.extend(&used);
    names.sort_unstable();
    names.dedup();
    let device = |name: &str| {
        let is_used = used.contains(&name);
        let repeats = repeats_on_every_host(name, local);
        let why = match (named, is_used) {
            (Some(named), true) => format!("NET_DEVICES={named} allows it"),
            (Some(named), false) => format!("NET_DEVICES={named} leaves it out"),
            (None, true) if repeats => {
                "other hosts may have the same address, but this host has no other interface that they reach".to_owned()
            }
            (None, true) => "used by default".to_owned(),
            (None, false) if repeats => {
                "software for containers gives interfaces of this name the same address on every host".to_owned()
            }
            (None, false) => "the transport or TLS leaves it out".to_owned(),
        };
        let addresses = addresses_of(name, local).map(|address| address.ip).collect();
        NetDevice { name: name.to_owned(), addresses, is_used, repeats, why }
    };
    names.into_iter().map(device).collect()
}

/// Refuses a NET_DEVICES that leaves UCX without any network device, where there are some.
pub(super) fn names_nothing(named: &str, all: &[Resource]) -> Result<()> {
    let there = network_devices(all);
    if there.is_empty() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "UCX_NET_DEVICES={named} names no network device of this host, which has {}; name one of these, or unset it",
        there.join(", ")
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn resources(names: &[&str]) -> Vec<Resource> {
        let one = |name: &&str| {
            let (transport, device) = name.split_once('/').unwrap();
            Resource { transport: transport.to_owned(), device: device.to_owned() }
        };
        names.iter().map(one).collect()
    }

    fn at(interface: &str, ip: &str, default_route: bool) -> LocalAddress {
        LocalAddress { interface: interface.to_owned(), ip: ip.parse().unwrap(), default_route }
    }

    fn local() -> Vec<LocalAddress> {
        vec![
            at("lo", "127.0.0.1", false),
            at("docker0", "172.17.0.1", false),
            at("eth0", "10.1.0.1", true),
            at("flannel.1", "10.244.0.0", false),
        ]
    }

    const ALL: [&str; 7] =
        ["self/memory", "cma/memory", "tcp/lo", "tcp/eth0", "tcp/docker0", "tcp/flannel.1", "rc_mlx5/mlx5_0:1"];

    #[test]
    fn devices_that_repeat_are_left_out() {
        let found = resources(&ALL);
        let out = left_out(&found, &local());
        assert_eq!(out, ["docker0", "flannel.1"]);
        assert_eq!(setting(CAN_LEAVE_OUT, &found, &out).unwrap(), "^docker0,flannel.1");
        assert_eq!(setting((1, 18, 1), &found, &out).unwrap(), "eth0,lo,mlx5_0:1");
        let used = resources(&["tcp/lo", "tcp/eth0", "rc_mlx5/mlx5_0:1"]);
        let told = describe(&used, &found, &local(), None);
        let of = |name: &str| told.iter().find(|device| device.name == name).unwrap();
        assert_eq!(told.len(), 5);
        assert!(!of("docker0").is_used && of("docker0").why.contains("same address on every host"));
        assert!(of("eth0").is_used && of("mlx5_0:1").is_used && of("mlx5_0:1").addresses.is_empty());
    }

    #[test]
    fn a_host_keeps_its_only_device() {
        let only = resources(&["tcp/lo", "tcp/docker0", "rc_mlx5/mlx5_0:1"]);
        assert!(left_out(&only, &local()).is_empty());
        let told = describe(&only, &only, &local(), None);
        assert!(told.iter().any(|device| device.name == "docker0" && device.why.contains("no other interface")));
        // The default route's, whatever its name.
        let bridge = [at("br-ex", "10.1.0.1", true), at("eth1", "10.2.0.1", false)];
        assert!(left_out(&resources(&["tcp/br-ex", "tcp/eth1"]), &bridge).is_empty());
    }

    #[test]
    fn too_many_names_are_not_listed() {
        let names: Vec<String> = (0..=MOST_NAMES).map(|n| format!("tcp/docker{n}")).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        names.push("tcp/eth0");
        let found = resources(&names);
        let out = left_out(&found, &local());
        assert_eq!((out.len(), setting(CAN_LEAVE_OUT, &found, &out)), (MOST_NAMES + 1, None));
        assert_eq!(setting((1, 20, 0), &found, &out).unwrap(), "eth0");
    }

    #[test]
    fn bridges_are_used_where_they_are_needed() {
        let needs = |found: &[&str], local: &[LocalAddress], named| {
            needs_bridges(&resources(found), local, named, |name| name.starts_with("br") || name == "docker0")
        };
        let lone = [at("lo", "127.0.0.1", false), at("docker0", "172.17.0.1", false)];
        assert!(needs(&["tcp/lo"], &lone, None), "nothing else reaches other hosts");
        assert!(!needs(&["tcp/lo", "rc_mlx5/mlx5_0:1"], &lone, None));
        assert!(!needs(&["tcp/lo", "tcp/eth0"], &local(), None));
        let routed = [at("br0", "10.1.0.1", true), at("eth1", "10.2.0.1", false)];
        assert!(needs(&["tcp/eth1"], &routed, None), "the default route uses one");
        assert!(needs(&["tcp/lo"], &local(), Some("eth7,docker0")) && !needs(&["tcp/lo"], &local(), Some("eth0")));
    }

    #[test]
    fn a_setting_that_names_nothing_is_refused() {
        let text = names_nothing("ens9", &resources(&ALL)).unwrap_err().to_string();
        assert!(
            text.contains("UCX_NET_DEVICES=ens9") && text.contains("docker0, eth0, flannel.1, lo, mlx5_0:1"),
            "{text}"
        );
        names_nothing("ens9", &resources(&["self/memory"])).unwrap();
    }
}
