//! Connections to other agents: made lazily, agreed on by hellos, lost once.
//!
//! Either side may connect, both may at once. Each side numbers its connection at random, says its number in its
//! hello, and repeats the other's: so a side knows which life of the connection a message belongs to. A hello that
//! repeats no number from a peer that is known by another one says that the peer has made a new connection, because
//! it lost the old: the old one is then lost here too.

pub(crate) mod admission;
pub(crate) mod backing;
pub(crate) mod close;
pub(crate) mod hello;
pub(crate) mod inbox;
pub(crate) mod reach;
pub(crate) mod secure;

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use self::hello::Hello;
use crate::agent::core::event::Event;
use crate::agent::core::frame::{Frame, FrameKind};
use crate::agent::core::ids::PeerId;
use crate::agent::engine::Engine;
use crate::agent::paths;
use crate::agent::peers::inbox::Inbox;
use crate::agent::rpc::flow_control::FlowControl;
use crate::agent::rpc::server::Server;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::process::{Challenge, Neighbour, ProcessPlace, Witness};
use crate::mem::ucx_error;
use crate::proto::ids::Incarnation;
use crate::proto::wire::{AgentMetadata, MemoryKind, OLDEST, RegionMetadata, Versions};
use crate::ucx::{self, Endpoint, EndpointOptions, Rkey, tells_segments};
use backing::Backing;
use reach::{Reach, has_only_tcp};
use secure::Session;

/// Peers that may be connected at a time. Engines of a thousand ranks on both sides stay under it; a peer that makes
/// connections without end does not take the process down.
const MAX_PEERS: usize = 16_384;

/// A region of the peer's. `None` for one that the peer has deregistered.
type RemoteRegion = Option<(RegionMetadata, Rc<Rkey>)>;

/// One connection.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    /// Our number for this connection.
    pub(crate) connection: u64,
    /// The peer's, once it said hello. From then on it is known to be alive and itself, and transfers are posted.
    remote_connection: Option<u64>,
    /// The protocol version in which this agent writes to it; the oldest that is spoken until it said hello.
    pub(crate) version: u16,
    /// When the peer must have said hello.
    deadline: Option<Instant>,
    regions: Vec<RemoteRegion>,
    /// Their lengths, 0 for `None`: what plans are checked against.
    lens: Vec<u64>,
    pub(crate) endpoint: Endpoint,
    /// Operations of transfers in flight, and their bytes.
    pub(crate) operations: u32,
    pub(crate) bytes: u64,
    /// Bytes of messages that UCX is not done with; the handle adds to it before it queues one.
    pub(crate) unsent: Arc<AtomicU64>,
    pub(crate) next_sequence: u64,
    pub(crate) inbox: Inbox,
    /// Whether it came by itself and has said nothing but hello.
    pub(crate) silent: bool,
    pub(crate) server: Server,
    pub(crate) flow: FlowControl,
    pub(crate) session: Session,
    /// Which pairs of memory the connection moves one-sided; known when it is ready.
    reach: Reach,
    /// Whether there may be streams between the two: both want them, and only TCP reaches the other.
    pub(crate) may_stream: bool,
    /// Whether there is one from the peer.
    pub(crate) streamed: bool,
    /// Whether the peer is on this host.
    pub(crate) on_this_host: bool,
    /// The peer's process, if this one may copy its memory.
    pub(crate) neighbour: Option<Arc<Neighbour>>,
    backing: Backing,
    /// Where it says that it is, until its witness there has proved that.
    claimed: Option<ProcessPlace>,
    /// What its witness must hold.
    challenge: Challenge,
    /// By what it knows this process.
    pub(crate) witness: Witness,
    /// Where it was connected to. Its hello must say the same.
    address: Vec<u8>,
    /// Whether its owner's metadata gave this address, and not only its own hello.
    vouched: bool,
}

impl Peer {
    pub(crate) fn is_ready(&self) -> bool {
        self.remote_connection.is_some()
    }

