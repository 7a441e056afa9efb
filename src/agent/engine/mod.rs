//! The engine: owns the parts and connects them.
//!
//! The parts ([`peers`](super::peers), [`rpc`](super::rpc), [`transfers`](super::transfers), [`paths`](super::paths)) do not
//! know the engine. They are lent what they need for a call, and note as an
//! [effect](super::core::effect) what concerns others; [`dispatch`] carries that out. [`event_loop`] drives all of it,
//! [`scheduler`] says which transfer posts next.

mod commands;
mod data_port;
mod dispatch;
pub(crate) mod driver;
pub(crate) mod event_loop;
pub(crate) mod probe;
mod revocation;
mod scheduler;
mod silence;
mod staging;
pub(crate) mod turn;
pub(crate) mod ucx_devices;
mod ucx_settings;
mod warmup;

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use self::data_port::DataPort;
use self::warmup::warm_up;
use super::command::Shared;
use super::core::config::AgentConfig;
use super::core::effect::Effects;
use super::core::event::Event;
use super::core::ids::{PeerId, RegionId, TransferId};
use super::core::in_flight::Operations;
use super::core::regions::Regions;
use super::core::request::TransferRequest;
use super::core::stats::AgentStats;
use super::paths::copy_pool::CopyPool;
use super::paths::device_copies::DeviceCopies;
use super::paths::rdma_flush::RdmaFlush;
use super::peers::{self, Local, Peers};
use super::revocation::holds::Holds;
use super::revocation::releases::Releases;
use super::rpc::client::Client;
use super::rpc::staged::Staged;
use super::transfers::Transfers;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{MemoryRange, cuda, ucx_error};
use crate::net::local_addresses;
use crate::proto::ids::Incarnation;
use crate::proto::wire::{AgentMetadata, MemoryKind};
use crate::secret::Key;
use crate::sys::limits::{check_descriptors, check_shared_memory, check_threads, raise_open_files};
use crate::sys::process::ProcessPlace;
use crate::ucx::{self, Resource, Worker};

/// Descriptors that a start takes, with its warm-up, beside those for network devices.
const START_DESCRIPTORS: u64 = 48;
/// Descriptors that two workers take for a network device: what they listen at and watch, and a connection between them.
const DEVICE_DESCRIPTORS: u64 = 8;
/// Threads that follow the progress thread: UCX's, two of the sockets of a driver, one that copies.
pub(crate) const START_THREADS: usize = 4;
/// The most that a worker takes of /dev/shm for UCX's transports over shared memory.
const SHARED_BYTES: u64 = 12 << 20;

/// Everything of UCX, and the parts that use it; for one thread at a time. Fields are dropped in the order in which they
/// stand: what uses UCX's objects before those.
pub(crate) struct Engine {
    config: AgentConfig,
    shared: Arc<Shared>,
    /// For the owner, in order.
    events: VecDeque<Event>,
    /// Effects that parts have noted and [`dispatch`] has yet to carry out.
    effects: Effects,
    stats: AgentStats,
    /// Set when the agent shuts down: when it must be over.
    closing: Option<Instant>,
    /// Whether device memory was ever registered.
    has_devices: bool,
    /// When a peer's request came last.
    served_at: Option<Instant>,
    /// How many announced messages were refused at the last check.
    refused: u64,
    /// When peers that owe answers are checked again.
    silence_look: Instant,
    transfers: Transfers,
    operations: Operations,
    /// Shared with what UCX hands arriving messages to.
    rpc: Rc<RefCell<Client>>,
    peers: Peers,
    copy_pool: CopyPool,
    device_copies: DeviceCopies,
    staged: Staged,
    rdma_flush: RdmaFlush,
    /// Regions that peers are to release.
    holds: Holds,
    /// Regions that this side is to release.
    releases: Releases,
    data_port: DataPort,
    worker: Worker,
    /// How many workers this one has replaced.
    workers: u64,
    regions: Regions,
    context: Arc<ucx::Context>,
}

impl Engine {
    pub(crate) fn new(config: AgentConfig, incarnation: Incarnation, shared: &Arc<Shared>) -> Result<Engine> {
        let key = Key::configured(config.key_file.as_deref())?;
        // UCX asks the driver for memory when it looks at the devices, and later.
        cuda::stay_out_of_captures();
        check_limits(&config.name)?;
        let rpc = Rc::<RefCell<Client>>::default();
        let is_keyed = key.is_some();
        let (context, worker, data_port) = data_port::open(&config, is_keyed, |context| {
            // Where nobody had used the driver, UCX has now.
            cuda::stay_out_of_captures();
            if context.resources().iter().any(Resource::is_shared_memory) {
                check_shared_memory(SHARED_BYTES * if config.warm_up { 2 } else { 1 })?;
            }
            data_port::make_worker(&config, is_keyed, &rpc, context)
        })?;
        if config.warm_up {
            match data_port.spare_context() {
                Ok(context) => warm_up(&config.name, &worker, &context),
                Err(error) => log::info!("agent {}: first connections will take longer: {error}", config.name),
            }
        }
        let local = Local {
            name: config.name.clone(),
            incarnation,
            address: worker.address().map_err(ucx_error)?,
            place: ProcessPlace::here(),
            device_copies: config.device_copies,
            connect_timeout: config.connect_timeout,
        };
        Ok(Engine {
            shared: Arc::clone(shared),
            events: VecDeque::new(),
            effects: Effects::default(),
            stats: AgentStats::default(),
            closing: None,
            has_devices: false,
            served_at: None,
            refused: 0,
            silence_look: Instant::now(),
            transfers: Transfers::new(&config),
            operations: Operations::default(),
            rpc,
            peers: Peers::new(local, key),
            copy_pool: CopyPool::new(config.copy_threads, shared.waker.clone()),
            device_copies: DeviceCopies::new(shared.waker.clone()),
            staged: Staged::default(),
            rdma_flush: RdmaFlush::default(),
            holds: Holds::default(),
            releases: Releases::default(),
            regions: Regions::new(shared.live.ids.salt()),
            config,
            data_port,
            worker,
            workers: 0,
            context,
        })
    }

