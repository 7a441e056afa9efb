//! The handle: what other threads hold of an agent.

use std::fmt;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::agent::command::{Command, Shared, shut_down};
use crate::agent::core::config::AgentConfig;
use crate::agent::core::event::{Direction, Event};
use crate::agent::core::ids::{PeerId, RegionId, TransferId};
use crate::agent::core::limits::check_message;
use crate::agent::core::reply::Reply;
use crate::agent::core::request::TransferRequest;
use crate::agent::core::route::Route;
use crate::agent::core::stats::{AgentStats, PeerStats};
use crate::agent::engine::START_THREADS;
use crate::agent::engine::driver::MakeDriver;
use crate::agent::engine::event_loop::{self, Started};
use crate::agent::engine::turn::Driven;
use crate::agent::metrics_file::MetricsFile;
use crate::agent::peers::inbox::reserve;
use crate::agent::progress_thread::ProgressThread;
use crate::agent::thread::callers::Polled;
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::ids::Incarnation;
use crate::proto::plan::CopyPlan;
use crate::proto::wire::{AgentMetadata, AgentRegion};
use crate::sys::limits::too_few_threads;
use crate::sys::thread::spawn;

/// How long a registration may take: pinning hundreds of gigabytes for RDMA takes minutes.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(600);
/// How long any other cold call waits for the progress thread, which answers within milliseconds unless UCX or a driver
/// hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long dropping the last handle of a running agent may take.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end waits for the last figures to be written.
const LAST_FIGURES: Duration = Duration::from_secs(5);

/// A transfer engine: registered regions, peers, transfers and messages, served by one thread of its own (the progress
/// thread). Without a driver, callers' threads take its place for small transfers that they wait for.
///
/// A handle: cheap to clone, usable from any thread but the progress thread itself, where a driver has
/// [`Context`](crate::agent::Context) for the same verbs and those that wait here would wait for themselves. When the
/// last one is dropped, the agent is shut down as by [`Agent::shutdown`] with 10 seconds.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    started: Started,
    has_driver: bool,
    deregister_timeout: Duration,
    send_queue_bytes: u64,
    thread: ProgressThread,
    metrics_file: Mutex<Option<MetricsFile>>,
}

/// Tells the handle that the thread serves nobody any more, also when it panics.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
        self.0.drop_commands();
    }
}

impl Agent {
    /// Starts an agent: opens UCX, makes its context and worker, starts the progress thread.
    ///
    /// # Errors
    /// [`ErrorKind::UcxMissing`] without a usable UCX, [`ErrorKind::InvalidArgument`] for settings that cannot work,
    /// [`ErrorKind::Ucx`] where UCX refuses.
    pub fn start(config: AgentConfig) -> Result<Agent> {
        Self::launch(config, None)
    }

    /// Starts an agent with a driver, which `make` makes on the progress thread; it is given a [`Waker`] of the loop.
    pub fn start_with(config: AgentConfig, make: MakeDriver) -> Result<Agent> {
        Self::launch(config, Some(make))
    }

    fn launch(config: AgentConfig, make: Option<MakeDriver>) -> Result<Agent> {
        config.validate()?;
        let has_driver = make.is_some();
        let incarnation = draw_incarnation()?;
        let shared = Arc::new(Shared::new(incarnation.0)?);
        let (deregister_timeout, send_queue_bytes) = (config.deregister_timeout, config.send_queue_bytes);
        let metrics_file = config.metrics_file.clone().filter(|path| !path.as_os_str().is_empty());
        let (up, is_up) = sync_channel(1);
        let (end, ended) = sync_channel(1);
        let for_thread = Arc::clone(&shared);
        let run = move || {
            let ending = Ending(for_thread);
            let outcome = event_loop::run(config, incarnation, &ending.0, make, &up);
            drop(ending);
            // Nobody may be listening any more.
            let _ = end.send(outcome);
        };
        let join = spawn("kvf-progress", run).map_err(|error| too_few_threads(0, START_THREADS + 1, &error))?;
        let started: Started = match is_up.recv() {
            Ok(started) => started,
            Err(_) => {
                // The thread ended before it was up; its outcome says why.
                let outcome = ended.recv().unwrap_or(Ok(()));
                let _ = join.join();
                return Err(match outcome {
                    Err(error) => error,
                    Ok(()) => Error::new(ErrorKind::Internal, "the progress thread ended while it started"),
                });
            }
        };
        let agent = Agent(Arc::new(Inner {
            shared,
            started,
            has_driver,
            deregister_timeout,
            send_queue_bytes,
            thread: ProgressThread::new(join, ended),
            metrics_file: Mutex::new(None),
        }));
        if let Some(path) = metrics_file {
            agent.0.keep_metrics(&path)?;
        }
        Ok(agent)
    }