    /// The peer's number for the connection, once it said hello.
    pub(crate) fn remote_connection(&self) -> Option<u64> {
        self.remote_connection
    }

    /// Whether a message over the peer's connection `connection` belongs to the current one.
    pub(crate) fn is_current(&self, connection: u64) -> bool {
        self.remote_connection == Some(connection)
    }

    /// Lengths of its regions by index.
    pub(crate) fn lens(&self) -> &[u64] {
        &self.lens
    }

    /// Whether bytes of its memory of kind `remote` reach local memory of kind `local` one-sided.
    pub(crate) fn is_direct(&self, remote: MemoryKind, local: MemoryKind) -> bool {
        match (local, remote) {
            (MemoryKind::Host, MemoryKind::Host) => self.reach.host,
            (MemoryKind::Cuda { .. }, MemoryKind::Cuda { .. }) => self.reach.device,
            _ => self.reach.mixed,
        }
    }

    /// What memory its region `index` is.
    pub(crate) fn kind(&self, index: u32) -> Option<MemoryKind> {
        self.regions.get(index as usize)?.as_ref().map(|(region, _)| region.kind)
    }

    /// Base address and rkey of a region.
    pub(crate) fn region(&self, index: u32) -> Option<(u64, &Rc<Rkey>)> {
        self.regions.get(index as usize)?.as_ref().map(|(region, rkey)| (region.base, rkey))
    }

    /// Refuses an index that names no region of the peer's.
    pub(crate) fn check_region(&self, index: u32) -> Result<()> {
        match self.regions.get(index as usize) {
            Some(Some(_)) => Ok(()),
            Some(None) => Err(Error::not_found(format!(
                "the plan names region {index} of peer {}, which had deregistered it when its metadata was made",
                self.name
            ))),
            None => Err(Error::not_found(format!(
                "the plan names region {index} of peer {}, whose metadata lists {}",
                self.name,
                self.regions.len()
            ))),
        }
    }

    /// Writes the peer's challenge where the peer looks for it.
    pub(crate) fn take_challenge(&self, hello: &Hello) {
        if let Some(challenge) = hello.challenge {
            self.witness.answer(challenge);
        }
    }

    /// Looks whether the process at the place that the peer named has answered the peer's challenge. One that was connected
    /// to by this side has, when it says hello; one that has connected answers when it has this side's hello.
    pub(crate) fn find_neighbour(&mut self, own_address: &[u8]) {
        let Some(place) = &self.claimed else { return };
        match Neighbour::find(place, self.incarnation.0, self.challenge, own_address) {
            Ok(found) => {
                self.claimed = None;
                self.neighbour = found.map(Arc::new);
                self.look_behind_regions();
            }
            // The kernel says so, and will again.
            Err(error) if error.kind() == ErrorKind::Io => {
                self.claimed = None;
                log::warn!("memory of agent {} on this host goes by messages: {error}", self.name);
            }
            Err(error) => log::debug!("memory of agent {} goes by messages: {error}", self.name),
        }
    }

    fn look_behind_regions(&mut self) {
        let Some(neighbour) = &self.neighbour else { return };
        let range = |region: &RemoteRegion| {
            region.as_ref().map_or(0..0, |(region, _)| region.base..region.base.saturating_add(region.len))
        };
        self.backing.update(neighbour, self.regions.iter().map(range).collect());
    }

    /// Whether the kernel fills all pages of its region `index` by itself, so that a copy waits for nobody.
    pub(crate) fn is_filled_by_kernel(&self, index: u32) -> bool {
        self.backing.is_kernel(index as usize)
    }

    /// Takes the regions of (newer) metadata; rkeys of unchanged ones are kept.
    fn update_regions(&mut self, metadata: &AgentMetadata) -> Result<()> {
        let mut regions = Vec::with_capacity(metadata.regions.len());
        for (index, region) in metadata.regions.iter().enumerate() {
            let known = self.regions.get(index).and_then(Option::as_ref).filter(|(known, _)| known == region);
            regions.push(match known {
                Some(known) => Some(known.clone()),
                None => self
                    .unpack(region)
                    .map_err(|e| e.context(format!("region {index} of the metadata of agent {}", metadata.name)))?,
            });
        }
        self.lens = regions.iter().map(|region| region.as_ref().map_or(0, |(region, _)| region.len)).collect();
        self.regions = regions;
        self.look_behind_regions();
        Ok(())
    }

