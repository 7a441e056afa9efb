//! The ferry thread's state, and the verbs that a passenger uses.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::chunks::{Chunks, Placer};
use super::config::AgentConfig;
use super::copiers::Copiers;
use super::event::{Direction, Event};
use super::farewell::Leaving;
use super::guests::Guests;
use super::handle::check_message;
use super::hello::{AM_ID, FRAME_BYTES};
use super::ids::{PeerId, RegionId, TransferId};
use super::operations::Operations;
use super::peers::Peers;
use super::registry::Registry;
use super::rehearsal::rehearse;
use super::route::Route;
use super::sealed::Secrets;
use super::setup;
use super::shared::{Command, Reply, Shared};
use super::stats::AgentStats;
use super::streams::Streams;
use super::transfers::Transfers;
use super::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::mem::process::ProcessPlace;
use crate::mem::{MemoryRange, ucx_error};
use crate::proto::ids::Incarnation;
use crate::proto::plan::CopyPlan;
use crate::proto::wire::AgentMetadata;
use crate::secret::{Key, sealed_len};
use crate::ucx::{Context, MessageSink, Worker, WorkerOptions};

/// The longest message between agents, in bytes. Far above what the connector sends (block lists do not travel as
/// messages), low enough that one message holds up the loop for a few milliseconds at most.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Everything that the ferry thread owns. Fields are dropped in the order in which they stand: what uses UCX's
/// objects before those.
pub(super) struct Engine {
    pub(super) config: AgentConfig,
    pub(super) shared: Arc<Shared>,
    pub(super) incarnation: Incarnation,
    pub(super) secrets: Secrets,
    /// This worker's address in its envelope.
    pub(super) address: Vec<u8>,
    pub(super) events: VecDeque<Event>,
    pub(super) stats: AgentStats,
    /// Set when the agent shuts down: when it must be over.
    pub(super) closing: Option<Instant>,
    pub(super) transfers: Transfers,
    pub(super) operations: Operations,
    /// Shared with what UCX hands arriving messages to, on this thread.
    pub(super) chunks: Rc<RefCell<Chunks>>,
    pub(super) peers: Peers,
    pub(super) streams: Streams,
    pub(super) guests: Guests,
    /// How many announced messages were refused when that was looked at last.
    pub(super) refused: u64,
    /// When a peer's request came last.
    pub(super) served_at: Option<Instant>,
    /// Of messages that are dropped.
    pub(super) drop_log: LogLimit,
    pub(super) leaving: Leaving,
    pub(super) copiers: Copiers,
    /// Where this process is.
    pub(super) place: Option<ProcessPlace>,
    pub(super) worker: Worker,
    pub(super) registry: Registry,
    pub(super) context: Arc<Context>,
}

