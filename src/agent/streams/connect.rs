//! How a stream comes about: asked for, offered, connected, accepted.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::recv::{Inbound, Receiving};
use super::send::Outbound;
use super::wire::{GREETING_BYTES, MAX_ADDRESSES, Offer, Secret, draw, greeting, ticket_of};
use super::{DOOR, INBOUND, prepare};
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::engine::Engine;
use crate::agent::rpc::server::Load;
use crate::error::{Error, ErrorKind, Result};
use crate::net::local_addresses;

/// How long an address may take to connect and to answer.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// How long who connects may take to say who it is.
const GREETING_TIME: Duration = Duration::from_secs(5);
/// Connections of unknown peers at a time. Others wait, in the kernel's queue.
const MAX_STRANGERS: usize = 64;

/// How a stream within a host avoids congestion: Reno, which every kernel has, does not send by a timer. There is no network
/// to be gentle to, and by BBR 32 MiB in blocks of 4 KiB took 9.2 ms in place of 5.6. A connection that was made with BBR
/// keeps its timer when it changes to Reno, so listeners have Reno, and streams to other hosts change to what is usual.
const NEAR_CONGESTION: &str = "reno";

/// A connection that was accepted and has not said whose it is.
pub(crate) struct Stranger {
    socket: TcpStream,
    heard: [u8; GREETING_BYTES],
    len: usize,
    pub(crate) deadline: Instant,
}

/// What the asking side has yet to try.
pub(crate) struct Attempt {
    socket: TcpStream,
    to: SocketAddr,
    left: VecDeque<SocketAddr>,
    ticket: Secret,
    answer: Secret,
    /// Bytes of the answer that have come; `None` until the ticket was shown.
    heard: Option<Vec<u8>>,
    pub(crate) deadline: Instant,
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

/// A connection that is being made.
fn open(to: SocketAddr) -> std::result::Result<TcpStream, Errno> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error),
    }
}

fn listening(ip: IpAddr, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("listening at {ip}: {error}"))
}

/// Listens at a free port, of `ports` if given. `start` says at which of them to begin, so that agents of one host do not all
/// try the same. Returns also what connections usually avoid congestion with, which the listener's do not.
fn listen(ip: IpAddr, ports: Option<RangeInclusive<u16>>, start: u64) -> Result<(TcpListener, Option<String>)> {
    let listener = match ports {
        None => TcpListener::bind((ip, 0)).map_err(|e| listening(ip, &e))?,
        Some(ports) => bind_within(ip, &ports, start)?,
    };
    listener.set_nonblocking(true).map_err(|e| listening(ip, &e))?;
    let usual = sockopt::tcp_congestion(&listener).ok();
    let _ = sockopt::set_tcp_congestion(&listener, NEAR_CONGESTION);
    Ok((listener, usual))
}

