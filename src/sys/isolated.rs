//! A value that threads use in turn, of parts that must not be used at once.

use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard};

/// Why there is no value any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// It was taken out.
    Ended,
    /// A thread panicked while it had it.
    Broken,
}

/// A value for one thread at a time, whose parts may share each other (`Rc`). [`Mutex`] alone does not allow that.
///
/// It is made of what may go from thread to thread, and lent only to functions that take and return such things, so none
/// of its parts is ever shared with anything outside. What the compiler cannot see remains: the value must not put parts
/// of itself into variables of a thread, nor have parts that belong to the thread that made them, such as a lock's guard.
#[derive(Debug)]
pub struct Isolated<T>(Mutex<Option<Whole<T>>>);

#[derive(Debug)]
struct Whole<T>(T);

// SAFETY: a `Whole` is made by `Isolated::new` alone, inside a function that is `Send`, so it shares no `Rc` with what
// stayed outside; and functions that get at it are `Send` and return what is `Send`, so they cannot bring any part in or
// out. Whatever its parts share among each other is therefore used only by the thread that has the lock, which orders one
// thread's use before the next one's. What is put into it keeps the promise of `Isolated`: UCX's objects may be used by any
// thread, one at a time (`UCS_THREAD_MODE_SERIALIZED`).
unsafe impl<T> Send for Whole<T> {}

impl<T> Isolated<T> {
    /// Makes the value, on the calling thread.
    ///
    /// # Errors
    /// That of `make`.
    pub fn new<E: Send>(make: impl FnOnce() -> Result<T, E> + Send) -> Result<Self, E> {
        Ok(Isolated(Mutex::new(Some(Whole(make()?)))))
    }

    /// Waits until no other thread has the value, and lends it.
    ///
    /// # Errors
    /// When there is none any more.
    pub fn with<R: Send>(&self, use_it: impl FnOnce(&mut T) -> R + Send) -> Result<R, Gone> {
        let mut value = self.0.lock().map_err(|_| Gone::Broken)?;
        lend(&mut value, use_it)
    }

    /// Lends the value if no other thread has it.
    pub fn try_with<R: Send>(&self, use_it: impl FnOnce(&mut T) -> R + Send) -> Option<R> {
        lend(&mut self.0.try_lock().ok()?, use_it).ok()
    }

    /// Takes the value out and gives it to `end`.
    ///
    /// # Errors
    /// When there is none any more.
    pub fn end<R: Send>(&self, end: impl FnOnce(T) -> R + Send) -> Result<R, Gone> {
        let value = self.0.lock().map_err(|_| Gone::Broken)?.take();
        // Not with the lock: whoever tries meanwhile finds that there is none.
        value.map(|whole| end(whole.0)).ok_or(Gone::Ended)
    }

    /// Drops the value on the calling thread, also after a panic.
    pub fn clear(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn lend<T, R>(value: &mut MutexGuard<'_, Option<Whole<T>>>, use_it: impl FnOnce(&mut T) -> R) -> Result<R, Gone> {
    match value.as_mut() {
        Some(whole) => Ok(use_it(&mut whole.0)),
        None => Err(Gone::Ended),
    }
}