    fn unpack(&self, region: &RegionMetadata) -> Result<RemoteRegion> {
        if region.len == 0 && region.rkey.is_empty() {
            return Ok(None);
        }
        let rkey = self.endpoint.unpack_rkey(&region.rkey).map_err(ucx_error)?;
        let kind = match region.kind {
            MemoryKind::Host => ucx::MemoryKind::Host,
            MemoryKind::Cuda { .. } => ucx::MemoryKind::Cuda,
        };
        if (rkey.base(), rkey.len(), rkey.kind()) != (region.base, region.len, kind) {
            return Err(Error::corrupt(format!(
                "the metadata says {} bytes of {kind} memory at {:#x}, the rkey inside says {} bytes of {} memory at {:#x}",
                region.len,
                region.base,
                rkey.len(),
                rkey.kind(),
                rkey.base()
            )));
        }
        Ok(Some((region.clone(), rkey)))
    }
}

/// All connections.
#[derive(Default)]
pub(crate) struct Peers {
    by_id: BTreeMap<PeerId, Peer>,
    by_incarnation: HashMap<Incarnation, PeerId>,
    by_endpoint: HashMap<u64, PeerId>,
}

impl Peers {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn get(&self, id: PeerId) -> Result<&Peer> {
        self.by_id.get(&id).ok_or_else(|| id.unknown())
    }

    pub(crate) fn get_mut(&mut self, id: PeerId) -> Result<&mut Peer> {
        self.by_id.get_mut(&id).ok_or_else(|| id.unknown())
    }

    pub(crate) fn find(&self, incarnation: Incarnation) -> Option<PeerId> {
        self.by_incarnation.get(&incarnation).copied()
    }

    pub(crate) fn of_endpoint(&self, endpoint: u64) -> Option<PeerId> {
        self.by_endpoint.get(&endpoint).copied()
    }

    pub(crate) fn ids(&self) -> Vec<PeerId> {
        self.by_id.keys().copied().collect()
    }

    fn insert(&mut self, peer: Peer) {
        self.by_incarnation.insert(peer.incarnation, peer.id);
        self.by_endpoint.insert(peer.endpoint.id(), peer.id);
        self.by_id.insert(peer.id, peer);
    }

    fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let peer = self.by_id.remove(&id)?;
        self.by_incarnation.remove(&peer.incarnation);
        self.by_endpoint.remove(&peer.endpoint.id());
        Some(peer)
    }

    /// Bytes of messages that wait for earlier ones, of all.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.by_id.values().map(|peer| peer.inbox.held_bytes() as u64).sum()
    }

    /// The next time at which a peer must have said hello.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.by_id.values().filter_map(|peer| peer.deadline).min()
    }
}

impl Engine {
    /// The peer that `metadata` describes, connected to now if it was not.
    pub(crate) fn connect(&mut self, metadata: &AgentMetadata, now: Instant) -> Result<PeerId> {
        self.check_open()?;
        if metadata.name.is_empty() || metadata.name.len() > 256 || metadata.incarnation.0 == 0 {
            return Err(Error::corrupt(format!(
                "agent metadata with a name of {} bytes (expected 1 to 256) and incarnation {} (expected not zero)",
                metadata.name.len(),
                metadata.incarnation
            )));
        }
        if let Some(id) = self.peers.find(metadata.incarnation)
            && self.peers.get(id)?.address != metadata.address
        {
            let error = self.two_addresses(&metadata.name, metadata.incarnation);
            if self.peers.get(id)?.vouched {
                return Err(error);
            }
            // It came by itself and took this agent's name.
            self.lose(id, error, now);
        }
        if let Some(id) = self.peers.find(metadata.incarnation) {
            let peer = self.peers.get_mut(id)?;
            (peer.silent, peer.vouched) = (false, true);
            peer.update_regions(metadata)?;
            return Ok(id);
        }
        let deadline = now.checked_add(self.config.connect_timeout);
        let mut peer = self.new_peer(metadata.name.clone(), metadata.incarnation, &metadata.address)?;
        peer.update_regions(metadata)?;
        (peer.deadline, peer.vouched) = (deadline, true);
        let id = peer.id;
        self.admit(peer);
        if let Err(error) = self.send_hello(id) {
            self.remove_peer(id);
            return Err(error);
        }
        Ok(id)
    }

