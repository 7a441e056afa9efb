//! A byte by which a worker tells whoever looks that it has news.
//!
//! Its memory is never given back to the system, only to the next worker. So a look needs neither a call nor a lock, nor
//! care for the worker's end: at the worst it sees another worker's news, and the poll that follows finds out.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The bytes of workers that are gone.
static FREE: Mutex<Vec<&'static AtomicU8>> = Mutex::new(Vec::new());

fn free() -> MutexGuard<'static, Vec<&'static AtomicU8>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One worker's byte: 0 without news.
pub(super) struct Beacon(&'static AtomicU8);

impl Beacon {
    pub(super) fn set(&self, news: bool) {
        self.0.store(news.into(), Ordering::Release);
    }

    /// Where it is. May be read until the process ends.
    pub(super) fn address(&self) -> *const u8 {
        self.0.as_ptr()
    }
}

impl Default for Beacon {
    fn default() -> Self {
        let old = free().pop();
        Self(old.unwrap_or_else(|| Box::leak(Box::new(AtomicU8::new(0)))))
    }
}

impl Drop for Beacon {
    fn drop(&mut self) {
        self.set(false);
        free().push(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_one_workers_at_a_time_and_reads_0_at_first() {
        let (one, other) = (Beacon::default(), Beacon::default());
        one.set(true);
        assert_ne!(one.address(), other.address());
        assert_eq!((one.0.load(Ordering::Acquire), other.0.load(Ordering::Acquire)), (1, 0));
        drop(one);
        let next = Beacon::default();
        assert_eq!(next.0.load(Ordering::Acquire), 0);
        assert_ne!(next.address(), other.address());
    }
}
