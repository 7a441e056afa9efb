//! How kvferry starts its threads, and how they wait.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Signals that a thread's own instructions raise. The kernel ends a process in which the thread blocks them, and no handler,
/// such as Python's faulthandler, says where it was.
const FAULTS: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Starts a thread that blocks all signals but those of its own faults.
///
/// The process's signals are its owner's: a handler must not run on a thread that the owner does not know, and a system call
/// of kvferry's must not end early. The thread inherits the mask, so that it blocks them from its beginning on, and so do the
/// threads that it makes itself or has UCX or CUDA make. The calling thread blocks them for the duration of this call.
///
/// # Errors
/// The kernel's error when it makes no thread.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let blocked = SignalsBlocked::new()?;
    let spawned = Builder::new().name(name.into()).spawn(run);
    drop(blocked);
    spawned
}

/// The calling thread blocks all signals but [`FAULTS`] while this lives. Not to be sent to another thread.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> io::Result<SignalsBlocked> {
        let (mut signals, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: `sigfillset` makes the set, which `sigdelset` then changes and `pthread_sigmask` reads; the latter makes
        // `before` when it returns zero.
        unsafe {
            libc::sigfillset(signals.as_mut_ptr());
            for fault in FAULTS {
                libc::sigdelset(signals.as_mut_ptr(), fault);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), before.as_mut_ptr()) {
                0 => Ok(SignalsBlocked(before.assume_init())),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: reads a set that the kernel has made; null takes no old one.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// Sleeps until the descriptor is readable or closed, or the time is up. Also earlier, when a signal comes. Returns
/// whether it is.
pub fn wait_readable(descriptor: RawFd, limit: Duration) -> bool {
    let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    let limit = libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    // SAFETY: the kernel writes to `polled`, the one entry, and reads `limit`; null leaves the signals' mask as it is.
    let found = unsafe { libc::ppoll(&raw mut polled, 1, &raw const limit, std::ptr::null()) };
    found > 0 && polled.revents != 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn waiting_tells_whether_a_descriptor_is_readable_and_ends_in_time() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(!wait_readable(near.as_raw_fd(), Duration::from_micros(1)));
        (&far).write_all(b"x").unwrap();
        assert!(wait_readable(near.as_raw_fd(), Duration::from_secs(3600)));
    }

    /// The signals that the calling thread blocks, a bit for each signal from 1 on.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

    #[test]
    fn started_threads_block_signals_and_their_starter_none() {
        let before = blocked();
        let theirs = spawn("signals", || (blocked(), std::thread::spawn(blocked).join().unwrap()));
        let (of_thread, of_its_thread) = theirs.unwrap().join().unwrap();
        assert_eq!((blocked(), of_thread), (before, of_its_thread));
        let blocks = |signal: libc::c_int| of_thread >> (signal - 1) & 1 == 1;
        let process = [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD, libc::SIGALRM, libc::SIGPROF, libc::SIGPIPE];
        assert!(process.into_iter().chain([libc::SIGRTMIN(), libc::SIGRTMAX()]).all(blocks), "{of_thread:x}");
        assert!(!FAULTS.into_iter().any(blocks), "{of_thread:x}");
    }
}
