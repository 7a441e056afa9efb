//! Whether this process is a copy that fork(2) has made: its threads stayed in the process that it is a copy of.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The number of forks from the first process that asked to this one. Takes no system call, as asking for the process's id
/// does.
pub fn generation() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler may run at any time in a child that has one thread, and does nothing but add to an atomic. If
        // this library is unloaded, the C library forgets it. It can fail for want of memory only; then forks go unseen.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

unsafe extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
