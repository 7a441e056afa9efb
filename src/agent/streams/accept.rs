//! The offering side: streams that peers ask for are offered, accepted and matched with who asked.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::send::Outbound;
use super::wire::{GREETING_BYTES, MAX_ADDRESSES, Offer, Secret, draw, ticket_of};
use super::{Io, LISTENING, Streams, prepare};
use crate::agent::core::frame::FrameKind;
use crate::agent::core::ids::PeerId;
use crate::agent::core::route::tcp_devices;
use crate::agent::peers::Peer;
use crate::error::{Error, ErrorKind, Result};
use crate::net::local_addresses;

/// How long who connects may take to say who it is.
const GREETING_TIME: Duration = Duration::from_secs(5);
/// Connections of unknown peers at a time. Others wait, in the kernel's queue.
const MAX_UNIDENTIFIED: usize = 64;

/// How a stream within a host avoids congestion: Reno, which every kernel has, does not send by a timer. There is no network
/// to be gentle to, and BBR's timer makes blocks wait. A connection that was made with BBR keeps its timer when it changes to
/// Reno, so listeners have Reno, and streams to other hosts change to what is usual.
const NEAR_CONGESTION: &str = "reno";

/// A connection that was accepted and has not said whose it is.
pub(super) struct Unidentified {
    socket: TcpStream,
    heard: [u8; GREETING_BYTES],
    len: usize,
    pub(super) deadline: Instant,
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

impl Streams {
    /// A peer asks for a stream: offers one, with no address where there is none.
    pub(crate) fn on_question(&mut self, id: PeerId, io: &mut Io<'_>) -> Result<()> {
        self.close_outbound(id, io.regions);
        let peer = io.peers.get(id)?;
        let addresses = self.addresses_for(peer).iter().map(ToString::to_string).collect();
        let offer = Offer { addresses, ticket: draw()?, answer: draw()? };
        let data = offer.encode(peer.version)?;
        if !offer.addresses.is_empty() {
            self.tickets.insert(offer.ticket, id);
            self.outbound.insert(id, Outbound::offered(offer.ticket, offer.answer, io.now));
        }
        io.effects.send(id, FrameKind::StreamOffer, 0, data);
        Ok(())
    }

    /// Where a peer can have a stream: the addresses of the devices by which UCX reaches it, listened at from now on.
    fn addresses_for(&mut self, peer: &Peer) -> Vec<SocketAddr> {
        if !peer.may_stream {
            return Vec::new();
        }
        let lanes = peer.endpoint.describe();
        let local = local_addresses().unwrap_or_else(|error| {
            log::info!("agent {}: no stream is offered: {error}", self.name);
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
                        log::info!("agent {}: no stream is offered at {}: {error}", self.name, address.ip)
                    }
                }
            }
        }
        addresses.truncate(MAX_ADDRESSES);
        addresses
    }

    fn listen_at(&mut self, ip: IpAddr) -> Result<SocketAddr> {
        let mut known = self.listeners.iter().filter_map(|listener| listener.local_addr().ok());
        if let Some(address) = known.find(|address| address.ip() == ip) {
            return Ok(address);
        }
        let (listener, usual) = listen(ip, self.ports.clone(), self.first_port)?;
        let address = listener.local_addr().map_err(|e| listening(ip, &e))?;
        self.congestion = usual;
        self.watch(&listener, LISTENING)?;
        self.listeners.push(listener);
        Ok(address)
    }

    /// Accepts connections and hears whose they are.
    pub(super) fn accept(&mut self, io: &mut Io<'_>) {
        loop {
            let mut accepted = false;
            let listeners = std::mem::take(&mut self.listeners);
            for listener in &listeners {
                while self.unidentified.len() < MAX_UNIDENTIFIED {
                    // Whatever else is wrong (descriptors that are used up) is so the next time too.
                    let Ok((socket, _)) = listener.accept() else { break };
                    if socket.set_nonblocking(true).is_err() || self.watch(&socket, LISTENING).is_err() {
                        continue;
                    }
                    accepted = true;
                    prepare(&socket);
                    self.unidentified.push(Unidentified {
                        socket,
                        heard: [0; GREETING_BYTES],
                        len: 0,
                        deadline: io.now + GREETING_TIME,
                    });
                }
            }
            self.listeners = listeners;
            for mut unidentified in std::mem::take(&mut self.unidentified) {
                match unidentified.hear() {
                    Ok(None) => self.unidentified.push(unidentified),
                    Ok(Some(ticket)) => self.admit(unidentified.socket, &ticket, io),
                    Err(error) => self.refuse(&error, io.now),
                }
            }
            // Those that wait behind the last one that was accepted make no change of their own.
            if !accepted {
                return;
            }
        }
    }

    /// Drops connections that have not said in time whose they are.
    pub(super) fn end_late_accepts(&mut self, io: &mut Io<'_>) {
        let before = self.unidentified.len();
        self.unidentified.retain(|unidentified| unidentified.deadline > io.now);
        if self.unidentified.len() < before {
            // Those that wait in the kernel's queue make no change any more.
            self.accept(io);
        }
    }

    /// Takes a stream of a peer that has shown its ticket.
    fn admit(&mut self, mut socket: TcpStream, ticket: &Secret, io: &mut Io<'_>) {
        let unknown = || Error::not_found("its ticket was not given to anybody, or used before");
        let admitted = self.tickets.remove(ticket).ok_or_else(unknown).and_then(|id| {
            self.watch_as(&socket, id.raw())?;
            let near = io.peers.get(id)?.on_this_host;
            let outbound = self.outbound.get_mut(&id).ok_or_else(unknown)?;
            // There is room for it in a new connection.
            let said = socket.write(&outbound.answer).unwrap_or(0);
            if said != outbound.answer.len() {
                return Err(Error::new(ErrorKind::Io, "it closed before it was answered"));
            }
            if let Some(usual) = self.congestion.as_ref().filter(|_| !near) {
                let _ = sockopt::set_tcp_congestion(&socket, usual);
            }
            outbound.connect(socket);
            Ok(())
        });
        if let Err(error) = admitted {
            self.refuse(&error, io.now);
        }
    }

    fn refuse(&mut self, error: &Error, now: Instant) {
        if let Some(left_out) = self.log.pass(now) {
            log::warn!("agent {}: a stream was refused: {error} ({left_out} such lines left out)", self.name);
        }
    }
}

impl Unidentified {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::agent::core::config::AgentConfig;
    use crate::proto::ids::Incarnation;

    #[test]
    fn an_address_is_listened_at_once() {
        let mut streams = Streams::new(&AgentConfig::default(), Incarnation(7));
        let (one, other) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, 2]));
        let first = streams.listen_at(one).unwrap();
        let second = streams.listen_at(other).unwrap();
        assert_eq!((first.ip(), second.ip()), (one, other));
        assert_eq!([one, other, one].map(|ip| streams.listen_at(ip).unwrap()), [first, second, first]);
        assert_eq!(streams.listeners.len(), 2);
    }

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
}
