//! Device memory of a peer on this host, as this process reaches it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use super::Peer;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::PrimaryContext;
use crate::mem::cuda::ipc::Imported;
use crate::proto::wire::MemoryKind;

/// Mappings of one peer's regions.
#[derive(Default)]
pub(crate) struct Imports {
    /// By region and device of this side.
    mapped: BTreeMap<(u32, u32), Arc<Imported>>,
    /// Regions that the driver did not map.
    refused: BTreeSet<u32>,
}

impl Imports {
    /// Forgets all but those of these regions.
    pub(super) fn retain(&mut self, regions: &BTreeSet<u32>) {
        self.mapped.retain(|(region, _), _| regions.contains(region));
        self.refused.retain(|region| regions.contains(region));
    }
}

impl Peer {
    /// Whether it is an agent of this process.
    fn is_in_this_process(&self) -> bool {
        self.neighbour.as_ref().is_some_and(|neighbour| u32::try_from(neighbour.process().0) == Ok(std::process::id()))
    }

    /// Whether this process can reach its region `index`, device memory, without it.
    pub(crate) fn is_importable(&self, index: u32) -> bool {
        let Some(Some((region, _))) = self.regions.get(index as usize) else { return false };
        matches!(region.kind, MemoryKind::Cuda { .. })
            && self.neighbour.is_some()
            && (region.handle.is_some() || self.is_in_this_process())
            && !self.imports.refused.contains(&index)
    }

    /// Whether that is so of all its device memory, as far as it is known.
    pub(crate) fn is_all_importable(&self) -> bool {
        let is_device = |region: &RemoteKind| matches!(region.1, MemoryKind::Cuda { .. });
        self.neighbour.is_some() && self.kinds().filter(is_device).all(|(index, _)| self.is_importable(index))
    }

    fn kinds(&self) -> impl Iterator<Item = RemoteKind> {
        self.regions.iter().zip(0..).filter_map(|(region, index)| Some((index, region.as_ref()?.0.kind)))
    }

    /// Its region `index`, for the device of `context`.
    ///
    /// # Errors
    /// What the driver says. The region is not importable any more then.
    pub(crate) fn import(&mut self, index: u32, context: &Arc<PrimaryContext>) -> Result<Arc<Imported>> {
        let key = (index, context.ordinal());
        if let Some(mapped) = self.imports.mapped.get(&key) {
            return Ok(Arc::clone(mapped));
        }
        let mapped = Arc::new(self.open(index, context).map_err(|error| self.refuse_import(index, error))?);
        self.imports.mapped.insert(key, Arc::clone(&mapped));
        Ok(mapped)
    }

    /// Its region `index` is not to be imported, for this reason.
    pub(crate) fn refuse_import(&mut self, index: u32, error: Error) -> Error {
        if self.imports.refused.is_empty() {
            log::warn!(
                "agent {}: its region {index} of device memory is not copied by the device but by UCX or by messages, which \
                 are slower: {error}",
                self.name
            );
        }
        self.imports.refused.insert(index);
        error
    }

    fn open(&self, index: u32, context: &Arc<PrimaryContext>) -> Result<Imported> {
        let region = self.regions.get(index as usize).and_then(Option::as_ref);
        let gone = || Error::not_found("a region of the plan is gone");
        let ((region, _), neighbour) = region.zip(self.neighbour.as_ref()).ok_or_else(gone)?;
        match (&region.handle, region.kind) {
            (_, MemoryKind::Cuda { device }) if self.is_in_this_process() => {
                Imported::of_this_process(context, device, region.base, region.len)
            }
            (Some(handle), _) => Imported::open(context, handle, region.len, neighbour.process().0),
            (None, _) => Err(Error::new(ErrorKind::Unsupported, "the region has no handle for other processes")),
        }
    }

    /// The peer deregisters its region `index`: nothing more is read or written there. Returns what is to be gone before that
    /// can be said.
    pub(crate) fn revoke(&mut self, index: u32) -> Vec<Weak<Imported>> {
        if let (Some(region), Some(len)) = (self.regions.get_mut(index as usize), self.lens.get_mut(index as usize)) {
            (*region, *len) = (None, 0);
        }
        let gone = self.imports.mapped.extract_if(.., |(region, _), _| *region == index);
        gone.map(|(_, mapped)| Arc::downgrade(&mapped)).collect()
    }
}

/// A region's index and what memory it is.
type RemoteKind = (u32, MemoryKind);
