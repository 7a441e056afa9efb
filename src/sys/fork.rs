//! The process id, and values that each process has for itself, without a lock that a fork could copy while it is held.

use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Memory for the process id, which the kernel zeroes in a forked child. Null before the first call; [`NOWHERE`] where
/// the kernel has no such memory.
static KEPT: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
static NOWHERE: AtomicU32 = AtomicU32::new(0);

/// The number of the calling process.
///
/// Every call of the C ABI asks for it, to refuse a handle that was made before a fork. C libraries do not keep the number,
/// so that each poll would be a system call.
pub fn process_id() -> u32 {
    let kept = kept();
    if ptr::eq(kept, &raw const NOWHERE) {
        return process::id();
    }
    // Nothing else depends on it: a thread that sees zero asks the system again.
    match kept.load(Ordering::Relaxed) {
        0 => {
            let own = process::id();
            kept.store(own, Ordering::Relaxed);
            own
        }
        own => own,
    }
}

fn kept() -> &'static AtomicU32 {
    let known = KEPT.load(Ordering::Acquire);
    // SAFETY: null, or what is stored below: valid for ever and only used through shared references.
    if let Some(known) = unsafe { known.as_ref() } {
        return known;
    }
    let made = wiped_at_forks().unwrap_or((&raw const NOWHERE).cast_mut());
    match KEPT.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above.
        Ok(_) => unsafe { &*made },
        Err(earlier) => {
            // Another thread was faster.
            if !ptr::eq(made, &raw const NOWHERE) {
                // SAFETY: the mapping made above, to which nothing points.
                unsafe { libc::munmap(made.cast(), LEN) };
            }
            // SAFETY: as above.
            unsafe { &*earlier }
        }
    }
}

const LEN: usize = size_of::<AtomicU32>();

/// `None` where the kernel cannot do that (Linux before 4.14).
fn wiped_at_forks() -> Option<*mut AtomicU32> {
    // SAFETY: a mapping of its own, of a whole page, whose place the kernel chooses.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
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
    Some(page.cast())
}

/// A value of which each process has its own.
///
/// A process that was forked off gets a new one, since threads of the other process may have held locks in the old one at the
/// fork, and nobody unlocks their copies.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Own<T>>,
    make: fn(Option<&T>) -> T,
}

struct Own<T: 'static> {
    process: u32,
    value: T,
    /// The value of the process from which this one was forked. Neither used nor freed: its threads were doing anything with it.
    _earlier: Option<&'static Own<T>>,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// A value that `make` makes for each process at its first use. It gets the value of the process that it was
    /// forked from. That one must not be locked.
    pub const fn new(make: fn(Option<&T>) -> T) -> Self {
        PerProcess { current: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// The calling process's value.
    pub fn get(&self) -> &'static T {
        let process = process_id();
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            // SAFETY: null or what is stored below, which is never freed and only shared from then on.
            let known: Option<&'static Own<T>> = unsafe { current.as_ref() };
            if let Some(own) = known
                && own.process == process
            {
                return &own.value;
            }
            let value = (self.make)(known.map(|own| &own.value));
            let made = Box::into_raw(Box::new(Own { process, value, _earlier: known }));
            match self.current.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: it is stored now, see above.
                Ok(_) => return unsafe { &(*made).value },
                Err(other) => {
                    // SAFETY: of `into_raw` above, and not stored: nobody else knows it.
                    drop(unsafe { Box::from_raw(made) });
                    current = other;
                }
            }
        }
    }
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
        assert!(!ptr::eq(kept(), &raw const NOWHERE), "this kernel wipes memory at forks");
        for _ in 0..3 {
            assert_eq!(process_id(), process::id());
            assert!(child_sees(|parent| {
                let own = process_id();
                own != parent && own == process::id() && own == process_id()
            }));
        }
        assert_eq!(process_id(), process::id());
    }

    #[test]
    fn a_forked_process_has_a_value_of_its_own() {
        use std::sync::Mutex;
        static VALUE: PerProcess<(u32, Mutex<()>)> =
            PerProcess::new(|earlier| (earlier.map_or(1, |(number, _)| number + 1), Mutex::new(())));
        let (number, locked) = VALUE.get();
        assert_eq!(*number, 1);
        let _held = locked.lock();
        assert!(child_sees(|_| VALUE.get().0 == 2 && VALUE.get().1.try_lock().is_ok()));
        assert!(ptr::eq(locked, &raw const VALUE.get().1));
    }
}
