//! The hosts that `kv_transfer_params`, which come through proxies and from clients, may send a consumer to.

use core::net::{IpAddr, Ipv6Addr};
use std::collections::BTreeSet;

use crate::error::{Error, Result};

/// The longest list; each entry costs a comparison per request.
const MAX_ENTRIES: usize = 4096;

/// Hosts that this engine may read from: names and networks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllowedHosts {
    /// In lower case.
    names: BTreeSet<String>,
    networks: Vec<Network>,
}

/// The addresses whose first `bits` bits are those of `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Network {
    first: IpAddr,
    bits: u32,
}

impl AllowedHosts {
    /// Reads a list of names, addresses and networks, such as `10.1.0.0/16, prefill-0.example`.
    ///
    /// Errors: [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for an entry that is none of these, for an empty list and
    /// for more than 4096 entries.
    pub fn parse(list: &str) -> Result<AllowedHosts> {
        let mut allowed = AllowedHosts::default();
        for (count, entry) in list.split(',').map(str::trim).enumerate() {
            if count == MAX_ENTRIES {
                return Err(Error::invalid(format!("allowed_hosts: at most {MAX_ENTRIES} entries can be given")));
            }
            if let Some(network) = Network::parse(entry) {
                allowed.networks.push(network);
            } else if is_name(entry) {
                allowed.names.insert(entry.to_ascii_lowercase());
            } else {
                return Err(Error::invalid(format!(
                    "allowed_hosts: expected names, addresses and networks such as 10.1.0.0/16 with commas between them, got \
                     {entry:?}"
                )));
            }
        }
        Ok(allowed)
    }

    /// True if the list has this host. A name counts as it is written, an address by its network. An IPv6 address may
    /// stand in brackets. A name is not resolved, so it needs an entry of its own whatever its address.
    pub fn allows(&self, host: &str) -> bool {
        match address_of(host) {
            Some(address) => self.networks.iter().any(|network| network.holds(address)),
            None => self.names.contains(&host.to_ascii_lowercase()),
        }
    }
}

impl Network {
    /// An address, or a network in CIDR notation. None for other text, and for a network with bits behind its prefix. One of
    /// IPv4 addresses that are written as IPv6 ones is the network of those IPv4 addresses.
    fn parse(text: &str) -> Option<Network> {
        let (address, bits) = match text.split_once('/') {
            None => (text, None),
            Some((address, bits)) => (address, Some(bits)),
        };
        let first: IpAddr = address.parse().ok()?;
        let width = width_of(first);
        let bits = match bits {
            None => width,
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok()?,
            Some(_) => return None,
        };
        let network = Network { first, bits };
        let is_first = bits <= width && bits_of(first) == bits_of(first) & network.mask();
        is_first.then_some(network.to_canonical())
    }

    fn to_canonical(self) -> Network {
        let first = self.first.to_canonical();
        // A shorter prefix than that of mapped addresses has none of their bits.
        let left_out = width_of(self.first).saturating_sub(width_of(first));
        Network { first, bits: self.bits.saturating_sub(left_out) }
    }

    fn mask(self) -> u128 {
        u128::MAX.checked_shl(width_of(self.first).saturating_sub(self.bits)).unwrap_or(0)
    }

    /// An IPv4 address may be written as an IPv6 one (`::ffff:10.1.2.3`), and is the same host.
    fn holds(self, address: IpAddr) -> bool {
        [address, address.to_canonical()].into_iter().any(|address| {
            width_of(address) == width_of(self.first) && bits_of(address) & self.mask() == bits_of(self.first)
        })
    }
}

/// The address that a host is, rather than a name.
fn address_of(host: &str) -> Option<IpAddr> {
    match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => host.parse().ok(),
    }
}

fn width_of(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn bits_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// True if a text can be a host's name: the letters of the DNS, and the underscore of container networks.
fn is_name(text: &str) -> bool {
    let has_letter = text.bytes().any(|byte| byte.is_ascii_alphabetic());
    has_letter && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_and_networks_are_told_apart() {
        let allowed = AllowedHosts::parse("10.1.0.0/16,prefill-0.Example , 192.0.2.7, fd00::/8,0.0.0.0/32").unwrap();
        for host in
            ["10.1.0.0", "10.1.255.255", "::ffff:10.1.2.3", "PREFILL-0.example", "192.0.2.7", "fdff::1", "0.0.0.0"]
        {
            assert!(allowed.allows(host), "{host}");
        }
        for host in [
            "10.2.0.0",
            "10.0.255.255",
            "prefill-1.example",
            "192.0.2.8",
            "fe00::1",
            "::a01:203",
            "0x0a010203",
            "10.1",
            "",
            "0.0.0.1",
        ] {
            assert!(!allowed.allows(host), "{host}");
        }
        let all = AllowedHosts::parse("0.0.0.0/0,::/0").unwrap();
        assert!(all.allows("203.0.113.9") && all.allows("2001:db8::1") && !all.allows("name"));
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for list in [
            "",
            "a,,b",
            "10.1.2.3/16",
            "10.0.0.0/33",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "fd00::/129",
            "http://a",
            "a b",
            "10.1",
            "[::1]",
        ] {
            let error = AllowedHosts::parse(list).unwrap_err();
            assert!(error.message().contains("allowed_hosts"), "{list}: {error}");
        }
        let many = vec!["a"; MAX_ENTRIES + 1].join(",");
        assert!(AllowedHosts::parse(&many).unwrap_err().message().contains("4096"));
    }

    #[test]
    fn ipv6_address_may_stand_in_brackets() {
        let allowed = AllowedHosts::parse("fd00::/8,a.example").unwrap();
        assert!(allowed.allows("[fd00::1]"));
        for host in ["[fe00::1]", "[fd00::1", "fd00::1]", "[[fd00::1]]", "[10.1.2.3]", "[a.example]", "[]"] {
            assert!(!allowed.allows(host), "{host}");
        }
        assert!(!AllowedHosts::parse("0.0.0.0/0").unwrap().allows("[10.1.2.3]"), "no address is written so");
    }

    #[test]
    fn network_of_mapped_addresses_is_the_ipv4_one() {
        let allowed = AllowedHosts::parse("::ffff:10.1.0.0/112,::ffff:192.0.2.7").unwrap();
        assert_eq!(allowed, AllowedHosts::parse("10.1.0.0/16,192.0.2.7").unwrap());
        assert!(allowed.allows("10.1.2.3") && allowed.allows("::ffff:10.1.2.3") && !allowed.allows("10.2.0.0"));
        assert!(AllowedHosts::parse("::ffff:0:0/96").unwrap().allows("203.0.113.9"));
        for list in ["::ffff:10.1.2.3/112", "::ffff:0:0/95", "::ffff:10.1.0.0/129"] {
            AllowedHosts::parse(list).unwrap_err();
        }
    }
}
