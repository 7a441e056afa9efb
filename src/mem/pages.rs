//! Where the missing pages of this process's memory come from: the kernel alone, or somebody that it waits for.
//!
//! A process that copies this memory waits until every page is there. A page of a mapped file comes from the file's
//! server (NFS, FUSE), one of a range that is registered with userfaultfd from a program, and either may never answer.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::RawFd;

use super::mapping::Mapping;

/// Names of mappings that have an inode and yet no server: shared memory of every kind.
const SHARED_MEMORY: [&str; 5] = ["/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage"];
/// `VmFlags` of pages that a program fills: userfaultfd for missing, write-protected and minor faults.
const FILLED_BY_A_PROGRAM: [&str; 3] = ["um", "uw", "ui"];
/// The `VmFlags` entry of huge pages, whose files have names of their own.
const HUGE: &str = "ht";
/// How `/proc/self/fd` names a descriptor of userfaultfd.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// Tells whether a mapping has a file that may have a server, by what `/proc/PID/maps` says of it.
pub(super) fn may_have_server(mapping: &Mapping) -> bool {
    mapping.has_inode && !SHARED_MEMORY.iter().any(|shared| mapping.name.starts_with(shared))
}

/// Tells whether the kernel alone fills missing pages of mapped memory; `may_have_server`: of any of its mappings.
///
/// Programs that fill pages are seen in `/proc/self/smaps` only, for which the kernel walks the page tables of all
/// memory up to there. So that is read only where this process has a descriptor of userfaultfd, or a file may be one of
/// huge pages.
pub(super) fn are_filled_by_kernel(addresses: &Range<u64>, may_have_server: bool) -> bool {
    if !may_have_server && !has_userfaultfd() {
        return true;
    }
    let judged = File::open("/proc/self/smaps").and_then(|smaps| judge(BufReader::new(smaps), addresses));
    judged.unwrap_or_else(|error| {
        log::debug!("reading /proc/self/smaps: {error}; copy threads of peers copy this memory");
        false
    })
}

/// Tells whether this process has a descriptor of userfaultfd; `true` where that cannot be told.
fn has_userfaultfd() -> bool {
    let Ok(descriptors) = fs::read_dir("/proc/self/fd") else { return true };
    let is_one = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // Reading a link takes many times as long as asking for the type.
        number.is_none_or(has_no_type) && fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == USERFAULTFD)
    };
    descriptors.flatten().any(is_one)
}

/// Tells whether a descriptor is one of the kernel's own, as of userfaultfd, which are files of no type.
fn has_no_type(descriptor: RawFd) -> bool {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` has room for what the call writes. A number that is no descriptor is refused.
    if unsafe { libc::fstat(descriptor, status.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call that succeeded has filled it in.
    unsafe { status.assume_init() }.st_mode & libc::S_IFMT == 0
}

fn judge(smaps: impl BufRead, addresses: &Range<u64>) -> io::Result<bool> {
    // Up to where all is the kernel's. Mappings come in the order of their addresses.
    let mut filled = addresses.start;
    let mut mapping: Option<Mapping> = None;
    for line in smaps.split(b'\n') {
        let line = line?;
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let flags = String::from_utf8_lossy(flags);
            if let Some(mapping) = mapping.take().filter(|mapping| mapping.addresses.contains(&filled)) {
                if !is_mapping_filled_by_kernel(&mapping, &flags) {
                    return Ok(false);
                }
                filled = mapping.addresses.end;
            }
            if filled >= addresses.end {
                return Ok(true);
            }
        } else if let Some(next) = Mapping::parse(&line) {
            mapping = Some(next);
        }
    }
    Ok(false)
}

fn is_mapping_filled_by_kernel(mapping: &Mapping, flags: &str) -> bool {
    let has = |wanted: &str| flags.split_whitespace().any(|flag| flag == wanted);
    (!may_have_server(mapping) || has(HUGE)) && !FILLED_BY_A_PROGRAM.into_iter().any(has)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SMAPS: &[u8] = b"\
1000-3000 rw-p 00000000 00:00 0                          [heap]
Size:                  8 kB
VmFlags: rd wr mr mw me ac sd
3000-5000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me um ac sd
5000-6000 rw-s 00000000 00:01 1234                       /memfd:kv (deleted)
VmFlags: rd wr sh mr mw me ms sd
6000-7000 r--p 00001000 fe:01 99                         /lib/a \xff file
VmFlags: rd mr mw me sd
8000-9000 rw-s 00000000 00:10 77                         /mnt/huge/kv
VmFlags: rd wr sh mr mw me ms de ht sd
9000-a000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac uw
";

    #[test]
    fn only_memory_without_a_server_is_filled_by_the_kernel() {
        let cases = [
            (0x1000..0x3000, true),
            (0x1ff0..0x2000, true),
            (0x2fff..0x3001, false), // its last byte is a program's
            (0x3000..0x5000, false),
            (0x5000..0x6000, true),
            (0x5000..0x6001, false), // its last byte is a file's
            (0x6000..0x7000, false),
            (0x7000..0x8000, false), // not mapped
            (0x8000..0x9000, true),
            (0x8800..0x9001, false),
            (0x9000..0xa000, false),
            (0xf000..0xf001, false),
        ];
        for (addresses, expected) in cases {
            assert_eq!(judge(SMAPS, &addresses).unwrap(), expected, "{addresses:x?}");
        }
    }

    #[test]
    fn of_this_process_all_is_known() {
        let heap = vec![1u8; 1 << 20];
        let heap = heap.as_ptr().addr() as u64..heap.as_ptr().addr() as u64 + (1 << 20);
        assert!(are_filled_by_kernel(&heap, true));
        // The code of this function is a file's.
        let code = of_this_process_all_is_known as fn() as usize as u64;
        assert!(!are_filled_by_kernel(&(code..code + 1), true));
    }
}
