//! Numbers that stand for things, each given out once.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicUsize, RwLock};

/// Numbers start in a page that no process maps, so that following a handle by mistake faults at once.
pub(super) const FIRST: usize = STEP;
const STEP: usize = 0x10;

/// Things that are alive, by number. Usable from any thread.
pub(super) struct NumberTable<T> {
    live: RwLock<Option<HashMap<usize, T>>>,
    next: AtomicUsize,
}

impl<T> NumberTable<T> {
    /// From an empty map and the first number.
    pub(super) const fn from(live: RwLock<Option<HashMap<usize, T>>>, next: AtomicUsize) -> Self {
        NumberTable { live, next }
    }

    /// The number of the next thing. Takes no lock.
    pub(super) fn next(&self) -> usize {
        self.next.load(Ordering::Relaxed)
    }

    /// Gives `thing` a number.
    pub(super) fn insert(&self, thing: T) -> usize {
        let number = self.next.fetch_add(STEP, Ordering::Relaxed);
        self.live.write().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(number, thing);
        number
    }

    /// Returns the result of `look` at the thing with this number.
    pub(super) fn look<R>(&self, number: usize, look: impl FnOnce(Option<&T>) -> R) -> R {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        look(live.as_ref().and_then(|live| live.get(&number)))
    }

    /// Takes the thing with this number away, unless `look` makes an error of it. Dropping the thing is left to the
    /// caller, who does not hold the table any more.
    pub(super) fn take<R, E>(
        &self,
        number: usize,
        look: impl FnOnce(Option<&T>) -> Result<R, E>,
    ) -> Result<(R, Option<T>), E> {
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        let found = look(live.as_ref().and_then(|live| live.get(&number)))?;
        Ok((found, live.as_mut().and_then(|live| live.remove(&number))))
    }
}
