//! A queue that UCX's callbacks push to and the worker's owner pops from, all on one thread at a time.

use std::cell::Cell;
use std::collections::VecDeque;

/// Takes the contents of a cell out, changes them, and puts them back. `how` neither calls nor drops anything that could come to
/// the same cell meanwhile, which would find it empty.
pub(super) fn change<T: Default, R>(cell: &Cell<T>, how: impl FnOnce(&mut T) -> R) -> R {
    let mut contents = cell.take();
    let result = how(&mut contents);
    cell.set(contents);
    result
}

/// First in, first out. Sharing it needs no lock and no borrow flag: it is `!Sync`, and nothing comes here while a method has
/// the contents out ([`change`]). So a callback that runs inside any UCX call may push.
pub(super) struct Queue<T>(Cell<VecDeque<T>>);

impl<T> Queue<T> {
    pub(super) fn new() -> Self {
        Self(Cell::new(VecDeque::new()))
    }

    pub(super) fn push(&self, item: T) {
        change(&self.0, |items| items.push_back(item));
    }

    pub(super) fn pop(&self) -> Option<T> {
        change(&self.0, VecDeque::pop_front)
    }

    pub(super) fn is_empty(&self) -> bool {
        change(&self.0, |items| items.is_empty())
    }
}
