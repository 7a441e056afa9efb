//! Key files that leave nothing behind: they are in memory, and are gone with the process of the test.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};

/// The path of a new file that its owner may use, for this process and others.
pub fn file(text: &str) -> PathBuf {
    static FILES: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let mut file = File::from(memfd_create("key", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(text.as_bytes()).unwrap();
    file.set_permissions(Permissions::from_mode(0o600)).unwrap();
    let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    FILES.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    path
}

/// A key file; the same bytes for the same `byte`.
pub fn key_file(byte: u8) -> PathBuf {
    file(&format!("{byte:02x}").repeat(32))
}
