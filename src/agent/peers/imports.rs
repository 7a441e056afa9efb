//! Device memory of a peer on this host, as this process reaches it, and the regions that a peer has revoked.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::Peer;
use super::peer::{MAX_RUNS, RemoteRegion};
use crate::agent::revocation::releases::Traces;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::cuda::PrimaryContext;
use crate::mem::cuda::ipc::Imported;
use crate::mem::cuda::unmapper::Unmapper;
use crate::proto::wire::MemoryKind;

/// The means to map a peer's memory for a device.
pub(crate) struct Importing<'a> {
    pub(crate) context: &'a Arc<PrimaryContext>,
    pub(crate) unmapper: &'a Unmapper,
    pub(crate) traces: &'a mut Traces,
}

impl Peer {
    /// Whether a device of this process can reach its region `index`, device memory, without it.
    pub(crate) fn is_importable(&self, index: u32, device: u32) -> bool {
        self.may_be_importable(index) && !self.imports.refused.contains(&(index, device))
    }

    /// Whether some device may.
    fn may_be_importable(&self, index: u32) -> bool {
        let Some((region, _)) = self.regions.get(&index) else { return false };
        matches!(region.kind, MemoryKind::Cuda { .. })
            && self.locality.neighbour.is_some()
            // Else it does not ask for its memory back.
            && self.locality.on_this_host
            && (region.handle.is_some() || self.locality.is_in_this_process())
            && !self.imports.are_off
    }

    /// Whether some device of this side does not reach its region `index`. UCX asks that of one device only, the current one
    /// when it gets to see the rkey, and its operations for others fail.
    pub(crate) fn is_unreached(&self, index: u32) -> bool {
        self.imports.unreached.iter().any(|(region, _)| *region == index)
    }

    /// Whether it has device memory and this process can reach all of it without the peer, as far as was tried.
    pub(crate) fn is_all_importable(&self) -> bool {
        let is_refused = |index: u32| self.imports.refused.iter().any(|(region, _)| *region == index);
        let mut devices = self.kinds().filter(|(_, kind)| matches!(kind, MemoryKind::Cuda { .. })).peekable();
        devices.peek().is_some() && devices.all(|(index, _)| self.may_be_importable(index) && !is_refused(index))
    }

    /// Its regions and what memory they are.
    pub(super) fn kinds(&self) -> impl Iterator<Item = RemoteKind> {
        self.regions.iter().map(|(index, (region, _))| (*index, region.kind))
    }

    /// Its region `index`, for a device.
    ///
    /// # Errors
    /// [`ErrorKind::PeerDied`] for a peer that has given this side up, as far as can be told. What else is wrong, as the driver says; the region is
    /// not importable for this device any more then.
    pub(crate) fn import(&mut self, index: u32, means: Importing<'_>) -> Result<Arc<Imported>> {
        let key = (index, means.context.ordinal());
        if let Some(mapped) = self.imports.mapped.get(&key) {
            return Ok(Arc::clone(mapped));
        }
        let opened = self.open(index, means);
        if let Some(neighbour) = &self.locality.neighbour {
            // To open it has taken a while; and the number of its process, whose descriptors were taken, can have become another's.
            neighbour.check_at_once().map_err(|error| Error::new(ErrorKind::PeerDied, error.message()))?;
        }
        match opened {
            Ok(mapped) => {
                let mapped = Arc::new(mapped);
                self.imports.mapped.insert(key, Arc::clone(&mapped));
                Ok(mapped)
            }
            Err(error) => Err(self.refuse_import(key, error)),
        }
    }

    /// Its region `index` is not to be imported for a device of this side, for this reason.
    pub(crate) fn refuse_import(&mut self, (index, device): (u32, u32), error: Error) -> Error {
        if !std::mem::replace(&mut self.imports.are_logged, true) {
            log::warn!(
                "agent {}: its region {index} of device memory is not copied by the device but by UCX or by messages, which \
                 are slower: {error}",
                self.name
            );
        }
        self.imports.refused.insert((index, device));
        if error.kind() == ErrorKind::Unsupported {
            self.imports.unreached.insert((index, device));
        }
        error
    }

    fn open(&self, index: u32, means: Importing<'_>) -> Result<Imported> {
        let region = self.regions.get(&index);
        let gone = || Error::not_found("a region of the plan is gone");
        let ((region, _), neighbour) = region.zip(self.locality.neighbour.as_ref()).ok_or_else(gone)?;
        let Importing { context, unmapper, traces } = means;
        let trace = traces.begin(self.incarnation, index);
        match (&region.handle, region.kind) {
            (_, MemoryKind::Cuda { device }) if self.locality.is_in_this_process() => {
                Imported::of_this_process(context, trace, device, region.base, region.len)
            }
            (Some(handle), _) => Imported::open(context, (unmapper, trace), handle, region.len, neighbour.process().0),
            (None, _) => Err(Error::new(ErrorKind::Unsupported, "the region has no handle for other processes")),
        }
    }

    /// The peer has revoked its regions of a run of indices: nothing more is read or written there.
    ///
    /// # Errors
    /// [`ErrorKind::PeerDied`] where UCX has mapped one of them, which it goes on doing until the connection ends, and
    /// where not all can be remembered that the peer has deregistered.
    pub(crate) fn take_revoked(&mut self, run: RangeInclusive<u32>) -> Result<()> {
        if run.is_empty() {
            return Ok(());
        }
        let gone: Vec<u32> = self.regions.range(run.clone()).map(|(index, _)| *index).collect();
        let mut mapped = None;
        for index in gone {
            // Operations that are under way hold the rkey.
            mapped =
                self.regions.remove(&index).filter(|region| self.is_mapped_by_ucx(region)).map(|_| index).or(mapped);
            self.removed.remove(&index);
        }
        self.imports.forget(&run);
        self.imports.revoked.add(run);
        if let Some(index) = mapped {
            return Err(Error::new(
                ErrorKind::PeerDied,
                format!("the peer has deregistered its region {index}, which UCX has mapped; connect again"),
            ));
        }
        if self.imports.revoked.len() > MAX_RUNS {
            // Older metadata would bring regions back that were forgotten. The next hello lists all that matter.
            return Err(Error::new(
                ErrorKind::PeerDied,
                format!(
                    "the peer has deregistered regions at more than {MAX_RUNS} places between others; connect again"
                ),
            ));
        }
        Ok(())
    }

    /// Tells whether UCX has mapped a region for its operations, as it does at the first one and until the connection ends.
    pub(super) fn is_mapped_by_ucx(&self, (region, rkey): &RemoteRegion) -> bool {
        // It may also have mapped what no lane of the connection is for.
        (self.reach.by_cuda_ipc || region.handle.is_some()) && region.kind != MemoryKind::Host && rkey.is_some()
    }
}

/// A region's index and what memory it is.
type RemoteKind = (u32, MemoryKind);
