//! Which memory of a process of this host the ferry thread may copy itself.
//!
//! The call that copies cannot be ended, so what may wait for a file's server or for another program is left to threads of
//! their own ([`Copiers`](super::copiers::Copiers)).

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::mem::process::Neighbour;

/// By region of the peer's: whether the kernel fills its pages by itself. Nothing is known to be until a thread has looked.
#[derive(Default)]
pub(super) struct Backing(Arc<OnceLock<Vec<bool>>>);

impl Backing {
    /// Starts to look. It takes as long as the process has memory, and for ever where that process holds its own locks.
    pub(super) fn look(neighbour: &Arc<Neighbour>, regions: Vec<Range<u64>>) -> Backing {
        let backing = Backing::default();
        if regions.is_empty() {
            return backing;
        }
        let (neighbour, found) = (Arc::clone(neighbour), Arc::clone(&backing.0));
        let look = move || match neighbour.is_filled_by_kernel(&regions) {
            Ok(filled) => {
                let _ = found.set(filled);
            }
            Err(error) => log::debug!("what is behind the memory of {neighbour:?}: {error}; copiers copy it"),
        };
        if let Err(error) = std::thread::Builder::new().name("kvf-look".to_owned()).spawn(look) {
            log::debug!("starting a thread to look at a process's memory: {error}; copiers copy it");
        }
        backing
    }

    /// Whether the kernel fills all of the region by itself.
    pub(super) fn is_kernel(&self, region: u32) -> bool {
        self.0.get().and_then(|regions| regions.get(region as usize)).is_some_and(|filled| *filled)
    }
}