impl Engine {
    pub(super) fn new(config: AgentConfig, incarnation: Incarnation, shared: &Arc<Shared>) -> Result<Engine> {
        let secrets = Secrets::new(Key::configured(config.key_file.as_deref())?);
        let context = setup::context(&config, secrets.is_keyed())?;
        let longest = MAX_MESSAGE_BYTES + FRAME_BYTES;
        let max_message = if secrets.is_keyed() { sealed_len(longest) } else { MAX_MESSAGE_BYTES };
        let options = WorkerOptions { name: config.name.clone(), max_message };
        let worker = Worker::with_options(&context, &options).map_err(ucx_error)?;
        let chunks = Rc::<RefCell<Chunks>>::default();
        // What comes sealed must be opened first.
        let sink = (!secrets.is_keyed()).then(|| Rc::new(Placer(Rc::clone(&chunks))) as Rc<dyn MessageSink>);
        worker.accept_messages(AM_ID, sink).map_err(ucx_error)?;
        if config.rehearse {
            rehearse(&config.name, &worker);
        }
        let address = worker.address().map_err(ucx_error)?;
        Ok(Engine {
            place: ProcessPlace::here(),
            copiers: Copiers::new(config.copy_threads, shared.waker.clone()),
            registry: Registry::new(shared.ids.salt()),
            config,
            shared: Arc::clone(shared),
            incarnation,
            secrets,
            address,
            events: VecDeque::new(),
            stats: AgentStats::default(),
            closing: None,
            transfers: Transfers::default(),
            operations: Operations::default(),
            chunks,
            peers: Peers::default(),
            streams: Streams::default(),
            guests: Guests::default(),
            refused: 0,
            served_at: None,
            drop_log: LogLimit::default(),
            leaving: Leaving::default(),
            worker,
            context,
        })
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match self.closing {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::ShutDown, "the agent is shutting down")),
        }
    }

    pub(super) fn metadata(&self) -> AgentMetadata {
        AgentMetadata {
            name: self.config.name.clone(),
            incarnation: self.incarnation,
            ucx_version: self.context.library().info().version.clone(),
            address: self.address.clone(),
            regions: self.registry.metadata(),
        }
    }

    pub(super) fn register(&mut self, range: MemoryRange) -> Result<RegionId> {
        self.check_open()?;
        self.registry.register(&self.context, range)
    }

    pub(super) fn stats(&self) -> AgentStats {
        let (regions, region_bytes) = self.registry.totals();
        let (operations_in_flight, bytes_in_flight) = self.transfers.in_flight();
        AgentStats {
            regions,
            region_bytes,
            peers: self.peers.len() as u64,
            endpoints: (self.peers.len() + self.leaving.len()) as u64,
            transfers: self.transfers.len() as u64,
            operations_in_flight,
            bytes_in_flight,
            messages_dropped: self.stats.messages_dropped + self.worker.dropped_messages(),
            ..self.stats
        }
    }

    /// Registers for a caller. Who has given up must not find the memory exported: it may be freed by now.
    fn serve_register(&mut self, range: MemoryRange, reply: Reply<RegionId>) {
        if !reply.is_wanted() {
            return;
        }
        let registered = self.register(range);
        self.answer_registration(range, registered, reply);
    }

    fn answer_registration(&mut self, range: MemoryRange, registered: Result<RegionId>, reply: Reply<RegionId>) {
        if let Err(Ok(region)) = reply.send(registered) {
            log::warn!("agent {}: {range} is unmapped again: its owner has given up waiting", self.config.name);
            self.registry.forget(region);
        }
    }

    /// Connects for a caller. Who has given up knows no id to disconnect by.
    fn serve_connect(&mut self, metadata: &AgentMetadata, reply: Reply<PeerId>, now: Instant) {
        if !reply.is_wanted() {
            return;
        }
        let known = self.peers.find(metadata.incarnation).is_some();
        let connected = self.connect(metadata, now);
        if let (Err(Ok(peer)), false) = (reply.send(connected), known) {
            let _ = self.disconnect(peer, now);
        }
    }

    /// Serves one command of the handle's.
    pub(super) fn serve(&mut self, command: Command, now: Instant) {
        // Answers that only tell may find nobody: a caller may have given up waiting.
        match command {
            Command::Register { range, reply } => self.serve_register(range, reply),
            Command::Deregister { region, reply } => {
                let grace = now.checked_add(self.config.cancel_grace);
                if let Some(index) = self.registry.close(region, reply, grace) {
                    self.cancel_users(index, now);
                    self.registry.unmap_if_unused(index);
                }
            }
            Command::Metadata { reply } => {
                let _ = reply.send(Ok(self.metadata()));
            }
            Command::Connect { metadata, reply } => self.serve_connect(&metadata, reply, now),
            Command::Disconnect { peer } => {
                // It may have been lost since the handle looked.
                let _ = self.disconnect(peer, now);
            }
            Command::Route { peer, reply } => {
                let _ = reply.send(self.peers.get(peer).map(Route::to));
            }
            Command::Transfer { id, peer, direction, plan } => {
                let known = self.peers.get(peer).is_ok();
                if let Err(error) = self.start_transfer(id, peer, direction, plan, now) {
                    // The handle found the peer alive.
                    let gone = || Error::new(ErrorKind::PeerDied, "the peer was lost before the transfer began");
                    self.refuse_transfer(id, peer, if known { error } else { gone() }, now);
                }
            }
            Command::Cancel { id } => {
                // It may have ended since the handle looked.
                let _ = self.cancel(id, now);
            }
            Command::Send { peer, data } => {
                if let Err(error) = self.send(peer, data, now) {
                    log::debug!("agent {}: a message was not sent: {error}", self.config.name);
                }
            }
            Command::Stats { reply } => {
                let _ = reply.send(Ok(self.stats()));
            }
            // The loop's own.
            Command::ShutDown { .. } => {}
        }
    }
}

/// What a [`Passenger`](super::Passenger) does with the agent: the handle's verbs, at once and without queues. On the
/// ferry thread only.
pub struct Ferry<'a> {
    engine: &'a mut Engine,
    now: Instant,
}

