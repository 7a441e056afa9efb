//! Which memory of a process of this host the progress thread may copy itself.
//!
//! The call that copies cannot be ended, so what may wait for a file's server or for another program is left to threads of
//! their own ([`CopyPool`](crate::agent::paths::copy_pool::CopyPool)).

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::agent::core::live::lock;
use crate::sys::thread::spawn;

/// Looks of this process that may be under way at a time. One does not end where the other process holds its own locks.
const MAX_LOOKS: usize = 64;
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// By region of the peer's: whether the kernel fills its pages by itself. Nothing is known to be until a thread has looked.
///
/// A look takes the longer the more memory the process has, whatever it looks for. So there is one at a time, and what
/// changes meanwhile is looked at together when it ends.
#[derive(Default)]
pub(super) struct Backing(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    regions: Vec<Region>,
    /// Whether there are others than when the last look began.
    changed: bool,
    is_looking: bool,
}

#[derive(Clone, PartialEq)]
struct Region {
    range: Range<u64>,
    is_kernel: bool,
}

const UNKNOWN: Region = Region { range: 0..0, is_kernel: false };

impl State {
    /// What is known of a range stays known of that index only: other memory may be at its place by the time of another.
    fn set(&mut self, index: usize, range: Range<u64>) {
        if self.regions.len() <= index {
            self.regions.resize(index.saturating_add(1), UNKNOWN);
        }
        if let Some(region) = self.regions.get_mut(index).filter(|region| region.range != range) {
            *region = Region { range, is_kernel: false };
            self.changed = true;
        }
    }

    /// What to look at now; none when all has been looked at.
    fn next(&mut self) -> Option<Vec<Range<u64>>> {
        self.is_looking = std::mem::take(&mut self.changed);
        self.is_looking.then(|| self.regions.iter().map(|region| region.range.clone()).collect())
    }

    fn take(&mut self, looked_at: &[Range<u64>], filled: &[bool]) {
        for ((region, range), filled) in self.regions.iter_mut().zip(looked_at).zip(filled) {
            if region.range == *range {
                region.is_kernel = *filled;
            }
        }
    }
}

impl Backing {
    /// Takes all of the peer's regions; `look` is asked about them if they are others than those known.
    pub(super) fn update<L>(&self, regions: Vec<Range<u64>>, look: L)
    where
        L: Fn(&[Range<u64>]) -> io::Result<Vec<bool>> + Send + 'static,
    {
        let mut state = lock(&self.0);
        state.regions.truncate(regions.len());
        for (index, range) in regions.into_iter().enumerate() {
            state.set(index, range);
        }
        self.look(&mut state, look);
    }

    /// Takes one more region.
    pub(super) fn add<L>(&self, index: usize, range: Range<u64>, look: L)
    where
        L: Fn(&[Range<u64>]) -> io::Result<Vec<bool>> + Send + 'static,
    {
        let mut state = lock(&self.0);
        state.set(index, range);
        self.look(&mut state, look);
    }

    /// Starts to look, unless a thread does already, which goes on with what has changed.
    fn look<L>(&self, state: &mut State, look: L)
    where
        L: Fn(&[Range<u64>]) -> io::Result<Vec<bool>> + Send + 'static,
    {
        if !state.changed || state.is_looking {
            return;
        }
        if LOOKS.fetch_add(1, Ordering::Relaxed) >= MAX_LOOKS {
            LOOKS.fetch_sub(1, Ordering::Relaxed);
            log::warn!(
                "{MAX_LOOKS} threads look behind the memory of other processes; copy threads copy that of one more"
            );
            return;
        }
        state.is_looking = true;
        let shared = Arc::clone(&self.0);
        let looks = move || {
            while let Some(ranges) = next(&shared) {
                match look(&ranges) {
                    Ok(filled) => lock(&shared).take(&ranges, &filled),
                    Err(error) => log::debug!("what is behind a process's memory: {error}; copy threads copy it"),
                }
            }
            LOOKS.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = spawn("kvf-look", looks) {
            // The next change looks at all.
            state.is_looking = false;
            LOOKS.fetch_sub(1, Ordering::Relaxed);
            log::debug!("starting a thread to look at a process's memory: {error}; copy threads copy it");
        }
    }

    /// Whether the kernel fills all of the region by itself.
    pub(super) fn is_kernel(&self, region: usize) -> bool {
        lock(&self.0).regions.get(region).is_some_and(|region| region.is_kernel)
    }
}

/// What to look at now; none when all has been looked at or nobody asks any more.
fn next(shared: &Arc<Mutex<State>>) -> Option<Vec<Range<u64>>> {
    if Arc::strong_count(shared) == 1 {
        return None;
    }
    lock(shared).next()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn regions_that_are_added_one_by_one_are_looked_at_by_one_thread_at_a_time() {
        let (backing, now, most, looks) = (Backing::default(), Arc::default(), Arc::default(), Arc::default());
        let look = || {
            let counters: [Arc<AtomicUsize>; 3] = [&now, &most, &looks].map(Arc::clone);
            move |ranges: &[Range<u64>]| {
                let [now, most, looks] = &counters;
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                looks.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(20));
                now.fetch_sub(1, Ordering::SeqCst);
                Ok(ranges.iter().map(|range| range.start % 4 != 3).collect())
            }
        };
        for index in 0..200 {
            backing.add(index, index as u64..index as u64 + 1, look());
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !(0..200).all(|index| backing.is_kernel(index) == (index % 4 != 3)) {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(most.load(Ordering::SeqCst), 1);
        assert!(looks.load(Ordering::SeqCst) < 100, "{looks:?}");
        // One that is the same is not looked at again; one with another range at its place is not known.
        backing.update((0..199).map(|start| start..start + 1).collect(), look());
        assert!(backing.is_kernel(0) && !backing.is_kernel(200));
        let gate = Arc::new(Mutex::new(()));
        let (held, wait) = (lock(&gate), Arc::clone(&gate));
        backing.add(0, 8..9, move |ranges: &[Range<u64>]| {
            drop(wait.lock());
            Ok(vec![true; ranges.len()])
        });
        assert!(!backing.is_kernel(0));
        drop(held);
    }
}