    /// The configured name.
    pub fn name(&self) -> &str {
        &self.0.started.name
    }

    /// This life of the agent, drawn at random.
    pub fn incarnation(&self) -> Incarnation {
        self.0.started.incarnation
    }

    /// Which UCX is in use: version, path, origin.
    pub fn ucx(&self) -> &str {
        &self.0.started.ucx
    }

    /// A handle to wake the progress thread with.
    pub fn waker(&self) -> Waker {
        self.0.shared.waker.clone()
    }

    /// Registers a range, so that transfers can name it and peers can read and write it. Waits for the progress thread
    /// and the registration itself (pinning gigabytes takes a while). The promise to keep the memory alive was made
    /// with [`MemoryRange::new`]. Ranges may overlap: each is a region of its own.
    ///
    /// # Errors
    /// Those of [`crate::mem::check`];
    /// [`ErrorKind::Unsupported`] when UCX cannot move this kind of memory; [`ErrorKind::Exhausted`] after 65,536
    /// registrations; [`ErrorKind::Timeout`] after 10 minutes: then the range does not stay registered, but its memory must
    /// stay alive until the agent is shut down or has answered another call.
    pub fn register(&self, range: MemoryRange) -> Result<RegionId> {
        self.ask(Some(REGISTER_TIMEOUT), |reply| Command::Register { range, reply })
    }

