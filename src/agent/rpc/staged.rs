//! Bytes on their way between device memory and messages: the device copies them while this thread does other things, and a
//! request is answered, or a reply counts, when they are there.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use super::client::Chunk;
use crate::agent::core::ids::PeerId;
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::limits::MAX_WAITING;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::staging::{STAGED_BYTES, Stage, Ticket};

/// What is to be done when the bytes are there.
pub(crate) enum Then {
    /// They answer a read of a peer's, of so many bytes, from these regions.
    Reply { peer: PeerId, number: u64, bytes: u64, regions: Vec<u32> },
    /// A peer's write to these regions is confirmed.
    Written { peer: PeerId, number: u64, regions: Vec<u32> },
    /// A chunk that was asked for is over.
    Placed(Chunk),
}

/// What has no room yet.
struct Waiting {
    iovs: Vec<Iov>,
    /// Of a write.
    data: Option<Vec<u8>>,
    then: Then,
}

struct Device {
    stage: Stage,
    under_way: BTreeMap<Ticket, Then>,
    waiting: VecDeque<Waiting>,
    /// Bytes that those hold.
    held: usize,
}

/// Bytes of writes and replies that may wait for a device, as many as the windows have of a few peers.
const MAX_HELD: usize = 64 << 20;

/// All such bytes of one agent.
#[derive(Default)]
pub(crate) struct Staged {
    devices: BTreeMap<u32, Device>,
    /// What has failed at once, to be told with the others.
    failed: Vec<Ended>,
}

impl Staged {
    /// Makes what copies of a device's memory take, which takes time and may wait for the device.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn prepare(&mut self, device: u32) -> Result<()> {
        if let Entry::Vacant(place) = self.devices.entry(device) {
            let stage = Stage::new(device)?;
            place.insert(Device { stage, under_way: BTreeMap::new(), waiting: VecDeque::new(), held: 0 });
        }
        Ok(())
    }

    /// The device that these parts can be copied by: the one that all of them are on, unless too much waits for it already.
    pub(crate) fn device_for(&self, iovs: &[Iov]) -> Option<u32> {
        let device = iov::device_of(iovs)?;
        let bytes: u64 = iovs.iter().map(|iov| u64::from(iov.len)).sum();
        let has_room = self.devices.get(&device).is_some_and(|d| d.waiting.len() < MAX_WAITING && d.held < MAX_HELD);
        (has_room && bytes <= STAGED_BYTES as u64).then_some(device)
    }

    /// Copies parts of registered ranges of a device ([`Staged::device_for`]), which the caller keeps registered until
    /// [`Staged::reap`] has told the end.
    pub(crate) fn read(&mut self, device: u32, iovs: Vec<Iov>, then: Then) {
        let Some(device) = self.devices.get_mut(&device) else {
            return self.failed.push((then, Err(not_prepared(device))));
        };
        let work = Waiting { iovs, data: None, then };
        if device.waiting.is_empty() {
            device.take_up(work, &mut self.failed);
        } else {
            device.wait(work);
        }
    }

    /// Puts bytes in place, likewise.
    pub(crate) fn write(&mut self, device: u32, iovs: Vec<Iov>, data: &[u8], then: Then) {
        let Some(device) = self.devices.get_mut(&device) else {
            return self.failed.push((then, Err(not_prepared(device))));
        };
        if device.waiting.is_empty() {
            match device.stage.write(&iovs, data) {
                Ok(Some(ticket)) => drop(device.under_way.insert(ticket, then)),
                Ok(None) => device.wait(Waiting { iovs, data: Some(data.to_vec()), then }),
                Err(error) => self.failed.push((then, Err(error))),
            }
        } else {
            device.wait(Waiting { iovs, data: Some(data.to_vec()), then });
        }
    }

    /// Begins nothing more that a lost peer has asked for. Returns the regions that are not used for it any more.
    pub(crate) fn forget(&mut self, lost: PeerId) -> Vec<u32> {
        let mut freed = Vec::new();
        for device in self.devices.values_mut() {
            for work in std::mem::take(&mut device.waiting) {
                match work.then {
                    Then::Reply { peer, regions, .. } | Then::Written { peer, regions, .. } if peer == lost => {
                        freed.extend(regions);
                    }
                    then => device.waiting.push_back(Waiting { then, ..work }),
                }
            }
            device.held = device.waiting.iter().map(Waiting::held).sum();
        }
        freed
    }

    /// Whether anything is under way.
    pub(crate) fn is_running(&self) -> bool {
        let is_busy = |device: &Device| device.stage.is_running() || !device.waiting.is_empty();
        !self.failed.is_empty() || self.devices.values().any(is_busy)
    }

    /// What has ended since the last time. `buffer` makes one for so many bytes that were read.
    pub(crate) fn reap(&mut self, buffer: impl Fn(usize) -> Vec<u8>) -> Vec<Ended> {
        let mut ended = std::mem::take(&mut self.failed);
        for device in self.devices.values_mut() {
            while let Some((ticket, result)) = device.stage.next_ended() {
                let Some(then) = device.under_way.remove(&ticket) else { continue };
                let bytes = result.map(|()| match &then {
                    Then::Reply { bytes, .. } => {
                        let mut data = buffer(usize::try_from(*bytes).unwrap_or(0));
                        device.stage.take(ticket, &mut data);
                        data
                    }
                    Then::Written { .. } | Then::Placed(_) => Vec::new(),
                });
                ended.push((then, bytes));
            }
            while let Some(waiting) = device.next_waiting() {
                if !device.take_up(waiting, &mut ended) {
                    break;
                }
            }
        }
        ended
    }
}

/// What has ended, and how: with the bytes of a read.
pub(crate) type Ended = (Then, Result<Vec<u8>>);

fn not_prepared(device: u32) -> Error {
    Error::new(ErrorKind::Internal, format!("CUDA device {device} was not prepared"))
}

impl Waiting {
    fn held(&self) -> usize {
        self.data.as_ref().map_or(0, Vec::len)
    }
}

impl Device {
    /// Puts something behind all that waits.
    fn wait(&mut self, work: Waiting) {
        self.held += work.held();
        self.waiting.push_back(work);
    }

    fn next_waiting(&mut self) -> Option<Waiting> {
        let work = self.waiting.pop_front()?;
        self.held = self.held.saturating_sub(work.held());
        Some(work)
    }

    /// Begins what nothing waits before, if there is room; else it waits at the front. Returns whether there was room.
    fn take_up(&mut self, work: Waiting, ended: &mut Vec<Ended>) -> bool {
        let begun = match &work.data {
            None => self.stage.read(&work.iovs),
            Some(data) => self.stage.write(&work.iovs, data),
        };
        match begun {
            Ok(Some(ticket)) => drop(self.under_way.insert(ticket, work.then)),
            Ok(None) => {
                self.held += work.held();
                self.waiting.push_front(work);
                return false;
            }
            Err(error) => ended.push((work.then, Err(error))),
        }
        true
    }
}
