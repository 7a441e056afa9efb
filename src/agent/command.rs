//! What the handle and the progress thread share: the command queue, the event queue, and which ids live.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use crate::agent::core::event::{Direction, Event};
use crate::agent::core::ids::{IdSource, PeerId, RegionId, TransferId};
use crate::agent::core::route::Route;
use crate::agent::core::stats::AgentStats;
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::plan::CopyPlan;
use crate::proto::wire::AgentMetadata;
use crate::sync::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard};

/// Where the answer to a cold call goes. Either the caller gets it or the progress thread learns that nobody does.
pub(crate) struct Reply<T> {
    to: SyncSender<Result<T>>,
    /// Set by whichever comes first: the answer, or the end of the caller's patience.
    settled: Arc<AtomicBool>,
}

impl<T> Reply<T> {
    /// Answers. Gives the answer back if the caller does not wait any more.
    pub(crate) fn send(self, answer: Result<T>) -> std::result::Result<(), Result<T>> {
        if self.settled.swap(true, Ordering::AcqRel) {
            return Err(answer);
        }
        self.to.send(answer).map_err(|unsent| unsent.0)
    }

    /// Whether the caller still waits.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.settled.load(Ordering::Acquire)
    }
}

/// The caller's end of a [`Reply`].
pub(crate) struct Answer<T> {
    from: Receiver<Result<T>>,
    settled: Arc<AtomicBool>,
}

impl<T> Answer<T> {
    /// Waits for the answer. `None`: it did not come in time, and whoever answers later is told so.
    pub(crate) fn wait(self, timeout: Duration) -> Option<Result<T>> {
        let gone = || Err(Error::new(ErrorKind::ShutDown, "the agent is shut down"));
        match self.from.recv_timeout(timeout) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Disconnected) => Some(gone()),
            // It may be on its way just now.
            Err(RecvTimeoutError::Timeout) if self.settled.swap(true, Ordering::AcqRel) => {
                Some(self.from.recv().unwrap_or_else(|_| gone()))
            }
            Err(RecvTimeoutError::Timeout) => None,
        }
    }
}

/// The two ends of an answer.
pub(crate) fn answer<T>() -> (Reply<T>, Answer<T>) {
    let (to, from) = sync_channel(1);
    let settled = Arc::new(AtomicBool::new(false));
    (Reply { to, settled: Arc::clone(&settled) }, Answer { from, settled })
}

/// What the handle asks of the progress thread.
pub(crate) enum Command {
    Register { range: MemoryRange, reply: Reply<RegionId> },
    Deregister { region: RegionId, reply: Reply<()> },
    Metadata { reply: Reply<AgentMetadata> },
    Connect { metadata: Box<AgentMetadata>, reply: Reply<PeerId> },
    Disconnect { peer: PeerId },
    Route { peer: PeerId, reply: Reply<Option<Route>> },
    Transfer { id: TransferId, peer: PeerId, direction: Direction, plan: CopyPlan },
    Cancel { id: TransferId },
    Send { peer: PeerId, data: Vec<u8> },
    Stats { reply: Reply<AgentStats> },
    ShutDown { deadline: Instant },
}

/// Ids that may be used now, kept by the progress thread so that the handle can refuse stale ones without waiting.
#[derive(Default)]
pub(crate) struct Live {
    /// With the bytes of messages to each that are not sent yet.
    pub(crate) peers: HashMap<PeerId, Arc<AtomicU64>>,
    pub(crate) transfers: HashSet<TransferId>,
    /// Set when the progress thread takes no more commands.
    pub(crate) ended: bool,
}

pub(crate) struct Shared {
    pub(crate) ids: IdSource,
    pub(crate) waker: Waker,
    commands: Mutex<VecDeque<Command>>,
    events: Mutex<VecDeque<Event>>,
    /// Bytes of the messages among them.
    unread_bytes: AtomicU64,
    arrived: Condvar,
    live: Mutex<Live>,
}

/// A panic while one of these short locks was held leaves no half-made state behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an event counts in the bytes that are unread.
fn message_bytes(event: &Event) -> u64 {
    match event {
        Event::Message { data, .. } => data.len() as u64,
        _ => 0,
    }
}

impl Shared {
    pub(crate) fn new(entropy: u64) -> Result<Self> {
        Ok(Shared {
            ids: IdSource::new(entropy),
            waker: Waker::new()?,
            commands: Mutex::default(),
            events: Mutex::default(),
            unread_bytes: AtomicU64::new(0),
            arrived: Condvar::new(),
            live: Mutex::default(),
        })
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, Live> {
        lock(&self.live)
    }

    /// Queues a command and wakes the thread.
    pub(crate) fn command(&self, command: Command) {
        lock(&self.commands).push_back(command);
        self.waker.wake();
    }

    /// Progress thread: the oldest command.
    pub(crate) fn next_command(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }

    /// Progress thread: drops the commands that nobody will serve, which tells their callers.
    pub(crate) fn drop_commands(&self) {
        let commands = std::mem::take(&mut *lock(&self.commands));
        drop(commands);
    }

    /// Progress thread: gives `events` to whoever polls the handle.
    pub(crate) fn publish(&self, events: &mut VecDeque<Event>) {
        if events.is_empty() {
            return;
        }
        let bytes: u64 = events.iter().map(message_bytes).sum();
        self.unread_bytes.fetch_add(bytes, Ordering::Relaxed);
        lock(&self.events).append(events);
        self.arrived.notify_all();
    }

    pub(crate) fn poll_event(&self) -> Option<Event> {
        self.take(&mut lock(&self.events))
    }

    /// Bytes of the messages that were published and not polled.
    pub(crate) fn unread_bytes(&self) -> u64 {
        self.unread_bytes.load(Ordering::Relaxed)
    }

    fn take(&self, events: &mut VecDeque<Event>) -> Option<Event> {
        let event = events.pop_front()?;
        self.unread_bytes.fetch_sub(message_bytes(&event), Ordering::Relaxed);
        Some(event)
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Option<Event> {
        let deadline = Instant::now().checked_add(timeout);
        let mut events = lock(&self.events);
        loop {
            if let Some(event) = self.take(&mut events) {
                return Some(event);
            }
            if self.live().ended {
                return None;
            }
            let left = match deadline {
                Some(deadline) => deadline.checked_duration_since(Instant::now())?,
                // So far away that it does not matter when to look again.
                None => Duration::from_secs(3600),
            };
            events = self.arrived.wait_timeout(events, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Progress thread: no event will come any more.
    pub(crate) fn end(&self) {
        // Under the events' lock, so that a waiter either sees the flag or gets the notification.
        let events = lock(&self.events);
        let mut live = self.live();
        live.ended = true;
        live.peers.clear();
        live.transfers.clear();
        drop(live);
        drop(events);
        self.arrived.notify_all();
    }
}
