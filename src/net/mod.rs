//! ZMQ and addresses: the listener that serves an engine's rank metadata, the client that asks for it, and the choice
//! of the address that other hosts are told. This layer moves bytes; what they mean is decided in `proto`.

#![forbid(unsafe_code)]

mod address;
mod awaits;
mod blocking;
mod client;
mod connections;
mod flags;
mod listener;
mod probe;
mod request;
mod requests;
mod resolver;
mod route;
mod sealed;

pub use address::{Address, LocalAddress, choose, is_reachable, local_addresses, repeats_on_every_host};
pub use awaits::{Awaited, AwaitedPrefill, unanswered};
pub use blocking::{push, query};
pub use client::{Client, ClientLimits};
pub use listener::{Listener, ListenerConfig, RequestHandler};
pub use requests::HandshakeAnswer;
pub use sealed::AuthLayer;

use std::net::{Ipv6Addr, SocketAddr, TcpStream};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use crate::error::{Error, Result};

/// The ZMQ endpoint of a host and port, IPv6 addresses in brackets. `host` may come from another engine, so that it
/// is checked before ZMQ, which gives some characters a meaning of its own, sees it.
pub(crate) fn endpoint(host: &str, port: u16) -> Result<String> {
    let plain = unbracketed(host);
    let text_ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if is_ipv6(plain) {
        return Ok(format!("tcp://[{plain}]:{port}"));
    }
    if plain.is_empty() || plain.len() > 253 || !plain.chars().all(text_ok) {
        return Err(Error::invalid(format!(
            "{host:?} is not a host: expected an IPv4 address, an IPv6 address or a name of at most 253 letters, \
             digits, '.', '-' and '_'"
        )));
    }
    Ok(format!("tcp://{plain}:{port}"))
}

/// A TCP connection that is being made. It never blocks.
pub(crate) fn connecting(to: SocketAddr) -> std::io::Result<TcpStream> {
    let family = if to.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(e) => Err(e.into()),
    }
}

/// The port that an engine's listener binds: `port` for the first of data-parallel engines, and one more for each further.
/// 0, any that is free, stays 0.
///
/// # Errors
/// A sum over 65535.
pub(crate) fn bind_port(port: u16, data_parallel_index: u16) -> Result<u16> {
    if port == 0 {
        return Ok(0);
    }
    port.checked_add(data_parallel_index).ok_or_else(|| {
        Error::invalid(format!(
            "port {port} plus data_parallel_index {data_parallel_index} is over 65535; configure a lower port"
        ))
    })
}

/// `host:port` for people, IPv6 addresses in brackets.
pub fn host_port(host: &str, port: u16) -> String {
    let plain = unbracketed(host);
    if is_ipv6(plain) { format!("[{plain}]:{port}") } else { format!("{plain}:{port}") }
}

/// `host` without the brackets that an IPv6 address may be written in.
fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}

/// True if `host` is an IPv6 address, a link-local one with its interface (`fe80::1%eth0`) included.
fn is_ipv6(host: &str) -> bool {
    let (address, zone) = host.split_once('%').unwrap_or((host, "x"));
    let zone_ok = !zone.is_empty() && zone.len() < 16 && zone.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    address.parse::<Ipv6Addr>().is_ok() && zone_ok
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_bracketed_and_checked() {
        assert_eq!(endpoint("10.0.0.1", 7).as_deref(), Ok("tcp://10.0.0.1:7"));
        assert_eq!(endpoint("fd00::1", 7).as_deref(), Ok("tcp://[fd00::1]:7"));
        assert_eq!(endpoint("[fd00::1]", 7).as_deref(), Ok("tcp://[fd00::1]:7"));
        assert_eq!(endpoint("fe80::1%eth0", 7).as_deref(), Ok("tcp://[fe80::1%eth0]:7"));
        assert_eq!(endpoint("head-0.cluster_a.local", 7).as_deref(), Ok("tcp://head-0.cluster_a.local:7"));
        for bad in ["", "a b", "10.0.0.1;10.0.0.2", "*", "[::1", "a/b", "a:b", "host\0", "::1%", "::1%a b"] {
            let error = endpoint(bad, 7).err().map(|e| e.message().to_owned()).unwrap_or_default();
            assert!(error.contains("is not a host"), "{bad:?}: {error}");
        }
        assert!(endpoint(&"a".repeat(254), 7).is_err());
        assert_eq!(host_port("::1", 7), "[::1]:7");
        assert_eq!(host_port("h", 7), "h:7");
    }
}