impl<'a> Ferry<'a> {
    pub(super) fn new(engine: &'a mut Engine, now: Instant) -> Self {
        Ferry { engine, now }
    }

    /// When this turn began.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The agent's name.
    pub fn name(&self) -> &str {
        &self.engine.config.name
    }

    /// This life of the agent.
    pub fn incarnation(&self) -> Incarnation {
        self.engine.incarnation
    }

    /// A handle to wake this loop with, from any thread.
    pub fn waker(&self) -> Waker {
        self.engine.shared.waker.clone()
    }

    /// What a peer needs to connect and to reach the regions registered so far.
    pub fn metadata(&self) -> AgentMetadata {
        self.engine.metadata()
    }

    /// As [`Agent::register`](super::Agent::register).
    pub fn register(&mut self, range: MemoryRange) -> Result<RegionId> {
        self.engine.register(range)
    }

    /// As [`Agent::connect`](super::Agent::connect). A peer that exists already, whichever side made the connection,
    /// is found and returned.
    pub fn connect(&mut self, metadata: &AgentMetadata) -> Result<PeerId> {
        self.engine.connect(metadata, self.now)
    }

    /// Whether the peer is neither lost nor disconnected.
    pub fn has_peer(&self, peer: PeerId) -> bool {
        self.engine.peers.get(peer).is_ok()
    }

    /// As [`Agent::disconnect`](super::Agent::disconnect).
    pub fn disconnect(&mut self, peer: PeerId) -> Result<()> {
        self.engine.disconnect(peer, self.now)
    }

    /// Starts a transfer. What is wrong with the plan is an error here; then there is no event.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a stale peer, a region that is not registered (any more) or not exported by the
    /// peer; [`ErrorKind::OutOfRange`] and [`ErrorKind::InvalidArgument`] as
    /// [`CopyPlan::check`](crate::proto::plan::CopyPlan::check).
    pub fn transfer(&mut self, peer: PeerId, direction: Direction, plan: CopyPlan) -> Result<TransferId> {
        let id = self.engine.shared.ids.transfer()?;
        self.engine.shared.live().transfers.insert(id);
        let started = self.engine.start_transfer(id, peer, direction, plan, self.now);
        if started.is_err() {
            self.engine.shared.live().transfers.remove(&id);
        }
        started.map(|()| id)
    }

    /// As [`Agent::cancel`](super::Agent::cancel).
    pub fn cancel(&mut self, id: TransferId) -> Result<()> {
        self.engine.cancel(id, self.now)
    }

    /// As [`Agent::send`](super::Agent::send).
    pub fn send(&mut self, peer: PeerId, data: Vec<u8>) -> Result<()> {
        check_message(&data)?;
        self.engine.reserve_message(peer, data.len())?;
        self.engine.send(peer, data, self.now)
    }

    /// The oldest event not yet taken.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.engine.events.pop_front()
    }

    /// Counters now.
    pub fn stats(&self) -> AgentStats {
        self.engine.stats()
    }

    /// Whether the agent is shutting down: then nothing new can be registered, connected to, or transferred;
    /// messages can still be sent.
    pub fn is_shutting_down(&self) -> bool {
        self.engine.closing.is_some()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::shared::answer;
    use super::*;

    #[test]
    fn what_nobody_takes_an_answer_for_is_undone() {
        let shared = Arc::new(Shared::new(1).unwrap());
        let config = AgentConfig { rehearse: false, ..AgentConfig::default() };
        let mut engine = Engine::new(config, Incarnation(7), &shared).unwrap();
        let range = MemoryRange::leaked(4096);
        // The caller gives up in the midst of the registration.
        let region = engine.register(range).unwrap();
        let (reply, caller) = answer();
        assert!(caller.wait(std::time::Duration::ZERO).is_none());
        engine.answer_registration(range, Ok(region), reply);
        assert!(engine.metadata().regions.is_empty());
        assert_eq!(engine.stats().regions, 0);
        let region = engine.register(range).unwrap();
        // Who gets it at the last moment has it.
        let (reply, caller) = answer();
        engine.answer_registration(range, Ok(region), reply);
        assert_eq!(caller.wait(std::time::Duration::ZERO).unwrap().unwrap(), region);
        assert_eq!(engine.stats().regions, 1);
    }
}
