//! Files that tell what a worker does, written by a thread of their own: a disk that hangs must not hold up the progress
//! thread, on which all transfers and heartbeats are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::sys::thread::spawn;

/// How long the end of a worker waits for the last lines to be written. On a busy machine the thread that writes them may
/// get no processor for more than a second.
const LAST_LINES: Duration = Duration::from_secs(5);

/// The progress thread's end of such a thread.
pub(super) struct Writer<T> {
    sender: Option<SyncSender<T>>,
    left_out: Arc<AtomicU64>,
    /// Never gets anything; disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// The thread's end.
pub(super) struct WriterInbox<T> {
    pub(super) receiver: Receiver<T>,
    left_out: Arc<AtomicU64>,
}

impl<T> WriterInbox<T> {
    /// How much was left out since it was last asked.
    pub(super) fn take_left_out(&self) -> u64 {
        self.left_out.swap(0, Ordering::Relaxed)
    }
}

impl<T: Send + 'static> Writer<T> {
    /// Starts the thread `name`, which writes `what` with `write` until nothing more can come. At most `waiting` pieces wait
    /// for it.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when the system refuses a thread.
    pub(super) fn start(
        name: &str,
        what: &str,
        waiting: usize,
        write: impl FnOnce(WriterInbox<T>) + Send + 'static,
    ) -> Result<Writer<T>> {
        let (sender, receiver) = sync_channel(waiting);
        let (alive, ended) = sync_channel(0);
        let left_out = Arc::new(AtomicU64::new(0));
        let inbox = WriterInbox { receiver, left_out: Arc::clone(&left_out) };
        let run = move || {
            write(inbox);
            drop::<SyncSender<()>>(alive);
        };
        spawn(name, run)
            .map_err(|e| Error::new(ErrorKind::Io, format!("starting the thread that writes {what}: {e}")))?;
        Ok(Writer { sender: Some(sender), left_out, ended })
    }

    /// Hands over what is to be written. Never waits: while the disk does not keep up, it is left out.
    pub(super) fn send(&self, piece: T) {
        if let Some(sender) = &self.sender
            && sender.try_send(piece).is_err()
        {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl<T> Drop for Writer<T> {
    fn drop(&mut self) {
        self.sender = None;
        // Ends when the thread is done, or when it takes too long: a disk that hangs must not hold up a shutdown.
        let _ = self.ended.recv_timeout(LAST_LINES);
    }
}
