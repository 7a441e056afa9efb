//! Copies between device memories that are under way.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use crate::agent::core::effect::{Effect, Effects, OperationEnd};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::stats::PathBytes;
use crate::agent::peers::imports::Importing;
use crate::agent::revocation::releases::Traces;
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::PrimaryContext;
use crate::mem::cuda::copier::Copier;
use crate::mem::cuda::unmapper::Unmapper;
use crate::proto::ids::Incarnation;
use crate::sys::process::Neighbour;

/// From which length on pieces are left to the driver: none are, whose copies within a device are no faster.
const LONG_BYTES: u64 = u64::MAX;

/// The copies of one device.
struct Device {
    copier: Copier,
    /// The batches under way, in the order of their ends.
    running: VecDeque<StartedBatch>,
    /// Made when memory is to be mapped for it. Dropped after the copier, whose batches hold mappings.
    unmapper: Option<Unmapper>,
}

/// Whose a batch is.
pub(super) struct StartedBatch {
    pub(super) transfer: TransferId,
    pub(super) peer: PeerId,
    /// The owner of the memory that it reads, if it does.
    pub(super) read_from: Option<Arc<Neighbour>>,
    pub(super) bytes: u64,
}

/// The copiers of one agent, made when there is something for them.
pub(crate) struct DeviceCopies {
    devices: BTreeMap<u32, Device>,
    running: usize,
    traces: Traces,
    waker: Waker,
}

impl DeviceCopies {
    /// `waker` wakes the thread that takes note of what has ended.
    pub(crate) fn new(waker: Waker) -> DeviceCopies {
        DeviceCopies { devices: BTreeMap::new(), running: 0, traces: Traces::default(), waker }
    }

    /// Makes what is needed for copies on a device: the driver compiles a kernel, and what it gives memory for can wait for all
    /// that the device computes. An error is told when there is something to copy.
    pub(crate) fn prepare(&mut self, device: u32) {
        if let Err(error) = self.copier(device) {
            log::debug!("CUDA device {device}: {error}");
        }
    }

    /// The copier for a device.
    ///
    /// # Errors
    /// What the driver says when it is to be made.
    pub(super) fn copier(&mut self, device: u32) -> Result<&mut Copier> {
        use std::collections::btree_map::Entry;
        match self.devices.entry(device) {
            Entry::Occupied(made) => Ok(&mut made.into_mut().copier),
            Entry::Vacant(place) => {
                let copier = Copier::new(Arc::new(PrimaryContext::retain(device)?), LONG_BYTES)?;
                Ok(&mut place.insert(Device { copier, running: VecDeque::new(), unmapper: None }).copier)
            }
        }
    }

    /// The means to map a peer's region for a device.
    ///
    /// # Errors
    /// What the driver says when the copier is to be made, or the system when the thread is.
    pub(super) fn importing(&mut self, device: u32) -> Result<Importing<'_>> {
        self.copier(device)?;
        let none = || Error::new(ErrorKind::Internal, "no copier was made");
        let Device { copier, unmapper, .. } = self.devices.get_mut(&device).ok_or_else(none)?;
        let unmapper = match unmapper {
            Some(unmapper) => unmapper,
            None => {
                let waker = self.waker.clone();
                // A peer may wait to hear of it.
                unmapper.insert(Unmapper::start(move || waker.wake())?)
            }
        };
        Ok(Importing { context: copier.context(), unmapper, traces: &mut self.traces })
    }

    /// The traces of what was mapped of a region.
    pub(crate) fn traces(&self, owner: Incarnation, region: u32) -> Vec<Weak<()>> {
        self.traces.of(owner, region)
    }

    /// Hands a device's batch to it, an operation of a transfer; of how many bytes it fills in. Returns how many are under way now, and
    /// what the driver said.
    pub(super) fn launch(&mut self, device: u32, batch: StartedBatch) -> (u64, Result<()>) {
        let Some(Device { copier, running, .. }) = self.devices.get_mut(&device) else { return (0, Ok(())) };
        let bytes = copier.bytes();
        if bytes == 0 {
            copier.discard();
            return (0, Ok(()));
        }
        match copier.launch() {
            (true, launched) => {
                // Some of it may be under way where the driver refused, and none of it counts.
                running.push_back(StartedBatch { bytes: if launched.is_ok() { bytes } else { 0 }, ..batch });
                self.running += 1;
                (bytes, launched)
            }
            (false, launched) => (0, launched),
        }
    }

    /// Gives up what was added for a device and not launched. Returns whether nothing of it is under way.
    pub(super) fn discard(&mut self, device: u32) -> bool {
        self.devices.get_mut(&device).is_none_or(|made| {
            made.copier.discard();
            made.copier.bytes() == 0
        })
    }

    /// Whether nothing more can be added for a device now.
    pub(super) fn are_full(&self, device: u32) -> bool {
        self.devices.get(&device).is_some_and(|made| made.copier.fits(1) == 0)
    }

    /// Waits for all that is under way. Returns whether nothing is any more.
    pub(crate) fn finish(&mut self) -> bool {
        self.devices.values_mut().fold(true, |is_over, device| device.copier.finish() & is_over)
    }

    /// Whether anything is under way.
    pub(crate) fn are_running(&self) -> bool {
        self.running > 0
    }

    /// Whether memory of a peer is being copied.
    pub(crate) fn is_copying(&self, peer: PeerId) -> bool {
        self.running > 0 && self.devices.values().any(|device| device.running.iter().any(|batch| batch.peer == peer))
    }

    /// Takes note of the batches that have ended. Returns whether there were any.
    pub(crate) fn reap(&mut self, effects: &mut Effects) -> bool {
        if self.running == 0 {
            return false;
        }
        let mut any = false;
        for Device { copier, running, .. } in self.devices.values_mut() {
            while let Some(result) = copier.next_ended() {
                let Some(StartedBatch { transfer, peer, read_from, bytes }) = running.pop_front() else { break };
                self.running = self.running.saturating_sub(1);
                any = true;
                // A peer that has given this side up may use its memory for something else meanwhile.
                let result = result.and_then(|()| read_from.map_or(Ok(()), |owner| owner.check_at_once()));
                if let Err(error) = &result
                    && error.kind() == ErrorKind::PeerDied
                {
                    effects.lose(peer, error.clone());
                }
                let device_copied = if result.is_ok() { bytes } else { 0 };
                let moved = PathBytes { device_copied, ..PathBytes::default() };
                effects.push(Effect::OperationEnded(OperationEnd { transfer, windowed: None, moved, result }));
            }
        }
        any
    }
}
