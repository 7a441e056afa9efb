//! Other agents' memory is unmapped in a thread of its own: the driver may have that wait for all that the device computes.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use super::stay_out_of_captures;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::thread::spawn;

/// A thread that drops mappings, which undoes them. Dropping it waits until it has.
pub struct Unmapper {
    queue: Queue,
    thread: Option<JoinHandle<()>>,
}

/// Things to drop, until `None` comes.
pub(super) type Queue = Sender<Option<Box<dyn Send>>>;

impl Unmapper {
    /// Starts the thread, which calls `unmapped` whenever it has undone a mapping.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] when the system makes no thread.
    pub fn start(unmapped: impl Fn() + Send + 'static) -> Result<Unmapper> {
        let (queue, dropped): (Queue, _) = channel();
        let run = move || {
            stay_out_of_captures();
            while let Ok(Some(mapped)) = dropped.recv() {
                drop(mapped);
                unmapped();
            }
        };
        match spawn("kvf-unmap", run) {
            Ok(thread) => Ok(Unmapper { queue, thread: Some(thread) }),
            Err(error) => {
                Err(Error::new(ErrorKind::Exhausted, format!("starting a thread that unmaps device memory: {error}")))
            }
        }
    }

    /// Where mappings go when they are dropped. Those that are dropped after the thread's end are undone at once.
    pub(super) fn queue(&self) -> Queue {
        self.queue.clone()
    }
}

impl Drop for Unmapper {
    fn drop(&mut self) {
        let _ = self.queue.send(None);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
