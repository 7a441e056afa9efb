//! The agent's own regions.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use super::ids::RegionId;
use super::reply::Reply;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::{PrimaryContext, ipc};
use crate::mem::{self, MemoryRange};
use crate::proto::wire::limits::MAX_REGIONS;
use crate::proto::wire::{MemoryKind, RegionMetadata};
use crate::ucx;

struct Region {
    range: MemoryRange,
    memory: Arc<ucx::Memory>,
    exported: Option<ipc::Exported>,
    metadata: RegionMetadata,
    /// Transfers that name it and are not over.
    users: u32,
    /// Whom to tell when it is unmapped; `Some` as soon as it is being deregistered.
    closing: Option<Vec<Reply<()>>>,
}

/// Regions by index. `None`: deregistered.
pub(crate) struct Regions {
    salt: u64,
    slots: Vec<Option<Region>>,
    /// Length by index, 0 for what is gone or going: what plans are checked against.
    lens: Vec<u64>,
    /// Until when peers that read a region may still do so, of those that are being deregistered.
    graces: BTreeMap<u32, Instant>,
    /// The primary contexts of the devices in use; the first is the progress thread's current one.
    cuda: BTreeMap<u32, PrimaryContext>,
}

impl Regions {
    pub(crate) fn new(salt: u64) -> Self {
        Regions { salt, slots: Vec::new(), lens: Vec::new(), graces: BTreeMap::new(), cuda: BTreeMap::new() }
    }

