//! The agent's own regions.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::ids::{PeerId, RegionId};
use super::reply::Reply;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::{PrimaryContext, ipc};
use crate::mem::{self, MemoryRange};
use crate::proto::wire::limits::MAX_REGIONS;
use crate::proto::wire::{LateRegion, MemoryKind, RegionMetadata};
use crate::ucx;

/// A use of a region by a peer, or by a transfer with it: the region stays registered as long as there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) region: u32,
    pub(crate) peer: PeerId,
    uses: Rc<Uses>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.uses.is_closing.get() {
            self.uses.ended.borrow_mut().push(self.region);
        }
    }
}

/// What the holds of a region share.
#[derive(Debug, Default, PartialEq, Eq)]
struct Uses {
    is_closing: Cell<bool>,
    /// Regions that are being deregistered and of which a hold has ended, in the order of these ends.
    ended: Rc<RefCell<Vec<u32>>>,
}

#[cfg(test)]
impl Hold {
    /// One of a region that there is not, for tests.
    pub(crate) fn new(region: u32, peer: PeerId) -> Hold {
        Hold { region, peer, uses: Rc::default() }
    }
}

struct Region {
    range: MemoryRange,
    memory: Arc<ucx::Memory>,
    exported: Option<ipc::Exported>,
    metadata: RegionMetadata,
    /// Shared by its holds.
    uses: Rc<Uses>,
    /// Whom to tell when it is unmapped; `Some` as soon as it is being deregistered.
    closing: Option<Vec<Reply<()>>>,
}

/// The registered regions.
pub(crate) struct Regions {
    salt: u64,
    /// By index. What was deregistered is not there.
    table: BTreeMap<u32, Region>,
    /// The next region's index; none is used twice.
    next: u32,
    /// Until when peers may still read those that are being deregistered.
    graces: BTreeMap<u32, Instant>,
    /// Shared with the uses of all regions.
    ended: Rc<RefCell<Vec<u32>>>,
    /// The primary contexts of the devices in use; the first is the progress thread's current one.
    cuda: BTreeMap<u32, PrimaryContext>,
}

impl Regions {
    pub(crate) fn new(salt: u64) -> Self {
        Regions {
            salt,
            table: BTreeMap::new(),
            next: 0,
            graces: BTreeMap::new(),
            ended: Rc::default(),
            cuda: BTreeMap::new(),
        }
    }

