//! The command queue and the event queue between the handle and the progress thread.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::agent::core::event::Event;
use crate::agent::core::ids::{PeerId, RegionId, TransferId};
use crate::agent::core::limits::LIGHT_BYTES;
use crate::agent::core::live::{Live, LiveIds, lock};
use crate::agent::core::reply::{Reply, answer};
use crate::agent::core::request::TransferRequest;
use crate::agent::core::route::Route;
use crate::agent::core::stats::{AgentStats, PeerStats};
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::wire::{AgentMetadata, AgentRegion};
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard};

/// How often a thread that waits for a transfer checks by itself.
const LOOK: Duration = Duration::from_millis(100);

/// A request of the handle to the progress thread.
pub(crate) enum Command {
    Register { range: MemoryRange, reply: Reply<RegionId> },
    Deregister { region: RegionId, reply: Reply<()> },
    Metadata { reply: Reply<AgentMetadata> },
    RegionMetadata { region: RegionId, reply: Reply<AgentRegion> },
    AddRegion { peer: PeerId, region: Box<AgentRegion>, reply: Reply<u32> },
    RemoveRegion { peer: PeerId, region: u32, reply: Reply<()> },
    Connect { metadata: Box<AgentMetadata>, reply: Reply<PeerId> },
    Disconnect { peer: PeerId },
    Route { peer: PeerId, reply: Reply<Option<Route>> },
    Transfer(TransferRequest),
    Cancel { id: TransferId },
    Send { peer: PeerId, data: Vec<u8> },
    Stats { reply: Reply<AgentStats> },
    PeerStats { reply: Reply<Vec<PeerStats>> },
    ShutDown { deadline: Instant },
}

impl Command {
    /// Whether it is served within some microseconds, so that the caller's thread may do it.
    pub(crate) fn is_light(&self) -> bool {
        match self {
            Command::Transfer(request) => request.is_light(),
            Command::Send { data, .. } => data.len() as u64 <= LIGHT_BYTES,
            _ => false,
        }
    }
}

pub(crate) struct Shared {
    pub(crate) live: Live,
    pub(crate) waker: Waker,
    commands: Mutex<VecDeque<Command>>,
    events: Mutex<VecDeque<Event>>,
    /// How many there are: lets an empty poll return without taking the lock. Changed under that lock.
    unread: AtomicU64,
    /// The memory that they take.
    unread_bytes: AtomicU64,
    arrived: Condvar,
    /// Threads that wait for that, changed and read under the events' lock: without any, nobody has to be woken, which takes
    /// a system call.
    waiters: AtomicU64,
}

/// The bytes that an unread event counts for: also one without a message, since peers can cause any number.
fn event_bytes(event: &Event) -> u64 {
    let data = match event {
        Event::Message { data, .. } => data.len(),
        _ => 0,
    };
    (size_of::<Event>() + data) as u64
}

pub(crate) fn shut_down() -> Error {
    Error::new(ErrorKind::ShutDown, "the agent is shut down")
}

fn lost(id: TransferId) -> Error {
    let text =
        format!("the agent has ended before {id} was over, which may still touch its memory: it must stay alive");
    Error::new(ErrorKind::ShutDown, text)
}

impl Shared {
    pub(crate) fn new(entropy: u64) -> Result<Self> {
        Ok(Shared {
            live: Live::new(entropy),
            waker: Waker::new()?,
            commands: Mutex::default(),
            events: Mutex::default(),
            unread: AtomicU64::new(0),
            unread_bytes: AtomicU64::new(0),
            arrived: Condvar::new(),
            waiters: AtomicU64::new(0),
        })
    }

    /// Queues a command and wakes the thread.
    pub(crate) fn command(&self, command: Command) {
        self.queue(command);
        self.waker.wake();
    }

    /// Sends a command and waits for its answer.
    pub(crate) fn ask<T>(&self, timeout: Duration, make: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        if self.live.lock().ended {
            return Err(shut_down());
        }
        let (reply, answer) = answer();
        self.command(make(reply));
        // A thread that ended between the check and the command drops no queue of its own accord: look again.
        if self.live.lock().ended {
            self.drop_commands();
        }
        answer.wait(timeout).unwrap_or_else(|| {
            Err(Error::new(ErrorKind::Timeout, format!("the progress thread did not answer within {timeout:?}")))
        })
    }

    /// Queues a command, for which the thread has to be woken if nobody else serves it.
    pub(crate) fn queue(&self, command: Command) {
        lock(&self.commands).push_back(command);
    }

    /// Whether there are commands that nobody has taken.
    pub(crate) fn has_commands(&self) -> bool {
        !lock(&self.commands).is_empty()
    }

    /// Progress thread: the oldest command.
    pub(crate) fn next_command(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }

