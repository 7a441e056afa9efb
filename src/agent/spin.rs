//! How many ferry threads of a process may spin at once.
//!
//! Spinning pays while a processor has nothing better to do. An agent spins alone in most processes; where a process has many,
//! such as an engine of 64 ranks, all of them are asked at once when a peer first comes, and each would then keep a
//! processor from those that have work: first contact took a sixth longer on two processors.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many threads of this process spin.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// One thread's leave to spin.
#[derive(Debug)]
pub(super) struct Spinner {
    spinning: &'static AtomicUsize,
    /// So many at most spin at once.
    most: usize,
    spins: bool,
}

impl Spinner {
    /// For half of the processors, at least one.
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Spinner { spinning: &SPINNING, most: (processors / 2).max(1), spins: false }
    }

    /// Whether the thread may spin, or go on spinning.
    pub(super) fn may_spin(&mut self) -> bool {
        // Nothing else depends on the number.
        let join =
            || self.spinning.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.most).then_some(n + 1));
        self.spins = self.spins || join().is_ok();
        self.spins
    }

    /// The thread spins no longer.
    pub(super) fn rest(&mut self) {
        if std::mem::take(&mut self.spins) {
            self.spinning.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_spin_at_once_than_are_allowed() {
        static SOME: AtomicUsize = AtomicUsize::new(0);
        let spinner = || Spinner { spinning: &SOME, most: 2, spins: false };
        let (mut a, mut b, mut c) = (spinner(), spinner(), spinner());
        assert!(a.may_spin() && b.may_spin() && a.may_spin());
        assert!(!c.may_spin());
        a.rest();
        a.rest();
        assert!(c.may_spin() && !a.may_spin());
        drop(b);
        assert!(a.may_spin());
        drop((a, c));
        assert_eq!(SOME.load(Ordering::Relaxed), 0);
    }
}
