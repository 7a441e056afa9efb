//! A queue that UCX's callbacks push to and the worker's owner pops from, all on one thread at a time.

use std::cell::Cell;
use std::collections::VecDeque;

/// First in, first out. Sharing it needs no lock and no borrow flag: it is `!Sync`, and each method takes
/// the contents out, changes them, and puts them back without calling anything in between that could come
/// here again. So a callback that runs inside any UCX call may push.
pub(super) struct Queue<T>(Cell<VecDeque<T>>);

impl<T> Queue<T> {
    pub(super) fn new() -> Self {
        Self(Cell::new(VecDeque::new()))
    }

    pub(super) fn push(&self, item: T) {
        let mut items = self.0.take();
        items.push_back(item);
        self.0.set(items);
    }

    pub(super) fn pop(&self) -> Option<T> {
        let mut items = self.0.take();
        let item = items.pop_front();
        self.0.set(items);
        item
    }

    pub(super) fn is_empty(&self) -> bool {
        let items = self.0.take();
        let empty = items.is_empty();
        self.0.set(items);
        empty
    }
}
