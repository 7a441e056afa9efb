//! What the handle and the progress thread share: the command queue and the event queue.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::agent::core::event::Event;
use crate::agent::core::ids::{PeerId, RegionId, TransferId};
use crate::agent::core::live::{Live, LiveIds, lock};
use crate::agent::core::reply::Reply;
use crate::agent::core::request::TransferRequest;
use crate::agent::core::route::Route;
use crate::agent::core::stats::AgentStats;
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::wire::{AgentMetadata, AgentRegion};
use crate::sync::{AtomicU64, Condvar, Mutex};

/// How often a thread that waits for a transfer looks for itself.
const LOOK: Duration = Duration::from_millis(100);

/// What the handle asks of the progress thread.
pub(crate) enum Command {
    Register { range: MemoryRange, reply: Reply<RegionId> },
    Deregister { region: RegionId, reply: Reply<()> },
    Metadata { reply: Reply<AgentMetadata> },
    RegionMetadata { region: RegionId, reply: Reply<AgentRegion> },
    AddRegion { peer: PeerId, region: Box<AgentRegion>, reply: Reply<u32> },
    Connect { metadata: Box<AgentMetadata>, reply: Reply<PeerId> },
    Disconnect { peer: PeerId },
    Route { peer: PeerId, reply: Reply<Option<Route>> },
    Transfer(TransferRequest),
    Cancel { id: TransferId },
    Send { peer: PeerId, data: Vec<u8> },
    Stats { reply: Reply<AgentStats> },
    ShutDown { deadline: Instant },
}

pub(crate) struct Shared {
    pub(crate) live: Live,
    pub(crate) waker: Waker,
    commands: Mutex<VecDeque<Command>>,
    events: Mutex<VecDeque<Event>>,
    /// Bytes of the messages among them.
    unread_bytes: AtomicU64,
    arrived: Condvar,
}

/// What an event counts in the bytes that are unread.
fn message_bytes(event: &Event) -> u64 {
    match event {
        Event::Message { data, .. } => data.len() as u64,
        _ => 0,
    }
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
            unread_bytes: AtomicU64::new(0),
            arrived: Condvar::new(),
        })
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
            if self.live.lock().ended {
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
            events = self.arrived.wait_timeout(events, left).unwrap_or_else(PoisonError::into_inner).0;
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
            events.push_back(Event::not_done((id, user_data), peer, lost(id), now));
        }
        drop(live);
        drop(events);
        self.arrived.notify_all();
    }
}