    /// Checks and registers a range; the thread that calls is the one that drives UCX.
    pub(crate) fn register(&mut self, context: &Arc<ucx::Context>, range: MemoryRange) -> Result<RegionId> {
        let index = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        if self.slots.len() >= MAX_REGIONS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "{MAX_REGIONS} regions were registered in this agent's life; register larger ranges, or start anew"
                ),
            ));
        }
        if let MemoryKind::Cuda { device } = range.kind() {
            self.enter_device(&range, device)?;
        }
        let mapped = self.map(context, range);
        if let Some(first) = self.cuda.values().next() {
            first.make_current()?;
        }
        let region = mapped?;
        self.lens.push(range.len());
        self.slots.push(Some(region));
        Ok(RegionId::of_index(self.salt, index))
    }

    /// Holds the device's primary context and makes it current, so that UCX finds it.
    fn enter_device(&mut self, range: &MemoryRange, device: u32) -> Result<()> {
        // Before a context is made on a device that does not own the memory.
        mem::check(range)?;
        match self.cuda.entry(device) {
            Entry::Occupied(held) => held.get().make_current(),
            Entry::Vacant(place) => place.insert(PrimaryContext::retain(device)?).make_current(),
        }
    }

    fn map(&self, context: &Arc<ucx::Context>, range: MemoryRange) -> Result<Region> {
        let (memory, is_filled_by_kernel) = mem::map(context, &range)?;
        let rkey = memory.pack_rkey().map_err(|e| mem::ucx_error(e).context(format!("exporting {range}")))?;
        let exported = ipc::export(&range).unwrap_or_else(|error| {
            log::warn!("{range} cannot be mapped by other processes, and goes to them by UCX or by messages: {error}");
            None
        });
        let handle = exported.as_ref().map(|exported| exported.handle.clone());
        let is_scattered = ipc::is_scattered(&range);
        let (base, len, kind) = (range.addr(), range.len(), range.kind());
        let metadata = RegionMetadata { base, len, kind, rkey, handle, is_scattered, is_filled_by_kernel };
        Ok(Region { range, memory, exported, metadata, users: 0, closing: None })
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &Region)> {
        self.slots.iter().enumerate().filter_map(|(index, region)| Some((index, region.as_ref()?)))
    }

    fn live(&self, index: u32) -> Option<&Region> {
        self.slots.get(index as usize)?.as_ref().filter(|region| region.closing.is_none())
    }

    /// Whether a peer may read and write a region without this side: host memory where the two are so near that the kernel
    /// copies between them, device memory on the same host.
    pub(crate) fn may_be_used_by(&self, index: u32, on_this_host: bool, is_near: bool) -> bool {
        match self.range(index).map(MemoryRange::kind) {
            Some(MemoryKind::Host) => is_near,
            Some(MemoryKind::Cuda { .. }) => on_this_host,
            None => false,
        }
    }

    /// The indices of registered regions.
    pub(crate) fn registered(&self) -> Vec<u32> {
        (0..).zip(&self.slots).filter(|(index, _)| self.live(*index).is_some()).map(|(index, _)| index).collect()
    }

    /// Lengths by index.
    pub(crate) fn lens(&self) -> &[u64] {
        &self.lens
    }

    /// The registration of a region that may be used.
    pub(crate) fn memory(&self, index: u32) -> Option<&Arc<ucx::Memory>> {
        self.slots.get(index as usize)?.as_ref().map(|region| &region.memory)
    }

    /// The range of a registered region.
    pub(crate) fn range(&self, index: u32) -> Option<&MemoryRange> {
        self.slots.get(index as usize)?.as_ref().map(|region| &region.range)
    }

    /// The range of a region, unless it is being deregistered or is none.
    pub(crate) fn live_range(&self, index: u32) -> Result<&MemoryRange> {
        self.live(index).map(|region| &region.range).ok_or_else(|| {
            let why = if (index as usize) < self.slots.len() { "was deregistered" } else { "was never registered" };
            Error::not_found(format!("the plan names local region {index}, which {why}"))
        })
    }

    /// Notes that a transfer uses these regions.
    pub(crate) fn enter(&mut self, indices: &[u32]) {
        for index in indices {
            if let Some(Some(region)) = self.slots.get_mut(*index as usize) {
                region.users = region.users.saturating_add(1);
            }
        }
    }

    /// Notes that a transfer that used these regions is over; unmaps those that waited for it.
    pub(crate) fn leave(&mut self, indices: &[u32]) {
        for index in indices {
            if let Some(Some(region)) = self.slots.get_mut(*index as usize) {
                region.users = region.users.saturating_sub(1);
            }
            self.unmap_if_unused(*index);
        }
    }

    /// Starts a deregistration: no new transfer may use the region; `reply` is told when it is unmapped. Peers that read it
    /// now have until `grace`. Returns its index, for the caller to cancel what uses it and then to call
    /// [`Regions::unmap_if_unused`].
    pub(crate) fn close(&mut self, id: RegionId, reply: Reply<()>, grace: Option<Instant>) -> Option<u32> {
        let index = id.index();
        let known = RegionId::of_index(self.salt, index) == id;
        match self.slots.get_mut(index as usize) {
            Some(Some(region)) if known => {
                let waiting = region.closing.get_or_insert_default();
                waiting.retain(Reply::is_wanted);
                waiting.push(reply);
                if let Some(grace) = grace {
                    self.graces.entry(index).or_insert(grace);
                }
                if let Some(len) = self.lens.get_mut(index as usize) {
                    *len = 0;
                }
                Some(index)
            }
            _ => {
                // The caller may have given up waiting, here and below.
                let _ = reply.send(Err(id.unknown()));
                None
            }
        }
    }

    /// Unmaps a region that was registered for a caller who does not know of it.
    pub(crate) fn forget(&mut self, id: RegionId) {
        if let Some(slot) = self.slots.get_mut(id.index() as usize) {
            *slot = None;
        }
        self.graces.remove(&id.index());
        if let Some(len) = self.lens.get_mut(id.index() as usize) {
            *len = 0;
        }
    }

    /// The next end of a grace.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.graces.values().min().copied()
    }

    /// Takes the regions whose readers have had their time.
    pub(crate) fn take_overdue(&mut self, now: Instant) -> Vec<u32> {
        let overdue: Vec<u32> = self.graces.iter().filter(|(_, at)| **at <= now).map(|(index, _)| *index).collect();
        for index in &overdue {
            self.graces.remove(index);
        }
        overdue
    }

    /// Unmaps a region that is being deregistered if no transfer uses it any more.
    pub(crate) fn unmap_if_unused(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let unused = slot.as_ref().is_some_and(|region| region.users == 0 && region.closing.is_some());
        if let Some(Region { memory, exported, closing, .. }) = slot.take_if(|_| unused) {
            self.graces.remove(&index);
            // The last owner: operations hold one each, and there are none. Descriptors of device memory keep it from being free.
            drop((memory, exported));
            for reply in closing.unwrap_or_default() {
                let _ = reply.send(Ok(()));
            }
        }
    }

    /// Deregistrations that are under way do not end well: the agent ends before what uses the memory has.
    pub(crate) fn abandon(&mut self) {
        for region in self.slots.iter_mut().flatten() {
            for reply in region.closing.take().unwrap_or_default() {
                let _ = reply.send(Err(Error::new(
                    ErrorKind::Timeout,
                    "the agent's shutdown ran out of time while the region was in use; its memory must stay alive",
                )));
            }
        }
    }

    /// The regions as peers see them. An index that is gone stays as an empty entry if a live one follows.
    pub(crate) fn metadata(&self) -> Vec<RegionMetadata> {
        let gone = || RegionMetadata::unreachable(0);
        let count = (0..self.slots.len()).rev().find(|index| self.live(*index as u32).is_some()).map_or(0, |i| i + 1);
        (0..count).map(|index| self.live(index as u32).map_or_else(gone, |region| region.metadata.clone())).collect()
    }

    /// One region as peers see it.
    pub(crate) fn metadata_of(&self, id: RegionId) -> Result<RegionMetadata> {
        let known = RegionId::of_index(self.salt, id.index()) == id;
        let region = self.live(id.index()).filter(|_| known).ok_or_else(|| id.unknown())?;
        Ok(region.metadata.clone())
    }

    /// Takes a region for memory of another kind, for tests of what follows from that.
    #[cfg(test)]
    pub(crate) fn describe_as(&mut self, id: RegionId, kind: MemoryKind) {
        if let Some(Some(region)) = self.slots.get_mut(id.index() as usize) {
            region.range = region.range.described_as(kind);
        }
    }

    /// How many are registered, and their bytes.
    pub(crate) fn totals(&self) -> (u64, u64) {
        self.iter().fold((0, 0), |(count, bytes), (_, region)| (count + 1, bytes + region.range.len()))
    }
}
