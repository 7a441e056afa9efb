//! The progress thread's state, and the verbs that a driver uses.

pub(crate) mod driver;
pub(crate) mod event_loop;
mod messages;
pub(crate) mod probe;
pub(crate) mod ucx_settings;
mod warmup;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::agent::command::{Command, Shared};
use crate::agent::core::config::AgentConfig;
use crate::agent::core::event::Event;
use crate::agent::core::frame::{AM_ID, FRAME_BYTES};
use crate::agent::core::ids::{PeerId, RegionId};
use crate::agent::core::in_flight::Operations;
use crate::agent::core::limits::MAX_MESSAGE_BYTES;
use crate::agent::core::regions::Regions;
use crate::agent::core::reply::Reply;
use crate::agent::core::stats::AgentStats;
use crate::agent::paths;
use crate::agent::paths::copy_pool::CopyPool;
use crate::agent::peers::Peers;
use crate::agent::peers::admission::Admission;
use crate::agent::peers::close::ClosingEndpoints;
use crate::agent::peers::secure::Secrets;
use crate::agent::rpc::client::{Client, Placer};
use crate::agent::streams::Streams;
use crate::agent::transfers::Transfers;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::mem::process::ProcessPlace;
use crate::mem::{MemoryRange, ucx_error};
use crate::proto::ids::Incarnation;
use crate::proto::wire::AgentMetadata;
use crate::secret::{Key, sealed_len};
use crate::ucx::{Context, MessageSink, Worker, WorkerOptions};
use warmup::warm_up;

/// Everything that the progress thread owns. Fields are dropped in the order in which they stand: what uses UCX's
/// objects before those.
pub(crate) struct Engine {
    pub(crate) config: AgentConfig,
    pub(crate) shared: Arc<Shared>,
    pub(crate) incarnation: Incarnation,
    pub(crate) secrets: Secrets,
    /// This worker's address in its envelope.
    pub(crate) address: Vec<u8>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) stats: AgentStats,
    /// Set when the agent shuts down: when it must be over.
    pub(crate) closing: Option<Instant>,
    pub(crate) transfers: Transfers,
    pub(crate) operations: Operations,
    /// Shared with what UCX hands arriving messages to, on this thread.
    pub(crate) rpc: Rc<RefCell<Client>>,
    pub(crate) peers: Peers,
    pub(crate) streams: Streams,
    pub(crate) admission: Admission,
    /// How many announced messages were refused when that was looked at last.
    pub(crate) refused: u64,
    /// When a peer's request came last.
    pub(crate) served_at: Option<Instant>,
    /// Of messages that are dropped.
    pub(crate) drop_log: LogLimit,
    pub(crate) closing_endpoints: ClosingEndpoints,
    pub(crate) copy_pool: CopyPool,
    /// Where this process is.
    pub(crate) place: Option<ProcessPlace>,
    pub(crate) worker: Worker,
    pub(crate) regions: Regions,
    pub(crate) context: Arc<Context>,
}

impl Engine {
    pub(crate) fn new(config: AgentConfig, incarnation: Incarnation, shared: &Arc<Shared>) -> Result<Engine> {
        let secrets = Secrets::new(Key::configured(config.key_file.as_deref())?);
        let context = ucx_settings::context(&config, secrets.is_keyed())?;
        let longest = MAX_MESSAGE_BYTES + FRAME_BYTES;
        let max_message = if secrets.is_keyed() { sealed_len(longest) } else { MAX_MESSAGE_BYTES };
        let options = WorkerOptions { name: config.name.clone(), max_message };
        let worker = Worker::with_options(&context, &options).map_err(ucx_error)?;
        let rpc = Rc::<RefCell<Client>>::default();
        // What comes sealed must be opened first.
        let sink = (!secrets.is_keyed()).then(|| Rc::new(Placer(Rc::clone(&rpc))) as Rc<dyn MessageSink>);
        worker.accept_messages(AM_ID, sink).map_err(ucx_error)?;
        if config.rehearse {
            warm_up(&config.name, &worker);
        }
        let address = worker.address().map_err(ucx_error)?;
        Ok(Engine {
            place: ProcessPlace::here(),
            copy_pool: CopyPool::new(config.copy_threads, shared.waker.clone()),
            regions: Regions::new(shared.live.ids.salt()),
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
            rpc,
            peers: Peers::default(),
            streams: Streams::default(),
            admission: Admission::default(),
            refused: 0,
            served_at: None,
            drop_log: LogLimit::default(),
            closing_endpoints: ClosingEndpoints::default(),
            worker,
            context,
        })
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closing {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::ShutDown, "the agent is shutting down")),
        }
    }

    pub(crate) fn metadata(&self) -> AgentMetadata {
        AgentMetadata {
            name: self.config.name.clone(),
            incarnation: self.incarnation,
            ucx_version: self.context.library().info().version.clone(),
            address: self.address.clone(),
            regions: self.regions.metadata(),
        }
    }

    pub(crate) fn register(&mut self, range: MemoryRange) -> Result<RegionId> {
        self.check_open()?;
        self.regions.register(&self.context, range)
    }

    pub(crate) fn stats(&self) -> AgentStats {
        let (regions, region_bytes) = self.regions.totals();
        let (operations_in_flight, bytes_in_flight) = self.transfers.in_flight();
        AgentStats {
            regions,
            region_bytes,
            peers: self.peers.len() as u64,
            endpoints: (self.peers.len() + self.closing_endpoints.len()) as u64,
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
            self.regions.forget(region);
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
    pub(crate) fn serve(&mut self, command: Command, now: Instant) {
        // Answers that only tell may find nobody: a caller may have given up waiting.
        match command {
            Command::Register { range, reply } => self.serve_register(range, reply),
            Command::Deregister { region, reply } => {
                let grace = now.checked_add(self.config.cancel_grace);
                if let Some(index) = self.regions.close(region, reply, grace) {
                    self.cancel_users(index, now);
                    self.regions.unmap_if_unused(index);
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
                let _ = reply.send(self.peers.get(peer).map(paths::route));
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::agent::core::reply::answer;

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