    /// Ends a registration: refuses new transfers with the region at once, cancels those that use it, waits for their
    /// end, then unmaps. Only after `Ok` may the memory be freed.
    ///
    /// Peers that still read or write the region get errors. Those on this host, for which the kernel or a device copies, are
    /// asked to stop, and their answers are waited for, also of peers that leave, and for as long as a copy that they have begun
    /// does not end. One that stands still, and so says nothing, loses its connection after
    /// [`cancel_grace`](AgentConfig::cancel_grace), and is not waited for any longer: when it goes on, it may copy until it
    /// notices. A peer that this side has disconnected is not asked: deregister first.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for an id that names no region; [`ErrorKind::Timeout`] when the transfers, or peers' copies,
    /// did not end in the configured time: the region stays unusable, is unmapped when they end, and the memory must stay
    /// alive; calling again waits again.
    pub fn deregister(&self, region: RegionId) -> Result<()> {
        let timeout = self.0.deregister_timeout;
        match self.ask(Some(timeout), |reply| Command::Deregister { region, reply }) {
            Err(e) if e.kind() == ErrorKind::Timeout => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "{region} is still used by transfers, or by copies that peers make, after {timeout:?}; keep its memory \
                     alive and try again"
                ),
            )),
            other => other,
        }
    }

    /// What a peer needs to connect and to reach the regions registered so far.
    pub fn metadata(&self) -> Result<AgentMetadata> {
        self.ask(None, |reply| Command::Metadata { reply })
    }

    /// What a peer that is connected already needs to reach one region. Its size does not depend on other regions.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for an id that names no region.
    pub fn region_metadata(&self, region: RegionId) -> Result<AgentRegion> {
        self.ask(None, |reply| Command::RegionMetadata { region, reply })
    }

    /// Makes a peer's region known that [`Agent::region_metadata`] describes there. Returns its index, by which plans
    /// name it. Again with the same region does nothing.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a stale peer id, [`ErrorKind::PeerDied`] for a region of another life of the peer,
    /// [`ErrorKind::Corrupt`] for damaged metadata, and for other metadata than before of a region that is known.
    pub fn add_region(&self, peer: PeerId, region: AgentRegion) -> Result<u32> {
        self.ask(None, |reply| Command::AddRegion { peer, region: Box::new(region), reply })
    }

    /// Forgets a peer's region, by its index: new transfers with it are refused, those that have begun go on. What this
    /// side holds of it, such as its key and a mapping, is released when the last of them has ended.
    /// [`Agent::add_region`] makes it known again.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a stale peer id, and for a region that is not known.
    pub fn remove_region(&self, peer: PeerId, region: u32) -> Result<()> {
        self.ask(None, |reply| Command::RemoveRegion { peer, region, reply })
    }

    /// Connects to the agent that `metadata` describes, or finds the connection that exists. Returns before the peer
    /// has answered: transfers and messages may be given at once, [`Event::PeerConnected`] or [`Event::PeerLost`]
    /// follows. For a connection that exists, the regions that `metadata` lists replace those that were known; metadata
    /// that lists none takes none away.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] or [`ErrorKind::VersionMismatch`] for damaged or foreign metadata,
    /// [`ErrorKind::Unreachable`] when no transport is shared.
    pub fn connect(&self, metadata: &AgentMetadata) -> Result<PeerId> {
        let metadata = Box::new(metadata.clone());
        self.ask(None, |reply| Command::Connect { metadata, reply })
    }

    /// Ends the connection: its transfers are cancelled, unsent messages are lost, the id becomes stale at once. No
    /// [`Event::PeerLost`] follows here; the other side gets one.
    pub fn disconnect(&self, peer: PeerId) -> Result<()> {
        let mut live = self.0.shared.live.lock();
        if live.ended {
            return Err(shut_down());
        }
        if live.peers.remove(&peer).is_none() {
            return Err(peer.unknown());
        }
        drop(live);
        self.0.shared.command(Command::Disconnect { peer });
        Ok(())
    }

    /// Which way bytes go between this agent and a peer; none before the peer has answered, which
    /// [`Event::PeerConnected`] tells.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a stale peer id.
    pub fn route(&self, peer: PeerId) -> Result<Option<Route>> {
        self.ask(None, |reply| Command::Route { peer, reply })
    }

    /// Starts a transfer. Never waits: what is wrong with the plan is the result in its [`Event::TransferDone`], which has
    /// `user_data` too, whatever that means to the caller.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a stale peer id.
    pub fn transfer(&self, peer: PeerId, direction: Direction, plan: CopyPlan, user_data: u64) -> Result<TransferId> {
        self.start_transfer(peer, direction, plan, None, user_data)
    }

    /// As [`Agent::transfer`], with a message that the progress thread sends to the peer as soon as every byte was moved.
    /// If the transfer fails it is not sent.
    ///
    /// # Errors
    /// Those of [`Agent::transfer`] and of [`Agent::send`].
    pub fn transfer_with(
        &self,
        peer: PeerId,
        direction: Direction,
        plan: CopyPlan,
        message: Vec<u8>,
        user_data: u64,
    ) -> Result<TransferId> {
        check_message(&message)?;
        self.start_transfer(peer, direction, plan, Some(message), user_data)
    }

    fn start_transfer(
        &self,
        peer: PeerId,
        direction: Direction,
        plan: CopyPlan,
        message: Option<Vec<u8>>,
        user_data: u64,
    ) -> Result<TransferId> {
        let id = self.0.shared.live.ids.transfer()?;
        let mut live = self.0.shared.live.lock();
        if live.ended {
            return Err(shut_down());
        }
        let unsent = live.peers.get(&peer).ok_or_else(|| peer.unknown())?;
        if let Some(message) = &message {
            reserve(unsent, message.len(), self.0.send_queue_bytes)?;
        }
        live.transfers.insert(id, (peer, user_data));
        drop(live);
        let request = TransferRequest { id, peer, direction, plan, message, user_data };
        if !self.0.copy_at_once(&request) {
            self.0.serve_at_once(Command::Transfer(request));
        }
        Ok(id)
    }

    /// Stops a transfer: nothing more is posted, and its [`Event::TransferDone`] (with [`ErrorKind::Cancelled`], or
    /// success if it was done already) follows when the operations in flight have ended.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a transfer that is over.
    pub fn cancel(&self, id: TransferId) -> Result<()> {
        let live = self.0.shared.live.lock();
        if live.ended {
            return Err(shut_down());
        }
        if !live.transfers.contains_key(&id) {
            return Err(id.unknown());
        }
        drop(live);
        self.0.shared.command(Command::Cancel { id });
        Ok(())
    }

    /// Waits until a transfer is over: from then on it touches no memory. Its [`Event::TransferDone`] is, or will be,
    /// polled as always. Returns at once for a transfer that is over. After [`Agent::cancel`], this waits until the
    /// cancelled transfer's memory may be freed.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] when it is not over in time; [`ErrorKind::ShutDown`] when the agent has ended before it was
    /// over: its memory must stay alive for ever.
    pub fn wait_transfer(&self, id: TransferId, timeout: Duration) -> Result<()> {
        self.0.shared.wait_transfer(id, timeout)
    }

    /// Sends a message of at most 16 MiB. Never waits. It arrives once, in order, unless the connection breaks.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a stale peer id, [`ErrorKind::InvalidArgument`] for a message over the limit,
    /// [`ErrorKind::Exhausted`] while more than the configured bytes of messages to this peer are not sent yet.
    pub fn send(&self, peer: PeerId, data: Vec<u8>) -> Result<()> {
        check_message(&data)?;
        let live = self.0.shared.live.lock();
        if live.ended {
            return Err(shut_down());
        }
        let unsent = live.peers.get(&peer).ok_or_else(|| peer.unknown())?;
        reserve(unsent, data.len(), self.0.send_queue_bytes)?;
        drop(live);
        self.0.serve_at_once(Command::Send { peer, data });
        Ok(())
    }

    /// The oldest event not yet taken. Never waits. With a driver there are none here.
    ///
    /// A caller that polls without a pause for something small drives the agent meanwhile, in place of the progress
    /// thread, which leaves a processor to others and spares two wake-ups.
    pub fn poll_event(&self) -> Option<Event> {
        self.next_event().or_else(|| {
            self.0.poll();
            self.next_event()
        })
    }

    /// As [`Agent::poll_event`], for one who takes what there is and does not poll for more.
    pub(crate) fn next_event(&self) -> Option<Event> {
        self.0.shared.poll_event()
    }

    /// The oldest event not yet taken, waiting for one for at most `timeout`; `None` at once when [`Agent::is_drained`].
    pub fn wait_event(&self, timeout: Duration) -> Option<Event> {
        self.0.shared.wait_event(timeout)
    }

    /// Whether the agent has ended and every event was taken, so that none will come any more.
    pub fn is_drained(&self) -> bool {
        self.0.shared.is_drained()
    }

    /// Counters now.
    pub fn stats(&self) -> Result<AgentStats> {
        self.ask(None, |reply| Command::Stats { reply })
    }

    /// What was moved from and to each peer, and which way, by the peers' names. The figures of a connection stay when it is
    /// over, of the last 256 that were made by [`Agent::connect`].
    pub fn peer_stats(&self) -> Result<Vec<PeerStats>> {
        self.ask(None, |reply| Command::PeerStats { reply })
    }

    /// Shuts the agent down: cancels every transfer, closes every connection, frees UCX, ends the thread. Each
    /// transfer still gets its event, which can be taken afterwards. Memory may be freed after `Ok`. A later call
    /// does nothing and returns what the first one did.
    ///
    /// Messages sent before leave first, for which a peer that has not answered yet is waited for, within
    /// [`cancel_grace`](AgentConfig::cancel_grace) and half of `timeout`. How many could not be delivered to a peer is said on
    /// the log.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] when that did not end within `timeout`, or when a peer that may copy this side's memory by itself
    /// has not said that it does not any more, as one that stands still: UCX's objects are then left alive for ever instead of
    /// freed under operations in flight, and registered memory must stay alive for ever too.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        self.0.shutdown(timeout)
    }

    /// Sends a command and waits for its answer. What the command of a caller who has given up has made is undone.
    fn ask<T>(&self, timeout: Option<Duration>, make: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        self.0.shared.ask(timeout.unwrap_or(ANSWER_TIMEOUT), make)
    }
}

