//! Host memory: is every page of a range mapped, and where do missing ones come from?

use super::MemoryRange;
use super::mapping::Mapping;
use super::pages::{are_filled_by_kernel, may_have_server};
use crate::error::{Error, ErrorKind, Result};

/// Checks that every page of `range` is mapped and accessible, without touching it. Returns whether the kernel alone
/// fills missing pages, so that a process that copies them waits for no other program.
///
/// A registration of unmapped memory would fault inside UCX or in a peer's transfer much later, so it is refused here.
/// Memory that was freed but is still mapped (a heap block that the allocator kept) cannot be told from live memory.
pub fn check_mapped(range: &MemoryRange) -> Result<bool> {
    let maps = std::fs::read("/proc/self/maps").map_err(|e| {
        Error::new(ErrorKind::Io, format!("reading /proc/self/maps to check a memory range: {e}; is /proc mounted?"))
    })?;
    let may_have_server = check_against(range, &maps)?;
    Ok(are_filled_by_kernel(&(range.addr()..range.end()), may_have_server))
}

/// Walks the maps, which the kernel lists in ascending order, and finds the first byte of `range` without a mapping.
/// Returns whether any of it is a file's that may have a server.
fn check_against(range: &MemoryRange, maps: &[u8]) -> Result<bool> {
    let (mut reached, mut has_server) = (range.addr(), false);
    for line in maps.split(|byte| *byte == b'\n') {
        let Some(mapping) = Mapping::parse(line) else { continue };
        let end = mapping.addresses.end;
        if end <= reached {
            continue;
        }
        if mapping.addresses.start > reached {
            break;
        }
        if !(mapping.is_readable && mapping.is_writable) {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!("{range} cannot be registered: from {reached:#x} on it is not mapped for reading and writing"),
            ));
        }
        has_server |= may_have_server(&mapping);
        reached = end;
        if reached >= range.end() {
            return Ok(has_server);
        }
    }
    Err(Error::new(
        ErrorKind::OutOfRange,
        format!(
            "{range} cannot be registered: from {reached:#x} on it is not mapped into this process; was it freed, or is \
             the length wrong (it is in bytes)?"
        ),
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::wire::MemoryKind;

    const MAPS: &[u8] = b"1000-3000 rw-p 00000000 00:00 0 \n3000-4000 rw-p 00000000 00:00 0      [heap]\n\
        4000-5000 r--p 00000000 08:01 12 /lib/\xff.so\n8000-9000 rw-p 00000000 00:00 0 \n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";

    fn verdict(addr: u64, len: u64) -> Result<bool> {
        // SAFETY: nothing is registered, so nothing is accessed.
        check_against(&unsafe { MemoryRange::new(addr, len, MemoryKind::Host) }.unwrap(), MAPS)
    }

    #[test]
    fn ranges_may_span_adjacent_mappings_but_no_hole() {
        for (addr, len) in [(0x1000, 1), (0x1000, 0x3000), (0x2fff, 2), (0x8000, 0x1000)] {
            assert!(!verdict(addr, len).unwrap());
        }
        for (addr, len) in [(0xfff, 2), (0x8fff, 2), (0x5000, 16), (0x8000, 0x1001), (0x9000, 1)] {
            let error = verdict(addr, len).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfRange);
            assert!(error.message().contains("not mapped into this process"), "{error}");
        }
    }

    #[test]
    fn read_only_memory_is_refused() {
        let error = verdict(0x3fff, 2).unwrap_err();
        assert!(error.message().contains("not mapped for reading and writing"), "{error}");
    }
}
