//! The progress thread as the handle holds it, and how it ended.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::command::{Command, Shared};
use crate::error::{Error, ErrorKind, Result};

/// The time that the thread gets beyond its own deadline to say that it ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The progress thread of one agent. It ends once, and its outcome is kept: memory that the first shutdown could not give back
/// is not given back by asking again.
pub(super) struct ProgressThread(Mutex<Life>);

enum Life {
    Runs(Thread),
    Ended(Result<()>),
}

struct Thread {
    join: JoinHandle<()>,
    /// Gets the outcome when the thread has freed (or given up) everything.
    ended: Receiver<Result<()>>,
}

impl ProgressThread {
    pub(super) fn new(join: JoinHandle<()>, ended: Receiver<Result<()>>) -> ProgressThread {
        ProgressThread(Mutex::new(Life::Runs(Thread { join, ended })))
    }

    /// Whether nobody has ended it.
    pub(super) fn is_running(&mut self) -> bool {
        matches!(self.0.get_mut().unwrap_or_else(PoisonError::into_inner), Life::Runs(_))
    }

    /// Ends the thread, within `timeout`, or waits for the caller that does. Returns the outcome, the same to every caller.
    pub(super) fn end(&self, shared: &Shared, timeout: Duration) -> Result<()> {
        let mut life = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The result for later callers should ending it panic.
        let unknown =
            Error::new(ErrorKind::Internal, "ending the progress thread panicked; keep registered memory alive");
        let outcome = match std::mem::replace(&mut *life, Life::Ended(Err(unknown))) {
            Life::Runs(thread) => thread.end(shared, timeout),
            Life::Ended(outcome) => outcome,
        };
        *life = Life::Ended(outcome.clone());
        outcome
    }
}

impl Thread {
    fn end(self, shared: &Shared, timeout: Duration) -> Result<()> {
        let Thread { join, ended } = self;
        let now = Instant::now();
        // A timeout beyond what the clock holds is as good as a year.
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 86_400));
        shared.command(Command::ShutDown { deadline });
        let panicked = || Error::new(ErrorKind::Internal, "the progress thread panicked; the log has its message");
        match ended.recv_timeout(timeout.saturating_add(LAST_WORDS)) {
            Ok(outcome) => join.join().map_err(|_| panicked()).and(outcome),
            Err(RecvTimeoutError::Disconnected) => {
                let _ = join.join();
                shared.end();
                Err(panicked())
            }
            Err(RecvTimeoutError::Timeout) => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "the progress thread did not end within {timeout:?}; it is left behind, keep registered memory alive"
                ),
            )),
        }
    }
}