    fn new_peer(&mut self, name: String, incarnation: Incarnation, address: &[u8]) -> Result<Peer> {
        if self.peers.len() >= MAX_PEERS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{MAX_PEERS} peers are connected; disconnect those that are not needed"),
            ));
        }
        if !tells_segments(address).map_err(ucx_error)? {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "agent {name} has a UCX address of version 1, which does not tell how long its TCP segments are, so that \
                     what is sent to it could pass their end: expected version 2; unset UCX_ADDRESS_VERSION and \
                     UCX_PROTO_ENABLE there, or update kvferry there"
                ),
            ));
        }
        let options = EndpointOptions { error_mode_peer: true, name: name.clone() };
        let endpoint = self.worker.connect(address, &options).map_err(|e| {
            ucx_error(e).context(format!("connecting to agent {name} (is it running, and the network open?)"))
        })?;
        // UCX takes a millisecond for it. Who connects to many ranks would leave the first without an answer as long.
        self.worker.progress();
        if let Some(status) = endpoint.failure() {
            return Err(Error::new(
                ErrorKind::Unreachable,
                format!("connecting to agent {name} (is it running, and the network open?): {status}"),
            ));
        }
        let draw = || {
            getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("drawing a random connection number: {e}")))
        };
        let (connection, challenge) = (draw()?, (draw()?, draw()?));
        Ok(Peer {
            id: self.shared.live.ids.peer()?,
            name,
            incarnation,
            connection,
            remote_connection: None,
            version: OLDEST,
            deadline: None,
            regions: Vec::new(),
            lens: Vec::new(),
            endpoint,
            operations: 0,
            bytes: 0,
            unsent: Arc::default(),
            next_sequence: 0,
            inbox: Inbox::default(),
            silent: false,
            server: Server::default(),
            flow: FlowControl::default(),
            session: Session::new(self.secrets.is_keyed()),
            reach: Reach::default(),
            may_stream: false,
            streamed: false,
            on_this_host: false,
            neighbour: None,
            backing: Backing::default(),
            claimed: None,
            challenge,
            witness: Witness::new(self.incarnation.0, address),
            address: address.to_vec(),
            vouched: false,
        })
    }

    fn admit(&mut self, peer: Peer) {
        self.shared.live.lock().peers.insert(peer.id, Arc::clone(&peer.unsent));
        self.peers.insert(peer);
    }

    fn send_hello(&mut self, id: PeerId) -> Result<()> {
        if self.secrets.is_keyed() {
            return self.send_sealed_hello(id);
        }
        let hello = self.own_hello(id, self.peers.get(id)?.remote_connection)?;
        let frame =
            Frame { kind: FrameKind::Hello, incarnation: self.incarnation, connection: hello.connection, sequence: 0 };
        self.post_message(id, frame, hello.encode()?, None)
    }

    pub(crate) fn own_hello(&self, id: PeerId, seen: Option<u64>) -> Result<Hello> {
        let peer = self.peers.get(id)?;
        Ok(Hello {
            name: self.config.name.clone(),
            incarnation: self.incarnation,
            connection: peer.connection,
            seen,
            address: self.address.clone(),
            process: peer.witness.place(),
            // With a key there are none: what they carry is not sealed.
            streams: self.config.streams && !self.secrets.is_keyed(),
            challenge: Some(peer.challenge),
            versions: Versions::OURS,
        })
    }

    /// Refuses a hello of an agent at another address than the one that was connected to.
    pub(crate) fn check_address(&self, id: PeerId, hello: &Hello) -> Result<()> {
        if self.peers.get(id)?.address == hello.address {
            return Ok(());
        }
        Err(self.two_addresses(&hello.name, hello.incarnation))
    }

    fn two_addresses(&self, name: &str, incarnation: Incarnation) -> Error {
        Error::corrupt(format!(
            "agent {name} ({incarnation}) is connected by another address than this one: one of the two is not that agent"
        ))
    }

    /// Takes a hello that arrived.
    pub(crate) fn on_hello(&mut self, frame: Frame, data: &[u8], now: Instant) -> Result<()> {
        let hello = Hello::decode(data)?;
        if (frame.incarnation, frame.connection) != (hello.incarnation, hello.connection) || hello.incarnation.0 == 0 {
            return Err(Error::corrupt(format!("a hello of agent {} that contradicts its own header", hello.name)));
        }
        let Some(id) = self.peers.find(hello.incarnation) else {
            return match hello.seen {
                // An answer to a connection that was given up here meanwhile.
                Some(_) => Err(Error::not_found(format!("a late hello of agent {}", hello.name))),
                None => self.accept(hello, now),
            };
        };
        self.check_address(id, &hello)?;
        let peer = self.peers.get_mut(id)?;
        match (hello.seen, peer.remote_connection) {
            (Some(seen), _) if seen != peer.connection => {
                Err(Error::not_found(format!("a hello of agent {} about an earlier connection", hello.name)))
            }
            (Some(_), known) => {
                if known != Some(hello.connection) {
                    peer.inbox = Inbox::default();
                }
                self.greet(id, &hello)
            }
            (None, Some(known)) if known == hello.connection => Ok(()),
            (None, None) => {
                self.greet(id, &hello)?;
                self.send_hello(id)
            }
            (None, Some(_)) => {
                let error = Error::new(
                    ErrorKind::PeerDied,
                    format!("agent {} lost the connection and has made a new one", hello.name),
                );
                self.lose(id, error, now);
                self.accept(hello, now)
            }
        }
    }

    /// Makes a peer of an agent that connected to this one.
    fn accept(&mut self, hello: Hello, now: Instant) -> Result<()> {
        self.check_open()?;
        let id = self.admit_new(&hello, now)?;
        self.greet(id, &hello)?;
        if let Err(error) = self.send_hello(id) {
            self.lose(id, error, now);
        }
        Ok(())
    }

    /// Connects back to an agent that said hello.
    pub(crate) fn admit_new(&mut self, hello: &Hello, now: Instant) -> Result<PeerId> {
        self.make_room(now)?;
        let peer = self.new_peer(hello.name.clone(), hello.incarnation, &hello.address)?;
        let id = peer.id;
        self.admit(peer);
        self.welcome(id);
        Ok(id)
    }

    /// Notes that the peer is there and itself.
    pub(crate) fn greet(&mut self, id: PeerId, hello: &Hello) -> Result<()> {
        let peer = self.peers.get_mut(id)?;
        peer.take_challenge(hello);
        let first = peer.remote_connection.replace(hello.connection).is_none();
        peer.deadline = None;
        if first {
            peer.version = hello.versions.common();
            let lanes = peer.endpoint.describe();
            peer.reach = Reach::of(&lanes, peer.incarnation == self.incarnation);
            peer.may_stream = hello.streams && self.config.streams && !self.secrets.is_keyed() && has_only_tcp(&lanes);
            let places = hello.process.as_ref().zip(self.place.as_ref());
            peer.on_this_host = places.is_some_and(|(theirs, own)| theirs.shares_host_with(own));
            // Where UCX would copy its memory by CMA, so may this process itself, with many pieces a call.
            let is_near = lanes.split(", ").any(|lane| lane.trim_start().starts_with("cma/"));
            peer.claimed = hello.process.clone().filter(|_| is_near);
            if hello.challenge.is_none() && peer.claimed.take().is_some() {
                log::info!(
                    "agent {}: agent {} is of an older kvferry and cannot prove which process it is: its memory goes by \
                     messages",
                    self.config.name,
                    peer.name
                );
            }
            peer.find_neighbour(&self.address);
            let (name, incarnation, version) = (peer.name.clone(), peer.incarnation, peer.version);
            let way = format!("{lanes}; host memory is {}", paths::between(peer, MemoryKind::Host, MemoryKind::Host));
            // A driver knows more of the peer, and says it in one line.
            let level = if self.config.tells_connections { log::Level::Info } else { log::Level::Debug };
            log::log!(
                level,
                "agent {}: connected to agent {name} ({incarnation}) over {way}, protocol {version}",
                self.config.name
            );
            self.events.push_back(Event::PeerConnected { peer: id, name, way, incarnation, version });
        }
        Ok(())
    }

    /// The connection is broken or given up: its transfers fail, its id becomes stale, its owner is told.
    pub(crate) fn lose(&mut self, id: PeerId, error: Error, now: Instant) {
        if self.peers.get(id).is_err() {
            return;
        }
        log::info!("agent {}: {id} is lost: {error}", self.config.name);
        self.stats.peers_lost += 1;
        self.events.push_back(Event::PeerLost { peer: id, error: error.clone() });
        self.remove_peer(id);
        self.stop_transfers_of(id, &error, now);
        self.fail_chunks_of(id, &error, now);
    }

    /// Drops the connection, which closes the endpoint by force: its operations end with errors.
    fn remove_peer(&mut self, id: PeerId) {
        self.shared.live.lock().peers.remove(&id);
        drop(self.peers.remove(id));
        self.close_streams(id);
    }

    /// Drops the connection in order.
    pub(crate) fn part(&mut self, id: PeerId, now: Instant) {
        self.shared.live.lock().peers.remove(&id);
        self.close_streams(id);
        if let Some(peer) = self.peers.remove(id) {
            self.leave(peer, now);
        }
    }

    pub(crate) fn disconnect(&mut self, id: PeerId, now: Instant) -> Result<()> {
        self.peers.get(id)?;
        let error = Error::new(ErrorKind::Cancelled, "its peer was disconnected by this side");
        self.part(id, now);
        self.stop_transfers_of(id, &error, now);
        self.fail_chunks_of(id, &error, now);
        Ok(())
    }

    /// Takes the connections that UCX gave up.
    pub(crate) fn reap_failed_endpoints(&mut self, now: Instant) {
        while let Some((endpoint, status)) = self.worker.poll_failed_endpoints() {
            let Some(id) = self.peers.of_endpoint(endpoint) else { continue };
            let (name, ready) = self.peers.get(id).map_or((String::new(), false), |p| (p.name.clone(), p.is_ready()));
            let error = if ready {
                Error::new(
                    ErrorKind::PeerDied,
                    format!("the connection to agent {name} broke ({status}): it died, restarted, or closed it"),
                )
            } else {
                Error::new(
                    ErrorKind::Unreachable,
                    format!("agent {name} could not be reached ({status}): is it running, and the network open?"),
                )
            };
            self.lose(id, error, now);
        }
    }

    /// Gives up on peers that did not say hello in time.
    pub(crate) fn check_hello_deadlines(&mut self, now: Instant) {
        if self.peers.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        for id in self.peers.ids() {
            let Ok(peer) = self.peers.get(id) else { continue };
            if peer.deadline.is_some_and(|deadline| deadline <= now) {
                let error = Error::new(
                    ErrorKind::Unreachable,
                    format!(
                        "agent {} did not answer within {:?}: is it running, and the network open?{}",
                        peer.name,
                        self.config.connect_timeout,
                        self.secrets.hint()
                    ),
                );
                self.lose(id, error, now);
            }
        }
    }
}
