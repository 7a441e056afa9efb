//! Tells if a process has ended.

use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use super::thread::wait_readable;

/// True if no process has this number, or one that has ended and waits to be reaped. `false` where that cannot be
/// told.
///
/// Not asked of `/proc`, which hides the processes of other users where it is mounted with `hidepid`.
pub fn has_ended(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        // Readable when all of its threads have ended.
        Ok(process) => wait_readable(process.as_raw_fd(), Duration::ZERO),
        Err(Errno::SRCH) => true,
        // Linux before 5.3, a filter of system calls, or no descriptor left.
        Err(_) => test_kill_process(pid) == Err(Errno::SRCH),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use std::process::Command;
    use std::time::Instant;
    use std::{io, ptr};

    use super::*;

    /// Gives the calling thread a `/proc` that hides processes of other users, and makes it nobody's. Returns why it cannot.
    pub(in crate::sys) fn become_nobody_with_hidepid() -> io::Result<()> {
        let done = |status: libc::c_long| if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        let (proc, root, options) = (c"proc", c"/", c"hidepid=2");
        // SAFETY: system calls with strings that live until they return. The user is the calling thread's alone, as libc does
        // not know of the call.
        unsafe {
            done(libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS).into())?;
            let none = ptr::null();
            let private = libc::MS_REC | libc::MS_PRIVATE;
            done(libc::mount(none, root.as_ptr(), none, private, none.cast()).into())?;
            done(libc::mount(proc.as_ptr(), c"/proc".as_ptr(), proc.as_ptr(), 0, options.as_ptr().cast()).into())?;
            // Nor of root's group, from which nothing is hidden.
            done(libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()))?;
            done(libc::syscall(libc::SYS_setresgid, 65_534, 65_534, 65_534))?;
            done(libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534))
        }
    }

    #[test]
    fn ended_processes_are_told_from_living_ones() {
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        assert!(!has_ended(other.id()) && !has_ended(std::process::id()));
        other.kill().unwrap();
        // Before its parent looks at it, and after.
        let begun = Instant::now();
        while !has_ended(other.id()) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        other.wait().unwrap();
        assert!(has_ended(other.id()));
        // Linux gives no process a number above 2^22 (PID_MAX_LIMIT); 0 is none, and is not told.
        assert!(has_ended((1 << 22) + 1) && !has_ended(0) && !has_ended(u32::MAX));
    }
}