impl Inner {
    /// Starts the thread that writes the agent's figures to a file. It holds no handle, which would keep the agent alive.
    fn keep_metrics(&self, pattern: &Path) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let figures = move || {
            let stats = shared.ask(ANSWER_TIMEOUT, |reply| Command::Stats { reply })?;
            Ok((stats, shared.ask(ANSWER_TIMEOUT, |reply| Command::PeerStats { reply })?))
        };
        let file = MetricsFile::start(pattern, (&self.started.name, self.started.incarnation), figures)?;
        *self.metrics_file.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
        Ok(())
    }

    /// Lends the engine to the calling thread if nobody else has it or waits for it.
    fn try_with<R: Send>(&self, use_it: impl FnOnce(&mut Driven) -> R + Send) -> Option<R> {
        if self.started.callers.may_take() { self.started.engine.try_with(use_it) } else { None }
    }

    /// Makes a transfer on the calling thread if that takes some microseconds and nobody else has the engine. Returns whether
    /// it is over.
    fn copy_at_once(&self, request: &TransferRequest) -> bool {
        let copy = |driven: &mut Driven| driven.copy_at_once(request);
        !self.has_driver && request.is_light() && self.try_with(copy) == Some(true)
    }

    /// Serves a command on the calling thread if that takes some microseconds and nobody else has the engine; else leaves
    /// it to the progress thread.
    fn serve_at_once(&self, command: Command) {
        let is_light = !self.has_driver && command.is_light();
        self.shared.queue(command);
        if !is_light || self.try_with(Driven::serve_at_once).unwrap_or(true) {
            self.shared.waker.wake();
        }
    }

    /// What a poll does that has found no event.
    fn poll(&self) {
        if self.has_driver {
            return;
        }
        let now = Instant::now();
        match self.started.callers.poll(now) {
            Polled::Nothing => return,
            Polled::Ask => self.shared.waker.wake(),
            Polled::Drive => {}
        }
        self.try_with(|driven| driven.poll(now));
    }

    fn shutdown(&self, timeout: Duration) -> Result<()> {
        let begin = Instant::now();
        // Not with the lock, for which another call would wait.
        let file = self.metrics_file.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(file) = file {
            file.end(timeout.min(LAST_FIGURES));
        }
        self.thread.end(&self.shared, timeout.saturating_sub(begin.elapsed()))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.thread.is_running()
            && let Err(error) = self.shutdown(DROP_TIMEOUT)
        {
            log::error!("agent {}: shutting down: {error}", self.started.name);
        }
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agent({} {})", self.0.started.name, self.0.started.incarnation)
    }
}

