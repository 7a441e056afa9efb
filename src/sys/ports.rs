//! TCP ports of this process: which are free, which sockets listen, and which connections of strangers a socket has.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, getsockname, shutdown, socket_with, sockopt,
};

/// The ports that are tried where any will do, and the system chooses each.
const TRIES: usize = 64;

/// Takes a port at an address, as UCX does: not one at which another socket still has a connection. Port 0 is any.
fn take(ip: IpAddr, port: u16) -> rustix::io::Result<(OwnedFd, u16)> {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddr::new(ip, port))?;
    let bound = SocketAddr::try_from(getsockname(&socket)?).map_or(port, |address| address.port());
    Ok((socket, bound))
}

/// True if nobody has the port at the address, or the address cannot be bound at all.
fn is_free(ip: IpAddr, port: u16) -> bool {
    !matches!(take(ip, port), Err(Errno::ADDRINUSE))
}

/// Finds a port that is free at all of `addresses`.
///
/// It is one of `range`, tried from its `start`th on, or any where there is no range, and one that `is_allowed`. `None` where
/// there is no such port.
pub fn free_port(
    addresses: &[IpAddr],
    range: Option<&RangeInclusive<u16>>,
    start: u64,
    is_allowed: impl Fn(u16) -> bool,
) -> Option<u16> {
    let fits = |port: &u16| is_allowed(*port) && addresses.iter().all(|ip| is_free(*ip, *port));
    match range {
        Some(range) => {
            let turn = start.checked_rem(range.len() as u64).unwrap_or(0) as usize;
            range.clone().cycle().skip(turn).take(range.len()).find(fits)
        }
        None => {
            let first = *addresses.first()?;
            (0..TRIES).filter_map(|_| take(first, 0).ok().map(|(_, port)| port)).find(fits)
        }
    }
}

/// A socket of this process that listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listening {
    descriptor: RawFd,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Listening {
    /// True if the socket is still open and listens there.
    pub fn is_open(&self) -> bool {
        // SAFETY: the descriptor is only asked what it is; where it is closed or somebody else's, the answer says so.
        let descriptor = unsafe { BorrowedFd::borrow_raw(self.descriptor) };
        listens(descriptor) && address_of(descriptor) == Some(self.address)
    }

    /// Keeps the closed socket's descriptor number from being used again. `None` where somebody has it.
    pub fn occupy(&self) -> Option<OwnedFd> {
        let nothing = std::fs::File::open("/dev/null").ok()?;
        // As the lowest that is free.
        if nothing.as_raw_fd() == self.descriptor {
            return Some(nothing.into());
        }
        let taken = rustix::io::fcntl_dupfd_cloexec(&nothing, self.descriptor).ok()?;
        (taken.as_raw_fd() == self.descriptor).then_some(taken)
    }
}

fn listens(descriptor: impl AsFd) -> bool {
    sockopt::socket_acceptconn(descriptor).unwrap_or(false)
}

fn address_of(descriptor: impl AsFd) -> Option<SocketAddr> {
    SocketAddr::try_from(getsockname(descriptor).ok()?).ok()
}

/// The sockets of this process that have `port`, each by its number and as a descriptor of its own, so that it stays the
/// same while it is inspected.
fn sockets_at(port: u16) -> impl Iterator<Item = (RawFd, OwnedFd, SocketAddr)> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let numbers: Vec<RawFd> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.into_iter().filter_map(move |number| {
        // SAFETY: fcntl takes any number; a new descriptor, if it returns one, is this function's alone.
        let owned = unsafe {
            let new = libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0);
            (new >= 0).then(|| OwnedFd::from_raw_fd(new))?
        };
        let address = address_of(&owned)?;
        (address.port() == port).then_some((number, owned, address))
    })
}

/// The sockets of this process that listen at `port`.
pub fn listening_at(port: u16) -> Vec<Listening> {
    let found = sockets_at(port).filter(|(_, socket, _)| listens(socket));
    found.map(|(descriptor, _, address)| Listening { descriptor, address }).collect()
}

/// Ends connections to `port` that have stayed silent, and returns how many.
///
/// Those are connections over which at most `heard` bytes have come, the last of them `patience` ago or earlier. A reader sees
/// their end.
pub fn end_silent(port: u16, heard: u64, patience: Duration) -> usize {
    let is_silent = |socket: &OwnedFd| {
        !listens(socket) && silence(socket).is_some_and(|(bytes, time)| bytes <= heard && time >= patience)
    };
    let silent = sockets_at(port).filter(|(_, socket, _)| is_silent(socket));
    silent.filter(|(_, socket, _)| shutdown(socket, Shutdown::Both).is_ok()).count()
}

/// Makes connections to `port` end at once when they are closed, so that it is free.
pub fn forget_at_close(port: u16) {
    for (_, socket, _) in sockets_at(port).filter(|(_, socket, _)| !listens(socket)) {
        let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    }
}

/// Bytes that have come over a TCP connection, and the time since the last of them, or since it was made.
fn silence(socket: impl AsFd) -> Option<(u64, Duration)> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the length of the structure.
    let got = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // SAFETY: all-zero is valid for this structure of integers, and the kernel has written others.
    let info = unsafe { info.assume_init() };
    (got == 0).then(|| (info.tcpi_bytes_received, Duration::from_millis(info.tcpi_last_data_recv.into())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;

    const HOME: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    #[test]
    fn a_port_is_free_at_all_addresses_or_not_taken() {
        let held = TcpListener::bind((OTHER, 0)).unwrap();
        let port = held.local_addr().unwrap().port();
        let one = port..=port;
        assert_eq!(free_port(&[HOME, OTHER], Some(&one), 3, |_| true), None);
        drop(held);
        assert_eq!(free_port(&[HOME, OTHER], Some(&one), 3, |_| false), None);
        let any = free_port(&[HOME, OTHER], None, 0, |_| true).unwrap();
        assert!(any > 0);
    }

    #[test]
    fn silent_connections_end_and_others_go_on() {
        let listener = TcpListener::bind((HOME, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let listening = listening_at(address.port());
        assert_eq!(listening.iter().map(|found| found.address).collect::<Vec<_>>(), [address]);
        let mut talker = TcpStream::connect(address).unwrap();
        let mut heard = listener.accept().unwrap().0;
        talker.write_all(&[1; 9]).unwrap();
        heard.read_exact(&mut [0; 9]).unwrap();
        let mut silent = TcpStream::connect(address).unwrap();
        let mut kept = listener.accept().unwrap().0;
        assert_eq!(end_silent(address.port(), 8, Duration::from_secs(3600)), 0);
        assert_eq!(end_silent(address.port(), 8, Duration::ZERO), 1);
        assert_eq!((silent.read(&mut [0]).unwrap(), kept.read(&mut [0]).unwrap()), (0, 0));
        talker.write_all(&[2]).unwrap();
        heard.read_exact(&mut [0]).unwrap();
        let found = listening.first().unwrap();
        assert!(found.is_open());
        assert!(found.occupy().is_none(), "the listener has it");
        drop(listener);
        assert!(!found.is_open());
        let mut occupied = Vec::new();
        // Other tests open files too.
        while let Some(taken) = found.occupy() {
            occupied.push(taken);
        }
        assert!(occupied.len() <= 1);
    }
}
