//! Bytes on their way between device memory and messages: the device copies them while this thread does other things, and a
//! request is sent or answered, or a reply counts, when they are there.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use super::client::Chunk;
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::iov::{self, Iov};
use crate::agent::core::refusals::Refusals;
use crate::agent::core::regions::Hold;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::staging::{Stage, StagedCopy};

/// What to run once the bytes have arrived.
pub(crate) enum Continuation {
    /// They answer a read of a peer, of so many bytes.
    Reply { peer: PeerId, number: u64, bytes: u64, holds: Vec<Hold> },
    /// A write of a peer is confirmed.
    Written { peer: PeerId, number: u64, holds: Vec<Hold> },
    /// Their digest answers a question of a peer.
    Digest { peer: PeerId, number: u64, holds: Vec<Hold> },
    /// The peer is asked to write them: they belong behind what the request has already.
    Ask { chunk: Chunk, request: Vec<u8> },
    /// A chunk that was asked for is over.
    Placed(Chunk),
    /// A chunk that was read is over if they have the digest that the peer told.
    Compare { chunk: Chunk, theirs: Vec<u8> },
}

impl Continuation {
    /// The peer that it is for.
    fn peer(&self) -> PeerId {
        match self {
            Continuation::Reply { peer, .. }
            | Continuation::Written { peer, .. }
            | Continuation::Digest { peer, .. } => *peer,
            Continuation::Ask { chunk, .. } | Continuation::Placed(chunk) | Continuation::Compare { chunk, .. } => {
                chunk.peer
            }
        }
    }

    /// The chunk of a transfer of this side that it is for.
    fn chunk(&self) -> Option<&Chunk> {
        match self {
            Continuation::Ask { chunk, .. } | Continuation::Placed(chunk) | Continuation::Compare { chunk, .. } => {
                Some(chunk)
            }
            Continuation::Reply { .. } | Continuation::Written { .. } | Continuation::Digest { .. } => None,
        }
    }

    fn into_chunk(self) -> Option<Chunk> {
        match self {
            Continuation::Ask { chunk, .. } | Continuation::Placed(chunk) | Continuation::Compare { chunk, .. } => {
                Some(chunk)
            }
            Continuation::Reply { .. } | Continuation::Written { .. } | Continuation::Digest { .. } => None,
        }
    }

    /// The buffer that the bytes which were read are appended to; `buffer` makes one for so many bytes.
    fn begin(&mut self, buffer: impl Fn(usize) -> Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Continuation::Reply { bytes, .. } => Some(buffer(usize::try_from(*bytes).unwrap_or(0))),
            Continuation::Ask { request, .. } => Some(std::mem::take(request)),
            Continuation::Digest { .. } | Continuation::Compare { .. } => Some(Vec::new()),
            Continuation::Written { .. } | Continuation::Placed(_) => None,
        }
    }
}

/// A copy that waits for room.
struct Waiting {
    iovs: Vec<Iov>,
    /// The bytes of a write.
    data: Option<Vec<u8>>,
    then: Continuation,
}

struct Device {
    stage: Stage,
    under_way: BTreeMap<StagedCopy, Continuation>,
    waiting: VecDeque<Waiting>,
}

/// All such bytes of one agent.
#[derive(Default)]
pub(crate) struct Staged {
    devices: BTreeMap<u32, Device>,
    refusals: Refusals,
    /// Those that failed at once, to be told with the others.
    failed: Vec<Ended>,
}

