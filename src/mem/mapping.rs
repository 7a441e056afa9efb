//! The lines of `/proc/PID/maps` and of `/proc/PID/smaps` that begin a mapping.

use std::ops::Range;

/// A mapping of a process's memory. The kernel lists them in the order of their addresses.
pub(crate) struct Mapping {
    pub(crate) addresses: Range<u64>,
    pub(crate) is_readable: bool,
    pub(crate) is_writable: bool,
    /// Inode 0 is memory without a file.
    pub(crate) has_inode: bool,
    /// The name of its file up to the first blank. Bytes that are no text are replaced.
    pub(crate) name: String,
}

impl Mapping {
    /// `None` for a line that begins no mapping. Addresses, access, offset, device, inode and name (proc_pid_maps(5)).
    pub(crate) fn parse(line: &[u8]) -> Option<Mapping> {
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let addresses = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        let access = words.next()?;
        let has_inode = words.nth(2)? != "0";
        let name = words.next().unwrap_or_default().to_owned();
        let (is_readable, is_writable) = (access.starts_with('r'), access.get(1..2) == Some("w"));
        Some(Mapping { addresses, is_readable, is_writable, has_inode, name })
    }
}