fn draw_incarnation() -> Result<Incarnation> {
    let number = getrandom::u64()
        .map_err(|e| Error::new(ErrorKind::Io, format!("drawing a random incarnation from the system: {e}")))?;
    Ok(Incarnation(number.max(1)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender};

    use super::*;
    use crate::agent::engine::driver::{Context, Driver};

    /// Keeps the progress thread busy until it is told to go on.
    struct Dawdler {
        at_work: SyncSender<()>,
        may_go: Receiver<()>,
    }

    impl Driver for Dawdler {
        fn turn(&mut self, _: &mut Context<'_>) -> Option<Instant> {
            let _ = self.at_work.try_send(());
            let _ = self.may_go.recv();
            None
        }
    }

    /// Panics when it is told to.
    struct Stumbler(Receiver<()>);

    impl Driver for Stumbler {
        fn turn(&mut self, _: &mut Context<'_>) -> Option<Instant> {
            assert!(self.0.try_recv().is_err(), "this panic is the test's");
            None
        }
    }

    #[test]
    fn abandoned_transfer_is_not_over() {
        let quiet = |name: &str| AgentConfig { name: name.to_owned(), warm_up: false, ..AgentConfig::default() };
        let (tell, told) = sync_channel(1);
        let agent = Agent::start_with(quiet("a"), Box::new(|_| Box::new(Stumbler(told)))).unwrap();
        let other = Agent::start(quiet("b")).unwrap();
        let peer = agent.connect(&other.metadata().unwrap()).unwrap();
        let never = TransferId::from_raw(7);
        agent.wait_transfer(never, Duration::ZERO).unwrap();
        // As one that the thread has taken up.
        let id = agent.0.shared.live.ids.transfer().unwrap();
        agent.0.shared.live.lock().transfers.insert(id, (peer, 9));
        assert_eq!(agent.wait_transfer(id, Duration::from_millis(1)).unwrap_err().kind(), ErrorKind::Timeout);
        tell.send(()).unwrap();
        agent.waker().wake();
        let error = agent.wait_transfer(id, Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ShutDown, "{error}");
        let events = std::iter::from_fn(|| agent.poll_event());
        let ends = events.filter_map(|event| match event {
            Event::TransferDone { id, user_data, result, .. } => Some((id, user_data, result.unwrap_err().kind())),
            _ => None,
        });
        assert_eq!(ends.collect::<Vec<_>>(), [(id, 9, ErrorKind::ShutDown)]);
        for _ in 0..2 {
            assert_eq!(agent.shutdown(Duration::from_secs(60)).unwrap_err().kind(), ErrorKind::Internal);
        }
    }

    #[test]
    fn request_without_caller_is_not_done() {
        let quiet = |name: &str| AgentConfig { name: name.to_owned(), warm_up: false, ..AgentConfig::default() };
        let ((go, may_go), (at_work, works)) = (sync_channel(0), sync_channel(1));
        let agent = Agent::start_with(quiet("a"), Box::new(|_| Box::new(Dawdler { at_work, may_go }))).unwrap();
        works.recv().unwrap();
        let other = Agent::start(quiet("b")).unwrap();
        let range = MemoryRange::leaked(4096);
        let metadata = Box::new(other.metadata().unwrap());
        let soon = Some(Duration::from_millis(1));
        let error = agent.ask(soon, |reply| Command::Register { range, reply }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let error = agent.ask(soon, |reply| Command::Connect { metadata, reply }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        drop(go);
        let stats = agent.stats().unwrap();
        assert_eq!((stats.regions, stats.peers, agent.metadata().unwrap().regions.len()), (0, 0, 0));
        let region = agent.register(range).unwrap();
        agent.deregister(region).unwrap();
    }
}
