//! Answers to callers on other threads, who may give up waiting.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Arc, AtomicBool};

/// Where the answer to a cold call goes. Either the caller gets it or the progress thread learns that nobody does.
pub(crate) struct Reply<T> {
    to: SyncSender<Result<T>>,
    /// Set by whichever comes first: the answer, or the end of the caller's patience.
    settled: Arc<AtomicBool>,
}

impl<T> Reply<T> {
    /// Answers. Gives the answer back if the caller does not wait any more.
    pub(crate) fn send(self, answer: Result<T>) -> std::result::Result<(), Result<T>> {
        if self.settled.swap(true, Ordering::AcqRel) {
            return Err(answer);
        }
        self.to.send(answer).map_err(|unsent| unsent.0)
    }

    /// Whether the caller still waits.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.settled.load(Ordering::Acquire)
    }
}

/// The caller's end of a [`Reply`].
pub(crate) struct Answer<T> {
    from: Receiver<Result<T>>,
    settled: Arc<AtomicBool>,
}

impl<T> Answer<T> {
    /// Waits for the answer. `None`: it did not come in time, and a later answer is refused.
    pub(crate) fn wait(self, timeout: Duration) -> Option<Result<T>> {
        let gone = || Err(Error::new(ErrorKind::ShutDown, "the agent is shut down"));
        match self.from.recv_timeout(timeout) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Disconnected) => Some(gone()),
            // It may be on its way just now.
            Err(RecvTimeoutError::Timeout) if self.settled.swap(true, Ordering::AcqRel) => {
                Some(self.from.recv().unwrap_or_else(|_| gone()))
            }
            Err(RecvTimeoutError::Timeout) => None,
        }
    }
}

/// The two ends of an answer.
pub(crate) fn answer<T>() -> (Reply<T>, Answer<T>) {
    let (to, from) = sync_channel(1);
    let settled = Arc::new(AtomicBool::new(false));
    (Reply { to, settled: Arc::clone(&settled) }, Answer { from, settled })
}