    /// Checks and registers a range; the thread that calls is the one that drives UCX.
    pub(crate) fn register(&mut self, context: &Arc<ucx::Context>, range: MemoryRange) -> Result<RegionId> {
        if self.table.len() >= MAX_REGIONS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "{MAX_REGIONS} regions are registered, and no more can be at a time: deregister those that are not \
                     needed, or register larger ranges"
                ),
            ));
        }
        let index = self.next;
        let Some(next) = index.checked_add(1) else {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "this agent has registered {index} regions in its life and has no index for another; start a new one"
                ),
            ));
        };
        if let MemoryKind::Cuda { device } = range.kind() {
            self.enter_device(&range, device)?;
        }
        let mapped = self.map(context, range);
        if let Some(first) = self.cuda.values().next() {
            first.make_current()?;
        }
        let region = mapped?;
        self.table.insert(index, region);
        self.next = next;
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
        Ok(Region { range, memory, exported, metadata, uses: self.uses(), closing: None })
    }

    fn uses(&self) -> Rc<Uses> {
        Rc::new(Uses { is_closing: Cell::new(false), ended: Rc::clone(&self.ended) })
    }

    fn live(&self, index: u32) -> Option<&Region> {
        self.table.get(&index).filter(|region| region.closing.is_none())
    }

    /// Those that are not being deregistered.
    fn all_live(&self) -> impl Iterator<Item = (u32, &Region)> {
        self.table.iter().filter(|(_, region)| region.closing.is_none()).map(|(index, region)| (*index, region))
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

    /// The index that the next region gets: all of before are below it.
    pub(crate) fn next_index(&self) -> u32 {
        self.next
    }

    /// The indices of registered regions.
    pub(crate) fn registered(&self) -> Vec<u32> {
        self.all_live().map(|(index, _)| index).collect()
    }

    /// The length of a region that transfers may begin with.
    pub(crate) fn live_len(&self, index: u32) -> Option<u64> {
        self.live(index).map(|region| region.range.len())
    }

    /// The registration of a region that may be used.
    pub(crate) fn memory(&self, index: u32) -> Option<&Arc<ucx::Memory>> {
        self.table.get(&index).map(|region| &region.memory)
    }

    /// The range of a registered region.
    pub(crate) fn range(&self, index: u32) -> Option<&MemoryRange> {
        self.table.get(&index).map(|region| &region.range)
    }

    /// The range of a region, unless it is being deregistered or is none.
    pub(crate) fn live_range(&self, index: u32) -> Result<&MemoryRange> {
        self.live(index).map(|region| &region.range).ok_or_else(|| {
            let why = if index < self.next { "was deregistered" } else { "was never registered" };
            Error::not_found(format!("the plan names local region {index}, which {why}"))
        })
    }

    /// A use of a region by a peer.
    pub(crate) fn hold(&self, region: u32, peer: PeerId) -> Option<Hold> {
        self.table.get(&region).map(|known| Hold { region, peer, uses: Rc::clone(&known.uses) })
    }

    /// Starts a deregistration: no new transfer may use the region; `reply` is told when it is unmapped. Peers that read it
    /// now have until `grace`. Returns its index, for the caller to end what uses it and then to call
    /// [`Regions::unmap_unused`].
    pub(crate) fn close(&mut self, id: RegionId, reply: Reply<()>, grace: Option<Instant>) -> Option<u32> {
        let index = id.index();
        let known = RegionId::of_index(self.salt, index) == id;
        match self.table.get_mut(&index) {
            Some(region) if known => {
                let waiting = region.closing.get_or_insert_default();
                waiting.retain(Reply::is_wanted);
                waiting.push(reply);
                // Anew for a caller who asks again: other peers may read it now.
                if let Some(grace) = grace {
                    self.graces.entry(index).or_insert(grace);
                }
                region.uses.is_closing.set(true);
                self.ended.borrow_mut().push(index);
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
        self.table.remove(&id.index());
        self.graces.remove(&id.index());
    }

    /// The next end of a grace.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.graces.values().min().copied()
    }

    /// Takes the regions whose readers have had their time.
    pub(crate) fn take_overdue(&mut self, now: Instant) -> Vec<u32> {
        let overdue: Vec<u32> =
            self.graces.iter().filter(|(_, grace)| **grace <= now).map(|(index, _)| *index).collect();
        for index in &overdue {
            self.graces.remove(index);
        }
        overdue
    }

    /// Unmaps the regions that are being deregistered and that nothing uses any more.
    pub(crate) fn unmap_unused(&mut self) {
        for index in self.ended.take() {
            let Entry::Occupied(region) = self.table.entry(index) else { continue };
            // One whose deregistration was abandoned stays.
            if region.get().closing.is_none() || Rc::strong_count(&region.get().uses) > 1 {
                continue;
            }
            self.graces.remove(&index);
            let Region { memory, exported, closing, .. } = region.remove();
            // The last owner: operations hold one each, and there are none. Descriptors of device memory keep it from being free.
            drop((memory, exported));
            for reply in closing.unwrap_or_default() {
                let _ = reply.send(Ok(()));
            }
        }
    }

    /// Deregistrations that are under way do not end well: the agent ends before what uses the memory has.
    pub(crate) fn abandon(&mut self) {
        for region in self.table.values_mut() {
            for reply in region.closing.take().unwrap_or_default() {
                let _ = reply.send(Err(Error::new(
                    ErrorKind::Timeout,
                    "the agent's shutdown ran out of time while the region was in use; its memory must stay alive",
                )));
            }
        }
    }

    /// The regions as peers see them: by position, where an index that is gone stays as an empty entry if a live one
    /// follows, and those with higher indices.
    pub(crate) fn metadata(&self) -> (Vec<RegionMetadata>, Vec<LateRegion>) {
        let (mut by_position, mut late) = (Vec::new(), Vec::new());
        for (index, Region { metadata, .. }) in self.all_live() {
            if (index as usize) < MAX_REGIONS {
                by_position.resize(index as usize, RegionMetadata::unreachable(0));
                by_position.push(metadata.clone());
            } else {
                late.push(LateRegion { index, region: metadata.clone() });
            }
        }
        (by_position, late)
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
        if let Some(region) = self.table.get_mut(&id.index()) {
            region.range = region.range.described_as(kind);
        }
    }

    /// Registers the same memory again until there are as many regions, for tests of what follows from that.
    #[cfg(test)]
    pub(crate) fn fill(&mut self, id: RegionId, count: usize) {
        while let Some(Region { range, memory, metadata, .. }) = self.table.get(&id.index())
            && self.table.len() < count
        {
            let (range, memory, metadata) = (*range, Arc::clone(memory), metadata.clone());
            let uses = self.uses();
            self.table.insert(self.next, Region { range, memory, exported: None, metadata, uses, closing: None });
            self.next += 1;
        }
    }

    /// Goes on with later indices, as if as many regions had been registered and were gone, for tests of what follows
    /// from that.
    #[cfg(test)]
    pub(crate) fn begin_at(&mut self, next: u32) {
        self.next = next;
    }

    /// How many are registered, and their bytes.
    pub(crate) fn totals(&self) -> (u64, u64) {
        (self.table.len() as u64, self.table.values().map(|region| region.range.len()).sum())
    }
}
