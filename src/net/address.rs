//! Which address to listen on, and which one to tell other hosts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use crate::error::{Error, ErrorKind, Result};

/// Where a listener binds and what it tells others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The address to bind.
    pub bind: IpAddr,
    /// The address that is put into `kv_transfer_params`.
    pub advertise: IpAddr,
    /// Whether only processes of this host can use the advertised address.
    pub local_only: bool,
    /// What the operator should know about the choice, for the log.
    pub note: Option<String>,
}

/// One address of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// Name of the interface that has it.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Whether the kernel would leave by it towards other networks.
    pub default_route: bool,
}

/// This host's addresses. Sends nothing.
///
/// # Errors
/// [`ErrorKind::Io`] when the system does not list its interfaces.
pub fn local_addresses() -> Result<Vec<LocalAddress>> {
    let routed = [default_source(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), default_source(IpAddr::V6(Ipv6Addr::UNSPECIFIED))];
    let found = if_addrs::get_if_addrs()
        .map_err(|e| Error::new(ErrorKind::Io, format!("this host's network interfaces cannot be listed: {e}")))?;
    Ok(found
        .into_iter()
        .map(|i| {
            let ip = i.ip();
            LocalAddress { interface: i.name, ip, default_route: routed.contains(&Some(ip)) }
        })
        .collect())
}

