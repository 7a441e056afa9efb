//! A driver rides on the progress thread and uses the agent without queues.

use std::time::Instant;

use super::Engine;
use crate::agent::core::event::{Direction, Event};
use crate::agent::core::ids::{PeerId, RegionId, TransferId};
use crate::agent::core::limits::check_message;
use crate::agent::core::request::TransferRequest;
use crate::agent::core::stats::AgentStats;
use crate::agent::thread::waker::Waker;
use crate::error::Result;
use crate::mem::MemoryRange;
use crate::proto::ids::Incarnation;
use crate::proto::plan::CopyPlan;
use crate::proto::wire::AgentMetadata;

/// Makes the driver, on the progress thread.
pub type MakeDriver = Box<dyn FnOnce(Waker) -> Box<dyn Driver> + Send>;

/// A driver that runs on an agent's progress thread, such as `connector::Worker`'s.
///
/// It is made on that thread (by the function given to [`Agent::start_with`](crate::agent::Agent::start_with)), is
/// called only there, and is dropped there. Nothing in it may block. With a driver, all events are its own: the handle's
/// `poll_event` returns none.
pub trait Driver: Send {
    /// Called after every wake-up of the loop, at least whenever an event, a ready socket, a
    /// [`Waker`](crate::agent::Waker) or the returned time asks for it; spurious calls happen. Takes all events from
    /// [`Context::poll_event`] and does what is to be done. Returns when it wants to be called again at the latest;
    /// `None`: only when something happens.
    fn turn(&mut self, context: &mut Context<'_>) -> Option<Instant>;

    /// Adds the ZMQ sockets (or file descriptors) whose readiness should wake the loop.
    fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        let _ = items;
    }

    /// The agent is shutting down: called once, before the agent cancels what is still in flight. Further turns
    /// follow, in which the transfers' last events arrive, until [`Driver::finished`] says yes and nothing is in
    /// flight, or the shutdown's time is up.
    fn shut_down(&mut self, context: &mut Context<'_>) {
        let _ = context;
    }

    /// During a shutdown: whether the driver has nothing left to do.
    fn finished(&self) -> bool {
        true
    }
}

/// What a [`Driver`](crate::agent::Driver) does with the agent: the handle's verbs, at once and without queues. On the
/// progress thread only.
pub struct Context<'a> {
    engine: &'a mut Engine,
    now: Instant,
}

impl<'a> Context<'a> {
    pub(crate) fn new(engine: &'a mut Engine, now: Instant) -> Self {
        Context { engine, now }
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
        self.engine.peers.local().incarnation
    }

    /// A handle to wake this loop with, from any thread.
    pub fn waker(&self) -> Waker {
        self.engine.shared.waker.clone()
    }

    /// What a peer needs to connect and to reach the regions registered so far.
    pub fn metadata(&self) -> AgentMetadata {
        self.engine.metadata()
    }

    /// As [`Agent::register`](crate::agent::Agent::register).
    pub fn register(&mut self, range: MemoryRange) -> Result<RegionId> {
        self.engine.register(range)
    }

    /// As [`Agent::connect`](crate::agent::Agent::connect). A peer that exists already, whichever side made the connection,
    /// is found and returned.
    pub fn connect(&mut self, metadata: &AgentMetadata) -> Result<PeerId> {
        self.engine.connect(metadata, self.now)
    }

    /// Whether the peer is neither lost nor disconnected.
    pub fn has_peer(&self, peer: PeerId) -> bool {
        self.engine.peers.get(peer).is_ok()
    }

    /// As [`Agent::disconnect`](crate::agent::Agent::disconnect).
    pub fn disconnect(&mut self, peer: PeerId) -> Result<()> {
        self.engine.disconnect(peer, self.now)
    }

    /// Starts a transfer; its event will have `user_data`. What is wrong with the plan is an error here; then there is no event.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) for a stale peer, a region that is not registered (any more) or not
    /// exported by the peer; [`OutOfRange`](crate::ErrorKind::OutOfRange) and
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) as
    /// [`CopyPlan::check`](crate::proto::plan::CopyPlan::check).
    pub fn transfer(
        &mut self,
        peer: PeerId,
        direction: Direction,
        plan: CopyPlan,
        user_data: u64,
    ) -> Result<TransferId> {
        let id = self.engine.shared.live.ids.transfer()?;
        self.engine.shared.live.lock().transfers.insert(id, (peer, user_data));
        let request = TransferRequest { id, peer, direction, plan, message: None, user_data };
        let started = self.engine.start_transfer(request, self.now);
        if started.is_err() {
            self.engine.shared.live.lock().transfers.remove(&id);
        }
        started.map(|()| id)
    }

    /// As [`Agent::cancel`](crate::agent::Agent::cancel).
    pub fn cancel(&mut self, id: TransferId) -> Result<()> {
        self.engine.cancel(id, self.now)
    }

    /// As [`Agent::send`](crate::agent::Agent::send).
    pub fn send(&mut self, peer: PeerId, data: Vec<u8>) -> Result<()> {
        check_message(&data)?;
        self.engine.peers.reserve(peer, data.len(), self.engine.config.send_queue_bytes)?;
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

/// Holds the progress thread up until the sender is gone, as an operation that does not end.
#[cfg(test)]
pub(crate) struct Stuck(pub std::sync::mpsc::Receiver<()>);

#[cfg(test)]
impl Driver for Stuck {
    fn turn(&mut self, _: &mut Context<'_>) -> Option<Instant> {
        let _ = self.0.recv();
        None
    }
}
