//! Other agents' memory is unmapped in a thread of its own: the driver may have that wait for all that the device computes.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use super::stay_out_of_captures;
use crate::error::{Error, ErrorKind, Result};

/// A thread that drops mappings, which undoes them.
pub struct Unmapper {
    queue: Queue,
    /// Closed when the thread has ended.
    ended: Receiver<Infallible>,
}

/// Of what is to be dropped, until `None` comes or nobody is left who could send.
pub(super) type Queue = Sender<Option<Box<dyn Send>>>;

impl Unmapper {
    /// Starts the thread, which calls `unmapped` whenever it has undone a mapping.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] when the system makes no thread.
    pub fn start(unmapped: impl Fn() + Send + 'static) -> Result<Unmapper> {
        let (queue, dropped): (Queue, _) = channel();
        let (running, ended) = channel();
        let run = move || {
            let _running: Sender<Infallible> = running;
            stay_out_of_captures();
            while let Ok(Some(mapped)) = dropped.recv() {
                drop(mapped);
                unmapped();
            }
        };
        match thread::Builder::new().name("kvf-unmap".to_owned()).spawn(run) {
            Ok(_) => Ok(Unmapper { queue, ended }),
            Err(error) => {
                Err(Error::new(ErrorKind::Exhausted, format!("starting a thread that unmaps device memory: {error}")))
            }
        }
    }

    /// Where mappings go when they are dropped.
    pub(super) fn queue(&self) -> Queue {
        self.queue.clone()
    }

    /// Ends the thread when it has undone all mappings that were dropped before, and waits for that for so long. Returns whether it
    /// has. Those that are dropped later are undone where they are dropped.
    pub fn finish(self, limit: Duration) -> bool {
        let _ = self.queue.send(None);
        self.ended.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }
}