fn bind_within(ip: IpAddr, ports: &RangeInclusive<u16>, start: u64) -> Result<TcpListener> {
    let turn = start.checked_rem(ports.len() as u64).unwrap_or(0) as usize;
    let mut last = None;
    for port in ports.clone().cycle().skip(turn).take(ports.len()) {
        match TcpListener::bind((ip, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some(error),
        }
    }
    let why = last.map(|error| format!(": {error}")).unwrap_or_default();
    let (first, end) = (ports.start(), ports.end());
    Err(Error::new(
        ErrorKind::Io,
        format!("no port of UCX's TCP_PORT_RANGE, {first}-{end}, is free at {ip}; a wider range has room{why}"),
    ))
}

impl Engine {
    /// Asks a peer for a stream if there may be one and was none.
    pub(crate) fn ask_for_stream(&mut self, id: PeerId) -> Result<()> {
        let may = self.peers.get(id).is_ok_and(|peer| peer.may_stream);
        if !may || self.streams.inbound.contains_key(&id) {
            return Ok(());
        }
        self.streams.inbound.insert(id, Inbound::Asked);
        self.post_service(id, FrameKind::StreamQuestion, 0, Load::Bytes(Vec::new()), 0)
    }

    /// A peer asks for a stream: offers one, with no address where there is none.
    pub(crate) fn on_stream_question(&mut self, id: PeerId, now: Instant) -> Result<()> {
        self.close_outbound(id);
        let addresses = self.stream_addresses(id).iter().map(ToString::to_string).collect();
        let offer = Offer { addresses, ticket: draw()?, answer: draw()? };
        let load = Load::Bytes(offer.encode(self.peers.get(id)?.version)?);
        if !offer.addresses.is_empty() {
            self.streams.tickets.insert(offer.ticket, id);
            self.streams.outbound.insert(id, Outbound::offered(offer.ticket, offer.answer));
        }
        if let Err(error) = self.post_service(id, FrameKind::StreamOffer, 0, load, 0) {
            self.lose(id, error, now);
        }
        Ok(())
    }

    /// Where a peer can have a stream: the addresses of the devices by which UCX reaches it, listened at from now on.
    fn stream_addresses(&mut self, id: PeerId) -> Vec<SocketAddr> {
        if !self.peers.get(id).is_ok_and(|peer| peer.may_stream) {
            return Vec::new();
        }
        let lanes = self.peers.get(id).map(|peer| peer.endpoint.describe()).unwrap_or_default();
        let local = local_addresses().unwrap_or_else(|error| {
            log::info!("agent {}: no stream is offered: {error}", self.config.name);
            Vec::new()
        });
        let mut addresses = Vec::new();
        for device in tcp_devices(&lanes) {
            for address in local.iter().filter(|address| address.interface == device) {
                // One of a link means nothing to the other side without its interface.
                if matches!(address.ip, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
                    continue;
                }
                match self.listen_at(address.ip) {
                    Ok(address) => addresses.push(address),
                    Err(error) => {
                        log::info!("agent {}: no stream is offered at {}: {error}", self.config.name, address.ip)
                    }
                }
            }
        }
        addresses.truncate(MAX_ADDRESSES);
        addresses
    }

    fn listen_at(&mut self, ip: IpAddr) -> Result<SocketAddr> {
        let mut known = self.streams.listeners.iter().filter_map(|listener| listener.local_addr().ok());
        if let Some(address) = known.find(|address| address.ip() == ip) {
            return Ok(address);
        }
        let (listener, usual) = listen(ip, self.config.tcp_ports(), self.incarnation.0)?;
        let address = listener.local_addr().map_err(|e| listening(ip, &e))?;
        self.streams.congestion = usual;
        self.streams.watch(&listener, DOOR)?;
        self.streams.listeners.push(listener);
        Ok(address)
    }

    /// A peer says where its stream is.
    pub(crate) fn on_stream_offer(&mut self, id: PeerId, data: &[u8], now: Instant) -> Result<()> {
        let offer = Offer::decode(data)?;
        let asked = matches!(self.streams.inbound.get(&id), Some(Inbound::Asked));
        if !asked || self.streams.attempts.contains_key(&id) {
            return Err(Error::corrupt("an offer of a stream that was not asked for"));
        }
        self.try_next(id, offer.parsed()?, offer.ticket, offer.answer, now);
        Ok(())
    }

    /// Connects to the next address of an offer.
    fn try_next(&mut self, id: PeerId, mut left: VecDeque<SocketAddr>, ticket: Secret, answer: Secret, now: Instant) {
        while let Some(to) = left.pop_front() {
            let opened = open(to).map_err(|e| Error::new(ErrorKind::Unreachable, e.to_string()));
            let socket =
                match opened.and_then(|socket| self.streams.watch(&socket, INBOUND | id.raw()).map(|()| socket)) {
                    Ok(socket) => socket,
                    Err(error) => {
                        self.tell_failed(id, to, &error);
                        continue;
                    }
                };
            prepare(&socket);
            let attempt = Attempt { socket, to, left, ticket, answer, heard: None, deadline: now + CONNECT_TIME };
            self.streams.attempts.insert(id, attempt);
            return;
        }
        log::info!(
            "agent {}: bytes of {} come in UCX's messages, because no stream to it could be made",
            self.config.name,
            self.peer_name(id)
        );
        self.streams.inbound.insert(id, Inbound::Failed);
    }

    fn tell_failed(&self, id: PeerId, to: SocketAddr, why: &dyn std::fmt::Display) {
        log::debug!("agent {}: no stream to {} at {to}: {why}", self.config.name, self.peer_name(id));
    }

    fn peer_name(&self, id: PeerId) -> &str {
        self.peers.get(id).map_or("a lost agent", |peer| peer.name.as_str())
    }

    /// Goes on with a stream that is being made, or looks at one that has changed.
    pub(crate) fn inbound_changed(&mut self, id: PeerId, now: Instant) {
        let Some(mut attempt) = self.streams.attempts.remove(&id) else {
            if let Some(Inbound::Up(_)) = self.streams.inbound.get(&id) {
                self.streams.reading.insert(id);
            }
            return;
        };
        match attempt.advance() {
            Ok(false) => drop(self.streams.attempts.insert(id, attempt)),
            Ok(true) => {
                log::debug!("agent {}: a stream from {} at {}", self.config.name, self.peer_name(id), attempt.to);
                if let Ok(peer) = self.peers.get_mut(id) {
                    peer.streamed = true;
                    let receiving = Receiving::new(attempt.socket);
                    self.streams.inbound.insert(id, Inbound::Up(receiving));
                }
            }
            Err(error) => {
                self.tell_failed(id, attempt.to, &error);
                self.try_next(id, attempt.left, attempt.ticket, attempt.answer, now);
            }
        }
    }

    /// Gives up on who takes too long.
    pub(crate) fn end_late_meetings(&mut self, now: Instant) {
        if self.streams.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let before = self.streams.strangers.len();
        self.streams.strangers.retain(|stranger| stranger.deadline > now);
        if self.streams.strangers.len() < before {
            // Those that wait in the kernel's queue make no change any more.
            self.answer_door(now);
        }
        let late = |(id, attempt): (&PeerId, &Attempt)| (attempt.deadline <= now).then_some(*id);
        let late: Vec<PeerId> = self.streams.attempts.iter().filter_map(late).collect();
        for id in late {
            if let Some(attempt) = self.streams.attempts.remove(&id) {
                self.tell_failed(id, attempt.to, &format!("no answer within {CONNECT_TIME:?}"));
                self.try_next(id, attempt.left, attempt.ticket, attempt.answer, now);
            }
        }
    }

    /// Accepts connections and hears whose they are.
    pub(crate) fn answer_door(&mut self, now: Instant) {
        loop {
            let mut accepted = false;
            let listeners = std::mem::take(&mut self.streams.listeners);
            for listener in &listeners {
                while self.streams.strangers.len() < MAX_STRANGERS {
                    // Whatever else is wrong (descriptors that are used up) is so the next time too.
                    let Ok((socket, _)) = listener.accept() else { break };
                    if socket.set_nonblocking(true).is_err() || self.streams.watch(&socket, DOOR).is_err() {
                        continue;
                    }
                    accepted = true;
                    prepare(&socket);
                    self.streams.strangers.push(Stranger {
                        socket,
                        heard: [0; GREETING_BYTES],
                        len: 0,
                        deadline: now + GREETING_TIME,
                    });
                }
            }
            self.streams.listeners = listeners;
            for mut stranger in std::mem::take(&mut self.streams.strangers) {
                match stranger.hear() {
                    Ok(None) => self.streams.strangers.push(stranger),
                    Ok(Some(ticket)) => self.admit_stream(stranger.socket, &ticket, now),
                    Err(error) => self.refuse_stream(&error, now),
                }
            }
            // Those that wait behind the last one that was accepted make no change of their own.
            if !accepted {
                return;
            }
        }
    }

    /// Takes a stream of a peer that has shown its ticket.
    fn admit_stream(&mut self, mut socket: TcpStream, ticket: &Secret, now: Instant) {
        let unknown = || Error::not_found("its ticket was not given to anybody, or used before");
        let admitted = self.streams.tickets.remove(ticket).ok_or_else(unknown).and_then(|id| {
            self.streams.watch_as(&socket, id.raw())?;
            let near = self.peers.get(id)?.on_this_host;
            let outbound = self.streams.outbound.get_mut(&id).ok_or_else(unknown)?;
            // There is room for it in a new connection.
            let said = socket.write(&outbound.answer).unwrap_or(0);
            if said != outbound.answer.len() {
                return Err(Error::new(ErrorKind::Io, "it closed before it was answered"));
            }
            if let Some(usual) = self.streams.congestion.as_ref().filter(|_| !near) {
                let _ = sockopt::set_tcp_congestion(&socket, usual);
            }
            outbound.connect(socket);
            Ok(())
        });
        if let Err(error) = admitted {
            self.refuse_stream(&error, now);
        }
    }

    fn refuse_stream(&mut self, error: &Error, now: Instant) {
        if let Some(left_out) = self.streams.log.pass(now) {
            log::warn!("agent {}: a stream was refused: {error} ({left_out} such lines left out)", self.config.name);
        }
    }
}

impl Stranger {
    /// Reads on. Returns the ticket when it has come.
    fn hear(&mut self) -> Result<Option<Secret>> {
        while let Some(room) = self.heard.get_mut(self.len..).filter(|room| !room.is_empty()) {
            match self.socket.read(room) {
                Ok(0) => return Err(Error::new(ErrorKind::Io, "it closed before it said whose it is")),
                Ok(len) => self.len = self.len.saturating_add(len),
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Error::new(ErrorKind::Io, format!("reading whose it is: {error}"))),
            }
        }
        ticket_of(&self.heard).map(Some)
    }
}