impl Staged {
    /// Makes what copies of a device's memory take, which takes time and may wait for the device.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn prepare(&mut self, device: u32) -> Result<()> {
        if let Entry::Vacant(place) = self.devices.entry(device) {
            let stage = self.refusals.make(device, Instant::now(), || Stage::new(device))?;
            place.insert(Device { stage, under_way: BTreeMap::new(), waiting: VecDeque::new() });
        }
        Ok(())
    }

    /// Copies parts of registered ranges of one device ([`iov::device_of`]), which the caller keeps registered until
    /// [`Staged::reap`] has told the end.
    pub(crate) fn read(&mut self, iovs: Vec<Iov>, then: Continuation) {
        self.begin(iovs, None, then);
    }

    /// Puts bytes in place, likewise.
    pub(crate) fn write(&mut self, iovs: Vec<Iov>, data: &[u8], then: Continuation) {
        self.begin(iovs, Some(data), then);
    }

    fn begin(&mut self, iovs: Vec<Iov>, data: Option<&[u8]>, then: Continuation) {
        let begun = self.device_of(&iovs, data).and_then(|device| {
            let begun = if device.waiting.is_empty() { device.stage.begin(&iovs, data)? } else { None };
            Ok((device, begun))
        });
        match begun {
            Ok((device, Some(copy))) => drop(device.under_way.insert(copy, then)),
            Ok((device, None)) => device.waiting.push_back(Waiting { iovs, data: data.map(<[u8]>::to_vec), then }),
            Err(error) => self.failed.push((then, Err(error))),
        }
    }

    /// The device of these parts. What the driver refused it at the registration may be given now.
    fn device_of(&mut self, iovs: &[Iov], data: Option<&[u8]>) -> Result<&mut Device> {
        let expected = iov::total(iovs);
        if let Some(data) = data
            && data.len() as u64 != expected
        {
            return Err(Error::corrupt(format!("{} bytes arrived, expected {expected}", data.len())));
        }
        let none = || Error::new(ErrorKind::Internal, "the pieces are of no device");
        let number = iov::device_of(iovs).ok_or_else(none)?;
        self.prepare(number)?;
        self.devices.get_mut(&number).ok_or_else(none)
    }

    /// Waits for all that is under way. Returns whether nothing is any more.
    pub(crate) fn finish(&mut self) -> bool {
        self.devices.values_mut().fold(true, |is_over, device| device.stage.finish() & is_over)
    }

    /// Begins nothing more that a lost peer has asked for, or that is to be asked of it. Returns the chunks that nothing more
    /// comes of.
    pub(crate) fn forget(&mut self, lost: PeerId) -> Vec<Chunk> {
        self.cancel_where(|then| then.peer() == lost)
    }

    /// Begins nothing more of a transfer that was stopped. Returns the chunks that nothing more comes of.
    pub(crate) fn cancel(&mut self, transfer: TransferId) -> Vec<Chunk> {
        self.cancel_where(|then| then.chunk().is_some_and(|chunk| chunk.transfer == transfer))
    }

    fn cancel_where(&mut self, which: impl Fn(&Continuation) -> bool) -> Vec<Chunk> {
        let mut taken = Vec::new();
        for device in self.devices.values_mut() {
            let (those, others) = std::mem::take(&mut device.waiting).into_iter().partition(|work| which(&work.then));
            device.waiting = others;
            let those: VecDeque<Waiting> = those;
            taken.extend(those.into_iter().filter_map(|work| work.then.into_chunk()));
        }
        taken
    }

    /// Whether anything is under way.
    pub(crate) fn is_running(&self) -> bool {
        let is_busy = |device: &Device| device.stage.is_running() || !device.waiting.is_empty();
        !self.failed.is_empty() || self.devices.values().any(is_busy)
    }

    /// Takes those that have ended since the last time. `buffer` makes one for so many bytes that were read.
    pub(crate) fn reap(&mut self, buffer: impl Fn(usize) -> Vec<u8>) -> Vec<Ended> {
        let mut ended = std::mem::take(&mut self.failed);
        for device in self.devices.values_mut() {
            while let Some((copy, result)) = device.stage.next_ended() {
                let Some(mut then) = device.under_way.remove(&copy) else { continue };
                let bytes = result.map(|()| {
                    let begun = then.begin(&buffer).map(|mut data| {
                        device.stage.take(copy, &mut data);
                        data
                    });
                    begun.unwrap_or_default()
                });
                ended.push((then, bytes));
            }
            while let Some(work) = device.waiting.pop_front() {
                match device.stage.begin(&work.iovs, work.data.as_deref()) {
                    Ok(Some(copy)) => drop(device.under_way.insert(copy, work.then)),
                    Ok(None) => {
                        device.waiting.push_front(work);
                        break;
                    }
                    Err(error) => ended.push((work.then, Err(error))),
                }
            }
        }
        ended
    }
}

/// One that has ended, and how: with the bytes of a read.
pub(crate) type Ended = (Continuation, Result<Vec<u8>>);
