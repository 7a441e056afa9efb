//! What stands behind memory of a process: whether the kernel fills a missing page by itself, or waits for somebody.
//!
//! A copy of another process's memory returns when every page has been found. A page of a mapped file comes from the file's
//! server (NFS, FUSE), one that is registered with userfaultfd from a program, and either may never answer.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use crate::mem::mapping::Mapping;

/// Names of mappings that have an inode and yet no server: shared memory of every kind.
const SHARED_MEMORY: [&str; 5] = ["/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage"];
/// `VmFlags` of pages that a program fills: userfaultfd for missing, write-protected and minor faults.
const FILLED_BY_A_PROGRAM: [&str; 3] = ["um", "uw", "ui"];
/// The `VmFlags` entry of huge pages, whose files have names of their own.
const HUGE: &str = "ht";

/// For each range of a process's addresses, whether the kernel fills all of its pages by itself. `false` also where a part of
/// it is not mapped.
///
/// The kernel walks the page tables of all of the process's memory for it, so it takes the longer the more that has.
///
/// # Errors
/// What opening or reading `/proc/PID/smaps` says.
pub fn is_filled_by_kernel(pid: libc::pid_t, ranges: &[Range<u64>]) -> io::Result<Vec<bool>> {
    judge(BufReader::new(File::open(format!("/proc/{pid}/smaps"))?), ranges)
}

fn judge(smaps: impl BufRead, ranges: &[Range<u64>]) -> io::Result<Vec<bool>> {
    // Up to where, from its start on, all is the kernel's. Mappings come in the order of their addresses.
    let mut filled: Vec<u64> = ranges.iter().map(|range| range.start).collect();
    let last = ranges.iter().map(|range| range.end).max().unwrap_or(0);
    let mut mapping: Option<Mapping> = None;
    for line in smaps.split(b'\n') {
        let line = line?;
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let flags = String::from_utf8_lossy(flags);
            let Some(mapping) = mapping.take().filter(|mapping| is_mapping_filled_by_kernel(mapping, &flags)) else {
                continue;
            };
            for filled in filled.iter_mut().filter(|filled| mapping.addresses.contains(*filled)) {
                *filled = mapping.addresses.end;
            }
        } else if let Some(next) = Mapping::parse(&line) {
            if next.addresses.start >= last {
                break;
            }
            mapping = Some(next);
        }
    }
    Ok(filled.into_iter().zip(ranges).map(|(filled, range)| filled >= range.end).collect())
}

fn is_mapping_filled_by_kernel(mapping: &Mapping, flags: &str) -> bool {
    let has = |wanted: &str| flags.split_whitespace().any(|flag| flag == wanted);
    let has_file = mapping.has_inode && !SHARED_MEMORY.iter().any(|shared| mapping.name.starts_with(shared));
    (!has_file || has(HUGE)) && !FILLED_BY_A_PROGRAM.into_iter().any(has)
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
            (0x2000..0x2000, true),
        ];
        let ranges = cases.clone().map(|(range, _)| range);
        assert_eq!(judge(SMAPS, &ranges).unwrap(), cases.map(|(_, expected)| expected));
    }

    #[test]
    fn of_this_process_all_is_known() {
        let heap = vec![1u8; 1 << 20];
        let heap = heap.as_ptr().addr() as u64..heap.as_ptr().addr() as u64 + (1 << 20);
        // The code of this function is a file's.
        let code = of_this_process_all_is_known as fn() as usize as u64;
        let pid = libc::pid_t::try_from(std::process::id()).unwrap();
        assert_eq!(is_filled_by_kernel(pid, &[heap, code..code + 1, 0..1]).unwrap(), [true, false, false]);
        assert!(is_filled_by_kernel(0, &[]).is_err());
    }
}