/// The source address of packets that leave by the default route. Connecting a UDP socket makes the kernel look up the
/// route without sending; the destinations are of the ranges kept for documentation.
fn default_source(any: IpAddr) -> Option<IpAddr> {
    let far: SocketAddr = match any {
        IpAddr::V4(_) => (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        IpAddr::V6(_) => (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(far).ok()?;
    socket.local_addr().ok().map(|a| a.ip())
}

/// Chooses from `host` as the operator gave it and this host's addresses. `host` may be an address, a name that
/// resolves to one (this may ask the name service), or `None`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a host that does not resolve.
pub fn choose(host: Option<&str>, advertise_local: bool) -> Result<Address> {
    let resolved = match host.map(super::unbracketed) {
        None | Some("") => None,
        Some(name) => Some((name.to_owned(), resolve(name)?)),
    };
    choose_among(resolved.as_ref().map(|(name, ips)| (name.as_str(), ips.as_slice())), advertise_local, local_addresses)
}

fn resolve(name: &str) -> Result<Vec<IpAddr>> {
    if let Ok(ip) = name.parse::<IpAddr>() {
        return Ok(vec![ip]);
    }
    super::endpoint(name, 1)?;
    let remedy = "give an address of this host, or leave the host out to have one found";
    let found: Vec<IpAddr> = (name, 0)
        .to_socket_addrs()
        .map_err(|e| Error::invalid(format!("the host name {name:?} does not resolve ({e}); {remedy}")))?
        .map(|a| a.ip())
        .collect();
    if found.is_empty() {
        return Err(Error::invalid(format!("the host name {name:?} resolves to no address; {remedy}")));
    }
    Ok(found)
}

/// The rule behind [`choose`], on given facts: `host` with the addresses that it stands for, and a way to list this
/// host's addresses, called only when one has to be found.
///
/// - No host: the found address is bound and advertised.
/// - `0.0.0.0` or `::`: bound as given, the found address is advertised.
/// - A name that stands for loopback only (`localhost`; Debian maps a host's own name to 127.0.1.1): as no host,
///   unless `advertise_local`.
/// - A loopback address spelled out: honoured, and marked as local.
/// - Nothing found: loopback, marked as local, with a note that says so.
pub fn choose_among(
    host: Option<(&str, &[IpAddr])>,
    advertise_local: bool,
    local: impl FnOnce() -> Result<Vec<LocalAddress>>,
) -> Result<Address> {
    let Some((name, ips)) = host else { return found_or_loopback(local()?, None, None) };
    if let Some(ip) = ips.iter().find(|ip| ip.is_unspecified()) {
        return found_or_loopback(local()?, Some(*ip), None);
    }
    if let Some(ip) = preferred(ips.iter().filter(|ip| !ip.is_loopback())) {
        return Ok(Address { bind: ip, advertise: ip, local_only: false, note: None });
    }
    let Some(ip) = preferred(ips.iter()) else {
        return Err(Error::invalid(format!("the host {name:?} stands for no address")));
    };
    if advertise_local || name.parse::<IpAddr>().is_ok() {
        let note = format!("listening on {ip} as configured: only engines on this host can reach it");
        return Ok(Address { bind: ip, advertise: ip, local_only: true, note: Some(note) });
    }
    found_or_loopback(
        local()?,
        None,
        Some(format!("the host {name:?} stands for {ip} here, which other hosts cannot reach")),
    )
}

fn preferred<'a>(ips: impl Iterator<Item = &'a IpAddr>) -> Option<IpAddr> {
    ips.min_by_key(|ip| ip.is_ipv6()).copied()
}

fn found_or_loopback(local: Vec<LocalAddress>, bind: Option<IpAddr>, why: Option<String>) -> Result<Address> {
    let only_v6 = matches!(bind, Some(IpAddr::V6(_)));
    let best = local.iter().filter_map(|a| rank(a, only_v6).map(|r| (r, a))).min_by_key(|(r, _)| *r);
    Ok(match best {
        Some((_, a)) => {
            // An IPv4 wildcard would not be reachable at an IPv6 address; the IPv6 wildcard takes both.
            let bind = match bind {
                Some(IpAddr::V4(_)) if a.ip.is_ipv6() => Some(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
                other => other,
            };
            let note = why.map(|w| format!("{w}; advertising {} ({}) instead", a.ip, a.interface));
            Address { bind: bind.unwrap_or(a.ip), advertise: a.ip, local_only: false, note }
        }
        None => {
            let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
            let note = "this host has no address that others could reach: advertising 127.0.0.1, which serves engines \
                        on this host only; give the host explicitly if that is wrong"
                .to_owned();
            Address { bind: bind.unwrap_or(ip), advertise: ip, local_only: true, note: Some(note) }
        }
    })
}

/// Lower is better; None is never advertised. IPv4 before IPv6, the default route's address first among its family,
/// bridges that containers make for themselves last: their addresses exist on every host alike.
fn rank(a: &LocalAddress, v6_first: bool) -> Option<u32> {
    let usable = match a.ip {
        IpAddr::V4(ip) => !(ip.is_loopback() || ip.is_link_local() || ip.is_unspecified() || ip.is_multicast()),
        IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified() || ip.is_multicast()),
    };
    if !usable {
        return None;
    }
    const OWN_BRIDGES: [&str; 7] = ["docker", "br-", "virbr", "cni", "flannel", "lxc", "podman"];
    let bridge = OWN_BRIDGES.iter().any(|p| a.interface.starts_with(p));
    Some(u32::from(bridge) * 4 + u32::from(a.ip.is_ipv6() != v6_first) * 2 + u32::from(!a.default_route))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(interface: &str, ip: &str, default_route: bool) -> LocalAddress {
        LocalAddress { interface: interface.to_owned(), ip: ip.parse().unwrap(), default_route }
    }

    fn pick(host: Option<&str>, ips: &[&str], local: &[LocalAddress]) -> Address {
        let ips: Vec<IpAddr> = ips.iter().map(|i| i.parse().unwrap()).collect();
        choose_among(host.map(|h| (h, ips.as_slice())), false, || Ok(local.to_vec())).unwrap()
    }

    #[test]
    fn the_best_address_is_found() {
        let lo = at("lo", "127.0.0.1", false);
        let all = [
            lo.clone(),
            at("docker0", "172.17.0.1", false),
            at("eth1", "10.2.0.1", false),
            at("eth0", "10.1.0.1", true),
            at("eth0", "fd00::1", true),
            at("eth2", "169.254.3.3", false),
            at("eth0", "fe80::5", false),
        ];
        let names = |n: usize| pick(None, &[], all.get(..n).unwrap()).advertise.to_string();
        assert_eq!(names(1), "127.0.0.1");
        assert_eq!(names(2), "172.17.0.1");
        assert_eq!(names(3), "10.2.0.1");
        assert_eq!(names(7), "10.1.0.1");
        let v6 = [lo.clone(), at("eth0", "fe80::5", true), at("eth0", "fd00::1", false)];
        assert_eq!(pick(None, &[], &v6).advertise.to_string(), "fd00::1");
        let none = pick(None, &[], &[lo, at("eth2", "169.254.3.3", false), at("eth0", "fe80::5", false)]);
        assert!(none.local_only && none.note.unwrap().contains("no address that others could reach"));
    }

    #[test]
    fn wildcards_and_localhost_are_never_advertised() {
        let local = [at("lo", "127.0.0.1", false), at("eth0", "10.1.0.1", true), at("eth0", "fd00::1", true)];
        let any = pick(Some("0.0.0.0"), &["0.0.0.0"], &local);
        assert_eq!((any.bind.to_string(), any.advertise.to_string()), ("0.0.0.0".into(), "10.1.0.1".into()));
        let any6 = pick(Some("::"), &["::"], &local);
        assert_eq!((any6.bind.to_string(), any6.advertise.to_string()), ("::".into(), "fd00::1".into()));
        let named = pick(Some("localhost"), &["::1", "127.0.0.1"], &local);
        assert_eq!((named.bind.to_string(), named.local_only), ("10.1.0.1".into(), false));
        assert!(named.note.unwrap().contains("localhost"));
        let own_name = pick(Some("box"), &["127.0.1.1"], &local);
        assert_eq!(own_name.advertise.to_string(), "10.1.0.1");
        let spelled = pick(Some("127.0.0.1"), &["127.0.0.1"], &local);
        assert_eq!((spelled.advertise.to_string(), spelled.local_only), ("127.0.0.1".into(), true));
        let only_v6 = [at("eth0", "fd00::1", true)];
        assert_eq!(pick(Some("0.0.0.0"), &["0.0.0.0"], &only_v6).bind.to_string(), "::");
    }

    #[test]
    fn a_given_address_is_taken() {
        let given = pick(Some("head"), &["::1", "fd00::9", "10.9.0.1"], &[]);
        assert_eq!((given.bind.to_string(), given.advertise.to_string()), ("10.9.0.1".into(), "10.9.0.1".into()));
        let error = choose(Some("no.such.host.invalid"), false).unwrap_err();
        assert!(error.message().contains("no.such.host.invalid"), "{error}");
        assert!(choose(Some("a;b"), false).unwrap_err().message().contains("is not a host"));
        let me = choose(None, false).unwrap();
        assert!(me.local_only || !me.advertise.is_loopback());
    }
}