    /// Takes the oldest command if it is such a one; for the thread that has the engine.
    pub(crate) fn next_command_if(&self, is_such: impl FnOnce(&Command) -> bool) -> Option<Command> {
        let mut commands = lock(&self.commands);
        if commands.front().is_some_and(is_such) { commands.pop_front() } else { None }
    }

    /// Progress thread: drops the commands that nobody will serve, which tells their callers.
    pub(crate) fn drop_commands(&self) {
        let commands = std::mem::take(&mut *lock(&self.commands));
        let mut live = self.live.lock();
        for command in &commands {
            // It has not begun, and so touches no memory.
            if let Command::Transfer(request) = command {
                live.lost.remove(&request.id);
            }
        }
        drop(live);
        drop(commands);
    }

    /// Publishes `events` to the handle; for the thread that has the engine.
    pub(crate) fn publish(&self, events: &mut VecDeque<Event>) {
        if events.is_empty() {
            return;
        }
        let bytes: u64 = events.iter().map(event_bytes).sum();
        self.unread_bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut published = lock(&self.events);
        published.append(events);
        self.unread.store(published.len() as u64, Ordering::Release);
        let is_awaited = self.waiters.load(Ordering::Relaxed) > 0;
        drop(published);
        if is_awaited {
            self.arrived.notify_all();
        }
    }

    /// Waits for news with the events' lock, at most so long.
    fn wait<'a>(&self, events: MutexGuard<'a, VecDeque<Event>>, limit: Duration) -> MutexGuard<'a, VecDeque<Event>> {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let events = self.arrived.wait_timeout(events, limit).unwrap_or_else(PoisonError::into_inner).0;
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        events
    }

    pub(crate) fn poll_event(&self) -> Option<Event> {
        if self.unread.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.take(&mut lock(&self.events))
    }

    /// The memory that events take which were published and not polled.
    pub(crate) fn unread_bytes(&self) -> u64 {
        self.unread_bytes.load(Ordering::Relaxed)
    }

    fn take(&self, events: &mut VecDeque<Event>) -> Option<Event> {
        let event = events.pop_front()?;
        self.unread.store(events.len() as u64, Ordering::Release);
        self.unread_bytes.fetch_sub(event_bytes(&event), Ordering::Relaxed);
        Some(event)
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Option<Event> {
        let deadline = Instant::now().checked_add(timeout);
        let mut events = lock(&self.events);
        loop {
            if let Some(event) = self.take(&mut events) {
                return Some(event);
            }
            if self.live.lock().ended {
                return None;
            }
            let left = match deadline {
                Some(deadline) => deadline.checked_duration_since(Instant::now())?,
                // So far away that it does not matter when to look again.
                None => Duration::from_secs(3600),
            };
            events = self.wait(events, left);
        }
    }

    /// Whether the agent has ended and every event was taken.
    pub(crate) fn is_drained(&self) -> bool {
        // In the order of `end`, so that its last events count.
        let events = lock(&self.events);
        events.is_empty() && self.live.lock().ended
    }

    /// Waits until a transfer is over.
    pub(crate) fn wait_transfer(&self, id: TransferId, timeout: Duration) -> Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        // Its end is published under this lock, after the id has left the table. What a driver takes is not published.
        let mut events = lock(&self.events);
        loop {
            let live = self.live.lock();
            if live.lost.contains(&id) {
                return Err(lost(id));
            }
            if !live.transfers.contains_key(&id) {
                return Ok(());
            }
            drop(live);
            let left = match deadline.map(|deadline| deadline.checked_duration_since(Instant::now())) {
                Some(None) => {
                    let text = format!("{id} is not over after {timeout:?}; its memory must stay alive");
                    return Err(Error::new(ErrorKind::Timeout, text));
                }
                Some(Some(left)) => left.min(LOOK),
                None => LOOK,
            };
            events = self.wait(events, left);
        }
    }

    /// Progress thread: the transfers that are not over are given up, though their operations may go on.
    pub(crate) fn abandon_transfers(&self) {
        let mut live = self.live.lock();
        let LiveIds { transfers, lost, .. } = &mut *live;
        lost.extend(transfers.keys());
    }

    /// Progress thread: no event will come any more. Transfers that are not over get their last one here.
    pub(crate) fn end(&self) {
        // Under the events' lock, so that a waiter either sees the flag or gets the notification.
        let mut events = lock(&self.events);
        let mut live = self.live.lock();
        live.ended = true;
        live.peers.clear();
        let now = Instant::now();
        for (id, (peer, user_data)) in std::mem::take(&mut live.transfers) {
            live.lost.insert(id);
            let event = Event::not_done((id, user_data), peer, lost(id), now);
            self.unread_bytes.fetch_add(event_bytes(&event), Ordering::Relaxed);
            events.push_back(event);
        }
        drop(live);
        self.unread.store(events.len() as u64, Ordering::Release);
        drop(events);
        self.arrived.notify_all();
    }
}
