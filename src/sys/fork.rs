//! Which process this is, without a system call per question.

use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Four bytes of memory that are zero in a process that was forked off, until that has written its own number there.
static KEPT: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// The number of the calling process.
///
/// Every call of the C ABI asks for it, to refuse a handle that was made before a fork. C libraries do not keep the number,
/// so that each poll would be a system call.
pub fn process_id() -> u32 {
    let Some(kept) = KEPT.get_or_init(wiped_at_forks) else { return process::id() };
    // Nothing else depends on it: who sees zero asks again.
    match kept.load(Ordering::Relaxed) {
        0 => {
            let own = process::id();
            kept.store(own, Ordering::Relaxed);
            own
        }
        own => own,
    }
}

/// `None` where the kernel cannot do that (Linux before 4.14).
fn wiped_at_forks() -> Option<&'static AtomicU32> {
    const LEN: usize = size_of::<AtomicU32>();
    // SAFETY: a mapping of its own, of a whole page, whose place the kernel chooses.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // An emulator may take any advice and follow none.
    const NO_ADVICE: libc::c_int = -1;
    // SAFETY: the mapping made above, of which nothing is kept at a fork but the place.
    let is_wiped =
        unsafe { libc::madvise(page, LEN, NO_ADVICE) != 0 && libc::madvise(page, LEN, libc::MADV_WIPEONFORK) == 0 };
    if !is_wiped {
        // SAFETY: likewise; nothing points to it.
        unsafe { libc::munmap(page, LEN) };
        return None;
    }
    // SAFETY: zeroed, aligned to a page, never unmapped, and used through this reference only.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The child tells by how it ends; what it does in between allocates nothing.
    fn child_sees(holds: fn(parent: u32) -> bool) -> bool {
        let parent = process_id();
        // SAFETY: the child makes system calls and uses memory that is there, and ends without returning.
        match unsafe { libc::fork() } {
            // SAFETY: ends this process at once.
            0 => unsafe { libc::_exit(if holds(parent) { 7 } else { 1 }) },
            child => {
                let mut status = 0;
                // SAFETY: `status` is valid for the call.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7
            }
        }
    }

    #[test]
    fn a_forked_process_has_its_own_number() {
        assert!(KEPT.get_or_init(wiped_at_forks).is_some(), "this kernel wipes memory at forks");
        for _ in 0..3 {
            assert_eq!(process_id(), process::id());
            assert!(child_sees(|parent| {
                let own = process_id();
                own != parent && own == process::id() && own == process_id()
            }));
        }
        assert_eq!(process_id(), process::id());
    }
}