impl Attempt {
    /// Goes on. Returns whether the peer has answered.
    fn advance(&mut self) -> Result<bool> {
        let failed = |what: &str, e: std::io::Error| Error::new(ErrorKind::Unreachable, format!("{what}: {e}"));
        if let Some(error) = self.socket.take_error().map_err(|e| failed("connecting", e))? {
            return Err(failed("connecting", error));
        }
        let heard = match &mut self.heard {
            Some(heard) => heard,
            None => {
                if self.socket.peer_addr().is_err() {
                    return Ok(false);
                }
                let greeting = greeting(&self.ticket);
                // There is room for it in a new connection.
                if self.socket.write(&greeting).map_err(|e| failed("greeting", e))? != greeting.len() {
                    return Err(Error::new(ErrorKind::Unreachable, "the connection takes no greeting"));
                }
                self.heard.insert(Vec::new())
            }
        };
        loop {
            let mut part = [0; size_of::<Secret>()];
            // Not more than the answer: what follows is the first chunk's.
            let room = part.get_mut(heard.len()..).unwrap_or_default();
            if room.is_empty() {
                break;
            }
            match self.socket.read(room) {
                Ok(0) => return Err(Error::new(ErrorKind::Unreachable, "the other side closed the connection")),
                Ok(len) => heard.extend_from_slice(room.get(..len).unwrap_or_default()),
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(failed("reading the answer", error)),
            }
        }
        if *heard != self.answer {
            return Err(Error::new(ErrorKind::Unreachable, "somebody else answers there"));
        }
        Ok(true)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_a_listener_accepts_has_no_timer_of_its_own() {
        let (listener, usual) = listen(Ipv4Addr::LOCALHOST.into(), None, 0).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        listener.set_nonblocking(false).unwrap();
        let accepted = listener.accept().unwrap().0;
        assert_eq!(sockopt::tcp_congestion(&accepted).unwrap(), NEAR_CONGESTION);
        // What it takes on when its peer is on another host.
        assert_eq!(sockopt::tcp_congestion(&near).ok(), usual);
    }

    #[test]
    fn devices_are_those_of_the_tcp_lanes() {
        assert_eq!(tcp_devices("tcp/lo, tcp/eth0, tcp/lo, cuda_copy/cuda"), ["lo", "eth0"]);
        assert!(tcp_devices("posix/memory, cma/memory").is_empty());
        assert!(tcp_devices("unknown (this UCX cannot tell)").is_empty());
    }
}
