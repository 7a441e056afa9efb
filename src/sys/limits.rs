//! Limits that the system sets a process: open files, threads, shared memory.
//!
//! UCX ends the process, or never returns, where it gets too little of these. So they are checked first.

use std::sync::mpsc::channel;

use rustix::fs::statvfs;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::thread::spawn;
use crate::error::{Error, ErrorKind, Result};

/// Where UCX keeps the memory that processes of a host share.
const SHARED_MEMORY: &str = "/dev/shm";

/// Files that a process may open once [`raise_open_files`] was called, where the hard limit allows it. More would be of no
/// use, and there are programs that walk through all numbers below the limit.
const OPEN_FILES: u64 = 1 << 16;

/// Raises the soft limit on open files towards the hard one. Returns the new limit, `None` for any number. Never
/// lowers it.
pub fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(OPEN_FILES, |maximum| maximum.min(OPEN_FILES));
    if current.is_none_or(|current| current >= wanted) {
        return current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }) {
        Ok(()) => Some(wanted),
        Err(_) => current,
    }
}

/// How many files the process may have open.
pub fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How many more files the process may open, as far as its own limit goes.
pub fn free_descriptors() -> u64 {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return u64::MAX };
    // The folder itself takes one while it is read.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count).saturating_sub(1);
    limit.saturating_sub(open as u64)
}

/// Checks that the process can open `needed` more files.
///
/// # Errors
/// [`ErrorKind::Exhausted`], naming the limit.
pub fn check_descriptors(needed: u64) -> Result<()> {
    let free = free_descriptors();
    // A system without a file left (/proc/sys/fs/file-max) refuses the first.
    if free >= needed && std::fs::File::open("/dev/null").is_ok() {
        return Ok(());
    }
    let limit = getrlimit(Resource::Nofile).current.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    Err(Error::new(
        ErrorKind::Exhausted,
        format!(
            "{free} more files can be opened, and an agent needs {needed} at its start: raise the limit on open files, which \
             is {limit} (ulimit -n, RLIMIT_NOFILE; docker --ulimit nofile), or close some"
        ),
    ))
}

/// Checks that the process can start `needed` more threads. It starts as many and ends them.
///
/// # Errors
/// [`ErrorKind::Exhausted`], naming the limits.
pub fn check_threads(needed: usize) -> Result<()> {
    let mut started = Vec::new();
    let mut refused = None;
    for _ in 0..needed {
        let (end, ended) = channel::<()>();
        let wait = move || {
            let _ = ended.recv();
        };
        match spawn("kvf-probe", wait) {
            Ok(thread) => started.push((end, thread)),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let found = started.len();
    for (end, thread) in started {
        drop(end);
        let _ = thread.join();
    }
    refused.map_or(Ok(()), |error| Err(too_few_threads(found, needed, &error)))
}

/// That only `found` of the `needed` threads could be started, naming the limits.
pub fn too_few_threads(found: usize, needed: usize, error: &std::io::Error) -> Error {
    Error::new(
        ErrorKind::Exhausted,
        format!(
            "{found} more threads can be started, and an agent needs {needed} ({error}): raise the limit on processes and \
             threads (ulimit -u, RLIMIT_NPROC; pids.max of the cgroup; docker --pids-limit)"
        ),
    )
}

/// Checks that `needed` bytes are free in /dev/shm.
///
/// # Errors
/// [`ErrorKind::Exhausted`], naming the folder and the size.
pub fn check_shared_memory(needed: u64) -> Result<()> {
    let Ok(found) = statvfs(SHARED_MEMORY) else { return Ok(()) };
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free >= needed {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Exhausted,
        format!(
            "{free} bytes are free in {SHARED_MEMORY}, and UCX's shared-memory transports need {needed}: give it more (docker \
             --shm-size), or leave them out of UCX_TLS, as kvferry does by default: it has no use for them"
        ),
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_passes_and_too_much_is_named() {
        check_descriptors(8).unwrap();
        check_threads(2).unwrap();
        check_shared_memory(0).unwrap();
        let files = check_descriptors(u64::MAX - 1).unwrap_err();
        assert_eq!(files.kind(), ErrorKind::Exhausted);
        assert!(files.message().contains("ulimit -n"), "{files}");
        let memory = check_shared_memory(u64::MAX).unwrap_err();
        assert!(memory.message().contains("/dev/shm"), "{memory}");
    }
}