    /// The peers, and what they are lent.
    fn peers(&mut self, now: Instant) -> (&mut Peers, peers::Io<'_>) {
        let io = peers::Io {
            worker: &self.worker,
            operations: &mut self.operations,
            live: &self.shared.live,
            unread_bytes: self.shared.unread_bytes(),
            stats: &mut self.stats,
            effects: &mut self.effects,
            now,
        };
        (&mut self.peers, io)
    }

    fn check_open(&self) -> Result<()> {
        match self.closing {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::ShutDown, "the agent is shutting down")),
        }
    }

    fn metadata(&self) -> AgentMetadata {
        let local = self.peers.local();
        let (regions, late_regions) = self.regions.metadata();
        AgentMetadata {
            name: local.name.clone(),
            incarnation: local.incarnation,
            ucx_version: self.context.library().info().version.clone(),
            address: local.address.clone(),
            regions,
            late_regions,
        }
    }

    fn register(&mut self, range: MemoryRange) -> Result<RegionId> {
        self.check_open()?;
        let region = self.regions.register(&self.context, range)?;
        if let MemoryKind::Cuda { device } = range.kind() {
            self.has_devices = true;
            self.device_copies.prepare(device);
            if let Err(error) = self.staged.prepare(device) {
                log::debug!("agent {}: CUDA device {device}: {error}", self.config.name);
            }
            self.rdma_flush.add(&self.config.name, device);
        }
        Ok(region)
    }

    fn connect(&mut self, metadata: &AgentMetadata, now: Instant) -> Result<PeerId> {
        let is_copying = self.peers.find(metadata.incarnation).is_some_and(|id| self.is_copying(id));
        let (peers, mut io) = self.peers(now);
        let connected = peers.connect(metadata, is_copying, &mut io);
        self.dispatch(now);
        connected.map_err(|error| self.name_releases(error, &metadata.ucx_version))
    }

    /// An error of UCX's, with both sides' releases of it where they differ: then it may not read the other's address or keys.
    fn name_releases(&self, error: Error, theirs: &str) -> Error {
        let ours = &self.context.library().info().version;
        let from_ucx = matches!(error.kind(), ErrorKind::Ucx | ErrorKind::Unsupported | ErrorKind::Unreachable);
        if !from_ucx || theirs.is_empty() || theirs == ours {
            return error;
        }
        Error::new(
            error.kind(),
            format!(
                "{}; UCX is {theirs} there and {ours} here, and may not understand itself: have one release of it on all \
                 hosts",
                error.message()
            ),
        )
    }

    fn disconnect(&mut self, id: PeerId, now: Instant) -> Result<()> {
        let is_copying = self.is_copying(id);
        let (peers, mut io) = self.peers(now);
        let disconnected = peers.disconnect(id, is_copying, &mut io);
        self.dispatch(now);
        disconnected
    }

    /// Sends a message for which room was reserved.
    fn send(&mut self, id: PeerId, data: Vec<u8>, now: Instant) -> Result<()> {
        let (peers, mut io) = self.peers(now);
        let sent = peers.send(id, data, &mut io);
        self.dispatch(now);
        sent
    }

    fn start_transfer(&mut self, request: TransferRequest, now: Instant) -> Result<()> {
        self.check_open()?;
        self.peers.find_neighbour(request.peer)?;
        let peer = self.peers.get(request.peer)?;
        self.transfers.start(request, peer, &self.regions, &mut self.effects)?;
        self.dispatch(now);
        Ok(())
    }

    fn cancel(&mut self, id: TransferId, now: Instant) -> Result<()> {
        let cancelled = self.transfers.cancel(id, &mut self.effects, now);
        self.dispatch(now);
        cancelled
    }

    fn stats(&self) -> AgentStats {
        let (regions, region_bytes) = self.regions.totals();
        let in_flight = self.transfers.in_flight();
        AgentStats {
            regions,
            region_bytes,
            peers: self.peers.len() as u64,
            endpoints: self.peers.endpoints() as u64,
            transfers: self.transfers.len() as u64,
            operations_in_flight: in_flight.operations,
            bytes_in_flight: in_flight.bytes,
            messages_dropped: self.stats.messages_dropped + self.worker.dropped_messages(),
            ..self.stats
        }
    }
}

/// Checks that the process may have what UCX takes for a context and two workers, and this agent for itself.
fn check_limits(name: &str) -> Result<()> {
    match raise_open_files() {
        Some(limit) => log::debug!("agent {name}: the process may open {limit} files"),
        None => log::debug!("agent {name}: the process may open any number of files"),
    }
    let interfaces: BTreeSet<String> =
        local_addresses().map_or(BTreeSet::new(), |found| found.into_iter().map(|a| a.interface).collect());
    check_descriptors(START_DESCRIPTORS + interfaces.len() as u64 * DEVICE_DESCRIPTORS)?;
    check_threads(START_THREADS)
}

#[cfg(test)]
mod late_regions;
#[cfg(test)]
mod tests;
