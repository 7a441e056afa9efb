//! Which address to listen on, and which one to tell other hosts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use crate::error::{Error, ErrorKind, Result};

/// Where a listener binds and what it tells others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The address to bind. `::` stands for all of the host's, also where it has IPv4 only.
    pub bind: IpAddr,
    /// The address that is put into `kv_transfer_params`.
    pub advertise: IpAddr,
    /// A hint for the operator about the choice, for the log.
    pub note: Option<String>,
}

/// One address of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// Name of the interface that has it.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// True if the kernel would leave by it towards other networks.
    pub default_route: bool,
}

/// Beginnings of the names that software for containers and virtual machines gives its interfaces. Their addresses are the
/// same on every host.
const SAME_ON_EVERY_HOST: [&str; 18] = [
    "docker", "br-", "virbr", "cni", "flannel", "lxc", "lxdbr", "incusbr", "podman", "nerdctl", "cali", "cilium",
    "kube", "tunl", "vxlan", "genev", "vmnet", "vboxnet",
];

/// Tells by an interface's name whether its addresses repeat on every host.
///
/// The names are those that software for containers gives. An interface that the default route uses, of those in `local`,
/// does not count.
pub fn repeats_on_every_host(interface: &str, local: &[LocalAddress]) -> bool {
    let is_default = |address: &LocalAddress| address.interface == interface && address.default_route;
    SAME_ON_EVERY_HOST.iter().any(|start| interface.starts_with(start)) && !local.iter().any(is_default)
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

/// A host that the operator named, and the addresses that it stands for.
type Named<'a> = (&'a str, &'a [IpAddr]);

/// Chooses from `host` and `bind` as the operator gave them and this host's addresses. Either may be an address, a name
/// that resolves to one (this may ask the name service), or `None`.
///
/// - `bind`: bound as given, any host is advertised.
/// - Else all addresses are bound, the IPv6 ones too if there are any, so that others reach the listener by whichever
///   name or address they were told. A `host` that is a loopback address confines it to that one.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a host that does not resolve or, without `bind`, is not this one.
pub fn choose(host: Option<&str>, bind: Option<&str>, advertise_local: bool) -> Result<Address> {
    let named = |key: &str, name: Option<&str>| match name.map(super::unbracketed) {
        None | Some("") => Ok(None),
        Some(name) => Ok(Some((name.to_owned(), resolve(key, name)?))),
    };
    let (host, bind) = (named("host", host)?, named("bind", bind)?);
    let host: Option<Named<'_>> = host.as_ref().map(|(name, ips)| (name.as_str(), ips.as_slice()));
    let bind = bind.and_then(|(_, ips)| preferred(ips.iter()));
    if bind.is_none()
        && let Some((name, ips)) = host
        && !ips.iter().any(|ip| is_own(*ip))
    {
        return Err(Error::invalid(format!(
            "host {} is not an address of this host ({}); give one that is, or leave it out to have one found. If what \
             reaches it is forwarded here, give bind too, such as \"0.0.0.0\"",
            quoted(name, ips),
            own_text()
        )));
    }
    choose_among(host, bind, advertise_local, local_addresses)
}

/// True if a socket of this host may have that address.
fn is_own(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

fn quoted(name: &str, ips: &[IpAddr]) -> String {
    let list = ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if list == name { name.to_owned() } else { format!("{name:?} ({list})") }
}

/// This host's addresses, for people.
pub(super) fn own_text() -> String {
    match local_addresses() {
        Ok(found) => found.iter().map(|a| a.ip.to_string()).collect::<Vec<_>>().join(", "),
        Err(e) => e.message().to_owned(),
    }
}

fn resolve(key: &str, name: &str) -> Result<Vec<IpAddr>> {
    if let Ok(ip) = name.parse::<IpAddr>() {
        return Ok(vec![ip]);
    }
    super::endpoint(name, 1)?;
    let remedy = format!("give an address of this host as {key}, or leave it out");
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

/// The rule behind [`choose`], on given facts, with a way to list this host's addresses, called only when one has to be
/// found to advertise.
///
/// - No host, or `0.0.0.0` or `::`: the found address is advertised.
/// - A name that stands for loopback only (`localhost`; Debian maps a host's own name to 127.0.1.1): as no host,
///   unless `advertise_local`.
/// - A loopback address spelled out: honoured.
/// - Nothing found: loopback, with a note that says so.
fn choose_among(
    host: Option<Named<'_>>,
    bind: Option<IpAddr>,
    advertise_local: bool,
    local: impl FnOnce() -> Result<Vec<LocalAddress>>,
) -> Result<Address> {
    let all = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let Some((name, ips)) = host else {
        return match bind {
            Some(ip) if !ip.is_unspecified() => Ok(given(ip, ip)),
            _ => found_or_loopback(local()?, bind.unwrap_or(all), None),
        };
    };
    if let Some(ip) = ips.iter().find(|ip| ip.is_unspecified()) {
        return found_or_loopback(local()?, bind.unwrap_or(*ip), None);
    }
    if let Some(ip) = preferred(ips.iter().filter(|ip| !ip.is_loopback())) {
        return Ok(given(bind.unwrap_or(all), ip));
    }
    let Some(ip) = preferred(ips.iter()) else {
        return Err(Error::invalid(format!("the host {name:?} stands for no address")));
    };
    if advertise_local || name.parse::<IpAddr>().is_ok() {
        return Ok(given(bind.unwrap_or(ip), ip));
    }
    let why = format!("the host {name:?} stands for {ip} here, which other hosts cannot reach");
    found_or_loopback(local()?, bind.unwrap_or(all), Some(why))
}

fn given(bind: IpAddr, advertise: IpAddr) -> Address {
    let note = advertise
        .is_loopback()
        .then(|| format!("other engines are told {advertise} as configured: only those on this host can reach it"));
    Address { bind, advertise, note }
}

fn preferred<'a>(ips: impl Iterator<Item = &'a IpAddr>) -> Option<IpAddr> {
    ips.min_by_key(|ip| ip.is_ipv6()).copied()
}

fn found_or_loopback(local: Vec<LocalAddress>, bind: IpAddr, why: Option<String>) -> Result<Address> {
    // What is bound alone is what others can be told.
    let bound = |a: &&LocalAddress| bind.is_unspecified() || a.ip == bind;
    let ranked = local.iter().filter(bound).filter_map(|a| rank(a, &local).map(|r| (r, a)));
    Ok(match ranked.min_by_key(|(r, _)| *r) {
        Some((_, a)) => {
            // An IPv4 wildcard would not be reachable at an IPv6 address; the IPv6 wildcard takes both.
            let bind = if a.ip.is_ipv6() && bind == IpAddr::V4(Ipv4Addr::UNSPECIFIED) {
                IpAddr::V6(Ipv6Addr::UNSPECIFIED)
            } else {
                bind
            };
            let note = why.map(|w| format!("{w}; advertising {} ({}) instead", a.ip, a.interface));
            Address { bind, advertise: a.ip, note }
        }
        None => {
            let ip = if bind.is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { bind };
            let note = format!(
                "this host has no address that others could reach: advertising {ip}, which serves engines on this host \
                 only; give the host explicitly if that is wrong"
            );
            Address { bind, advertise: ip, note: Some(note) }
        }
    })
}

/// Lower is better; None is never advertised. IPv4 before IPv6, the default route's address first among its family, and
/// interfaces whose addresses repeat on every host last.
fn rank(a: &LocalAddress, local: &[LocalAddress]) -> Option<u32> {
    let repeats = repeats_on_every_host(&a.interface, local);
    is_reachable(a.ip).then(|| u32::from(repeats) * 4 + u32::from(a.ip.is_ipv6()) * 2 + u32::from(!a.default_route))
}

/// True if other hosts could reach an interface by this address.
pub fn is_reachable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !(ip.is_loopback() || ip.is_link_local() || ip.is_unspecified() || ip.is_multicast()),
        IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified() || ip.is_multicast()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(interface: &str, ip: &str, default_route: bool) -> LocalAddress {
        LocalAddress { interface: interface.to_owned(), ip: ip.parse().unwrap(), default_route }
    }

    fn choose_from(host: Option<&str>, bind: Option<&str>, ips: &[&str], local: &[LocalAddress]) -> Address {
        let ips: Vec<IpAddr> = ips.iter().map(|i| i.parse().unwrap()).collect();
        let bind = bind.map(|ip| ip.parse().unwrap());
        choose_among(host.map(|h| (h, ips.as_slice())), bind, false, || Ok(local.to_vec())).unwrap()
    }

    fn pick(host: Option<&str>, ips: &[&str], local: &[LocalAddress]) -> Address {
        choose_from(host, None, ips, local)
    }

    fn texts(address: &Address) -> (String, String) {
        (address.bind.to_string(), address.advertise.to_string())
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
        assert!(none.advertise.is_loopback() && none.note.unwrap().contains("no address that others could reach"));
    }

    #[test]
    fn a_bridge_with_the_default_route_does_not_repeat() {
        let local = [at("br-ex", "10.1.0.1", true), at("br-ex", "fd00::1", false), at("br-0a1b", "172.18.0.1", false)];
        assert!(!repeats_on_every_host("br-ex", &local) && repeats_on_every_host("br-0a1b", &local));
        assert!(!repeats_on_every_host("eth0", &local) && !repeats_on_every_host("bond0", &local));
        let first = [at("eth1", "10.2.0.1", false), at("br-ex", "10.1.0.1", true)];
        assert_eq!(pick(None, &[], &first).advertise.to_string(), "10.1.0.1");
    }

    #[test]
    fn wildcards_and_localhost_are_never_advertised() {
        let local = [at("lo", "127.0.0.1", false), at("eth0", "10.1.0.1", true), at("eth0", "fd00::1", true)];
        let any = pick(Some("0.0.0.0"), &["0.0.0.0"], &local);
        assert_eq!(texts(&any), ("0.0.0.0".into(), "10.1.0.1".into()));
        let any6 = pick(Some("::"), &["::"], &local);
        assert_eq!(texts(&any6), ("::".into(), "10.1.0.1".into()));
        let named = pick(Some("localhost"), &["::1", "127.0.0.1"], &local);
        assert_eq!(texts(&named), ("::".into(), "10.1.0.1".into()));
        assert!(named.note.unwrap().contains("localhost"));
        let own_name = pick(Some("box"), &["127.0.1.1"], &local);
        assert_eq!(own_name.advertise.to_string(), "10.1.0.1");
        let only_v6 = [at("eth0", "fd00::1", true)];
        assert_eq!(texts(&pick(Some("0.0.0.0"), &["0.0.0.0"], &only_v6)), ("::".into(), "fd00::1".into()));
    }

    #[test]
    fn all_addresses_are_bound_unless_one_is_asked_for() {
        let local = [at("lo", "127.0.0.1", false), at("eth0", "10.1.0.1", true), at("eth1", "10.2.0.1", false)];
        assert_eq!(texts(&pick(None, &[], &local)), ("::".into(), "10.1.0.1".into()));
        let given = pick(Some("head"), &["::1", "fd00::9", "10.2.0.1"], &local);
        assert_eq!(texts(&given), ("::".into(), "10.2.0.1".into()));
        // A loopback address that is spelled out keeps others away.
        let spelled = pick(Some("127.0.0.1"), &["127.0.0.1"], &local);
        assert_eq!(texts(&spelled), ("127.0.0.1".into(), "127.0.0.1".into()));
        assert!(spelled.note.unwrap().contains("only those on this host"));
        let bind = |host: Option<&str>, ip: &str| {
            let ips: Vec<&str> = host.into_iter().collect();
            texts(&choose_from(host, Some(ip), &ips, &local))
        };
        assert_eq!(bind(None, "10.2.0.1"), ("10.2.0.1".into(), "10.2.0.1".into()));
        assert_eq!(bind(None, "0.0.0.0"), ("0.0.0.0".into(), "10.1.0.1".into()));
        assert_eq!(bind(None, "::"), ("::".into(), "10.1.0.1".into()));
        assert_eq!(bind(Some("203.0.113.5"), "10.2.0.1"), ("10.2.0.1".into(), "203.0.113.5".into()));
        assert_eq!(bind(Some("0.0.0.0"), "10.2.0.1"), ("10.2.0.1".into(), "10.2.0.1".into()));
        assert_eq!(bind(Some("127.0.0.1"), "0.0.0.0"), ("0.0.0.0".into(), "127.0.0.1".into()));
    }

    #[test]
    fn what_is_no_address_of_this_host_is_named() {
        let error = choose(Some("no.such.host.invalid"), None, false).unwrap_err();
        assert!(error.message().contains("no.such.host.invalid"), "{error}");
        assert!(choose(Some("a;b"), None, false).unwrap_err().message().contains("is not a host"));
        let foreign = choose(Some("198.51.100.7"), None, false).unwrap_err();
        assert_eq!(foreign.kind(), ErrorKind::InvalidArgument);
        for part in ["host 198.51.100.7 is not an address of this host (127.0.0.1", "bind"] {
            assert!(foreign.message().contains(part), "{foreign}");
        }
        let forwarded = choose(Some("198.51.100.7"), Some("0.0.0.0"), false).unwrap();
        assert_eq!(texts(&forwarded), ("0.0.0.0".into(), "198.51.100.7".into()));
        let me = choose(None, None, false).unwrap();
        assert_eq!(me.note.is_some(), me.advertise.is_loopback());
    }
}
