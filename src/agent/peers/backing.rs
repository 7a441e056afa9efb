//! Which memory of a process of this host the progress thread may copy itself.
//!
//! The call that copies cannot be ended, so what may wait for a file's server or for another program is left to threads of
//! their own ([`CopyPool`](crate::agent::paths::copy_pool::CopyPool)).

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::sys::process::Neighbour;

/// Looks of this process that may be under way at a time. One does not end where the other process holds its own locks.
const MAX_LOOKS: usize = 64;
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// By region of the peer's: whether the kernel fills its pages by itself. Nothing is known to be until a thread has looked.
#[derive(Default)]
pub(super) struct Backing {
    regions: Vec<Range<u64>>,
    /// What was known when the look began.
    before: Vec<bool>,
    found: Arc<OnceLock<Vec<bool>>>,
}

impl Backing {
    /// Takes the peer's regions, and starts to look if they are others than those known. That takes as long as the
    /// process has memory, and for ever where the process holds its own locks.
    pub(super) fn update(&mut self, neighbour: &Arc<Neighbour>, regions: Vec<Range<u64>>) {
        if regions == self.regions || regions.is_empty() {
            return;
        }
        let known = |region: &Range<u64>| {
            let index = self.regions.iter().position(|known| known == region);
            index.is_some_and(|index| self.is_kernel(index))
        };
        let before = regions.iter().map(known).collect();
        *self = Backing { regions: regions.clone(), before, found: Arc::default() };
        let (neighbour, found) = (Arc::clone(neighbour), Arc::clone(&self.found));
        if LOOKS.fetch_add(1, Ordering::Relaxed) >= MAX_LOOKS {
            self.not_looked();
            log::warn!(
                "{MAX_LOOKS} threads look behind the memory of other processes; copy threads copy that of {neighbour:?}"
            );
            return;
        }
        let look = move || {
            match neighbour.is_filled_by_kernel(&regions) {
                Ok(filled) => drop(found.set(filled)),
                Err(error) => log::debug!("what is behind the memory of {neighbour:?}: {error}; copy threads copy it"),
            }
            LOOKS.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = std::thread::Builder::new().name("kvf-look".to_owned()).spawn(look) {
            self.not_looked();
            log::debug!("starting a thread to look at a process's memory: {error}; copy threads copy it");
        }
    }

    /// The next update looks, whatever it says.
    fn not_looked(&mut self) {
        LOOKS.fetch_sub(1, Ordering::Relaxed);
        self.regions.clear();
    }

    /// Whether the kernel fills all of the region by itself.
    pub(super) fn is_kernel(&self, region: usize) -> bool {
        self.found.get().unwrap_or(&self.before).get(region).is_some_and(|filled| *filled)
    }
}
